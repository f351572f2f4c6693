// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/netdev"
)

// Impairment describes how the fabric impairs packets between the edge router, balancers and
// servers. Each time a packet passes the fabric, it is randomly dropped, duplicated, reordered, or
// left alone. The zero value leaves all packets alone.
type Impairment struct {
	Drop      Share `yaml:"drop" json:"drop,omitempty"`
	Duplicate Share `yaml:"duplicate" json:"duplicate,omitempty"` // sent twice
	Reorder   Share `yaml:"reorder" json:"reorder,omitempty"`     // kept back for 2 ms (delayTime)
	// Links names nodes. Only packets to or from these nodes are impaired. If the list is empty,
	// the packets between all nodes are impaired.
	Links []string `yaml:"links" json:"links,omitempty"`
	// Seed is the seed of the random numbers. With the same seed and shares, the same happens to
	// the nth packet to a node in each run. Here n counts only packets that can be impaired: with
	// Links, those whose sender or receiver is among Links.
	Seed uint64 `yaml:"seed" json:"seed"`
}

// Share is a share of all packets as text, such as 5% or 0.1%. The empty text means 0%.
type Share string

// Set, String and Type make Share usable as the value of a command-line flag.
func (s *Share) Set(text string) error {
	*s = Share(text)
	_, err := s.chance()
	return err
}

func (s *Share) String() string { return string(*s) }

// Type returns the name of the flag's type.
func (s *Share) Type() string { return "share" }

var errShare = errors.New("must be a share from 0% to 100%, such as 5%")

// chance returns the share as a number from 0 to 1.
func (s Share) chance() (float64, error) {
	if s == "" {
		return 0, nil
	}
	number, isPercent := strings.CutSuffix(string(s), "%")
	percent, err := strconv.ParseFloat(number, 64)
	if !isPercent || err != nil || !(percent >= 0 && percent <= 100) {
		return 0, errShare
	}
	return percent / 100, nil
}

// some tells whether a share is more than zero. The share must be valid.
func (s Share) some() bool {
	chance, _ := s.chance()
	return chance > 0
}

// Some tells whether the impairment impairs any packets. The impairment must be valid.
func (i Impairment) Some() bool { return i.Drop.some() || i.Duplicate.some() || i.Reorder.some() }

// String describes the impairment in words.
func (i Impairment) String() string {
	if !i.Some() {
		return "no impairment"
	}
	var shares []string
	for _, kind := range []struct {
		share Share
		name  string
	}{{i.Drop, "dropped"}, {i.Duplicate, "duplicated"}, {i.Reorder, "reordered"}} {
		if kind.share.some() {
			shares = append(shares, string(kind.share)+" "+kind.name)
		}
	}
	where := "between all nodes"
	if len(i.Links) > 0 {
		where = "to and from " + strings.Join(i.Links, ", ")
	}
	return strings.Join(shares, ", ") + " " + where
}

// problems lists the errors of the impairment in a lab with this topology: shares that are not
// valid or add up to more than 100%, and names in Links that are not names of nodes on the fabric.
func (i Impairment) problems(t Topology) (errs fieldpath.Errors) {
	fail := func(path string, value any, problem string) {
		errs = append(errs, &fieldpath.Error{Path: path, Value: fmt.Sprint(value), Problem: problem})
	}
	sum := 0.0
	for _, share := range []struct {
		path  string
		value Share
	}{{"impair.drop", i.Drop}, {"impair.duplicate", i.Duplicate}, {"impair.reorder", i.Reorder}} {
		chance, err := share.value.chance()
		if err != nil {
			fail(share.path, share.value, err.Error())
		}
		sum += chance
	}
	const rounding = 1e-9 // more than the rounding errors of the sum
	if sum > 1+rounding {
		fail("impair", "", "the shares add up to more than 100%")
	}
	var links []string
	for _, spec := range t.fabricSpecs() {
		links = append(links, spec.Name)
	}
	for j, name := range i.Links {
		if !slices.Contains(links, name) {
			fail(fmt.Sprintf("impair.links[%d]", j), name, "must be one of "+enumerate(links))
		}
	}
	return errs
}

// Impair replaces the lab's impairment by i. First it ends the earlier impairment, and waits until
// the packets that the fabric keeps back have been sent (endImpairment). If i is the zero value,
// the lab has no impairment afterwards. While Impair runs, no other goroutine may use the lab's
// Topology or Status.
func (l *Lab) Impair(ctx context.Context, i Impairment) error {
	if errs := i.problems(l.Topology); len(errs) > 0 {
		return errs
	}
	lock, err := lockState(l.Name)
	if err != nil {
		return err
	}
	defer lock.unlock()
	if err := l.endImpairment(ctx); err != nil {
		return err
	}
	l.Topology.Impair = i
	if err := l.writeTopology(); err != nil {
		return err
	}
	return l.startImpairment(ctx)
}

