// SPDX-License-Identifier: Apache-2.0

package p4size

import (
	"fmt"
	"math/big"
)

// mostSteps ends a walk through a parser that goes on forever.
const mostSteps = 10_000

// Parse is what a parser does with a packet.
type Parse struct {
	// States is the number of visited states. States that follow each other in any case count as
	// one, because a parser of hardware looks up a state only to choose the next one.
	States int
	// Bits is the number of bits that were extracted into headers.
	Bits int
	// values has the values of all fields that the parser has set, by "header.field".
	values map[string]*big.Int
}

// Field returns the value of a field, such as "ipv6.next_header", or nil if the parser has not set it.
func (r *Parse) Field(name string) *big.Int { return r.values[name] }

// walker is the state of a parser in a packet.
type walker struct {
	*Program
	Parse
	frame []byte
	at    int // bits
}

// Parse walks through the parser with a frame. It returns an error if the frame ends before a header
// does, and if the parser has an operation that Parse does not know.
func (p *Program) Parse(frame []byte) (*Parse, error) {
	w := &walker{Program: p, frame: frame, Parse: Parse{States: 1, values: map[string]*big.Int{}}}
	state := p.states[p.Parsers[0].Start]
	for steps := 0; state != nil; steps++ {
		if steps == mostSteps {
			return nil, fmt.Errorf("the parser does not end: state %s", state.Name)
		}
		for i := range state.Operations {
			if err := w.do(&state.Operations[i]); err != nil {
				return nil, fmt.Errorf("state %s: %w", state.Name, err)
			}
		}
		next, err := w.next(state)
		if err != nil {
			return nil, fmt.Errorf("state %s: %w", state.Name, err)
		}
		if len(state.Key) > 0 && !p.accepts(next) {
			w.States++
		}
		state = p.states[next]
	}
	return &w.Parse, nil
}

// accepts tells whether nothing follows any more.
func (p *Program) accepts(state string) bool {
	s := p.states[state]
	return s == nil || len(s.Operations) == 0 && len(s.Key) == 0 && p.accepts(s.Transitions[0].Next)
}

// do makes an operation of a state.
func (w *walker) do(o *operation) error {
	switch o.Op {
	case "extract":
		return w.extract(o.Parameters[0].path[0], 0)
	case "extract_VL":
		bits, err := w.evaluate(&o.Parameters[1])
		if err != nil {
			return err
		}
		return w.extract(o.Parameters[0].path[0], int(bits.Int64()))
	case "set":
		v, err := w.evaluate(&o.Parameters[1])
		if err != nil {
			return err
		}
		w.values[name(o.Parameters[0].path)] = v
		return nil
	case "primitive": // at the start, it removes all headers
		return nil
	}
	return fmt.Errorf("unknown operation %s", o.Op)
}

// extract reads a header. variable is the length of its field of variable length.
func (w *walker) extract(header string, variable int) error {
	for _, f := range w.Program.fields(header) {
		bits := f.bits
		if f.varies {
			bits = variable
		}
		v, err := w.peek(bits)
		if err != nil {
			return fmt.Errorf("header %s: %w", header, err)
		}
		w.values[header+"."+f.name] = v
		w.at += bits
		w.Bits += bits
	}
	return nil
}

// peek returns the next bits.
func (w *walker) peek(bits int) (*big.Int, error) {
	if w.at+bits > 8*len(w.frame) {
		return nil, fmt.Errorf("the frame of %d bytes ends", len(w.frame))
	}
	v := new(big.Int)
	for i := w.at; i < w.at+bits; i++ {
		v.Lsh(v, 1).Or(v, big.NewInt(int64(w.frame[i/8]>>(7-i%8)&1)))
	}
	return v, nil
}

