// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// Frames that XDP has rewritten for another server leave by the kernel's route. No other frame
// does.
func TestForward(t *testing.T) {
	k := testKernel(t)
	for _, c := range nexts() {
		t.Run(c.name, func(t *testing.T) {
			verdict, out := run(t, k.objects.TcForward, c.out)
			if verdict != tcRedirect {
				t.Errorf("verdict %d, want %d", verdict, tcRedirect)
			}
			if diff := cmp.Diff(c.out, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
		})
	}
	for name, frame := range leftAlone() {
		t.Run("leaves alone/"+name, func(t *testing.T) { requireLeftAlone(t, k, frame) })
	}
}

// leftAlone returns frames that XDP has not rewritten for another server.
func leftAlone() map[string][]byte {
	next := nexts()[0].out
	ours := func(frame []byte) []byte { return packet.SetMACs(frame, hostMAC, hostMAC) }
	vlan := wrap(packet.TCP(client6, vip6, packet.VLAN(7)), srv6Encap(desired.SRv6Insert, nextSID))
	all := map[string][]byte{
		"from another host":    packet.SetMACs(next, packet.MAC{2}, hostMAC),
		"to another host":      packet.SetMACs(next, hostMAC, packet.MAC{2}),
		"to this server":       ours(nexts()[0].frame),
		"to a balancer":        set(next, functionAt, 0, 0x11),
		"to a host":            set(next, functionAt, 0, 0),
		"to a multicast group": set(next, 24, 0xff, 2),
		"marked, IPv4":         ours(packet.TCP(client4, vip4)),
		"marked, to a VIP":     ours(packet.TCP(client6, vip6)),
		"marked, in a VLAN":    ours(vlan),
		"not yet seen by XDP":  nexts()[0].frame,
	}
	for _, c := range append(passes(), deliveries()...) {
		if c.reason == "pass_ip_header" {
			continue // too short for a socket buffer of its protocol
		}
		all[c.name] = c.frame
		if c.out != nil {
			all[c.name] = c.out
		}
	}
	return all
}

func requireLeftAlone(t *testing.T, k *kernel, frame []byte) {
	t.Helper()
	verdict, out := run(t, k.objects.TcForward, frame)
	if verdict != tcUnspec || !bytes.Equal(out, frame) {
		t.Errorf("verdict %#x, %d bytes; want %#x and all %d unchanged",
			verdict, len(out), uint32(tcUnspec), len(frame))
	}
}

// A host outside the domain can mark a frame like XDP. It is not sent into the domain.
func TestForwardFromOutside(t *testing.T) {
	cfg := testConfig()
	cfg.Node.Internal = new(bool)
	k := testKernelOf(t, cfg)
	for _, c := range nexts() {
		t.Run(c.name, func(t *testing.T) { requireLeftAlone(t, k, c.out) })
	}
}

// synAckCase is a frame that the host sends.
type synAckCase struct {
	name    string
	frame   []byte
	counter string // of SYN-ACKs; empty: none
	want    []byte // nil: unchanged
}

// synAcks are SYN-ACKs for an MTU of 1500 bytes. The MSS of IPv6 with srv6-insert (56 bytes) is
// 1384, of IPv4 with gre over IPv6 (44 bytes) 1416, and of IPv4 with srv6-encap (40 bytes) 1420.
func synAcks() []synAckCase {
	synAck := packet.Flags(packet.SYN | packet.ACK)
	nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
	timestamps := packet.Timestamps(1, 2)
	otherPort := netip.AddrPortFrom(vip4.Addr(), 8080)
	return []synAckCase{
		{"IPv6", packet.TCP(vip6, client6, synAck, packet.MSS(1440), timestamps), "clamped",
			packet.TCP(vip6, client6, synAck, packet.MSS(1384), timestamps)},
		{"IPv4", packet.TCP(vip4, client4, synAck, packet.MSS(1460), timestamps), "clamped",
			packet.TCP(vip4, client4, synAck, packet.MSS(1416), timestamps)},
		{"all ports", packet.TCP(otherPort, client4, synAck, packet.MSS(1460)), "clamped",
			packet.TCP(otherPort, client4, synAck, packet.MSS(1420))},
		{"IPv4 options", packet.TCP(vip4, client4, synAck, packet.IPOptions([]byte{1, 1, 1, 1}), packet.MSS(1460)), "clamped",
			packet.TCP(vip4, client4, synAck, packet.IPOptions([]byte{1, 1, 1, 1}), packet.MSS(1416))},
		{"behind timestamps", packet.TCP(vip6, client6, synAck, timestamps, packet.MSS(65535)), "clamped",
			packet.TCP(vip6, client6, synAck, timestamps, packet.MSS(1384))},
		{"at an odd byte", packet.TCP(vip6, client6, synAck, nop, packet.MSS(1440)), "clamped",
			packet.TCP(vip6, client6, synAck, nop, packet.MSS(1384))},
		{"behind 16 no-operations", padded(16, 1440), "clamped",
			padded(16, 1384)},
		{"equal", packet.TCP(vip6, client6, synAck, packet.MSS(1384)), "fits", nil},
		{"less", packet.TCP(vip6, client6, synAck, packet.MSS(1220)), "fits", nil},
		{"no options", packet.TCP(vip6, client6, synAck), "no_option", nil},
		{"other options", packet.TCP(vip6, client6, synAck, timestamps), "no_option", nil},
		{"behind the end", packet.SetByte(packet.TCP(vip6, client6, synAck, nop, packet.MSS(1440)), 14+60, 0), "no_option", nil},
		{"36 no-operations", padded(36, 1440), "malformed", nil},
		{"option of length 0", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 0), "malformed", nil},
		{"MSS of length 3", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 3), "malformed", nil},
		{"option beyond the header", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 5), "malformed", nil},
		{"SYN", packet.TCP(vip6, client6, packet.Flags(packet.SYN), packet.MSS(1440)), "", nil},
		{"ACK", packet.TCP(vip6, client6, packet.Flags(packet.ACK), packet.MSS(1440)), "", nil},
		{"other address", packet.TCP(other6, client6, synAck, packet.MSS(1440)), "", nil},
		{"other port", packet.TCP(netip.AddrPortFrom(vip6.Addr(), 53), client6, synAck, packet.MSS(1440)), "", nil},
		{"UDP", packet.UDP(vip6, client6), "", nil},
		{"first fragment", set(packet.TCP(vip4, client4, synAck, packet.MSS(1460)), 6, 0x20), "clamped",
			set(packet.TCP(vip4, client4, synAck, packet.MSS(1416)), 6, 0x20)},
		{"later fragment", set(packet.TCP(vip4, client4, synAck, packet.MSS(1460)), 7, 1), "", nil},
		{"IPv4 version 5", set(packet.TCP(vip4, client4, synAck, packet.MSS(1460)), 0, 0x55), "", nil},
		{"IPv4 header of 16 bytes", // the bytes at the offset of the flags are a SYN-ACK's
			set(packet.TCP(vip4, client4, packet.Sequence(0, 0x120000), packet.MSS(1460)), 0, 0x44), "", nil},
		{"IPv6 version 5", set(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 0, 0x50), "", nil},
		{"the mapped form of an IPv4 address", mapped(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 8, vip4.Addr()), "", nil},
	}
}

func TestClampMSS(t *testing.T) {
	k := testKernel(t)
	for _, c := range synAcks() {
		t.Run(c.name, func(t *testing.T) {
			before := counters(t, k)
			verdict, out := run(t, k.objects.TcAgent, c.frame)
			if verdict != tcUnspec {
				t.Errorf("verdict %#x, want %#x", verdict, uint32(tcUnspec))
			}
			want := c.want
			if want == nil {
				want = c.frame
			}
			if diff := cmp.Diff(want, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
			wantCounters := map[string]agentCounter{}
			if c.counter != "" {
				wantCounters["syn_ack_"+c.counter] = agentCounter{Packets: 1}
			}
			if diff := cmp.Diff(wantCounters, changed(before, counters(t, k))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
		})
	}
}

// padded returns a SYN-ACK whose MSS option comes after n no-operations.
func padded(n int, mss uint16) []byte {
	options := []packet.Option{packet.Flags(packet.SYN | packet.ACK)}
	for range n {
		options = append(options, packet.TCPOption(layers.TCPOptionKindNop, nil))
	}
	return packet.TCP(vip6, client6, append(options, packet.MSS(mss))...)
}
