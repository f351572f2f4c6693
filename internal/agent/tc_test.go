// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/packet"
)

func TestForward(t *testing.T) {
	k := testKernel(t)
	for _, c := range nexts() {
		t.Run(c.name, func(t *testing.T) {
			verdict, out := run(t, k.objects.TcForward, c.frame)
			if verdict != tcRedirect {
				t.Errorf("verdict %d, want %d", verdict, tcRedirect)
			}
			want, err := packet.Advance(c.frame)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
		})
	}
	for _, c := range append(passes(), deliveries()...) {
		if c.reason == "pass_ip_header" {
			continue // too short for a socket buffer of its protocol
		}
		frame := c.frame
		if c.out != nil {
			frame = c.out
		}
		t.Run("leaves alone/"+c.name, func(t *testing.T) {
			verdict, out := run(t, k.objects.TcForward, frame)
			if verdict != tcUnspec || !bytes.Equal(out, frame) {
				t.Errorf("verdict %#x, %d bytes; want %#x and all %d unchanged", verdict, len(out), uint32(tcUnspec), len(frame))
			}
		})
	}
	next := nexts()[0].frame // last entry 3: the balancer, two servers and the VIP
	for name, frame := range map[string][]byte{
		"without segments":               set(set(drops()[0].frame, 0, 0x60), srhSegmentsLeft, 0),
		"hop limit 0":                    packet.SetHopLimit(next, 0),
		"hop limit 1":                    packet.SetHopLimit(next, 1),
		"segments left beyond the list":  set(next, srhSegmentsLeft, 5),
		"last entry beyond the header":   set(next, srhSegmentsLeft+1, 4),
		"both, beyond the packet's list": set(next, srhSegmentsLeft, 5, 4),
	} {
		t.Run(name, func(t *testing.T) {
			before := counters(t, k)
			if verdict, _ := run(t, k.objects.TcForward, frame); verdict != tcShot {
				t.Errorf("verdict %d, want %d", verdict, tcShot)
			}
			want := map[string]agentCounter{"drop_rewrite": {Packets: 1, Bytes: uint64(len(frame) - 14)}}
			if diff := cmp.Diff(want, changed(before, counters(t, k))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
		})
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
