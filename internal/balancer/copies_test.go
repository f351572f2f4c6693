// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// An ICMP error of an unknown flow is left for copies to all servers if the flow's bucket does not
// tell its server. If the flow is known, the error goes to its server.
func TestICMPErrorsOfUnknownFlows(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		placement desired.Placement
		selection desired.Selection
		protocol  desired.Protocol
		agents    bool
		copied    bool
		among     desired.Among
	}{
		{desired.PlacementHash, "", desired.UDP, false, false, ""},
		{desired.PlacementHash, "", desired.TCP, true, false, ""},
		{desired.PlacementRoundRobin, "", desired.UDP, false, true, ""},
		{desired.PlacementRoundRobin, "", desired.TCP, false, true, ""},
		{desired.PlacementRoundRobin, "", desired.TCP, true, true, ""},
		{desired.PlacementInfer, "", desired.UDP, false, true, ""},
		{desired.PlacementInfer, "", desired.TCP, true, true, ""},
		{desired.PlacementInfer, "", desired.TCP, false, true, desired.AmongCandidates},
		{desired.PlacementInfer, "", desired.UDP, true, true, desired.AmongCandidates},
		{desired.PlacementInfer, "", desired.TCP, true, false, desired.AmongCandidates},
		{desired.PlacementLeastQueue, "", desired.UDP, false, true, ""},
		{desired.PlacementLeastQueue, "", desired.TCP, true, true, ""},
		{desired.PlacementAWCMP, "", desired.UDP, false, true, ""},
		{desired.PlacementWeightedTurns, "", desired.UDP, false, true, ""},
		{desired.PlacementGSQ2, "", desired.UDP, false, true, ""},
		{desired.PlacementHunt, desired.SelectConsistent, desired.TCP, true, false, ""},
		{desired.PlacementHunt, desired.SelectReports, desired.TCP, true, false, ""},
		{desired.PlacementHunt, desired.SelectRandom, desired.TCP, true, true, ""},
		{desired.PlacementHunt, desired.SelectSpare, desired.TCP, true, true, ""},
	} {
		t.Run(fmt.Sprint(test.placement, test.selection, test.protocol, test.agents, test.among), func(t *testing.T) {
			t.Parallel()
			cfg := inferring(manyServers(12)...)
			if test.placement != desired.PlacementInfer {
				cfg = placingBy(test.placement, manyServers(12)...)
			}
			svc := &cfg.Services[0]
			svc.Protocol, svc.Selection = test.protocol, test.selection
			if test.among != "" {
				svc.Infer.Among, svc.Candidates = test.among, 3
			}
			if test.agents {
				cfg = withProbes(cfg)
			}
			f := open(t, cfg)
			r := newReference(f)
			flow := flowTo(vip6, 80, test.protocol)
			frame := packet.ICMPError(router6, 2, 0, 1280, reply(flow))
			got := f.run(frame)
			f.check(r.receive(frame), got)
			if copied := reasonOf(got) == "copy_icmp"; copied != test.copied {
				t.Errorf("unknown flow: %s", reasonOf(got))
			}
			f.enter(flow, "web", "s7", stateEstablished)
			f.check(f.forwardedBy(frame, flow, "s7"), f.run(frame))
		})
	}
}

// forwardedBy returns the outcome for an ICMP error that goes to a server of the service web.
func (f *fixture) forwardedBy(frame []byte, flow dataplane.Flow, server string) outcome {
	f.t.Helper()
	return f.visited(frame, flow, "web", "forward_icmp", stage{function: srv6.Deliver, server: server})
}

// An error that is left for copies has hops left, and a service with servers.
func TestErrorsThatAreNotCopied(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(drainable(desired.UDP, desired.PlacementRoundRobin, desired.OnDrainKeep)))
	flow := flowTo(vip6, 80, desired.UDP)
	for _, limit := range []uint8{0, 1} {
		frame := packet.ICMPError(router6, 2, 0, 1280, reply(flow), packet.HopLimit(limit))
		f.check(refused(frame, "drop_hop_limit", layer3(frame)), f.run(frame))
	}
	empty := drainable(desired.UDP, desired.PlacementRoundRobin, desired.OnDrainKeep)
	empty.Servers = nil
	f.mustApply(balancerOf(empty))
	frame := packet.ICMPError(router6, 2, 0, 1280, reply(flow))
	f.check(refused(frame, "drop_no_server", layer3(frame)), f.run(frame))
}

// No frame from the network passes as one that was left for copies.
func TestGroupAddressAsSource(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for name, frame := range map[string][]byte{
		"to a VIP":     frameOf(web),
		"to no VIP":    frameOf(flowTo(netip.MustParseAddr("2001:db8:99::1"), 80, desired.TCP)),
		"another type": setEthertype(frameOf(web), 0x0806),
	} {
		for _, first := range []byte{0x5f, 0x01, 0xff} {
			frame := bytes.Clone(frame)
			frame[6] = first
			if got := f.run(frame); !same(refused(frame, "drop_group_source", 0), got) {
				t.Errorf("%s from %x: %+v", name, frame[6:12], got)
			}
		}
		frame[0] = 3 // to a group
		frame[6] = 1
		if got := f.run(frame); !same(refused(frame, "pass_not_for_host", 0), got) {
			t.Errorf("%s to a group: %+v", name, got)
		}
	}
}

