// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// webAnd returns a service of vip6, which stays, and services of other VIPs.
func webAnd(vips ...netip.Addr) *desired.Balancer {
	cfg := webOf(srv6Server("s", 1, 1))
	for _, vip := range vips {
		cfg.Services = append(cfg.Services,
			serviceOf("at-"+vip.String(), vip, 80, desired.TCP, desired.SRv6Encap, srv6Server("t", 2, 1)))
	}
	return cfg
}

// requireRemoved fails the test unless these are the removed VIPs, with their dropped packets.
func (f *fixture) requireRemoved(want map[netip.Addr]uint64) {
	f.t.Helper()
	got := map[netip.Addr]uint64{}
	for _, vip := range f.snapshot().RemovedVIPs {
		got[vip.VIP] = vip.Packets
		if vip.Age < 0 || vip.Age > time.Hour.Seconds() {
			f.t.Errorf("%s was removed %f s ago", vip.VIP, vip.Age)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Errorf("removed VIPs (-want +got):\n%s", diff)
	}
}

// age makes all removed VIPs older by the given time.
func (f *fixture) age(by time.Duration) {
	f.t.Helper()
	entries := f.plane.Services.All()
	for i := range entries {
		if _, removed := entries[i].Removed(); removed {
			entries[i].Id -= uint32(by / time.Second)
		}
	}
	f.must(f.services.replaceEntries(entries))
}

// All packets to a removed VIP are dropped, and counted by VIP. Nothing answers them. They pass to
// the host when the time is over.
func TestRemovedVIP(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4, vipGone))
	f.foresees = true
	f.requireRemoved(map[netip.Addr]uint64{})
	f.mustApply(webAnd())
	counted := map[netip.Addr]uint64{vip4: 0, vipGone: 0}
	check := func(reason string) {
		t.Helper()
		for vip := range counted {
			closed := flowTo(vip, 9999, desired.UDP)
			frames := [][]byte{
				frameOf(flowTo(vip, 80, desired.TCP)), frameOf(flowTo(vip, 80, desired.TCP), packet.Flags(packet.ACK)),
				frameOf(closed), frameOf(closed, packet.HopLimit(1)), setByte(frameOf(closed), 0, 0xff),
			}
			frames = append(frames, packet.Fragments(frameOf(closed, large), 64, 9)...)
			if vip.Is4() {
				frames = append(frames, packet.ICMP(client4.Addr(), vip, 8, 0, 1),
					packet.ICMPError(router4, 3, 4, 1400, reply(flowTo(vip, 80, desired.TCP))))
			} else {
				frames = append(frames, packet.ICMP(client6.Addr(), vip, 128, 0, 1),
					packet.ICMPError(router6, 2, 0, 1400, reply(flowTo(vip, 80, desired.TCP))))
			}
			for _, frame := range frames {
				got := f.run(frame)
				f.check(refused(frame, reason, got.Reasons[reason].Bytes), got)
				if reason == "drop_removed_vip" {
					counted[vip]++
				}
			}
		}
	}
	check("drop_removed_vip")
	f.requireRemoved(counted)
	f.check(f.forwarded(frameOf(web), web, "web", "s", "forward_new"), f.run(frameOf(web)))

	f.age(desired.DefaultDropRemovedVIPs - 5*time.Second)
	f.must(f.sweep())
	check("drop_removed_vip")
	f.requireRemoved(counted)
	f.age(5 * time.Second)
	f.must(f.sweep())
	check("pass_not_vip")
	f.requireRemoved(map[netip.Addr]uint64{})
	if left := f.removedCounters(); left != 0 {
		t.Errorf("%d counters are left", left)
	}
}

// removedCounters returns the number of VIPs that have a counter as removed ones.
func (f *fixture) removedCounters() (n int) {
	f.t.Helper()
	var vip [16]byte
	var cpus []dataplane.Counter
	for entries := f.plane.Objects.RemovedVips.Iterate(); entries.Next(&vip, &cpus); {
		n++
	}
	return n
}

// The next process goes on to drop the packets, and to count them. It also drops packets to a VIP
// whose last service was removed while no process ran.
func TestRemovedVIPsOutliveTheProcess(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4, vipGone))
	f.mustApply(webAnd(vip4))
	gone, gone4 := frameOf(flowTo(vipGone, 80, desired.TCP)), frameOf(flowTo(vip4, 80, desired.TCP))
	f.run(gone)
	f.age(time.Minute)
	node := f.cfg.Node
	f.stop()
	cfg := webAnd()
	cfg.Node = node
	f.start(cfg)
	for range 2 {
		f.check(refused(gone, "drop_removed_vip", 60), f.run(gone))
		f.check(refused(gone4, "drop_removed_vip", 40), f.run(gone4))
	}
	f.requireRemoved(map[netip.Addr]uint64{vip4: 2, vipGone: 3})
	f.age(desired.DefaultDropRemovedVIPs - time.Minute - time.Second)
	f.must(f.sweep())
	f.age(time.Second)
	f.must(f.sweep())
	f.requireRemoved(map[netip.Addr]uint64{vip4: 2})
}

