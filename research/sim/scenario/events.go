// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/research/sim"
)

// happening is an event with the indexes of its servers or balancers.
type happening struct {
	kind    sim.EventKind
	at      time.Duration
	speed   float64
	targets []target
}

// target is a name in an event, with the indexes of the servers or balancers that it stands for.
type target struct {
	path string // of the name, for errors
	of   []int32
}

// events reads the events of a case into its configuration. It also adds a later check, which
// replays the events to find those that change nothing.
func (m *merger) events(r *RunnableCase) {
	events, path := section[*[]Event](m, "Events")
	if events == nil {
		return
	}
	var all []happening
	for i := range *events {
		eventPath := fmt.Sprintf("%s[%d]", path, i)
		h := m.event(eventPath, r, &(*events)[i])
		all = append(all, h)
		event := sim.Event{
			At: h.at.Seconds(), Kind: h.kind, Speed: h.speed, Detect: (*events)[i].Detect.Seconds(),
		}
		for _, t := range h.targets {
			if ofBalancers(h.kind) {
				event.Balancers = append(event.Balancers, t.of...)
			} else {
				event.Servers = append(event.Servers, t.of...)
			}
		}
		slices.Sort(event.Servers)
		event.Servers = slices.Compact(event.Servers)
		r.Config.Events, r.events = append(r.Config.Events, event), append(r.events, eventPath)
	}
	m.useAdded(r)
	m.later = append(m.later, func() { m.replay(r, all) })
}

// event reads an event, which must have exactly one kind. It reports what is wrong, and
// returns what it could read.
func (m *merger) event(path string, r *RunnableCase, e *Event) happening {
	m.require(e.At != nil, path+".at", "is required")
	h := happening{at: given(e.At, 0)}
	m.require(h.at >= 0, path+".at", "must not be negative")
	if end := r.Config.Duration; end > 0 {
		m.require(h.at.Seconds() < end, path+".at", "must be before the end of arrivals, a duration of %gs", end)
	}
	m.require(e.Detect >= 0, path+".detect", "must not be negative")
	m.require(e.Detect == 0 || e.Speed == nil && e.BalancerAdd == nil && e.BalancerFail == nil,
		path+".detect", "only with server-add, server-drain, server-fail and application-fail")
	var speed []string
	if e.Speed != nil {
		m.require(e.Speed.To > 0, path+".speed.to", "must be positive")
		// An empty list is not nil, so the event still has a kind below.
		speed, h.speed = append([]string{}, e.Speed.Servers...), e.Speed.To
	}
	n := 0
	for _, of := range []struct {
		name  string
		names []string
		kind  sim.EventKind
	}{
		{"server-add", e.ServerAdd, sim.ServerAdd},
		{"server-drain", e.ServerDrain, sim.ServerDrain},
		{"server-fail", e.ServerFail, sim.ServerFail},
		{"application-fail", e.AppFail, sim.ApplicationFail},
		{"speed.servers", speed, sim.SetSpeed},
		{"balancer-add", e.BalancerAdd, sim.BalancerAdd},
		{"balancer-fail", e.BalancerFail, sim.BalancerFail},
	} {
		if of.names != nil {
			h.kind, h.targets = of.kind, m.targets(path+"."+of.name, of.names, of.kind, r)
			n++
		}
	}
	m.require(n == 1, path,
		"must have one of server-add, server-drain, server-fail, application-fail, speed, "+
			"balancer-add and balancer-fail")
	return h
}

// targets resolves the names in an event of the given kind: of balancers, or of servers and groups.
// It reports an unknown name, which then stands for nothing.
func (m *merger) targets(path string, names []string, kind sim.EventKind, r *RunnableCase) []target {
	m.require(len(names) > 0, path, "at least one is required")
	var targets []target
	for i, name := range names {
		t := target{path: fmt.Sprintf("%s[%d]", path, i)}
		if ofBalancers(kind) {
			if b := m.balancer(t.path, name, len(r.Config.Balancers)); b >= 0 {
				t.of = []int32{b}
			}
		} else {
			t.of = r.servers(name)
			m.require(len(t.of) > 0, t.path, "no server or group has this name")
		}
		targets = append(targets, t)
	}
	return targets
}

