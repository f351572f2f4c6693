// SPDX-License-Identifier: Apache-2.0

package agent

//go:generate go tool bpf2go -target bpfel timestamp ../../bpf/test/timestamp.bpf.c -- -I../../bpf

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// stamps are the timestamps of a packet.
type stamps struct {
	Found       bool
	Value, Echo uint32
}

// Both ends find the timestamps in any legal order of options, and none in malformed ones.
func TestFindTimestamps(t *testing.T) {
	testhost.NeedAgent(t)
	var objects timestampObjects
	testhost.Must(t, loadTimestampObjects(&objects, nil))
	t.Cleanup(func() {
		if err := objects.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range timestampCases() {
		t.Run(c.name, func(t *testing.T) {
			if verdict, _ := run(t, objects.XdpTimestamps, c.frame); verdict != xdpPass {
				t.Fatalf("verdict %d, want %d", verdict, xdpPass)
			}
			var got stamps
			err := objects.Found.Get(&got.Found)
			if got.Found {
				err = errors.Join(err, objects.Value.Get(&got.Value), objects.Echo.Get(&got.Echo))
			}
			testhost.Must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("timestamps (-want +got):\n%s", diff)
			}
		})
	}
}

type timestampCase struct {
	name  string
	frame []byte
	want  stamps
}

func timestampCases() []timestampCase {
	const optionsAt = 14 + 40 + 20 // of an IPv6 packet
	found := stamps{true, 0x01020304, 0xf1f2f3f4}
	option := packet.TCPOption(layers.TCPOptionKindTimestamps, []byte{1, 2, 3, 4, 0xf1, 0xf2, 0xf3, 0xf4})
	aligned := packet.Timestamps(found.Value, found.Echo)
	nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
	sack := packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8))
	unknown := packet.TCPOption(layers.TCPOptionKind(253), []byte{8, 10})
	segment := func(options ...packet.Option) []byte {
		return packet.TCP(client6, vip6, append(options, packet.Payload([]byte("hello, hello, hello")))...)
	}
	nops := func(n int) (out []packet.Option) {
		for range n {
			out = append(out, nop)
		}
		return out
	}
	return []timestampCase{
		{"aligned", segment(aligned), found},
		{"IPv4", packet.TCP(client4, vip4, aligned), found},
		{"IPv4 options", packet.TCP(client4, vip4, packet.IPOptions([]byte{1, 1, 1, 1}), aligned), found},
		{"extension header", packet.TCP(client6, vip6, packet.DestinationOptions(16), aligned), found},
		{"before SACK", segment(aligned, nop, nop, sack), found},
		{"behind SACK", segment(nop, nop, sack, aligned), found},
		{"behind SACK, not aligned", segment(sack, option), found},
		{"first", segment(option), found},
		{"at an odd byte", segment(nop, option), found},
		{"behind MSS", segment(packet.MSS(1460), option), found},
		{"behind an unknown option", segment(unknown, option), found},
		{"behind 30 no-operations", segment(append(nops(30), option)...), found},
		{"no options", segment(), stamps{}},
		{"no timestamps", segment(nop, nop, sack), stamps{}},
		{"40 no-operations", segment(nops(40)...), stamps{}},
		{"behind the end", packet.SetByte(segment(nop, nop, nop, nop, aligned), optionsAt, 0), stamps{}},
		{"of length 9", packet.SetByte(segment(aligned), optionsAt+3, 9), stamps{}},
		{"of length 11", packet.SetByte(segment(aligned), optionsAt+3, 11), stamps{}},
		{"behind an option of length 0", packet.SetByte(segment(unknown, option), optionsAt+1, 0), stamps{}},
		{"behind an option of length 1", packet.SetByte(segment(unknown, option), optionsAt+1, 1), stamps{}},
		{"behind an option beyond the header", packet.SetByte(segment(unknown, option), optionsAt+1, 200), stamps{}},
		// The bytes behind the header are the data, though they look like the option.
		{"in the data", packet.SetByte(segment(aligned), 14+40+12, 0x50), stamps{}},
		{"half in the data", packet.SetByte(segment(aligned), 14+40+12, 0x70), stamps{}},
	}
}
