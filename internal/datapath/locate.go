// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/rundir"
)

// Located is an instance with the place where its program runs. All network namespaces see the same
// pins, so a listed instance may work in another network namespace than the reader's.
type Located struct {
	Instance
	Attachment *Attachment `json:"attachment"` // of LinkPin; nil: not attached
	// Namespace is the path of the interface's network namespace, as `nsenter --net=` takes it. It
	// is empty if the namespace is the reader's, if it was not found, or if there is no interface.
	Namespace string `json:"network_namespace"`
}

// Here tells whether the instance works in the network namespace of the thread that located it.
func (l *Located) Here() bool { return l.Attachment != nil && l.Attachment.Interface != "" }

// Locate finds the place where an instance's program runs.
func Locate(instance Instance) (Located, error) {
	l := Located{Instance: instance}
	pin := filepath.Join(Dir(instance.Name), LinkPin)
	var err error
	if l.Attachment, err = ReadAttachment(pin); err != nil || l.Attachment == nil || l.Here() {
		return l, err
	}
	program, err := programOf(pin)
	if err != nil {
		return l, err
	}
	for _, path := range namespacePaths(instance.Name) {
		if runsIn(path, l.Attachment.Ifindex, program) {
			l.Namespace = path
			break
		}
	}
	return l, nil
}

// namespacePaths returns the network namespaces that the instance may be in: those with names of
// ip-netns(8), the host's, and that of the instance's process.
func namespacePaths(instance string) []string {
	paths, _ := filepath.Glob("/run/netns/*") // fails only for a bad pattern
	paths = append(paths, "/proc/1/ns/net")
	if process, err := rundir.FindProcess(instance); err == nil && process != nil {
		paths = append(paths, fmt.Sprintf("/proc/%d/ns/net", process.PID))
	}
	return paths
}

// runsIn tells whether the interface of a network namespace runs a program. It returns false if the
// namespace does not exist any more or cannot be entered.
func runsIn(namespace string, ifindex int, program ebpf.ProgramID) bool {
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return false
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return false
	}
	defer handle.Close()
	iface, err := handle.LinkByIndex(ifindex)
	return err == nil && iface.Attrs().Xdp != nil && iface.Attrs().Xdp.ProgId == uint32(program)
}

// infoOf describes a pinned link. It returns nil if there is no such link.
func infoOf(pin string) (*link.Info, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	return info, nil
}

// programOf returns the ID of a pinned link's program. It is 0 if there is no such link.
func programOf(pin string) (ebpf.ProgramID, error) {
	info, err := infoOf(pin)
	if info == nil {
		return 0, err
	}
	return info.Program, nil
}

// CheckNamespace returns an error if a link of an instance belongs to another network namespace
// than that of the caller.
func CheckNamespace(instance string, hooks []Hook) error {
	for _, hook := range hooks {
		if _, err := AttachedTo(filepath.Join(Dir(instance), hook.Pin)); err != nil {
			return err
		}
	}
	return nil
}

// AttachedTo returns the index of the interface of a pinned XDP or tcx link. It is 0 if there is no
// link, or if the interface has been removed. It is an error if the interface is in another network
// namespace: all network namespaces see the same pins, but indexes differ.
func AttachedTo(pin string) (int, error) {
	info, err := infoOf(pin)
	if info == nil {
		return 0, err
	}
	ifindex := 0
	here := false
	if xdp := info.XDP(); xdp != nil {
		ifindex = int(xdp.Ifindex)
		here, err = runsXDP(ifindex, info.Program)
	} else if tcx := info.TCX(); tcx != nil {
		ifindex = int(tcx.Ifindex)
		here, err = runsTCX(ifindex, ebpf.AttachType(tcx.AttachType), info.ID)
	} else {
		return 0, fmt.Errorf("%s: neither an XDP link nor a tcx link", pin)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pin, err)
	}
	if ifindex != 0 && !here {
		return 0, elsewhere(pin, ifindex)
	}
	return ifindex, nil
}

// elsewhere returns the error about an instance in another network namespace. The error says what
// to do.
func elsewhere(pin string, ifindex int) error {
	dir, name := filepath.Split(pin)
	return fmt.Errorf("instance %q works in another network namespace, on its interface %d "+
		"(pin %s): run this command there (`nsenter --net=`); another instance needs another "+
		"node.instance", filepath.Base(dir), ifindex, name)
}

