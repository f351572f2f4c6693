// SPDX-License-Identifier: Apache-2.0

// Package p4switch programs a switch that runs the balancer of folder p4 through P4Runtime.
package p4switch

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/segue-lb/segue/p4"
)

// Entry is an entry of a table, by the names of P4Info. The entry of a table without a key is the
// table's default action.
type Entry struct {
	Table  string
	Key    []Value // in the order of the table's fields
	Action string
	Params []Value // in the order of the action's parameters
}

// Value is a number in network order. Leading zeros do not count.
type Value []byte

// Number returns a value for a number.
func Number(n uint64) Value {
	v := Value{byte(n >> 56), byte(n >> 48), byte(n >> 40), byte(n >> 32), byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
	return v.canonical()
}

// canonical returns the value in the only form that P4Runtime accepts for it: without leading
// zeros (P4Runtime 1.4, section 8.3).
func (v Value) canonical() Value {
	for len(v) > 1 && v[0] == 0 {
		v = v[1:]
	}
	return v
}

// program translates between entries and the messages of P4Runtime, which have numbers for names.
type program struct {
	info     *configv1.P4Info
	tables   map[string]*configv1.Table
	actions  map[string]*configv1.Action
	counters map[string]*configv1.Counter
	byID     struct {
		tables  map[uint32]*configv1.Table
		actions map[uint32]*configv1.Action
	}
}

// ours is the program of this build.
var ours = sync.OnceValues(func() (*program, error) { return newProgram(p4.Info) })

// newProgram reads a description in the text format.
func newProgram(text []byte) (*program, error) {
	info := &configv1.P4Info{}
	if err := prototext.Unmarshal(text, info); err != nil {
		return nil, fmt.Errorf("P4Info: %w", err)
	}
	p := &program{
		info: info, tables: map[string]*configv1.Table{}, actions: map[string]*configv1.Action{},
		counters: map[string]*configv1.Counter{},
	}
	p.byID.tables, p.byID.actions = map[uint32]*configv1.Table{}, map[uint32]*configv1.Action{}
	for _, t := range info.Tables {
		p.tables[t.Preamble.Alias], p.byID.tables[t.Preamble.Id] = t, t
	}
	for _, a := range info.Actions {
		p.actions[a.Preamble.Alias], p.byID.actions[a.Preamble.Id] = a, a
	}
	for _, c := range info.Counters {
		p.counters[c.Preamble.Alias] = c
	}
	return p, nil
}

// action finds an action of a table by the last part of its name: the places of a list have actions
// of the same name.
func (p *program) action(t *configv1.Table, name string) *configv1.Action {
	for _, ref := range t.ActionRefs {
		a := p.byID.actions[ref.Id]
		if alias := a.Preamble.Alias; alias == name || strings.HasSuffix(alias, "."+name) {
			return a
		}
	}
	return nil
}

// message returns an entry as P4Runtime has it. Without an action, it has only the key, as for a
// removal. message returns an error if the program has no such table or action, or another number of
// fields.
func (p *program) message(e *Entry) (*p4v1.TableEntry, error) {
	t := p.tables[e.Table]
	if t == nil {
		return nil, fmt.Errorf("the program has no table %s", e.Table)
	}
	if len(e.Key) != len(t.MatchFields) {
		return nil, fmt.Errorf("table %s has %d fields, not %d", e.Table, len(t.MatchFields), len(e.Key))
	}
	m := &p4v1.TableEntry{TableId: t.Preamble.Id, IsDefaultAction: len(e.Key) == 0}
	for i, value := range e.Key {
		m.Match = append(m.Match, &p4v1.FieldMatch{
			FieldId:        t.MatchFields[i].Id,
			FieldMatchType: &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: value.canonical()}},
		})
	}
	if e.Action == "" {
		return m, nil
	}
	a := p.action(t, e.Action)
	if a == nil {
		return nil, fmt.Errorf("table %s has no action %s", e.Table, e.Action)
	}
	if len(e.Params) != len(a.Params) {
		return nil, fmt.Errorf("action %s of table %s has %d parameters, not %d",
			e.Action, e.Table, len(a.Params), len(e.Params))
	}
	action := &p4v1.Action{ActionId: a.Preamble.Id}
	for i, value := range e.Params {
		action.Params = append(action.Params, &p4v1.Action_Param{ParamId: a.Params[i].Id, Value: value.canonical()})
	}
	m.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: action}}
	return m, nil
}

// entry returns what a message says: only the key, if the message has no action. It returns an error
// if the message is not of this program.
func (p *program) entry(m *p4v1.TableEntry) (Entry, error) {
	t := p.byID.tables[m.TableId]
	if t == nil {
		return Entry{}, fmt.Errorf("the program has no table with the number %d", m.TableId)
	}
	e := Entry{Table: t.Preamble.Alias}
	for _, field := range t.MatchFields {
		i := slices.IndexFunc(m.Match, func(f *p4v1.FieldMatch) bool { return f.FieldId == field.Id })
		if i < 0 {
			return Entry{}, fmt.Errorf("an entry of table %s has no field %s", e.Table, field.Name)
		}
		e.Key = append(e.Key, Value(m.Match[i].GetExact().GetValue()).canonical())
	}
	if m.Action == nil {
		return e, nil
	}
	action := m.Action.GetAction()
	a := p.byID.actions[action.GetActionId()]
	if a == nil {
		return Entry{}, fmt.Errorf("an entry of table %s has the unknown action %d", e.Table, action.GetActionId())
	}
	e.Action = a.Preamble.Name[strings.LastIndexByte(a.Preamble.Name, '.')+1:]
	for _, param := range action.GetParams() {
		e.Params = append(e.Params, Value(param.Value).canonical())
	}
	return e, nil
}