// A VIP that gets a service again is one like any other.
func TestRemovedVIPReturns(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4))
	flow := flowTo(vip4, 80, desired.TCP)
	closed := frameOf(flowTo(vip4, 81, desired.TCP))
	for range 2 {
		f.mustApply(webAnd())
		f.check(refused(closed, "drop_removed_vip", 40), f.run(closed))
		f.requireRemoved(map[netip.Addr]uint64{vip4: 1})
		f.mustApply(webAnd(vip4))
		f.check(rejected(closed, "answer_no_service"), f.run(closed))
		if got := serverOf(f.run(frameOf(flow))); got != "at-"+vip4.String()+"/t" {
			t.Errorf("a packet goes to %q", got)
		}
		f.requireRemoved(map[netip.Addr]uint64{})
	}
}

// A reload with node.drop-removed-vips 0 forgets all removed VIPs at once, and keeps none.
func TestRemovedVIPsAreNotDropped(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4, vipGone))
	f.mustApply(webAnd(vip4))
	frame := frameOf(flowTo(vipGone, 80, desired.TCP))
	f.check(refused(frame, "drop_removed_vip", 60), f.run(frame))
	for _, cfg := range []*desired.Balancer{webAnd(vip4), webAnd()} {
		cfg.Node.DropRemovedVIPs = 0
		f.mustApply(cfg)
		f.check(refused(frame, "pass_not_vip", 60), f.run(frame))
		f.requireRemoved(map[netip.Addr]uint64{})
	}
	frame = frameOf(flowTo(vip4, 80, desired.TCP))
	f.check(refused(frame, "pass_not_vip", 40), f.run(frame))
}

// Packets to an address that the host has itself pass, whether the host gets the address before the
// VIP is removed or after.
func TestRemovedVIPOfTheHost(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4, vipGone))
	f.leaveSharedNetwork()
	assign := func(address string) {
		t.Helper()
		f.must(f.ns.Do(func() error {
			link, err := netlink.LinkByName("out")
			if err != nil {
				return err
			}
			parsed, err := netlink.ParseAddr(address)
			if err != nil {
				return err
			}
			parsed.Flags = unix.IFA_F_NODAD // otherwise the kernel would first look for other owners
			return netlink.AddrAdd(link, parsed)
		}))
	}
	frame, frame4 := frameOf(flowTo(vipGone, 80, desired.TCP)), frameOf(flowTo(vip4, 80, desired.TCP))
	assign(vip4.String() + "/32")
	f.mustApply(webAnd())
	f.check(refused(frame4, "pass_not_vip", 40), f.run(frame4))
	f.check(refused(frame, "drop_removed_vip", 60), f.run(frame))
	assign(vipGone.String() + "/128")
	f.must(f.ns.Do(f.sweep))
	f.check(refused(frame, "pass_not_vip", 60), f.run(frame))
	f.requireRemoved(map[netip.Addr]uint64{})
}

// The tables have room for a number of removed VIPs. Beyond that, the oldest ones are forgotten.
func TestRemovedVIPsAreBounded(t *testing.T) {
	t.Parallel()
	s := services{dropRemoved: 24 * time.Hour}
	now, err := dataplane.BootTime()
	testhost.Must(t, err)
	var before []dataplane.ServiceEntry
	for i := range dataplane.MaxRemovedVIPs + 2 {
		vip := netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: byte(i >> 8), 15: byte(i), 13: byte(i >> 16)})
		at := now
		if i == 7 || i == 8 {
			at -= time.Second
		}
		before = append(before, dataplane.VIPKey(vip).Remove(at))
	}
	removed, err := s.removedVIPs(before, func(dataplane.ServiceEntry) bool { return false })
	if err != nil || len(removed) != dataplane.MaxRemovedVIPs {
		t.Fatalf("%d removed VIPs, %v", len(removed), err)
	}
	for _, entry := range removed {
		if entry == before[7] || entry == before[8] {
			t.Errorf("%s is kept, though it is one of the oldest", entry.VIP())
		}
	}
}

// A trace says why packets to a removed VIP are dropped.
func TestTraceOfRemovedVIP(t *testing.T) {
	t.Parallel()
	f := open(t, webAnd(vip4))
	f.mustApply(webAnd())
	trace := mustTrace(t, f.view(), inspect.Packet{Flow: flowTo(vip4, 80, desired.TCP), Opens: true, Length: 40})
	if trace.Reason != "drop_removed_vip" || trace.Service != nil {
		t.Errorf("%+v", trace)
	}
	f.requireRemoved(map[netip.Addr]uint64{vip4: 0})
}
