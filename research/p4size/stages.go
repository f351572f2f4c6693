// SPDX-License-Identifier: Apache-2.0

package p4size

import (
	"maps"
	"slices"
)

// The switch of Bosshart et al., "Forwarding Metamorphosis: Fast Programmable Match-Action Processing
// in Hardware for SDN", SIGCOMM 2013 (RMT): sections 4 and 5.
const (
	// RMTStages is the number of match-action stages.
	RMTStages = 32
	// RMTHeaderVector is the number of bits that go from stage to stage with a packet.
	RMTHeaderVector = 4096
	// RMTParserEntries is the number of entries of a parser's TCAM. Each has 32 bits of the packet,
	// and 8 bits for the state.
	RMTParserEntries = 256
	parserKeyBits    = 32
	// Each stage has 106 blocks of SRAM. A block has 1,024 words of 112 bits.
	blocksOfStage = 106
	blockBits     = 1024 * 112
)

// sramBlocks returns how many blocks of RMT's SRAM hold entries of some bits. It is a bound from below:
// entries are packed without gaps, and a hash table has no free places.
func sramBlocks(entries, bits int) int { return (entries*bits + blockBits - 1) / blockBits }

// node is a table or a condition of a pipeline.
type node struct {
	next      []string // "": the end
	reads     map[string]bool
	writes    map[string]bool
	length    int // stages that its longest action takes
	blocks    int
	successor map[string]bool // all nodes that may follow, also later
}

// Stages returns how many stages of RMT's kind the tables need. entries has numbers of entries by the
// names of tables. Other tables have as many entries as the program says.
//
// A table comes in a later stage than all tables before it that write a field that it reads or
// writes (match and action dependencies of Jose et al., "Compiling Packet Programs to Reconfigurable
// Switches", NSDI 2015, section 3.2). A table whose execution only depends on an earlier one may
// share its stage. A stage sets each field once, by one operation of any kind. Copies take no
// operation. Tables that are larger than the SRAM of a stage continue in the next stages.
// dependencies is the number of stages with memory of any size.
func (p *Program) Stages(entries map[string]int) (stages, dependencies int) {
	blocks := map[int]int{} // by stage
	for i := range p.Pipelines {
		nodes := p.nodes(i, entries)
		for name, first := range firstStages(nodes) {
			n := nodes[name]
			dependencies = max(dependencies, first+n.length)
			blocks[first] += n.blocks
		}
	}
	for stage := range dependencies {
		stages += max(1, (blocks[stage]+blocksOfStage-1)/blocksOfStage)
	}
	return stages, dependencies
}

// nodes returns the tables and conditions of a pipeline by their names.
func (p *Program) nodes(pipeline int, entries map[string]int) map[string]*node {
	nodes := map[string]*node{}
	add := func(name string, next []string) *node {
		n := &node{next: next, reads: map[string]bool{}, writes: map[string]bool{}, length: 1}
		nodes[name] = n
		return n
	}
	for _, c := range p.Pipelines[pipeline].Conditionals {
		n := add(c.Name, []string{c.True, c.False})
		n.length = 0
		p.markReads(&c.Expression, n.reads)
	}
	for _, t := range p.Pipelines[pipeline].Tables {
		n := add(t.Name, slices.Sorted(maps.Values(t.Next)))
		for _, key := range t.Key {
			n.reads[name(key.Target)] = true
		}
		for _, id := range t.Actions {
			n.length = max(n.length, p.markAction(id, n))
		}
		if size := p.table(&t); size.Key > 0 && !size.Ternary {
			if n, ok := entries[t.Name]; ok {
				size.Entries = n
			}
			n.blocks = sramBlocks(size.Entries, size.Key+size.Data)
		}
	}
	for _, n := range nodes {
		n.successor = map[string]bool{}
		n.follow(nodes, n.successor)
	}
	return nodes
}

func (n *node) follow(nodes map[string]*node, reached map[string]bool) {
	for _, next := range n.next {
		if m := nodes[next]; m != nil && !reached[next] {
			reached[next] = true
			m.follow(nodes, reached)
		}
	}
}