// servers returns the servers for the name of a server or a group.
func (r *RunnableCase) servers(name string) (all []int32) {
	for s := range r.Config.Servers {
		server := &r.Config.Servers[s]
		if server.Name == name || r.Groups[server.Group] == name {
			all = append(all, int32(s))
		}
	}
	return all
}

// presence tells whether a server or balancer exists.
type presence uint8

const (
	gone presence = iota
	draining
	there
)

// cluster is the state of servers and balancers after the events so far.
type cluster struct {
	servers   []presence
	speeds    []float64
	balancers []presence
}

// newCluster returns the state before all events.
func newCluster(c *sim.Config) *cluster {
	presentUnless := func(absent bool) presence {
		if absent {
			return gone
		}
		return there
	}
	cl := &cluster{}
	for i := range c.Servers {
		cl.servers = append(cl.servers, presentUnless(c.Servers[i].Absent))
		cl.speeds = append(cl.speeds, c.Servers[i].Speed)
	}
	for i := range c.Balancers {
		cl.balancers = append(cl.balancers, presentUnless(c.Balancers[i].Absent))
	}
	return cl
}

// replay applies the events in the order of their times. It reports each name for which an event
// changes nothing, in the first case where this happens. For a group, at least one server must
// change.
func (m *merger) replay(r *RunnableCase, events []happening) {
	slices.SortStableFunc(events, func(a, b happening) int { return cmp.Compare(a.at, b.at) })
	state := newCluster(r.Config)
	for i := range events {
		for _, t := range events[i].targets {
			changed, problem := false, ""
			for _, index := range t.of {
				if why := state.change(&events[i], index); why != "" {
					problem = why
				} else {
					changed = true
				}
			}
			reported := slices.ContainsFunc(m.errs, func(e *fieldpath.Error) bool { return e.Path == t.path })
			if !changed && !reported {
				m.failf(t.path, "changes nothing: at %v it %s%s", events[i].at, problem, m.inCase(t.path, r))
			}
		}
	}
}

// inCase returns words that name the case, for a problem in a section of the file that cases share.
// It returns nothing if the file has no cases, or if the path is in the case itself.
func (m *merger) inCase(path string, r *RunnableCase) string {
	if m.path == "" || strings.HasPrefix(path, m.path+".") {
		return ""
	}
	return ", in case " + r.Name
}

// change applies an event to one server or balancer. If the event changes nothing, it returns the
// reason.
func (c *cluster) change(h *happening, i int32) (problem string) {
	if h.kind == sim.SetSpeed {
		if c.speeds[i] == h.speed {
			return "already has this speed"
		}
		c.speeds[i] = h.speed
		return ""
	}
	states := c.servers
	if ofBalancers(h.kind) {
		states = c.balancers
	}
	was, becomes := states[i], gone
	switch h.kind {
	case sim.ServerAdd, sim.BalancerAdd:
		becomes = there
	case sim.ServerDrain:
		becomes = draining
	}
	switch {
	case was == gone && becomes != there:
		return "is not present"
	case was == becomes && was == draining:
		return "is already drained"
	case was == becomes:
		return "is already present"
	}
	states[i] = becomes
	return ""
}

// useAdded marks fields "absent" as used: those of the servers and balancers that an event adds.
func (m *merger) useAdded(r *RunnableCase) {
	_, serversPath := section[*[]Servers](m, "Servers")
	balancers, balancersPath := section[*Balancers](m, "Balancers")
	for _, e := range r.Config.Events {
		switch e.Kind {
		case sim.ServerAdd:
			for _, s := range e.Servers {
				m.use(fmt.Sprintf("%s[%d].absent", serversPath, r.Config.Servers[s].Group))
			}
		case sim.BalancerAdd:
			for _, b := range e.Balancers {
				i := slices.Index(given(balancers, Balancers{}).Absent, "b"+strconv.Itoa(int(b)+1))
				m.use(fmt.Sprintf("%s.absent[%d]", balancersPath, i))
			}
		}
	}
}

func ofBalancers(kind sim.EventKind) bool { return kind == sim.BalancerAdd || kind == sim.BalancerFail }
