// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// foreseen is what a dry run has decided about a frame.
type foreseen struct {
	verdict  uint32
	frame    []byte // with the metadata of the driver
	decision *dataplane.Decision
}

var allDryRuns = flag.Bool("dryruns", false, "make dry runs in all packet tests, and not in one of ten")

// foresees tells whether a test makes dry runs. The kernel verifies the dry run's program for each
// fixture, so dry runs in all tests would double the time of the tests.
func foresees(test string) bool {
	return *allDryRuns || crc32.ChecksumIEEE([]byte(test))%10 == 0
}

// foresee makes a dry run of a program. It makes none, and returns nil, if a test has replaced the
// program by another one.
func (f *fixture) foresee(program *ebpf.Program, options ebpf.RunOptions) *foreseen {
	f.t.Helper()
	at := slices.IndexFunc(f.plane.Sides, func(s *dataplane.Side) bool { return s.Objects.XdpLb == program })
	if at < 0 {
		return nil
	}
	side := f.plane.Sides[at]
	d := f.dryRunOf(side, at == 0 && !f.cfg.Node.IsInternal())
	var mac [8]byte
	var hairpin uint32
	var locator uint64
	f.must(errors.Join(side.Objects.HostMac.Get(&mac), side.Objects.HostHairpin.Get(&hairpin), side.Objects.NodeLocator.Get(&locator)))
	f.must(d.SetHost([6]byte(mac[:6]), hairpin, locator))
	options.DataOut = make([]byte, len(options.DataOut))
	flows, halfOpen := slices.Clone(f.plane.Flows.Entries), slices.Clone(f.plane.HalfOpen.Entries)
	hints := slices.Clone(f.plane.Hints.Words())
	verdict, decision, err := d.Run(&options, 0)
	if err != nil {
		f.t.Fatalf("dry run of a frame of %d bytes: %v", len(options.Data), err)
	}
	if !slices.Equal(flows, f.plane.Flows.Entries) || !slices.Equal(halfOpen, f.plane.HalfOpen.Entries) {
		f.t.Fatalf("a dry run has changed flows: %x", options.Data)
	}
	if !slices.Equal(hints, f.plane.Hints.Words()) {
		f.t.Fatalf("a dry run has changed hints: %x", options.Data)
	}
	return &foreseen{verdict, options.DataOut, decision}
}

// dryRunOf returns a dry run of a side's program, on the same tables.
func (f *fixture) dryRunOf(side *dataplane.Side, outside bool) *dataplane.DryRun {
	f.t.Helper()
	program := side.Objects.XdpLb
	if f.dryRuns[program] == nil {
		d, err := dataplane.NewDryRun(f.plane.Objects.Shared(), f.plane.Constants, outside)
		f.must(err)
		f.dryRuns[program] = d
	}
	return f.dryRuns[program]
}

// checkSame compares the result of a run with that of the dry run before it. With random
// candidates, each run has others.
func (f *fixture) checkSame(dry *foreseen, frame []byte, verdict uint32, out []byte) {
	f.t.Helper()
	isRandom := dry.decision.Placement.IsRandom != 0
	if dry.verdict != verdict || !isRandom && !bytes.Equal(dry.frame, out) {
		f.t.Fatalf("frame %x:\nby the dry run %s %x,\nthen           %s %x",
			frame, verdicts[dry.verdict], dry.frame, verdicts[verdict], out)
	}
	if isForward(reasonName(dry.decision.Reason)) && !isRandom {
		decided, sent := f.decidedSegments(dry.decision), visitedBy(out, dry.decision.Rule.EncapsulationName())
		if !slices.Equal(decided, sent) {
			f.t.Fatalf("frame %x: decided to visit %v, sent to %v", frame, decided, sent)
		}
	}
}

// checkCounters compares the counters of a run with the decision of the dry run before it.
func (f *fixture) checkCounters(d *dataplane.Decision, o outcome) {
	f.t.Helper()
	reason := reasonName(d.Reason)
	if got := slices.Collect(maps.Keys(o.Reasons)); !slices.Equal(got, []string{reason}) {
		f.t.Fatalf("counted as %v, decided %s", got, reason)
	}
	if isForward(reason) && d.Placement.IsRandom == 0 {
		servers := []string{f.nameOf(d.Segment[0].Server)}
		if got := slices.Collect(maps.Keys(o.Servers)); !slices.Equal(got, servers) {
			f.t.Fatalf("counted for %v, decided %v", got, servers)
		}
	}
}

func isForward(reason string) bool { return strings.HasPrefix(reason, "forward_") }

// nameOf returns the name of a slot, as counters have it.
func (f *fixture) nameOf(slot uint32) string {
	for s, key := range f.slots.All() {
		if s == slot && f.slots.IsRetired(slot) {
			return key.Service + "/" + key.Server + ", retired"
		}
		if s == slot {
			return key.Service + "/" + key.Server
		}
	}
	return fmt.Sprintf("slot %d", slot)
}

// decidedSegments returns the addresses of the servers that a packet visits by a decision.
func (f *fixture) decidedSegments(d *dataplane.Decision) (all []netip.Addr) {
	for _, at := range d.Segment[:d.Count] {
		address := f.plane.Servers.Address(at.Server)
		if kind := d.Rule.EncapsulationName(); kind == desired.SRv6Insert || kind == desired.SRv6Encap {
			locator := netip.PrefixFrom(address, srv6.LocatorBits)
			address = srv6.SID{Locator: locator, Function: srv6.Function(at.Function), Argument: at.Argument}.Addr()
		}
		all = append(all, address)
	}
	return all
}

// visitedBy returns the addresses of the servers that a packet with an encapsulation visits. It
// reads only headers of the encapsulation, because those of clients may be malformed.
func visitedBy(frame []byte, kind desired.Encapsulation) (all []netip.Addr) {
	const ipv6Length, hopByHop, routing = 40, 0, 43
	p := frame[ethernetLength:]
	if p[0]>>4 == 4 {
		return []netip.Addr{netip.AddrFrom4([4]byte(p[16:20]))}
	}
	all = []netip.Addr{netip.AddrFrom16([16]byte(p[24:40]))}
	next, at := p[6], ipv6Length
	if next == hopByHop {
		next, at = p[at], at+8*(int(p[at+1])+1)
	}
	if next != routing || kind == desired.GRE || kind == desired.IPIP {
		return all
	}
	for left := int(p[at+3]); left > 0; left-- { // the last segment comes first
		segment := p[at+8+16*(left-1):]
		all = append(all, netip.AddrFrom16([16]byte(segment[:16])))
	}
	if kind == desired.SRv6Insert { // the last segment is the VIP
		all = all[:len(all)-1]
	}
	return all
}

// A dry run changes no table, whatever the frame and whatever flows there are.
func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	r := openHintReference(t)
	r.t = t
	frames := captures()
	for range 2 {
		before := datapathtest.ReadMaps(t, r.plane.Objects.Shared())
		for _, frame := range frames {
			r.foresee(r.plane.Objects.XdpLb, ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)})
		}
		for name, content := range datapathtest.ReadMaps(t, r.plane.Objects.Shared()) {
			if !maps.EqualFunc(before[name], content, bytes.Equal) {
				t.Errorf("table %s has changed", name)
			}
		}
		for _, frame := range frames { // so that the next dry runs find other flows
			r.exec(frame, nil)
		}
	}
}