func setEthertype(frame []byte, kind uint16) []byte {
	out := bytes.Clone(frame)
	binary.BigEndian.PutUint16(out[12:], kind)
	return out
}

// Each core leaves few errors for copies, because each of them becomes many packets. The others go
// to the servers that the flow's bucket names.
func TestCopyRate(t *testing.T) {
	f := open(t, balancerOf(drainable(desired.UDP, desired.PlacementRoundRobin, desired.OnDrainKeep)))
	frame := packet.ICMPError(router6, 2, 0, 1280, reply(flowTo(vip6, 80, desired.UDP)))
	done := make(chan map[string]tally)
	start := time.Now()
	go func() {
		pin(t, 0)
		f.refill()
		before := f.counters()
		for range 100 {
			if _, _, err := f.plane.Objects.XdpLb.Test(frame); err != nil {
				t.Error(err)
			}
		}
		done <- difference(before.reasons, f.counters().reasons)
	}()
	got := <-done
	meanwhile := uint64(time.Since(start).Milliseconds())/10 + 2 // with one jiffy
	copied, forwarded := got["copy_icmp"].Packets, got["forward_icmp"].Packets
	if copied < 20 || copied > 20+meanwhile || copied+forwarded != 100 {
		t.Errorf("%d left for copies and %d forwarded of 100, want 20 and %d at most for which there was time",
			copied, forwarded, meanwhile)
	}
}

// An error beyond the rate of copies goes to the servers that may have the flow, as under hash: to
// all of its row if they pass it on, and otherwise to the first one.
func TestErrorsBeyondTheCopies(t *testing.T) {
	t.Parallel()
	for _, agents := range []bool{false, true} {
		t.Run(fmt.Sprint(agents), func(t *testing.T) {
			cfg := placingBy(desired.PlacementLeastQueue, manyServers(12)...)
			if agents {
				cfg = withProbes(cfg)
			}
			f := open(t, cfg)
			flow := flowTo(vip6, 80, desired.TCP)
			frame := packet.ICMPError(router6, 2, 0, 1280, reply(flow))
			row := f.row(flow, "web")
			want := stages(srv6.Steer, row...)
			if !agents {
				want = stages(srv6.Deliver, row[0])
			}
			wanted := f.visited(frame, flow, "web", "forward_icmp", want...)
			cpus := ebpf.MustPossibleCPU()
			f.must(f.plane.Objects.Copied.Put(uint32(0), slices.Repeat([]uint64{math.MaxInt64}, cpus)))
			before := f.counters()
			verdict, out, err := f.plane.Objects.XdpLb.Test(frame)
			f.must(err)
			after := f.counters()
			f.check(wanted, outcome{verdict, out, difference(before.reasons, after.reasons), difference(before.servers, after.servers)})
		})
	}
}

// copying returns two services with placement round-robin for each encapsulation. Both have the
// same three servers.
func copying() *desired.Balancer {
	var services []desired.Service
	for i, w := range ways {
		svc := w.serviceBy(uint8(i), desired.UDP)
		for n := range 2 {
			server := srv6Server("t", uint8(60+20*n+i), 1)
			if svc.Encapsulation.IsTunnel() {
				server = tunnelServer("t", map[int]string{
					4: fmt.Sprintf("10.0.%d.%d", 2+n, i), 6: fmt.Sprintf("fd00:a::%d:%d", 2+n, i),
				}[w.outer])
			}
			server.Name = fmt.Sprint("t", n)
			svc.Servers = append(svc.Servers, server)
		}
		svc.Placement, svc.Candidates = desired.PlacementRoundRobin, 8
		services = append(services, svc)
		other := svc
		other.Name, other.Port = svc.Name+"-other", 81
		services = append(services, other)
	}
	return balancerOf(services...)
}

// Each server of a service gets one copy of an ICMP error of an unknown flow, in the service's
// encapsulation, and no other server gets one. Errors that arrive on node.interface reach servers
// behind node.inside.
func TestCopiesOfICMPErrors(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		for _, interfaces := range [][]string{{"eth0"}, {"eth0", "eth1"}} {
			t.Run(fmt.Sprint(way, interfaces), func(t *testing.T) {
				t.Parallel()
				n := newFabricOf(t, copying(), way, interfaces...)
				for i := range n.cfg.Services {
					if svc := &n.cfg.Services[i]; svc.Port == 80 {
						n.requireCopies(svc)
					}
				}
			})
		}
	}
}