// startImpairment begins the impairment of the lab's topology, if it has one.
func (l *Lab) startImpairment(ctx context.Context) error {
	i := l.Topology.Impair
	if !i.Some() {
		return nil
	}
	// Packets must be as short as on a wire, so the edge router must not send the large packets of
	// segmentation offload. On balancers and servers the offload is off already, because the far
	// ends of their cables run XDP.
	err := l.Node("edge").Do(func() error { return netdev.SetOffloads(uplink, false, netdev.TSO...) })
	if err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	if i.Reorder.some() {
		if err := l.delay.Start(ctx); err != nil {
			return err
		}
	}
	if err := l.attachImpairment(); err != nil {
		return fmt.Errorf("fabric: impair packets: %w", err)
	}
	return nil
}

// endImpairment removes the programs from the ports. Then it waits until the packets that are kept
// back have been sent, or count as lost (awaitReturned). Then it ends the process that keeps
// packets back. It returns nil if there is no impairment.
func (l *Lab) endImpairment(ctx context.Context) error {
	err := l.Node("fabric").netlink(func(h *netlink.Handle) error {
		for _, spec := range l.Topology.fabricSpecs() {
			port, err := h.LinkByName(spec.Name)
			if err != nil {
				return fmt.Errorf("fabric: port %s: %w", spec.Name, err)
			}
			err = h.FilterDel(filter(port, netlink.HANDLE_MIN_EGRESS))
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("fabric: port %s: delete filter: %w", spec.Name, err)
			}
		}
		return l.awaitReturned(ctx, h)
	})
	return errors.Join(err, l.delay.Stop())
}

