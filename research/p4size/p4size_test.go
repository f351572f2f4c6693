// SPDX-License-Identifier: Apache-2.0

package p4size

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/p4"
	"github.com/segue-lb/segue/p4/shell"
)

var (
	client = netip.MustParseAddrPort("[2001:db8:c::1]:50000")
	vip    = netip.MustParseAddrPort("[2001:db8:f::1]:80")
	nop    = packet.TCPOption(layers.TCPOptionKindNop, nil)
)

func read(t *testing.T, text []byte) *Program {
	t.Helper()
	p, err := Read(text)
	testhost.Must(t, err)
	return p
}

// TestParse walks through the parsers of all variants of SHELL. With the timestamps in front, a
// packet visits the states of Ethernet, IPv6, TCP, the options and the cookie. Behind SACKs, it
// visits one more.
func TestParse(t *testing.T) {
	for _, variant := range shell.Variants {
		p := read(t, shell.Program(variant))
		for blocks, offset := range []int{8, 11, 13, 15} {
			timestamps := []packet.Option{packet.Flags(packet.ACK), packet.Timestamps(2, 0x701)}
			sacks := []packet.Option{nop, nop, packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8*blocks))}
			if blocks == 0 {
				sacks = nil
			}
			for states, options := range map[int][]packet.Option{
				5: append(timestamps, sacks...),
				6: append(sacks, timestamps...),
			} {
				parse, err := p.Parse(packet.TCP(client, vip, options...))
				testhost.Must(t, err)
				if blocks == 0 {
					states = 5
				}
				bits, cookie := (14+40+4*offset)*8, int64(1)
				if offset > variant { // the options are not parsed
					states, bits, cookie = 3, (14+40+20)*8, 0
				}
				got := parse.Field("scalars.user_metadata_t.covert_channel").Int64()
				if parse.States != states || parse.Bits != bits || got != cookie {
					t.Errorf("d_off_max = %d, d_off = %d: %d states, %d bits, cookie %d; want %d, %d, %d",
						variant, offset, parse.States, parse.Bits, got, states, bits, cookie)
				}
			}
		}
	}
}

// TestParseSegue checks that the parser of Segue's program finds an echo behind any options, also in
// IPv4.
func TestParseSegue(t *testing.T) {
	p := read(t, p4.Config)
	options := append(slices.Repeat([]packet.Option{nop}, 28), packet.Timestamps(2, 0x701))
	for _, frame := range [][]byte{
		packet.TCP(client, vip, options...),
		packet.TCP(netip.MustParseAddrPort("192.0.2.1:50000"), netip.MustParseAddrPort("192.0.2.2:80"), options...),
	} {
		parse, err := p.Parse(frame)
		testhost.Must(t, err)
		found := false
		for field, value := range parse.values {
			found = found || strings.HasPrefix(field, "scalars.packet_t._echo") && value.Int64() == 0x701
		}
		if !found {
			t.Errorf("no echo in %v", parse.values)
		}
	}
}

// TestShortFrame checks that a frame that ends in a header is an error.
func TestShortFrame(t *testing.T) {
	p := read(t, shell.Program(15))
	frame := packet.TCP(client, vip)
	if _, err := p.Parse(frame[:len(frame)-1]); err == nil || !strings.Contains(err.Error(), "header tcp: the frame of 73 bytes ends") {
		t.Errorf("error %v", err)
	}
}

// TestSizes counts by hand what SHELL's program has. Each further length of headers adds four states,
// and a transition to it and five others.
func TestSizes(t *testing.T) {
	for i, variant := range shell.Variants {
		p := read(t, shell.Program(variant))
		if got, want := p.Parser(), (ParserSize{States: 5 + 4*i, Entries: 8 + 6*i}); got != want {
			t.Errorf("d_off_max = %d: %+v, want %+v", variant, got, want)
		}
		want := []Table{
			{"ShellIngress.consistent_hashing", 16, 2 + 256, 35591, false},
			{"ShellIngress.choice_history", 17, 2 + 256, 71182, false},
			{"ShellIngress.interfaces", 128, 9, 500, false},
		}
		if got := p.Tables(); !slices.Equal(got, want) {
			t.Errorf("d_off_max = %d: %v, want %v", variant, got, want)
		}
	}
}

