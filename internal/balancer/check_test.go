// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// The verdicts of tc_check (linux/pkt_cls.h).
const (
	tcUnspec   = ^uint32(0)
	tcShot     = 2
	tcRedirect = 7
)

// Offsets in struct __sk_buff.
const (
	skbMark = 8
	skbSize = 192
)

// sendCheck runs tc_check with a packet that the host sends, and returns the verdict, the frame and
// the mark that the packet has afterwards.
func (f *fixture) sendCheck(frame []byte, mark uint32) (verdict uint32, out []byte, after uint32) {
	f.t.Helper()
	context, left := make([]byte, skbSize), make([]byte, skbSize)
	binary.NativeEndian.PutUint32(context[skbMark:], mark)
	run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096), Context: context, ContextOut: left}
	verdict, err := f.plane.Objects.TcCheck.Run(&run)
	f.must(err)
	return verdict, run.DataOut, binary.NativeEndian.Uint32(left[skbMark:])
}

// checked makes checks of all servers take the path of clients' packets.
func (f *fixture) checked() {
	checks := map[uint32]dataplane.Check{}
	for _, svc := range f.services.byName {
		for _, m := range svc.members {
			checks[m.slot] = dataplane.Check{VIP: svc.VIP, Encapsulation: svc.Encapsulation}
		}
	}
	f.plane.Checks.Replace(checks)
}

// checkFrame returns a packet of a check of the service, as the host sends it. The hop limit is that
// of the host.
func checkFrame(svc *desired.Service, hopLimit uint8, options ...packet.Option) []byte {
	from := "10.9.9.9:1234"
	if svc.VIP.Is6() {
		from = "[2001:db8:9::9]:1234"
	}
	return packet.TCP(netip.MustParseAddrPort(from), netip.AddrPortFrom(svc.VIP, 80),
		append(options, packet.HopLimit(hopLimit), packet.TrafficClass(0x2e))...)
}

// encapsulatedCheck returns the frame that a check must be, as the reference implementation makes
// it. The reference decrements the hop limit of inner packets, as a forwarder does. A host does not.
// The first server to visit is s. The SIDs are those of SRv6.
func (f *fixture) encapsulatedCheck(
	svc *desired.Service, s *desired.Server, label uint32, sids []srv6.SID, options ...packet.Option,
) []byte {
	f.t.Helper()
	limit := uint8(64)
	if svc.Encapsulation != desired.SRv6Insert {
		limit++
	}
	e := packet.Encap{
		Kind: svc.Encapsulation, FlowLabel: label,
		Own: f.macs[f.linkOf(s.Name)], NextHop: hopMAC(target(s)),
	}
	if svc.Encapsulation.IsSRv6() {
		e.Sender = f.cfg.Node.Locator.Addr()
		for _, sid := range sids {
			e.Segments = append(e.Segments, sid.Addr())
		}
	} else {
		key := keyOfServer(svc, s, f.cfg.Node.Locator, f.cfg.Node.Addresses)
		e.Source, e.Destination = key.Source, s.Address
	}
	out, err := packet.Encapsulate(checkFrame(svc, limit, options...), e)
	f.must(err)
	return out
}

// A check has the encapsulation, the next hop and the port of clients' packets to its server.
func TestCheckFrames(t *testing.T) {
	t.Parallel()
	var services []desired.Service
	for i, w := range ways {
		services = append(services, w.serviceBy(uint8(i), desired.TCP))
	}
	f := open(t, balancerOf(services...))
	f.checked()
	for i := range services {
		svc, w := &services[i], ways[i]
		t.Run(svc.Name, func(t *testing.T) {
			f.t = t
			frame := checkFrame(svc, 64)
			verdict, got, mark := f.sendCheck(frame, dataplane.MarkOf(f.slot(svc.Name, "s")))
			label := uint32(0)
			if w.outer == 6 {
				label = binary.BigEndian.Uint32(got[ethernetLength:]) & 0xfffff
			}
			server := serverOfName(svc, "s")
			sids := []srv6.SID{{Locator: server.Locator, Function: srv6.Deliver}}
			if want := f.encapsulatedCheck(svc, server, label, sids); verdict != tcRedirect || !bytes.Equal(got, want) {
				t.Errorf("verdict %d\ngot  %x\nwant %x", verdict, got, want)
			}
			if mark != 0 {
				t.Errorf("the packet leaves with the mark %#x", mark)
			}
			if len(got)-len(frame) != w.overhead {
				t.Errorf("%d bytes added, want %d", len(got)-len(frame), w.overhead)
			}
		})
	}
}

