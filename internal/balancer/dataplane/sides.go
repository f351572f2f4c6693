// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
)

// Side is the data path on one of the balancer's interfaces: the outside, which is node.interface,
// or the inside, which is node.inside. Both sides share all tables. Each side has its own programs,
// because the variables of the programs describe the interface.
type Side struct {
	sideKind
	Objects SideObjects
	// running is held by goroutines that run XdpLb, so that Plane.Widen does not close it meanwhile.
	running sync.RWMutex
}

// sideKind contains the names that belong to a side.
type sideKind struct {
	Setting  string        // the setting that names the interface
	xdpPin   string        // the pin of the link of xdp_lb
	onReturn datapath.Hook // of tc_return, which runs after XDP
}

// sideKinds are the outside, which every balancer has, and the inside, in this order.
var sideKinds = [...]sideKind{
	{"node.interface", datapath.LinkPin, returnHook("link_return")},
	{"node.inside", datapath.InsidePin, returnHook("link_return_inside")},
}

func xdpPins() []string    { return []string{sideKinds[0].xdpPin, sideKinds[1].xdpPin} }
func returnPins() []string { return []string{sideKinds[0].onReturn.Pin, sideKinds[1].onReturn.Pin} }

// checkHook is where tc_check runs. Only a process sends checks, so the program need not outlive the
// process, and its link has no pin.
var checkHook = datapath.Hook{At: ebpf.AttachTCXEgress, Priority: 0x5e6d}

func returnHook(pin string) datapath.Hook {
	return datapath.Hook{At: ebpf.AttachTCXIngress, Priority: 0x5e6c, Pin: pin}
}

// SideObjects are the objects that each side has for itself.
type SideObjects struct {
	XdpLb               *ebpf.Program  `ebpf:"xdp_lb"`
	TcReturn            *ebpf.Program  `ebpf:"tc_return"`
	XdpProbe            *ebpf.Program  `ebpf:"xdp_probe"`
	HostMac             *ebpf.Variable `ebpf:"host_mac"`
	HostHairpin         *ebpf.Variable `ebpf:"host_hairpin"`
	HostClientInterface *ebpf.Variable `ebpf:"host_client_interface"`
	NodeLocator         *ebpf.Variable `ebpf:"node_locator"`
	ProbeTurn           *ebpf.Variable `ebpf:"probe_turn"`
	Variables           *ebpf.Map      `ebpf:".bss"` // the memory of the variables
}

// loadSides makes the outside from the loaded objects. If node.inside is configured, it loads
// further programs for the inside.
func (p *Plane) loadSides(spec *ebpf.CollectionSpec) error {
	own := &p.Objects
	p.Sides = []*Side{{sideKind: sideKinds[0], Objects: SideObjects{
		own.XdpLb, own.TcReturn, own.XdpProbe, own.HostMac, own.HostHairpin, own.HostClientInterface, own.NodeLocator,
		own.ProbeTurn, own.Variables,
	}}}
	if p.node.Inside == "" {
		return nil
	}
	if err := setOutside(spec, false); err != nil {
		return err
	}
	inside := &Side{sideKind: sideKinds[1]}
	err := spec.LoadAndAssign(&inside.Objects, &ebpf.CollectionOptions{MapReplacements: own.Shared()})
	if err != nil {
		return err
	}
	p.Sides = append(p.Sides, inside)
	return nil
}

// setOutside tells programs whether packets come to them from outside the segment routing domain.
func setOutside(spec *ebpf.CollectionSpec, outside bool) error {
	return datapath.SetVariables(spec, map[string]any{balancerVarHostIsOutside: outside})
}

