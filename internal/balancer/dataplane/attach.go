// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"slices"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
)

// sideKinds are the outside, which every balancer has, and the inside, in this order.
var sideKinds = [...]sideKind{
	{"node.interface", xdpHook(datapath.LinkPin), returnHook("link_return")},
	{"node.inside", xdpHook(datapath.InsidePin), returnHook("link_return_inside")},
}

// hooks lists all hooks that have pins, in the order in which programs are attached. The tc_return
// programs come first, because XDP passes packets to them. The XDP program of the outside comes
// last: servers answer the packets that it forwards, and the inside must be ready for the answers.
var hooks = []datapath.Hook{
	sideKinds[0].onReturn, sideKinds[1].onReturn, sideKinds[1].xdp, sideKinds[0].xdp,
}

// checkHook is where tc_check runs. Only a process sends checks, so the program need not outlive
// the process, and its link has no pin.
var checkHook = datapath.Hook{At: ebpf.AttachTCXEgress, Priority: 0x5e6d}

func xdpHook(pin string) datapath.Hook { return datapath.Hook{At: ebpf.AttachXDP, Pin: pin} }

// returnHook returns the hook of tc_return. Like that of checkHook, its priority is an arbitrary
// number that filters of others are unlikely to have.
func returnHook(pin string) datapath.Hook {
	return datapath.Hook{At: ebpf.AttachTCXIngress, Priority: 0x5e6c, Pin: pin}
}

// Attach attaches the programs to the interfaces of the sides, in the order of Sides. They replace
// the programs of an earlier process. After an error, the takeover restores these. Attach tells, in
// the same order, how it attached the XDP programs.
func (p *Plane) Attach(t *datapath.Takeover, links []nexthop.Link) ([]datapath.Attached, error) {
	if err := p.Loader.Publish(t); err != nil {
		return nil, err
	}
	attached, err := p.Loader.Attach(t, p.places(links))
	if err != nil {
		return nil, err
	}
	t.OnCommit(func() error {
		p.links = links
		return nil
	})
	slices.Reverse(attached) // the XDP program of the inside was attached first
	return attached, nil
}

// places returns where the programs run, in the order in which they are attached: see hooks. The
// program of checkHook comes before the XDP programs.
func (p *Plane) places(links []nexthop.Link) (places []datapath.Place) {
	for i, side := range p.Sides {
		places = append(places, datapath.Place{
			Hook: side.onReturn, Program: side.Objects.TcReturn, Ifindex: links[i].Index,
		})
	}
	towardsServers := links[len(links)-1].Index
	places = append(places, datapath.Place{
		Hook: checkHook, Program: p.Objects.TcCheck, Ifindex: towardsServers,
	})
	for i, side := range slices.Backward(p.Sides) {
		places = append(places, datapath.Place{
			Hook: side.xdp, Program: side.Objects.XdpLb, Ifindex: links[i].Index,
		})
	}
	return places
}

// Detach removes the data path of an instance from the kernel, with all flows. It removes the
// programs before their tables. The caller must be in the network namespace of the instance. If
// programs cannot be removed, Detach returns an error, and leaves the tables.
func Detach(instance string) error {
	if err := datapath.Detach(instance, hooks); err != nil {
		return err
	}
	return datapath.RemoveDir(instance)
}