// next returns the name of the state that follows. The fields of a key are padded to bytes.
func (w *walker) next(s *parserState) (string, error) {
	key := new(big.Int)
	for i := range s.Key {
		v, err := w.evaluate(&s.Key[i])
		if err != nil {
			return "", err
		}
		key.Lsh(key, uint(w.keyBits(&s.Key[i])+7)/8*8).Or(key, v)
	}
	for _, t := range s.Transitions {
		masked := key
		if t.Mask != "" {
			masked = new(big.Int).And(key, number(t.Mask))
		}
		if t.Type == "default" || masked.Cmp(number(t.Value)) == 0 {
			return t.Next, nil
		}
	}
	return "", nil
}

func (p *Program) keyBits(v *value) int {
	if v.kind == "field" {
		return p.width(v.path)
	}
	return v.bits
}

func name(path []string) string { return path[0] + "." + path[1] }

// evaluate returns the value of an expression.
func (w *walker) evaluate(v *value) (*big.Int, error) {
	switch v.kind {
	case "hexstr", "bool":
		return v.number, nil
	case "lookahead":
		return w.peek(v.bits)
	case "field":
		if n := w.values[name(v.path)]; n != nil {
			return n, nil
		}
		if v.path[0] == "standard_metadata" {
			return new(big.Int), nil
		}
		return nil, fmt.Errorf("field %s is read before it is set", name(v.path))
	case "operator":
		return w.operate(v)
	}
	return nil, fmt.Errorf("unknown value %s", v.kind)
}

func (w *walker) operate(v *value) (*big.Int, error) {
	var operands [3]*big.Int
	for i, part := range []*value{v.left, v.right, v.cond} {
		if part != nil {
			var err error
			if operands[i], err = w.evaluate(part); err != nil {
				return nil, err
			}
		}
	}
	left, right, result := operands[0], operands[1], new(big.Int)
	switch v.op {
	case "b2d", "d2b":
		return right, nil
	case "?":
		if operands[2].Sign() != 0 {
			return left, nil
		}
		return right, nil
	case "+":
		return result.Add(left, right), nil
	case "-":
		return result.Sub(left, right), nil
	case "&":
		return result.And(left, right), nil
	case "|":
		return result.Or(left, right), nil
	case "^":
		return result.Xor(left, right), nil
	case "<<":
		return result.Lsh(left, uint(right.Uint64())), nil
	case ">>":
		return result.Rsh(left, uint(right.Uint64())), nil
	case "and":
		return truth(left.Sign() != 0 && right.Sign() != 0), nil
	case "or":
		return truth(left.Sign() != 0 || right.Sign() != 0), nil
	case "not":
		return truth(right.Sign() == 0), nil
	case "==":
		return truth(left.Cmp(right) == 0), nil
	case "!=":
		return truth(left.Cmp(right) != 0), nil
	case "<":
		return truth(left.Cmp(right) < 0), nil
	case "<=":
		return truth(left.Cmp(right) <= 0), nil
	case ">":
		return truth(left.Cmp(right) > 0), nil
	case ">=":
		return truth(left.Cmp(right) >= 0), nil
	}
	return nil, fmt.Errorf("unknown operator %s", v.op)
}

func truth(b bool) *big.Int {
	if b {
		return big.NewInt(1)
	}
	return new(big.Int)
}

// ParserSize is the size of a parser.
type ParserSize struct {
	// States is the number of states, where states that follow each other in any case count as one.
	States int
	// Entries is the number of entries of the parser's TCAM: one for each transition and for each 32
	// bits of its key, as in RMT.
	Entries int
}

// Parser returns the size of the parser.
func (p *Program) Parser() ParserSize {
	chosen := map[string]bool{p.Parsers[0].Start: true}
	size := ParserSize{}
	for _, s := range p.Parsers[0].States {
		bits := 0
		for i := range s.Key {
			bits += p.keyBits(&s.Key[i])
		}
		for _, t := range s.Transitions {
			if bits > 0 {
				size.Entries += (bits + parserKeyBits - 1) / parserKeyBits
				if !p.accepts(t.Next) {
					chosen[t.Next] = true
				}
			}
		}
	}
	size.States = len(chosen)
	return size
}
