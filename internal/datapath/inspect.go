// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/rundir"
)

// Names of pins. Some exist for balancers and agents alike, and some tell the roles apart.
const (
	LinkPin         = "link"        // keeps the program attached
	InsidePin       = "link_inside" // keeps the program at a balancer's node.inside attached
	BalancerProgram = "xdp_lb"
	AgentProgram    = "xdp_agent"

	flowsPin = "flows" // a balancer has it before its program is attached
)

// xdpPins are the possible XDP links of an instance.
var xdpPins = [...]string{LinkPin, InsidePin}

// Role is what an instance does.
type Role string

// The roles of an instance.
const (
	RoleBalancer Role = "balancer"
	RoleAgent    Role = "agent"
)

// marks are pins that only one role has. They exist from the start of the instance's first process.
var marks = map[Role]string{RoleBalancer: "identity", RoleAgent: "belongings"}

// roleOf returns the role of an instance. It is empty if the instance has no pins.
func roleOf(instance string) (Role, error) {
	for role, mark := range marks {
		_, err := os.Stat(filepath.Join(Dir(instance), mark))
		if err == nil {
			return role, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("instance %q: %w", instance, err)
		}
	}
	return "", nil
}

// Instance is a data path in the kernel. Its process need not run.
type Instance struct {
	Name string `json:"instance"`
	Role Role   `json:"role"`
}

// CheckRole returns an error unless an instance has the pins of the role. The instance need not be
// attached: its process may have ended before it attached the programs.
func CheckRole(instance string, role Role) error {
	if err := errors.Join(desired.CheckInstance(instance), checkMounted()); err != nil {
		return err
	}
	dir := Dir(instance)
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("there is no instance %q: %s does not exist", instance, dir)
	}
	actual, err := roleOf(instance)
	if err == nil && actual != role {
		err = fmt.Errorf("instance %q does not have the role %s", instance, role)
	}
	return err
}

// checkMounted returns an error if the BPF file system is not visible.
func checkMounted() error {
	mounted, err := isMounted()
	if err != nil {
		return err
	}
	if !mounted {
		return fmt.Errorf("%s: not a BPF file system here (`ip netns exec` hides it, `nsenter --net=` does not)", Root)
	}
	return nil
}

// Instances returns the instances on this host, sorted by name. A balancer counts as soon as its
// tables have pins, and an agent as soon as its program has one.
func Instances() ([]Instance, error) {
	if err := checkMounted(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(Dir(""))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the instances (needs root): %w", err)
	}
	var instances []Instance
	for _, entry := range entries {
		for _, sign := range []struct {
			pin  string
			role Role
		}{{flowsPin, RoleBalancer}, {AgentProgram, RoleAgent}} {
			if _, err := os.Stat(filepath.Join(Dir(entry.Name()), sign.pin)); err == nil {
				instances = append(instances, Instance{entry.Name(), sign.role})
				break
			}
		}
	}
	return instances, nil
}

// Snapshot is the state of an instance at one moment: the part that balancers and agents share.
type Snapshot struct {
	Instance
	Time     time.Time `json:"time"`
	Interval float64   `json:"interval_seconds"` // interval of the rates; 0: no rates
	// Process is the process that runs the instance. If it is nil, no process runs, and the data
	// path works as the last process left it.
	Process *rundir.Process `json:"process"`
	// Configuration describes the process's configuration. It is nil if no process runs the
	// instance, or if the process is of an earlier build.
	Configuration *rundir.Configuration `json:"configuration"`
	Program       *Program              `json:"program"`    // nil before it is attached
	Attachment    *Attachment           `json:"attachment"` // nil: not attached, packets pass
	Reasons       []ReasonCount         `json:"reasons"`
}

// Program is a program in the kernel.
type Program struct {
	ID  ebpf.ProgramID `json:"id"`
	Tag string         `json:"tag"` // the kernel's hash of its instructions
}

// Attachment is the place where a program runs.
type Attachment struct {
	Ifindex int `json:"ifindex"`
	// Interface is the name of the interface. It is empty if the interface is in another network
	// namespace than the reader.
	Interface string `json:"interface"`
	Mode      Mode   `json:"mode"` // empty if Interface is empty
	// HiddenVLANTags tells why the program may not see the VLAN tags of frames. It is
	// empty if the program sees them, or if Interface is empty.
	HiddenVLANTags string `json:"hidden_vlan_tags,omitempty"`
}