// markReads marks the fields of an expression.
func (p *Program) markReads(v *value, fields map[string]bool) {
	if v == nil {
		return
	}
	switch v.kind {
	case "field":
		fields[name(v.path)] = true
	case "operator":
		p.markReads(v.left, fields)
		p.markReads(v.right, fields)
		p.markReads(v.cond, fields)
	case "calculation":
		for _, c := range p.Calculations {
			if c.Name == v.path[0] {
				for i := range c.Input {
					p.markReads(&c.Input[i], fields)
				}
			}
		}
	}
}

// markAction marks the fields that an action reads and writes. It returns the length of the longest
// chain of operations of which each needs the result of the one before.
func (p *Program) markAction(id int, n *node) (length int) {
	ready := map[string]int{} // after how many operations a field has its value
	for _, a := range p.Actions {
		if a.ID != id {
			continue
		}
		for _, o := range a.Primitives {
			reads, writes := p.uses(&o)
			after := 0
			for f := range reads {
				if ready[f] == 0 {
					n.reads[f] = true
				}
				after = max(after, ready[f])
			}
			if !isCopy(&o) {
				after++
			}
			for f := range writes {
				n.writes[f] = true
				ready[f] = after
			}
			length = max(length, after)
		}
	}
	return length
}

func isCopy(o *operation) bool {
	return o.Op == "assign_header" || o.Op == "assign" && o.Parameters[1].kind == "field"
}

// uses returns the fields that an operation of an action reads and writes.
func (p *Program) uses(o *operation) (reads, writes map[string]bool) {
	reads, writes = map[string]bool{}, map[string]bool{}
	switch o.Op {
	case "mark_to_drop":
		writes["standard_metadata.egress_spec"] = true
		return reads, writes
	case "add_header": // the other fields are set by other operations
		writes[o.Parameters[0].path[0]+".$valid$"] = true
		return reads, writes
	}
	for i := range o.Parameters {
		v := &o.Parameters[i]
		switch {
		case v.kind == "header" && o.Op == "assign_header" && i == 1:
			p.markHeader(v.path[0], reads)
		case v.kind == "header":
			p.markHeader(v.path[0], writes)
		case i == 0 && v.kind == "field" && o.Op != "_jump_if_zero":
			writes[name(v.path)] = true
		default:
			p.markReads(v, reads)
		}
	}
	return reads, writes
}

func (p *Program) markHeader(header string, fields map[string]bool) {
	fields[header+".$valid$"] = true
	for _, f := range p.fields(header) {
		fields[header+"."+f.name] = true
	}
}

// firstStages returns the stage in which each node begins.
func firstStages(nodes map[string]*node) map[string]int {
	first := map[string]int{}
	var place func(name string) int
	place = func(name string) int {
		if stage, ok := first[name]; ok {
			return stage
		}
		stage := 0
		for before, n := range nodes {
			if !n.successor[name] {
				continue
			}
			if b := nodes[name]; intersect(n.writes, b.reads) || intersect(n.writes, b.writes) {
				stage = max(stage, place(before)+n.length)
			} else if intersect(n.reads, b.writes) || decides(nodes, before, name) {
				stage = max(stage, place(before))
			}
		}
		first[name] = stage
		return stage
	}
	for name := range nodes {
		place(name)
	}
	return first
}

func intersect(a, b map[string]bool) bool {
	for f := range a {
		if b[f] {
			return true
		}
	}
	return false
}

// decides tells whether a node decides about the execution of another one: after some of its
// outcomes, the other one is executed in any case, and after others it is not.
func decides(nodes map[string]*node, before, name string) bool {
	some, all := false, true
	for _, next := range nodes[before].next {
		always := next == name || !avoids(nodes, next, name, map[string]bool{})
		some, all = some || always, all && always
	}
	return some && !all
}

// avoids tells whether there is a way from a node to the end without another node.
func avoids(nodes map[string]*node, from, other string, seen map[string]bool) bool {
	n := nodes[from]
	if n == nil {
		return true
	}
	seen[from] = true
	for _, next := range n.next {
		if next != other && !seen[next] && avoids(nodes, next, other, seen) {
			return true
		}
	}
	return false
}