// awaitReturned returns when the process delay has sent back all packets that were kept back. It
// also returns when no packet has come back for returnTimeout: the missing packets are lost.
func (l *Lab) awaitReturned(ctx context.Context, h *netlink.Handle) error {
	tick := time.NewTicker(delayTime)
	defer tick.Stop()
	var last uint64 // packets that had returned when the deadline was set
	for deadline := time.Now().Add(returnTimeout); time.Now().Before(deadline); {
		counts, err := l.countsAt(h, delayName, netlink.HANDLE_MIN_INGRESS)
		if errors.As(err, &netlink.LinkNotFoundError{}) { // nothing was reordered
			return nil
		}
		if err != nil {
			return fmt.Errorf("fabric: %w", err)
		}
		var reordered, returned uint64
		for _, c := range counts {
			reordered += c.Reordered
			returned += c.Returned
		}
		if returned == reordered {
			return nil
		}
		if returned > last { // packets still return, so wait for the others
			last, deadline = returned, time.Now().Add(returnTimeout)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
	return nil
}

// attachImpairment loads the programs of impair.bpf.c. It attaches one to the egress of each port
// of the fabric. If the lab reorders packets, it attaches another one to the ingress of the
// interface delay.
func (l *Lab) attachImpairment() error {
	return l.Node("fabric").netlink(func(h *netlink.Handle) error {
		var delay netlink.Link
		if l.Topology.Impair.Reorder.some() {
			var err error
			if delay, err = h.LinkByName(delayName); err != nil {
				return fmt.Errorf("interface %s: %w", delayName, err)
			}
		}
		objects, err := l.Topology.Impair.load(delay)
		if err != nil {
			return err
		}
		defer objects.Close()
		if delay != nil {
			if err := addClsact(h, delay); err != nil {
				return err
			}
			if err := attachFilter(h, delay, netlink.HANDLE_MIN_INGRESS, objects.GiveBack); err != nil {
				return err
			}
		}
		for _, spec := range l.Topology.fabricSpecs() {
			port, err := h.LinkByName(spec.Name)
			if err != nil {
				return fmt.Errorf("port %s: %w", spec.Name, err)
			}
			entry := l.Topology.Impair.port(spec.Name)
			if err := objects.Ports.Put(uint32(port.Attrs().Index), entry); err != nil {
				return fmt.Errorf("port %s: %w", spec.Name, err)
			}
			if err := attachFilter(h, port, netlink.HANDLE_MIN_EGRESS, objects.Impair); err != nil {
				return err
			}
		}
		return nil
	})
}

// load loads the programs of impair.bpf.c, with the shares and the seed of the impairment. The
// programs send packets that are to be kept back to the interface delay. delay is nil if the lab
// does not reorder packets. The caller closes the result.
func (i Impairment) load(delay netlink.Link) (*impairObjects, error) {
	spec, err := loadImpair()
	if err != nil {
		return nil, err
	}
	drop, _ := i.Drop.chance() // all shares are valid
	duplicate, _ := i.Duplicate.chance()
	reorder, _ := i.Reorder.chance()
	// The program draws a random number of 32 bits for each packet. It compares the number with the
	// limits DropBelow, DuplicateBelow and ReorderBelow, in this order. The first limit above the
	// number decides what happens to the packet. below returns a limit that is above the number
	// with the given chance.
	below := func(chance float64) uint64 { return uint64(math.Round(chance * (1 << 32))) }
	variables := map[string]any{
		impairVarDropBelow:      below(drop),
		impairVarDuplicateBelow: below(drop + duplicate),
		impairVarReorderBelow:   below(drop + duplicate + reorder),
		impairVarSeed:           i.Seed,
	}
	if delay != nil {
		variables[impairVarDelay] = uint32(delay.Attrs().Index)
	}
	for name, value := range variables {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	objects := new(impairObjects)
	return objects, spec.LoadAndAssign(objects, nil)
}

// port returns the initial entry of a node's port in the map of ports, with all counters zero.
func (i Impairment) port(node string) (port impairPort) {
	if len(i.Links) == 0 || slices.Contains(i.Links, node) {
		port.Impaired = 1
	}
	return port
}

// addClsact adds clsact, which attachFilter needs, to an interface. To add or delete clsact, the
// kernel stops the queues of the interface, and drops packets that are sent to it meanwhile. So the
// lab adds clsact before there is traffic, and never deletes it. Filters can be added and deleted
// without loss.
func addClsact(h *netlink.Handle, at netlink.Link) error {
	err := h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: at.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil {
		return fmt.Errorf("interface %s: add clsact: %w", at.Attrs().Name, err)
	}
	return nil
}

// attachFilter attaches a program to one side of an interface: HANDLE_MIN_INGRESS or
// HANDLE_MIN_EGRESS. The interface must have clsact, and no filter on this side.
func attachFilter(h *netlink.Handle, at netlink.Link, side uint32, program *ebpf.Program) error {
	f := filter(at, side)
	f.Fd = program.FD()
	if err := h.FilterAdd(f); err != nil {
		return fmt.Errorf("interface %s: add filter: %w", at.Attrs().Name, err)
	}
	return nil
}

// filter describes the filter that the lab attaches to one side of an interface.
func filter(at netlink.Link, side uint32) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: at.Attrs().Index, Parent: side, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Name: "segue/lab", DirectAction: true,
	}
}

// ImpairmentCounts counts the packets to a node since the impairment began.
type ImpairmentCounts struct {
	Packets    uint64 `json:"packets"` // that could be impaired, by Impairment.Links
	Dropped    uint64 `json:"dropped"`
	Duplicated uint64 `json:"duplicated"`
	Reordered  uint64 `json:"reordered"` // all that were kept back
	Returned   uint64 `json:"returned"`  // reordered packets that the process delay has sent back
}

// ImpairmentCounts returns the counts for each node with a link to the fabric, by name. It returns
// nil if there is no impairment.
func (l *Lab) ImpairmentCounts() (counts map[string]ImpairmentCounts, err error) {
	err = l.Node("fabric").netlink(func(h *netlink.Handle) error {
		// The programs of all ports share one map. So it does not matter which port leads to it.
		counts, err = l.countsAt(h, "edge", netlink.HANDLE_MIN_EGRESS)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fabric: counts of impaired packets: %w", err)
	}
	return counts, nil
}

// countsAt returns the counts of all ports, by the names of their nodes. It reads them from the map
// of the program that is attached to the given side of an interface. It returns nil if there is no
// program.
func (l *Lab) countsAt(
	h *netlink.Handle, ifname string, side uint32,
) (map[string]ImpairmentCounts, error) {
	at, err := h.LinkByName(ifname)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", ifname, err)
	}
	filters, err := h.FilterList(at, side)
	if err != nil {
		return nil, fmt.Errorf("interface %s: list filters: %w", ifname, err)
	}
	i := slices.IndexFunc(filters, func(f netlink.Filter) bool { return f.Type() == "bpf" })
	if i < 0 { // there is no impairment
		return nil, nil
	}
	table, err := mapOfProgram(ebpf.ProgramID(filters[i].(*netlink.BpfFilter).Id), impairMapPorts)
	if err != nil {
		return nil, err
	}
	defer table.Close()
	counts := make(map[string]ImpairmentCounts)
	for _, spec := range l.Topology.fabricSpecs() {
		link, err := h.LinkByName(spec.Name)
		if err != nil {
			return nil, fmt.Errorf("port %s: %w", spec.Name, err)
		}
		var p impairPort
		if err := table.Lookup(uint32(link.Attrs().Index), &p); err != nil {
			return nil, fmt.Errorf("port %s: %w", spec.Name, err)
		}
		counts[spec.Name] = ImpairmentCounts{p.Packets, p.Dropped, p.Duplicated, p.Reordered, p.Returned}
	}
	return counts, nil
}

// mapOfProgram opens the map with the given name among those that a program uses.
func mapOfProgram(id ebpf.ProgramID, name string) (*ebpf.Map, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", id, err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", id, err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		table, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("map %d: %w", id, err)
		}
		if info, err := table.Info(); err == nil && info.Name == name {
			return table, nil
		}
		table.Close()
	}
	return nil, fmt.Errorf("program %d has no map %s", id, name)
}
