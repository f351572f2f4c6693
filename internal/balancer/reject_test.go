// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// unserved has services without a server, of both protocols and IP versions, at port 81.
func unserved() *desired.Balancer {
	cfg := standard()
	cfg.Services = slices.DeleteFunc(cfg.Services, func(s desired.Service) bool { return s.Name == "drained" })
	for i, vip := range []netip.Addr{vip4, vip6} {
		for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
			name := fmt.Sprintf("none-%s-%d", protocol, i)
			cfg.Services = append(cfg.Services, serviceOf(name, vip, 81, protocol, desired.SRv6Encap))
		}
	}
	return cfg
}

// Resets have the sequence numbers of RFC 9293 section 3.10.7.1. The reference takes no part.
func TestNumbersOfResets(t *testing.T) {
	t.Parallel()
	f := open(t, unserved())
	for _, v := range []struct {
		flags    packet.TCPFlags
		payload  int
		seq, ack uint32 // of the reset
		set      byte   // its flags
	}{
		{packet.SYN, 0, 0, 1001, 0x14},
		{packet.SYN, 10, 0, 1011, 0x14}, // TCP Fast Open
		{packet.SYN | packet.ECE | packet.CWR, 0, 0, 1001, 0x14},
	} {
		frame := frameOf(flowTo(vip4, 8080, desired.TCP), packet.Flags(v.flags), packet.Sequence(1000, 5000),
			packet.MSS(1460), packet.Payload(make([]byte, v.payload)))
		tcp := f.run(frame).Frame[ethernetLength+20:]
		seq, ack := binary.BigEndian.Uint32(tcp[4:]), binary.BigEndian.Uint32(tcp[8:])
		if seq != v.seq || ack != v.ack || tcp[13] != v.set || len(tcp) != 20 {
			t.Errorf("%v with %d bytes: seq %d, ack %d, flags %#x and %d bytes, want %d, %d, %#x and 20",
				v.flags, v.payload, seq, ack, tcp[13], len(tcp), v.seq, v.ack, v.set)
		}
	}
}

// notRejected are packets that get no answer because it could do harm: resets, ICMP errors, packets
// whose source is not a single host, and packets that may belong to a connection. Where no server
// takes new flows, a drained or failing one may have the connection. Where no service has the port,
// it may be a connection through another balancer.
func notRejected() [][]byte {
	from := func(source string, protocol desired.Protocol) []byte {
		address := netip.MustParseAddr(source)
		vip := vip6
		if address.Is4() {
			vip = vip4
		}
		flow := flowTo(vip, 8080, protocol)
		flow.Source = netip.AddrPortFrom(address, 40000)
		return frameOf(flow)
	}
	none, closed := flowTo(vip6, 81, desired.TCP), flowTo(vip6, 8080, desired.TCP)
	return [][]byte{
		frameOf(closed, packet.Flags(packet.RST)),                                             // reset
		frameOf(closed, packet.Flags(packet.RST|packet.ACK)),                                  // reset with ACK
		frameOf(closed, packet.Flags(packet.RST|packet.SYN)),                                  // SYN and reset
		frameOf(none, packet.Flags(packet.RST)),                                               // reset without a server
		frameOf(none, packet.Flags(packet.RST|packet.SYN)),                                    // SYN, reset without a server
		frameOf(closed, packet.Flags(packet.FIN|packet.SYN)),                                  // SYN and FIN
		frameOf(closed, packet.Flags(packet.ACK)),                                             // ACK
		frameOf(closed, packet.Flags(packet.PSH|packet.ACK), packet.Payload(make([]byte, 9))), // data
		frameOf(closed, packet.Flags(packet.FIN|packet.ACK)),                                  // FIN
		frameOf(closed, packet.Flags(packet.SYN|packet.ACK)),                                  // SYN-ACK
		frameOf(closed, packet.Flags(0)),                                                      // no flags
		frameOf(none, packet.Flags(packet.ACK)),                                               // ACK without a server
		frameOf(none, packet.Flags(packet.FIN|packet.ACK)),                                    // FIN without a server
		frameOf(none, packet.Flags(packet.SYN|packet.ACK)),                                    // SYN-ACK without a server
		packet.ICMPError(router6, 1, 4, 0, reply(closed)),                                     // error about a closed port
		packet.ICMPError(router6, 1, 4, 0, reply(none)),                                       // error without a server
		from("ff02::1", desired.TCP),                                                          // SYN from multicast
		from("224.0.0.1", desired.UDP),                                                        // datagram from multicast
		from("255.255.255.255", desired.TCP),                                                  // SYN from broadcast
		from("::", desired.TCP),                                                               // SYN from nowhere
		from("0.0.0.0", desired.UDP),                                                          // datagram from nowhere
		from("127.0.0.1", desired.TCP),                                                        // SYN from loopback
		frameOf(noVIP),                                                                        // SYN to an address of no VIP
		frameOf(flowTo(otherIP4, 8080, desired.UDP)),                                          // datagram to an address, IPv4
	}
}

