// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
)

// arm is the data path on one interface. Arms have all tables in common, but each has programs of its own: what
// those are told is of their interface.
type arm struct {
	armKind
	objects armObjects
}

// armKind is which of the balancer's interfaces an arm is on.
type armKind struct {
	setting   string // that names the interface
	xdpPin    string // of the link of xdp_lb
	returnPin string // of the link of tc_return
}

// armKinds are node.interface, which every balancer has, and node.inside.
var armKinds = [...]armKind{
	{"node.interface", datapath.LinkPin, "link_return"},
	{"node.inside", datapath.InsidePin, "link_return_inside"},
}

// armObjects are what an arm has for itself of objects.
type armObjects struct {
	XdpLb               *ebpf.Program  `ebpf:"xdp_lb"`
	TcReturn            *ebpf.Program  `ebpf:"tc_return"`
	XdpProbe            *ebpf.Program  `ebpf:"xdp_probe"`
	HostMac             *ebpf.Variable `ebpf:"host_mac"`
	HostHairpin         *ebpf.Variable `ebpf:"host_hairpin"`
	HostClientInterface *ebpf.Variable `ebpf:"host_client_interface"`
	NodeLocator         *ebpf.Variable `ebpf:"node_locator"`
	ProbeTurn           *ebpf.Variable `ebpf:"probe_turn"`
}

// loadArms makes the arms of the objects that are loaded, and loads what node.inside needs beside.
func (k *kernel) loadArms(spec *ebpf.CollectionSpec, node *config.BalancerNode) error {
	own := &k.objects
	k.arms = []*arm{{armKinds[0], armObjects{
		own.XdpLb, own.TcReturn, own.XdpProbe, own.HostMac, own.HostHairpin, own.HostClientInterface, own.NodeLocator,
		own.ProbeTurn,
	}}}
	if node.Inside == "" {
		return nil
	}
	if err := spec.Variables[balancerVarHostIsOutside].Set(false); err != nil {
		return fmt.Errorf("set where node.inside leads: %w", err)
	}
	inside := &arm{armKind: armKinds[1]}
	err := spec.LoadAndAssign(&inside.objects, &ebpf.CollectionOptions{MapReplacements: own.tables()})
	if err != nil {
		return err
	}
	k.arms = append(k.arms, inside)
	return nil
}

// tables are those that all arms have in common, by their names.
func (o *objects) tables() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{
		balancerMapAnsweredOffers: o.AnsweredOffers,
		balancerMapAnswers:        o.Answers,
		balancerMapLocators:       o.Locators,
		balancerMapProbes:         o.Probes,
		balancerMapProbeTurns:     o.ProbeTurns,
		balancerMapSenders:        o.Senders,
		balancerMapSignalKeys:     o.SignalKeys,
	}
	for name, table := range pinned(&o.kernelMaps) {
		all[name] = *table
	}
	return all
}

// setHost tells the programs of the interface that they are on: which frames are for this host, and how they
// go back.
func (a *arm) setHost(link nexthop.Link) error {
	hairpin := uint32(0)
	if hairpins(link) {
		hairpin = uint32(link.Index)
	}
	if err := a.objects.HostHairpin.Set(hairpin); err != nil {
		return fmt.Errorf("set how frames go back: %w", err)
	}
	if err := a.objects.HostMac.Set(macWord(link.MAC)); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// setHost tells all programs of the interfaces of their arms. Servers' packets leave by the first.
func (k *kernel) setHost(links []nexthop.Link) error {
	for i, arm := range k.arms {
		if err := arm.objects.HostClientInterface.Set(uint32(links[0].Index)); err != nil {
			return fmt.Errorf("set which interface leads to clients: %w", err)
		}
		if err := arm.setHost(links[i]); err != nil {
			return err
		}
	}
	return nil
}

// check returns an error if the instance works in another network namespace, or if an interface
// runs a program of somebody else.
func (k *kernel) check(links []nexthop.Link) error {
	if err := k.checkNamespace(); err != nil {
		return err
	}
	outside, inside := k.pin(armKinds[0].xdpPin), k.pin(armKinds[1].xdpPin)
	for _, link := range links {
		if err := datapath.CheckXDP(link.Index, outside, inside); err != nil {
			return err
		}
	}
	return nil
}

// checkNamespace returns an error if the instance works in another network namespace.
func (k *kernel) checkNamespace() error {
	for _, kind := range armKinds {
		for _, pin := range []string{kind.xdpPin, kind.returnPin} {
			if _, err := datapath.AttachedTo(k.pin(pin)); err != nil {
				return err
			}
		}
	}
	return nil
}

// attach puts the programs on the interfaces of the arms, in the place of an earlier build's. The ones behind XDP
// come first, for XDP hands packets to them, and the outside last: what goes on from there is answered inside.
func (k *kernel) attach(t *datapath.Takeover, links []nexthop.Link) ([]datapath.Attached, error) {
	if err := k.claim(t, links); err != nil {
		return nil, err
	}
	for i, arm := range k.arms {
		if err := k.attachReturn(t, arm, links[i].Index); err != nil {
			return nil, err
		}
	}
	if err := k.pinCounting(t); err != nil {
		return nil, err
	}
	attached := make([]datapath.Attached, len(links))
	for i := len(links) - 1; i >= 0; i-- {
		var err error
		arm := k.arms[i]
		attached[i], err = t.AttachXDP(arm.objects.XdpLb, links[i].Index, k.pin(arm.xdpPin))
		if err != nil {
			return nil, err
		}
	}
	t.OnCommit(func() error { return k.leave(links) })
	return attached, nil
}

// claim finds the links that an earlier process has left on the interfaces, whichever parts these had then.
func (k *kernel) claim(t *datapath.Takeover, links []nexthop.Link) error {
	for i, link := range links {
		mine, other := armKinds[i], armKinds[1-i]
		for pin, other := range map[string]string{mine.xdpPin: other.xdpPin, mine.returnPin: other.returnPin} {
			if err := t.ClaimLink(k.pin(pin), k.pin(other), link.Index); err != nil {
				return err
			}
		}
	}
	return nil
}

// leave takes the programs off the interfaces that an earlier process had, and this one has not.
func (k *kernel) leave(links []nexthop.Link) error {
	for _, kind := range armKinds[len(k.arms):] {
		if err := detachLinks(k.pin(kind.xdpPin), k.pin(kind.returnPin)); err != nil {
			return err
		}
	}
	var keep []int
	for _, link := range links {
		keep = append(keep, link.Index)
	}
	return datapath.RemoveFilters(k.instance, keep...)
}

func (k *kernel) pin(name string) string { return filepath.Join(k.dir, name) }

// closeObjects lets go of what is loaded.
func (k *kernel) closeObjects() error {
	err := k.objects.Close()
	for _, arm := range k.arms[min(1, len(k.arms)):] { // the first has the same programs
		err = errors.Join(err, arm.objects.XdpLb.Close(), arm.objects.TcReturn.Close(), arm.objects.XdpProbe.Close())
	}
	return err
}

func detachLinks(pins ...string) error {
	var errs []error
	for _, pin := range pins {
		errs = append(errs, datapath.DetachLink(pin))
	}
	return errors.Join(errs...)
}