// The server of a call is asked as for clients: it has to accept the SYN, whatever its load is, and
// later packets are those of a known flow. The SYN can visit another server first, which does not
// have the flow and passes it on.
func TestCallFrames(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 4))
	f.checked()
	for service := range hunted {
		svc := f.service(service)
		sid := func(server string, function srv6.Function) srv6.SID {
			sid := srv6.SID{Locator: f.locatorOf(service, server), Function: function}
			if function != srv6.AckStickiness {
				sid.Argument = srv6.Offer{Column: srv6.NoColumn}.Argument()
			}
			return sid
		}
		for _, sent := range []struct {
			last  string
			flags packet.TCPFlags
			want  []srv6.SID
		}{
			{"s3", packet.SYN, []srv6.SID{sid("s3", srv6.ConnectForce)}},
			{"s3", packet.ACK, []srv6.SID{sid("s3", srv6.AckStickiness)}},
			{"s3", packet.RST | packet.ACK, []srv6.SID{sid("s3", srv6.AckStickiness)}},
			{"s5", packet.SYN, []srv6.SID{sid("s3", srv6.RecoverStickiness), sid("s5", srv6.ConnectForce)}},
			{"s5", packet.ACK, []srv6.SID{sid("s5", srv6.AckStickiness)}},
		} {
			f.plane.Checks.Lead(f.slot(service, "s3"), f.slot(service, sent.last))
			frame := checkFrame(svc, 64, packet.Flags(sent.flags))
			verdict, got, mark := f.sendCheck(frame, dataplane.CallMarkOf(f.slot(service, "s3")))
			first := "s3"
			if sent.flags != packet.SYN {
				first = sent.last
			}
			label := binary.BigEndian.Uint32(got[ethernetLength:]) & 0xfffff
			want := f.encapsulatedCheck(svc, serverOfName(svc, first), label, sent.want, packet.Flags(sent.flags))
			if verdict != tcRedirect || !bytes.Equal(got, want) || mark != 0 {
				t.Errorf("%s, to %s, flags %v: verdict %d, mark %#x\ngot  %x\nwant %x",
					service, sent.last, sent.flags, verdict, mark, got, want)
			}
		}
		// Calls change nothing for checks.
		_, got, _ := f.sendCheck(checkFrame(svc, 64), dataplane.MarkOf(f.slot(service, "s3")))
		label := binary.BigEndian.Uint32(got[ethernetLength:]) & 0xfffff
		deliver := []srv6.SID{{Locator: f.locatorOf(service, "s3"), Function: srv6.Deliver}}
		if want := f.encapsulatedCheck(svc, serverOfName(svc, "s3"), label, deliver); !bytes.Equal(got, want) {
			t.Errorf("%s: a check\ngot  %x\nwant %x", service, got, want)
		}
	}
}

// Other packets of the host are not changed, and checks that cannot be sent are dropped.
func TestChecksAreDropped(t *testing.T) {
	t.Parallel()
	svc := serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert, srv6Server("s", 1, 1))
	other := serviceOf("other", netip.MustParseAddr("2001:db8::9999"), 80, desired.TCP, desired.SRv6Encap)
	f := open(t, balancerOf(svc, other))
	slot := f.slot("web", "s")
	frame := checkFrame(&svc, 64)
	require := func(name string, frame []byte, mark, want uint32) {
		t.Helper()
		verdict, got, _ := f.sendCheck(frame, mark)
		if verdict != want || want != tcRedirect && !bytes.Equal(got, frame) {
			t.Errorf("%s: verdict %d, want %d", name, int32(verdict), int32(want))
		}
	}
	require("before there are checks", frame, dataplane.MarkOf(slot), tcShot)
	f.checked()
	require("a check", frame, dataplane.MarkOf(slot), tcRedirect)
	require("without a mark", frame, 0, tcUnspec)
	require("with another mark", frame, slot, tcUnspec)
	require("a call", frame, dataplane.CallMarkOf(slot), tcRedirect)
	require("with a mark that differs in a bit", frame, dataplane.MarkOf(slot)^2<<16, tcUnspec)
	require("of a slot without a server", frame, dataplane.MarkOf(slot+1), tcShot)
	require("of a slot that no table has", frame, dataplane.MarkOf(0xffff), tcShot)
	require("to another VIP", checkFrame(&other, 64), dataplane.MarkOf(slot), tcShot)
	f.plane.Checks.Replace(nil)
	require("when the server is no longer checked", frame, dataplane.MarkOf(slot), tcShot)
	f.checked()
	f.via["s"] = "narrow"
	f.route()
	large := func(payload int) []byte {
		return packet.TCP(netip.MustParseAddrPort("[2001:db8:9::9]:1234"), netip.AddrPortFrom(svc.VIP, 80),
			packet.Payload(make([]byte, payload)))
	}
	empty := len(large(0)) - ethernetLength
	require("that fits", large(links["narrow"]-empty-56), dataplane.MarkOf(slot), tcRedirect)
	require("that does not fit", large(links["narrow"]-empty-55), dataplane.MarkOf(slot), tcShot)
	f.via["s"] = ""
	f.route()
	require("to a server without a next hop", frame, dataplane.MarkOf(slot), tcShot)
}
