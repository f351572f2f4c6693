// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/rundir"
)

// tracePatience is how long trace waits for the switch.
const tracePatience = 10 * time.Second

// findSwitch returns the switch in front of a balancer, or nil if there is none, or if no process runs
// the instance.
func findSwitch(instance string) (*desired.Switch, error) {
	process, err := rundir.FindProcess(instance)
	if err != nil {
		return nil, err
	}
	record, err := rundir.FindRecord(instance, process)
	if record == nil || err != nil {
		return nil, err
	}
	return record.Switch, nil
}

// passSwitch adds what the switch does with the packet.
func (j *joinedTrace) passSwitch(t *p4switch.Trace) {
	j.Switch = t
	if j.isSwitched() {
		p := j.Trace
		j.Trace = &inspect.Trace{
			Instance: p.Instance, Flow: p.Flow, Opens: p.Opens, Length: p.Length, Echo: p.Echo, Service: p.Service,
			Course: t.Course, Reason: t.Reason,
		}
	}
}

// isSwitched tells whether the switch sends the packet to a server.
func (j *joinedTrace) isSwitched() bool { return j.Switch != nil && j.Switch.Forwards() }

// printSwitchTrace prints the entries of the switch that a packet matches, and the verdict.
func printSwitchTrace(out io.Writer, j *joinedTrace) error {
	s, table := j.Switch, newTable(out)
	table.row("switch", s.Address)
	if j.isSwitched() {
		table.row("packet", describePacket(j.Trace))
	}
	for _, l := range s.Lookups {
		table.row(l.Table, describeLookup(&l))
	}
	if j.isSwitched() {
		table.row("segments", describeSegments(s.Segments))
	}
	table.row("verdict of the switch", describeSwitched(s))
	if err := table.Flush(); err != nil || j.isSwitched() {
		return err
	}
	_, err := fmt.Fprintln(out)
	return err
}

// describeLookup returns the key and, if the switch has an entry with the key, the entry's action.
func describeLookup(l *p4switch.Lookup) string {
	text := describeFields(l.Key) + ": "
	if l.Action == "" {
		return text + "no entry"
	}
	return text + l.Action + " " + describeFields(l.Params)
}

func describeFields(fields []p4switch.Field) string {
	texts := make([]string, len(fields))
	for i, f := range fields {
		texts[i] = f.Name + " " + f.Value
	}
	return strings.Join(texts, ", ")
}

// describeSwitched returns the reason of the switch, and explains it.
func describeSwitched(t *p4switch.Trace) string {
	switch {
	case t.Problem != "":
		return "UNKNOWN: " + t.Problem
	case !t.Forwards():
		return t.Reason + ": passed to this host"
	}
	var servers []string
	for _, at := range t.Course {
		text := fmt.Sprintf("%s (%s", at.Server, at.Function)
		if at.Column != nil {
			text += fmt.Sprintf(", column %d", *at.Column)
		}
		servers = append(servers, text+")")
	}
	return fmt.Sprintf("%s: sent by the switch to %s", t.Reason, strings.Join(servers, ", then "))
}
