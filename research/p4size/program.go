// SPDX-License-Identifier: Apache-2.0

// Package p4size counts what a compiled P4 program needs of a switch: parser states, bits of headers,
// entries of tables, and stages. It reads the JSON that p4c-bm2-ss writes for the software switch
// bmv2 (JSON_format.md of github.com/p4lang/behavioral-model).
package p4size

import (
	"encoding/json"
	"fmt"
	"math/big"
	"slices"
	"strings"
)

// Program is a compiled program.
type Program struct {
	HeaderTypes []struct {
		Name      string
		Fields    [][]any // name, and bits or "*"
		MaxLength int     `json:"max_length"` // in bytes, with a field of variable length
	} `json:"header_types"`
	Headers []struct {
		Name     string
		Type     string `json:"header_type"`
		Metadata bool
	}
	HeaderStacks []struct {
		Name string
		Type string `json:"header_type"`
	} `json:"header_stacks"`
	Parsers []struct {
		Start  string        `json:"init_state"`
		States []parserState `json:"parse_states"`
	}
	Calculations []struct {
		Name  string
		Input []value
	}
	Actions []struct {
		ID         int
		Parameters []struct {
			Bits int `json:"bitwidth"`
		} `json:"runtime_data"`
		Primitives []operation
	}
	Pipelines []struct {
		Name         string
		Start        string `json:"init_table"`
		Tables       []tableNode
		Conditionals []conditional
	}

	// by the names above
	types  map[string][]field
	states map[string]*parserState
}

// field is a field of a header. If its length varies, bits is the largest one.
type field struct {
	name   string
	bits   int
	varies bool
}

type parserState struct {
	Name        string
	Operations  []operation `json:"parser_ops"`
	Key         []value     `json:"transition_key"`
	Transitions []struct {
		Type        string
		Value, Mask string
		Next        string `json:"next_state"` // "": accept
	}
}

type operation struct {
	Op         string
	Parameters []value
}

type tableNode struct {
	Name string
	Key  []struct {
		Match  string `json:"match_type"`
		Target []string
	}
	Actions []int             `json:"action_ids"`
	Size    int               `json:"max_size"`
	Next    map[string]string `json:"next_tables"`
}

type conditional struct {
	Name       string
	Expression value
	True       string `json:"true_next"`
	False      string `json:"false_next"`
}

// value is a parameter of an operation, or a part of an expression.
type value struct {
	kind              string   // as in the JSON; "operator" for an expression
	path              []string // of a field: header and name; otherwise the name of a thing
	number            *big.Int // of a constant
	bits              int      // of a lookahead
	op                string
	left, right, cond *value
}

// UnmarshalJSON reads a value. Expressions are wrapped in objects of type "expression".
func (v *value) UnmarshalJSON(text []byte) error {
	var object struct {
		Type              string
		Value             json.RawMessage
		Op                string
		Left, Right, Cond *value
	}
	if err := json.Unmarshal(text, &object); err != nil {
		return err
	}
	if object.Op != "" {
		*v = value{kind: "operator", op: object.Op, left: object.Left, right: object.Right, cond: object.Cond}
		return nil
	}
	v.kind = object.Type
	switch v.kind {
	case "expression":
		return json.Unmarshal(object.Value, v)
	case "field":
		return json.Unmarshal(object.Value, &v.path)
	case "hexstr":
		var digits string
		if err := json.Unmarshal(object.Value, &digits); err != nil {
			return err
		}
		v.number = number(digits)
	case "bool":
		v.number = big.NewInt(0)
		if string(object.Value) == "true" {
			v.number = big.NewInt(1)
		}
	case "lookahead":
		var window [2]int // offset and length, in bits
		if err := json.Unmarshal(object.Value, &window); err != nil {
			return err
		}
		v.bits = window[1]
	default: // a name, a number of a parameter, or a primitive operation
		v.path = []string{string(object.Value)}
		var name string
		if json.Unmarshal(object.Value, &name) == nil {
			v.path[0] = name
		}
	}
	return nil
}

func number(digits string) *big.Int {
	n, ok := new(big.Int).SetString(digits, 0)
	if !ok {
		return new(big.Int)
	}
	return n
}

// Read reads a program.
func Read(text []byte) (*Program, error) {
	p := &Program{types: map[string][]field{}, states: map[string]*parserState{}}
	if err := json.Unmarshal(text, p); err != nil {
		return nil, fmt.Errorf("compiled P4 program: %w", err)
	}
	if len(p.Parsers) != 1 || len(p.Pipelines) == 0 {
		return nil, fmt.Errorf("compiled P4 program: %d parsers and %d pipelines", len(p.Parsers), len(p.Pipelines))
	}
	for _, t := range p.HeaderTypes {
		for _, f := range t.Fields {
			bits, fixed := f[1].(float64)
			if !fixed {
				bits = float64(8 * t.MaxLength)
			}
			p.types[t.Name] = append(p.types[t.Name], field{fmt.Sprint(f[0]), int(bits), !fixed})
		}
	}
	for i, s := range p.Parsers[0].States {
		p.states[s.Name] = &p.Parsers[0].States[i]
	}
	return p, nil
}

// fields returns the fields of a header, or of the elements of a stack of headers.
func (p *Program) fields(header string) []field {
	for _, h := range p.Headers {
		if h.Name == header {
			return p.types[h.Type]
		}
	}
	for _, s := range p.HeaderStacks {
		if s.Name == header {
			return p.types[s.Type]
		}
	}
	return nil
}

// width returns the bits of a field. The field that says whether a header is there has one bit.
func (p *Program) width(path []string) int {
	fields := p.fields(path[0])
	if i := slices.IndexFunc(fields, func(f field) bool { return f.name == path[1] }); i >= 0 {
		return fields[i].bits
	}
	return 1
}

// Metadata returns the bits of the program's metadata, with the compiler's temporary fields, before
// any of them share their place.
func (p *Program) Metadata() (bits int) {
	for _, f := range p.fields("scalars") {
		if !strings.HasPrefix(f.name, "_padding") {
			bits += f.bits
		}
	}
	return bits
}

// Table is the size of a table.
type Table struct {
	Name string
	// Key and Data are the bits of an entry: those that are matched, and the parameters of the
	// action with the most bits.
	Key, Data int
	// Entries is how many entries the table can have.
	Entries int
	// Ternary says that a part of the key is matched otherwise than exactly, so that the table needs
	// TCAM.
	Ternary bool
}

// Tables returns the tables that have a key, in the order of the program.
func (p *Program) Tables() []Table {
	var tables []Table
	for _, pipeline := range p.Pipelines {
		for _, t := range pipeline.Tables {
			if len(t.Key) > 0 {
				tables = append(tables, p.table(&t))
			}
		}
	}
	return tables
}

func (p *Program) table(t *tableNode) Table {
	size := Table{Name: t.Name, Entries: t.Size}
	for _, key := range t.Key {
		size.Key += p.width(key.Target)
		size.Ternary = size.Ternary || key.Match != "exact"
	}
	for _, id := range t.Actions {
		size.Data = max(size.Data, p.parameterBits(id))
	}
	return size
}

func (p *Program) parameterBits(action int) (bits int) {
	for _, a := range p.Actions {
		if a.ID == action {
			for _, parameter := range a.Parameters {
				bits += parameter.Bits
			}
		}
	}
	return bits
}