// A reload switches node.reject.
func TestRejectIsReloaded(t *testing.T) {
	t.Parallel()
	f := open(t, unserved())
	silent := unserved()
	silent.Node.Reject = false
	for _, cfg := range []*desired.Balancer{unserved(), silent, unserved()} {
		f.mustApply(cfg)
		for reason, port := range map[string]uint16{"no_service": 8080, "no_server": 81} {
			for _, flow := range []dataplane.Flow{flowTo(vip6, port, desired.TCP), flowTo(vip4, port, desired.UDP)} {
				frame := frameOf(flow)
				want := refused(frame, "drop_"+reason, layer3(frame))
				if cfg.Node.Reject {
					want = rejected(frame, "answer_"+reason)
				}
				f.check(want, f.run(frame))
			}
		}
	}
}

// openNarrow opens a balancer that answers all frames of causes.
func openNarrow(t *testing.T) *fixture {
	f := open(t, unserved())
	for _, server := range []string{"s1", "s2", "s3"} {
		f.via[server] = "narrow"
	}
	f.route()
	return f
}

// answers tells whether the data path answers a frame now. Unlike run, it uses up the rate.
func (f *fixture) answers(frame []byte) bool {
	f.t.Helper()
	verdict, out, err := f.plane.Objects.XdpLb.Test(frame)
	f.must(err)
	if answered := verdict == verdictRedirect; answered != !slices.Equal(frame, out) {
		f.t.Errorf("verdict %d, and the frame that comes out is % x", verdict, out)
	}
	return verdict == verdictRedirect
}

// causes returns a frame for each kind of answer, with a name for it. Each kind has a rate of its
// own.
func causes() (frames map[string][]byte) {
	frames = map[string][]byte{}
	for version, flows := range map[string][2]dataplane.Flow{
		"IPv4": {web4, flowTo(vip4, 8080, desired.TCP)}, "IPv6": {web, flowTo(vip6, 8080, desired.TCP)},
	} {
		open, closed := flows[0], flows[1]
		vip := open.Destination.Addr()
		frames["time exceeded, "+version] = frameOf(open, packet.HopLimit(1))
		frames["too big, "+version] = frameOf(open, packet.Payload(make([]byte, 1440)))
		frames["unreachable, no service, "+version] = frameOf(flowTo(vip, closed.Destination.Port(), desired.UDP))
		frames["unreachable, no server, "+version] = frameOf(flowTo(vip, 81, desired.UDP))
		frames["echo reply, "+version] = packet.ICMP(open.Source.Addr(), vip, map[bool]uint8{true: 8, false: 128}[vip.Is4()], 0, 1)
	}
	frames["reset, no service"] = frameOf(flowTo(vip6, 8080, desired.TCP))
	frames["reset, no server"] = frameOf(flowTo(vip4, 81, desired.TCP))
	return frames
}

// For each kind of answer there is a budget of its own: when the budgets of all other kinds are
// used up, the kind is still sent, and when only its own is used up, only that kind is not sent.
func TestAnswersHaveBudgetsOfTheirOwn(t *testing.T) {
	t.Parallel()
	f := openNarrow(t)
	answers := f.plane.Objects.Answers
	cpus := ebpf.MustPossibleCPU()
	never, always := slices.Repeat([]uint64{math.MaxInt64}, cpus), make([]uint64, cpus)
	all := causes()
	if int(answers.MaxEntries()) != 5*3 {
		t.Fatalf("there are %d budgets: causes lists the kinds of 15", answers.MaxEntries())
	}
	budgets := map[uint32]string{}
	for name, frame := range all {
		f.setAnswered(math.MaxInt64)
		for budget := range answers.MaxEntries() {
			f.must(answers.Put(budget, always))
			isAnswered := f.answers(frame)
			f.must(answers.Put(budget, never))
			if isAnswered {
				if other := budgets[budget]; other != "" {
					t.Errorf("%q and %q have the same budget", name, other)
				}
				budgets[budget] = name
			}
		}
	}
	if len(budgets) != len(all) {
		t.Errorf("%d kinds have %d budgets: %v", len(all), len(budgets), budgets)
	}
}

// A flood of 80,000 packets of all kinds, as fast as possible, takes no answer from clients whose
// packets are too long, and no reset from clients of closed ports.
func TestFloodTakesNoOtherAnswers(t *testing.T) {
	f := openNarrow(t)
	all := causes()
	for _, name := range []string{"too big, IPv6", "too big, IPv4", "reset, no server", "unreachable, no service, IPv4"} {
		t.Run(name, func(t *testing.T) {
			f.refill()
			unpin := stayOnCPU(t)
			defer unpin()
			before := f.counters()
			const flood, clients = 80_000, 40
			for flooding, frame := range all {
				if flooding == name {
					continue
				}
				for i := range flood / len(all) {
					if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
						t.Fatal(err)
					}
					if i%(flood/len(all)/clients*len(all)) == 0 && !f.answers(all[name]) {
						t.Fatalf("not answered in a flood of %s", flooding)
					}
				}
			}
			if difference(before.reasons, f.counters().reasons)["drop_rate_limit"].Packets == 0 {
				t.Error("the machine is so slow that all of the flood was answered")
			}
		})
	}
}