// runsXDP tells whether the interface of this network namespace with the index runs this XDP
// program. It returns false if there is no such interface.
func runsXDP(ifindex int, program ebpf.ProgramID) (bool, error) {
	if ifindex == 0 {
		return false, nil
	}
	iface, err := netlink.LinkByIndex(ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	xdp := iface.Attrs().Xdp
	return xdp != nil && xdp.ProgId == uint32(program), nil
}

// runsTCX tells whether the interface of this network namespace with the index has the tcx link
// with this ID. It returns false if there is no such interface.
func runsTCX(ifindex int, at ebpf.AttachType, id link.ID) (bool, error) {
	if ifindex == 0 {
		return false, nil
	}
	found, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) { // no interface or no programs
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("list the programs of interface %d: %w", ifindex, err)
	}
	for _, program := range found.Programs {
		if other, ok := program.LinkID(); ok && other == id {
			return true, nil
		}
	}
	return false, nil
}

// Check returns an error if the instance works in another network namespace than that of the
// caller, or if one of the interfaces runs an XDP program that is not the instance's.
func (l *Loader) Check(ifindexes ...int) error {
	err := CheckNamespace(l.Instance, l.Hooks)
	for _, ifindex := range ifindexes {
		err = cmp.Or(err, CheckXDP(ifindex, l.Instance))
	}
	return err
}

// CheckXDP returns an error if an interface runs an XDP program that is not the instance's, or if
// there is no such interface.
func CheckXDP(ifindex int, instance string) error {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("interface %d: %w", ifindex, err)
	}
	xdp := iface.Attrs().Xdp
	if xdp == nil || xdp.ProgId == 0 {
		return nil
	}
	for _, pin := range xdpPins {
		pin := filepath.Join(Dir(instance), pin)
		for _, own := range []string{pin, next(pin)} {
			if program, err := programOf(own); err != nil || program == ebpf.ProgramID(xdp.ProgId) {
				return err
			}
		}
	}
	return busy(iface, unix.EBUSY)
}

// busy adds to an error the program that occupies the interface.
func busy(iface netlink.Link, err error) error {
	attrs := iface.Attrs()
	return fmt.Errorf("attach XDP to %s: %w: it runs %s", attrs.Name, err, describeXDP(attrs.Index))
}

// describeXDP names the program that an interface runs, and its owner, as far as they can be found
// out.
func describeXDP(ifindex int) string {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil || iface.Attrs().Xdp == nil || iface.Attrs().Xdp.ProgId == 0 {
		return "a program that is gone by now"
	}
	id := ebpf.ProgramID(iface.Attrs().Xdp.ProgId)
	text := fmt.Sprintf("program %d", id)
	if program, err := ebpf.NewProgramFromID(id); err == nil {
		if info, err := program.Info(); err == nil {
			text += fmt.Sprintf(" %q", info.Name)
		}
		_ = program.Close()
	}
	owner := ownerOf(id)
	if owner == nil {
		return text + ", which is not of segue"
	}
	text += fmt.Sprintf(" of the %s %q", owner.Role, owner.Name)
	command, ok := commands[owner.Role]
	if !ok {
		return text
	}
	return fmt.Sprintf("%s; an interface runs one instance; to free it (for example after a change "+
		"of node.instance), stop the process of %q and run `segue %s detach %s`",
		text, owner.Name, command, owner.Name)
}

// commands are the subcommands of segue that run the roles.
var commands = map[Role]string{RoleBalancer: "lb", RoleAgent: "agent"}

// ownerOf returns the instance that has attached a program, or nil if there is none.
func ownerOf(id ebpf.ProgramID) *Instance {
	entries, _ := os.ReadDir(Dir(""))
	for _, entry := range entries {
		for _, pin := range xdpPins {
			found, err := programOf(filepath.Join(Dir(entry.Name()), pin))
			if err != nil || found != id {
				continue
			}
			role, _ := roleOf(entry.Name())
			return &Instance{entry.Name(), role}
		}
	}
	return nil
}