// Inspect reads the state of an instance. Its program is pinned as program. reasons are its current
// counters.
func Inspect(instance Instance, program string, reasons []ReasonCount) (*Snapshot, error) {
	s := &Snapshot{Instance: instance, Time: time.Now(), Reasons: reasons}
	var err error
	if s.Process, err = rundir.FindProcess(instance.Name); err != nil {
		return nil, err
	}
	record, err := rundir.FindRecord(instance.Name, s.Process)
	if err != nil {
		return nil, err
	}
	if record != nil {
		s.Configuration = &record.Configuration
	}
	if s.Program, err = readProgram(instance.Name, program); err != nil {
		return nil, err
	}
	s.Attachment, err = ReadAttachment(filepath.Join(Dir(instance.Name), LinkPin))
	return s, err
}

// AddHiddenTags finds out whether VLAN tags are hidden, and sets HiddenVLANTags of the attachments.
// The calling process may know more than the process of the instance, if only the calling process
// can reach the other end of a veth.
func AddHiddenTags(attachments ...*Attachment) {
	for _, a := range attachments {
		if a == nil || a.Interface == "" {
			continue
		}
		if err := HiddenVLANTags(a.Ifindex); err != nil {
			a.HiddenVLANTags = err.Error()
		}
	}
}

// RatesSince computes the rates of the reasons since an earlier snapshot of the instance. It
// returns the time between the two.
func (s *Snapshot) RatesSince(earlier *Snapshot) time.Duration {
	interval := s.Time.Sub(earlier.Time)
	s.Interval = interval.Seconds()
	SetRates(s.Reasons, earlier.Reasons, interval)
	return interval
}

// OpenTable opens a pinned table for reading. It returns ebpf.ErrMapIncompatible if the layout of
// the table differs from this build's specification. A size of 1 in the specification stands for
// any size.
func OpenTable(pin string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	// The kernel refuses to mmap a map that was opened read-only, even for reading.
	mapped := spec.Flags&unix.BPF_F_MMAPABLE != 0
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: !mapped})
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("missing: another build of segue started the instance: %w", err)
	}
	if err != nil {
		return nil, err
	}
	expected := spec.Copy()
	if spec.MaxEntries == 1 { // the size is set at load
		expected.MaxEntries = m.MaxEntries()
	}
	if err := Compatible(expected, m); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("of another build of segue: %w", err)
	}
	return m, nil
}

// readProgram describes a pinned program. It returns nil if there is none.
func readProgram(instance, name string) (*Program, error) {
	pin := filepath.Join(Dir(instance), name)
	program, err := ebpf.LoadPinnedProgram(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	id, _ := info.ID()
	return &Program{ID: id, Tag: info.Tag}, nil
}

// AttachedHere tells whether the instance's program runs on an interface of the calling thread's
// network namespace.
func AttachedHere(instance string) (bool, error) {
	attachment, err := ReadAttachment(filepath.Join(Dir(instance), LinkPin))
	return attachment != nil && attachment.Interface != "", err
}

// ReadAttachments finds the places where the instance's XDP programs run.
func ReadAttachments(instance string) (attachments []*Attachment, err error) {
	for _, pin := range xdpPins {
		attachment, err := ReadAttachment(filepath.Join(Dir(instance), pin))
		if err != nil {
			return nil, err
		}
		if attachment != nil {
			attachments = append(attachments, attachment)
		}
	}
	return attachments, nil
}

// ReadAttachment finds the place where the program of a pinned XDP link runs. It returns nil if the
// program runs nowhere. An interface index does not identify a network namespace. So ReadAttachment
// names the interface with that index in this namespace only if that interface runs the same
// program.
func ReadAttachment(pin string) (*Attachment, error) {
	info, err := infoOf(pin)
	if info == nil {
		return nil, err
	}
	xdp := info.XDP()
	if xdp == nil || xdp.Ifindex == 0 { // the interface was removed
		return nil, nil
	}
	attachment := &Attachment{Ifindex: int(xdp.Ifindex)}
	iface, err := netlink.LinkByIndex(attachment.Ifindex)
	if err != nil || iface.Attrs().Xdp == nil || iface.Attrs().Xdp.ProgId != uint32(info.Program) {
		return attachment, nil
	}
	attachment.Interface = iface.Attrs().Name
	attachment.Mode = modeOf(iface)
	return attachment, nil
}