// requireCopies sends two ICMP errors. When the last copy of the second one has arrived, those of the
// first one have, too.
func (n *fabric) requireCopies(svc *desired.Service) {
	n.t.Helper()
	outside, inside := n.own[0], n.own[len(n.own)-1]
	clients, servers := n.routers[outside.Name], n.routers[inside.Name]
	out, in := n.socket(clients), n.socket(servers)
	defer unix.Close(out)
	defer unix.Close(in)
	flow := flowTo(svc.VIP, svc.Port.Number(), svc.Protocol)
	copies := map[string]int{} // by error and server
	cpus, err := ebpf.PossibleCPU()
	n.must(err)
	n.must(n.balancer.plane.Objects.Copied.Put(uint32(0), make([]uint64, cpus))) // no core has used its rate
	var errors [2][]byte
	for i := range errors {
		errors[i] = packet.ICMPError(routerOf(svc.VIP), 3, 1, uint32(1280+i), reply(flow))
		errors[i] = packet.SetMACs(errors[i], clients.link.MAC, outside.MAC)
		if _, err := unix.Write(out, errors[i]); err != nil {
			n.t.Fatal(err)
		}
	}
	buffer := make([]byte, 4096)
	for deadline := time.Now().Add(testhost.Patience); ; {
		done := true
		for _, server := range svc.Servers {
			done = done && copies[fmt.Sprint(1, server.Name)] > 0
		}
		if done {
			break
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: copies for %v", svc.Name, copies)
		}
		size, _, err := unix.Recvfrom(in, buffer, 0)
		if err != nil {
			continue // no frame for a second
		}
		for i, frame := range errors {
			for _, server := range svc.Servers {
				if bytes.Equal(buffer[:size], n.copyTo(svc, &server, frame, buffer[:size])) {
					copies[fmt.Sprint(i, server.Name)]++
				}
			}
		}
	}
	for i := range errors {
		for _, server := range svc.Servers {
			if got := copies[fmt.Sprint(i, server.Name)]; got != 1 {
				n.t.Errorf("%s: %s got %d copies of error %d", svc.Name, server.Name, got, i)
			}
		}
	}
}

// copyTo returns the copy of an error for a server. The kernel's hash of the packet gives the flow
// label, so the label is that of the received frame.
func (n *fabric) copyTo(svc *desired.Service, server *desired.Server, frame, received []byte) []byte {
	n.t.Helper()
	inside := n.own[len(n.own)-1]
	e := packet.Encap{Kind: svc.Encapsulation, Own: inside.MAC, NextHop: n.routers[inside.Name].link.MAC}
	if received[14]>>4 == 6 && svc.Encapsulation != desired.SRv6Insert {
		e.FlowLabel = uint32(received[15]&0xf)<<16 | uint32(received[16])<<8 | uint32(received[17])
	}
	if svc.Encapsulation.IsSRv6() {
		e.Sender = n.cfg.Node.Locator.Addr()
		e.Segments = []netip.Addr{srv6.SID{Locator: server.Locator, Function: srv6.Deliver}.Addr()}
	} else {
		sources := n.cfg.Node.Addresses
		i := slices.IndexFunc(sources, func(a netip.Addr) bool { return a.Is4() == server.Address.Is4() })
		e.Source, e.Destination = sources[i], server.Address
	}
	out, err := packet.Encapsulate(frame, e)
	n.must(err)
	return out
}

// If a service has more servers than MOST_COPIES, only this number of servers get a copy.
func TestMostCopies(t *testing.T) {
	t.Parallel()
	const most, servers = 256, 300 // most is MOST_COPIES of bpf/balancer/path/copies.h
	svc := serviceOf("web", vip4, 80, desired.UDP, desired.IPIP)
	for i := range servers {
		svc.Servers = append(svc.Servers, tunnelServer(fmt.Sprint("s", i), fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)))
	}
	svc.Placement, svc.Candidates, svc.Buckets = desired.PlacementRoundRobin, 8, 509
	cfg := balancerOf(svc)
	cfg.Node.Limits.Servers = servers
	n := newFabricOf(t, cfg, "tcx", "eth0")
	r := n.routers["eth0"]
	fd := n.socket(r)
	defer unix.Close(fd)
	n.must(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20))
	for i := range uint8(2) {
		frame := packet.ICMPError(router4, 3, 1, uint32(i), reply(flowTo(vip4, 80, desired.UDP)))
		_, err := unix.Write(fd, packet.SetMACs(frame, r.link.MAC, n.own[0].MAC))
		n.must(err)
	}
	// Copies of the first error arrive before those of the second one.
	copies := [2]int{}
	buffer := make([]byte, 4096)
	for deadline := time.Now().Add(testhost.Patience); copies[1] < most; {
		size, _, err := unix.Recvfrom(fd, buffer, 0)
		if err != nil && time.Now().After(deadline) {
			t.Fatalf("copies: %v", copies)
		}
		const inner = ethernetLength + 20
		if err == nil && size > inner+28 && buffer[23] == 4 && buffer[inner+9] == 1 {
			copies[buffer[inner+27]&1]++
		}
	}
	if copies[0] != most {
		t.Errorf("%d copies of the first error, want %d", copies[0], most)
	}
}
