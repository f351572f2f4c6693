// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/p4"
	"github.com/segue-lb/segue/p4/shell"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/p4size"
)

// switchProgram is a balancer for switches.
type switchProgram struct {
	name string
	*p4size.Program
}

// switchPrograms returns SHELL's variants, the smallest first, and Segue's program.
func switchPrograms() (programs []switchProgram, err error) {
	add := func(name string, text []byte) error {
		p, err := p4size.Read(text)
		programs = append(programs, switchProgram{name, p})
		return err
	}
	for _, variant := range shell.Variants {
		if err := add(fmt.Sprintf("SHELL, d_off max = %d", variant), shell.Program(variant)); err != nil {
			return nil, err
		}
	}
	return programs, add("Segue", p4.Config)
}

// ackAt returns a packet with timestamps, and with SACKs that fill the TCP header up to one of SHELL's
// data offsets. behind says that the timestamps are behind the SACKs.
func ackAt(offset int, behind bool) []byte {
	options := []packet.Option{packet.Flags(packet.ACK)}
	if !behind {
		options = append(options, packet.Timestamps(1, 1))
	}
	if blocks := (offset - 8) / 2; blocks > 0 {
		nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
		options = append(options, nop, nop, packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8*blocks)))
	}
	if behind {
		options = append(options, packet.Timestamps(1, 1))
	}
	return packet.TCP(netip.MustParseAddrPort("[2001:db8::1]:50000"), netip.MustParseAddrPort("[2001:db8::2]:80"),
		options...)
}

// parses returns what the parser does with packets of all of SHELL's data offsets.
func (p *switchProgram) parses(behind bool) (parses []*p4size.Parse, err error) {
	for _, offset := range shell.Variants {
		parse, err := p.Parse(ackAt(offset, behind))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		parses = append(parses, parse)
	}
	return parses, nil
}

// headerBits returns the bits of the headers of the packet with the most, with timestamps behind SACKs.
func (p *switchProgram) headerBits() (most int, err error) {
	parses, err := p.parses(true)
	for _, parse := range parses {
		most = max(most, parse.Bits)
	}
	return most, err
}

// shell5 draws what the parser of each program does with packets of each data offset.
func shell5(_ context.Context, r *run) error {
	programs, err := switchPrograms()
	if err != nil {
		return err
	}
	states := func(parse *p4size.Parse) float64 { return float64(parse.States) }
	bits := func(parse *p4size.Parse) float64 { return float64(parse.Bits) }
	for _, drawing := range []struct {
		title, unit string
		behind      bool
		value       func(*p4size.Parse) float64
	}{
		{"Parser states, timestamps in front", "states", false, states},
		{"Parser states, timestamps behind SACKs", "states", true, states},
		{"Parsed headers, timestamps behind SACKs", "bits", true, bits},
	} {
		c := chart.Chart{
			Title: drawing.title, X: chart.Axis{Label: "data offset of the packet, in units of 4 bytes"},
			Y: chart.Axis{Label: drawing.unit},
		}
		for _, p := range programs {
			parses, err := p.parses(drawing.behind)
			if err != nil {
				return err
			}
			s := chart.Series{Name: p.name, Style: chart.Marked}
			for i, parse := range parses {
				s.Points = append(s.Points, chart.Point{X: float64(shell.Variants[i]), Y: drawing.value(parse)})
			}
			c.Series = append(c.Series, s)
		}
		r.draw(c)
	}
	r.remark("Figure 5 of the paper has the latency of a NetFPGA card. These charts have the states that a " +
		"packet visits, and the bits that become headers. Neither is a latency.")
	r.remark("SHELL's variants do the same with a packet, unless its header is longer than a variant knows. " +
		"Then this variant does not parse the options.")
	return nil
}

// tableIII has the resources of table III of the paper, by variant, in percent of the card's.
var tableIII = []struct {
	name string
	used [4]float64
}{
	{"LUT", [4]float64{36.9, 40.1, 43.8, 48.7}},
	{"LUTRAM", [4]float64{19.4, 22.0, 24.9, 28.6}},
	{"FF", [4]float64{33.3, 36.4, 40.2, 45.8}},
	{"BRAM", [4]float64{59.3, 63.2, 67.7, 74.1}},
}

// shellIII draws how the programs grow with the longest header, how large tables are, and how many
// stages they need.
func shellIII(_ context.Context, r *run) error {
	programs, err := switchPrograms()
	if err != nil {
		return err
	}
	for _, p := range programs {
		bits, err := p.headerBits()
		if err != nil {
			return err
		}
		size := p.Parser()
		r.remark("%s: %d parser states, %d entries of a parser's TCAM, at most %d bits of headers in such a "+
			"packet, %d bits of metadata.", p.name, size.States, size.Entries, bits, p.Metadata())
	}
	if err := r.drawGrowth(programs[:len(shell.Variants)]); err != nil {
		return err
	}
	r.drawTables(programs)
	return nil
}

// drawGrowth draws, by variant, what the paper measured and what can be counted, divided by the same
// for the smallest variant.
func (r *run) drawGrowth(variants []switchProgram) error {
	c := chart.Chart{
		Title: "Growth of SHELL with the longest header",
		X:     chart.Axis{Label: "d_off max"},
		Y:     chart.Axis{Label: "size, relative to d_off max = 8"},
	}
	add := func(name string, style chart.Style, values ...float64) {
		s := chart.Series{Name: name, Style: style}
		for i, v := range values {
			s.Points = append(s.Points, chart.Point{X: float64(shell.Variants[i]), Y: v / values[0]})
		}
		c.Series = append(c.Series, s)
	}
	for _, resource := range tableIII {
		add(resource.name+" (paper)", chart.Dashed, resource.used[:]...)
	}
	var states, entries, bits []float64
	for _, p := range variants {
		longest, err := p.headerBits()
		if err != nil {
			return err
		}
		size := p.Parser()
		states, entries = append(states, float64(size.States)), append(entries, float64(size.Entries))
		bits = append(bits, float64(longest))
	}
	add("parser states", chart.Marked, states...)
	add("entries of the parser's TCAM", chart.Marked, entries...)
	add("bits of headers", chart.Marked, bits...)
	r.draw(c)
	return nil
}