// chain is a program of five tables. Table a sets x. Depending on x, table b sets y or table c sets z.
// Table d matches y, and sets w to z + 1 and z to w + 1. Table e matches z.
const chain = `{
"header_types": [{"name": "m", "fields": [["x", 8, false], ["y", 8, false], ["z", 8, false], ["w", 8, false]]}],
"headers": [{"name": "m", "header_type": "m", "metadata": true}],
"parsers": [{"init_state": "start", "parse_states": [{"name": "start", "transitions": [{"type": "default"}]}]}],
"actions": [
 {"id": 0, "runtime_data": [{"bitwidth": 8}], "primitives": [{"op": "assign", "parameters": [
  {"type": "field", "value": ["m", "x"]}, {"type": "runtime_data", "value": 0}]}]},
 {"id": 1, "runtime_data": [{"bitwidth": 8}], "primitives": [{"op": "assign", "parameters": [
  {"type": "field", "value": ["m", "y"]}, {"type": "runtime_data", "value": 0}]}]},
 {"id": 2, "runtime_data": [{"bitwidth": 8}], "primitives": [{"op": "assign", "parameters": [
  {"type": "field", "value": ["m", "z"]}, {"type": "runtime_data", "value": 0}]}]},
 {"id": 3, "primitives": [
  {"op": "assign", "parameters": [{"type": "field", "value": ["m", "w"]}, {"type": "expression", "value": {
   "op": "+", "left": {"type": "field", "value": ["m", "z"]}, "right": {"type": "hexstr", "value": "0x01"}}}]},
  {"op": "assign", "parameters": [{"type": "field", "value": ["m", "z"]}, {"type": "expression", "value": {
   "op": "+", "left": {"type": "field", "value": ["m", "w"]}, "right": {"type": "hexstr", "value": "0x01"}}}]}]}],
"pipelines": [{"init_table": "a",
 "tables": [
  {"name": "a", "key": [{"match_type": "exact", "target": ["m", "w"]}], "action_ids": [0], "max_size": 16, "next_tables": {"0": "if"}},
  {"name": "b", "key": [{"match_type": "exact", "target": ["m", "w"]}], "action_ids": [1], "max_size": 16, "next_tables": {"1": "d"}},
  {"name": "c", "key": [{"match_type": "exact", "target": ["m", "w"]}], "action_ids": [2], "max_size": 16, "next_tables": {"2": "d"}},
  {"name": "d", "key": [{"match_type": "exact", "target": ["m", "y"]}], "action_ids": [3], "max_size": 16, "next_tables": {"3": "e"}},
  {"name": "e", "key": [{"match_type": "exact", "target": ["m", "z"]}], "action_ids": [0], "max_size": 16, "next_tables": {"0": null}}],
 "conditionals": [{"name": "if", "expression": {"type": "expression", "value": {"op": "==",
  "left": {"type": "field", "value": ["m", "x"]}, "right": {"type": "hexstr", "value": "0x01"}}},
  "true_next": "b", "false_next": "c"}]}]}`

// TestStages: a is in the first stage, b and c are in the second one, as the condition that decides
// about them. d takes the third and the fourth one, because its operations need each other. e comes
// after both.
func TestStages(t *testing.T) {
	p := read(t, []byte(chain))
	want := map[string]int{"a": 0, "if": 1, "b": 1, "c": 1, "d": 2, "e": 4}
	for name, stage := range firstStages(p.nodes(0, nil)) {
		if stage != want[name] {
			t.Errorf("%s is in stage %d, want %d", name, stage, want[name])
		}
	}
	if stages, dependencies := p.Stages(nil); stages != 5 || dependencies != 5 {
		t.Errorf("%d stages, %d for dependencies; want 5, 5", stages, dependencies)
	}
	// An entry of b has 16 bits, so 7,168 of them fill a block, and these take 107 blocks.
	stages, dependencies := p.Stages(map[string]int{"b": 106*7168 + 1})
	if stages != 6 || dependencies != 5 {
		t.Errorf("with a larger table: %d stages, %d for dependencies; want 6, 5", stages, dependencies)
	}
}

func TestNotAProgram(t *testing.T) {
	for _, text := range []string{"", "{}", `{"parsers": [{}], "pipelines": [{"tables": 1}]}`} {
		if _, err := Read([]byte(text)); err == nil || !strings.HasPrefix(err.Error(), "compiled P4 program: ") {
			t.Errorf("%q: error %v", text, err)
		}
	}
}