// SetHost describes the interface to the programs on it: which frames are for this host, and how
// frames are sent back. SetHost returns an error if a variable cannot be written.
func (s *Side) SetHost(link nexthop.Link) error {
	hairpin := uint32(0)
	if hairpins(link) {
		hairpin = uint32(link.Index)
	}
	if err := s.Objects.HostHairpin.Set(hairpin); err != nil {
		return fmt.Errorf("set how frames go back: %w", err)
	}
	if err := s.Objects.HostMac.Set(macWord(link.MAC)); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// SetHost describes the interfaces to the programs on them. The links are those of the sides, in
// the order of Sides. Packets from servers to clients leave through the first link. SetHost returns
// an error if a variable cannot be written.
func (p *Plane) SetHost(links []nexthop.Link) error {
	for i, side := range p.Sides {
		if err := side.Objects.HostClientInterface.Set(uint32(links[0].Index)); err != nil {
			return fmt.Errorf("set which interface leads to clients: %w", err)
		}
		if err := side.SetHost(links[i]); err != nil {
			return err
		}
	}
	return nil
}

// CheckInterfaces returns an error if the instance works in another network namespace, or if one of
// the interfaces runs an XDP program that is not this instance's.
func (p *Plane) CheckInterfaces(links []nexthop.Link) error {
	if err := p.CheckNamespace(); err != nil {
		return err
	}
	outside, inside := p.pin(sideKinds[0].xdpPin), p.pin(sideKinds[1].xdpPin)
	for _, link := range links {
		if err := datapath.CheckXDP(link.Index, outside, inside); err != nil {
			return err
		}
	}
	return nil
}

// CheckNamespace returns an error if the instance works in another network namespace than that of
// the caller.
func (p *Plane) CheckNamespace() error {
	return datapath.CheckNamespace(p.instance, append(xdpPins(), returnPins()...)...)
}

// Attach attaches the programs to the interfaces of the sides, in the order of Sides. They replace
// the programs of an earlier process. The tc_return programs come first, because XDP passes packets
// to them. The XDP program of the outside comes last, because the packets that it forwards are
// answered on the inside. After an error, the takeover restores the programs of the earlier
// process.
func (p *Plane) Attach(t *datapath.Takeover, links []nexthop.Link) ([]datapath.Attached, error) {
	if err := p.claim(t, links); err != nil {
		return nil, err
	}
	for i, side := range p.Sides {
		if err := p.TC.Attach(t, side.Objects.TcReturn, links[i].Index, side.onReturn); err != nil {
			return nil, err
		}
	}
	if err := p.attachCheck(t, links[len(links)-1].Index); err != nil {
		return nil, err
	}
	if err := p.pinCounting(t); err != nil {
		return nil, err
	}
	attached := make([]datapath.Attached, len(links))
	for i := len(links) - 1; i >= 0; i-- {
		var err error
		side := p.Sides[i]
		attached[i], err = t.AttachXDP(side.Objects.XdpLb, links[i].Index, p.pin(side.xdpPin))
		if err != nil {
			return nil, err
		}
	}
	t.OnCommit(func() error {
		p.links = links
		p.recount = false // the counters are pinned
		return p.leave(links)
	})
	return attached, nil
}

// claim finds the links that an earlier process has left on the interfaces, even if an interface
// was the other side then.
func (p *Plane) claim(t *datapath.Takeover, links []nexthop.Link) error {
	for i, link := range links {
		mine, other := sideKinds[i], sideKinds[1-i]
		for pin, other := range map[string]string{mine.xdpPin: other.xdpPin, mine.onReturn.Pin: other.onReturn.Pin} {
			if err := t.ClaimLink(p.pin(pin), p.pin(other), link.Index); err != nil {
				return err
			}
		}
	}
	return nil
}

// leave detaches the programs from interfaces that an earlier process used and this process does
// not.
func (p *Plane) leave(links []nexthop.Link) error {
	for _, kind := range sideKinds[len(p.Sides):] {
		if err := datapath.DetachLinks(p.instance, kind.xdpPin, kind.onReturn.Pin); err != nil {
			return err
		}
	}
	var keep []int
	for _, link := range links {
		keep = append(keep, link.Index)
	}
	return datapath.RemoveFilters(p.instance, keep...)
}

func (p *Plane) pin(name string) string { return filepath.Join(p.dir, name) }

// closeObjects closes all loaded objects.
func (p *Plane) closeObjects() error {
	err := p.Objects.Close()
	for _, side := range p.Sides[min(1, len(p.Sides)):] { // the first has those of p.Objects
		err = errors.Join(err, side.Objects.XdpLb.Close(), side.Objects.TcReturn.Close(), side.Objects.XdpProbe.Close(),
			side.Objects.Variables.Close())
	}
	return err
}