// switchSetup is a program with the entries of a service.
type switchSetup struct {
	name string
	*switchProgram
	entries map[string]int // by the last part of the table's name
}

// shellEntries are the entries of SHELL's program for a number of buckets.
func shellEntries(buckets int) map[string]int {
	return map[string]int{
		"consistent_hashing": buckets,
		"choice_history":     buckets * shellCandidates,
		"interfaces":         shellServers,
	}
}

// segueEntries are the entries of Segue's program for one service with as many candidates and servers
// as SHELL has. changed says that all columns have had several servers.
func segueEntries(buckets int, changed bool) map[string]int {
	entries := map[string]int{
		"ports": 2, "services": 1, "services_of_all_ports": 0,
		"rows": buckets, "columns": buckets * shellCandidates, "histories": buckets,
		"next_hops": shellServers, "locators": shellServers,
		"quic_forms": 0, "quic_servers": 0,
	}
	if changed {
		entries["columns"], entries["histories"] = 0, buckets*(1+shellCandidates)
	}
	return entries
}

// switchSetups returns SHELL's program with its own number of buckets and with Segue's, and Segue's
// program.
func switchSetups(programs []switchProgram) []switchSetup {
	const same = 65536
	variant, segue := &programs[0], &programs[len(programs)-1]
	return []switchSetup{
		{"SHELL, 35591 buckets", variant, shellEntries(35591)},
		{"SHELL, 65536 buckets", variant, shellEntries(same)},
		{"Segue, new", segue, segueEntries(same, false)},
		{"Segue, changed", segue, segueEntries(same, true)},
	}
}

// The uses of tables.
const (
	ofSYNs         = "SYNs"
	ofOtherPackets = "other packets"
	ofServers      = "servers and services"
)

// drawTables draws the bytes of tables, and the stages.
func (r *run) drawTables(programs []switchProgram) {
	bytes := chart.Chart{Title: "Keys and values of the tables", Y: chart.Axis{Label: "MB"}}
	stages := chart.Chart{Title: "Stages by the model of RMT", Y: chart.Axis{Label: "stages"}}
	values := map[string][]float64{}
	for _, setup := range switchSetups(programs) {
		bytes.X.Categories = append(bytes.X.Categories, setup.name)
		for use, n := range setup.bytes() {
			values[use] = append(values[use], n/1e6)
		}
		all, dependencies := setup.Stages(setup.entriesByName())
		values["all"] = append(values["all"], float64(all))
		values["dependencies"] = append(values["dependencies"], float64(dependencies))
		r.remark("%s: %d entries, %.2f MB, of these %.2f MB in TCAM, %d stages (%d by dependencies).",
			setup.name, setup.count(), setup.megabytes(), setup.tcam()/1e6, all, dependencies)
	}
	bars := func(name, key string) chart.Series {
		return chart.Series{Name: name, Style: chart.Bars, Points: indexed(values[key]...)}
	}
	for _, use := range []string{ofSYNs, ofOtherPackets, ofServers} {
		bytes.Series = append(bytes.Series, bars("tables of "+use, use))
	}
	stages.X = bytes.X
	stages.Series = []chart.Series{bars("by dependencies", "dependencies"), bars("with the memory of the tables", "all")}
	r.draw(bytes)
	r.draw(stages)
	r.remark("Sizes are keys and values, without the overhead of a hash table. Segue's bars have 65536 " +
		"buckets. New tables have had no changes. In changed tables, each column has had several servers. A " +
		"change of generation needs twice as much for a short time.")
	r.remark("RMT has %d stages, %d entries of a parser's TCAM, and %d bits of headers and metadata.",
		p4size.RMTStages, p4size.RMTParserEntries, p4size.RMTHeaderVector)
}

// lastName returns the last part of a table's name.
func lastName(table string) string { return table[strings.LastIndexByte(table, '.')+1:] }

// entriesByName returns the entries by the full names of tables.
func (s *switchSetup) entriesByName() map[string]int {
	entries := map[string]int{}
	for _, t := range s.Tables() {
		entries[t.Name] = s.entries[lastName(t.Name)]
	}
	return entries
}

// count returns the number of all entries.
func (s *switchSetup) count() (sum int) {
	for n := range maps.Values(s.entriesByName()) {
		sum += n
	}
	return sum
}

// bytes returns the bytes of keys and values, by the use of tables.
func (s *switchSetup) bytes() map[string]float64 {
	sum := map[string]float64{}
	for _, t := range s.Tables() {
		use := ofServers
		switch lastName(t.Name) {
		case "consistent_hashing", "rows":
			use = ofSYNs
		case "choice_history", "columns", "histories":
			use = ofOtherPackets
		}
		sum[use] += float64(s.entries[lastName(t.Name)]*(t.Key+t.Data)) / 8
	}
	return sum
}

// tcam returns the bytes of the tables that do not match exactly.
func (s *switchSetup) tcam() (sum float64) {
	for _, t := range s.Tables() {
		if t.Ternary {
			sum += float64(s.entries[lastName(t.Name)]*t.Key) / 8
		}
	}
	return sum
}

func (s *switchSetup) megabytes() (sum float64) {
	for _, n := range s.bytes() {
		sum += n
	}
	return sum / 1e6
}
