// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var (
	failuresAll   = flag.Bool("failures.all", false, "TestServerFailures injects all failures")
	failuresTable = flag.Bool("failures.table", false,
		"TestServerFailures injects all failures and writes the tables of docs/operate/server-failures.md")
)

// allFailures tells whether TestServerFailures injects all failures, and not only the brief ones.
func allFailures() bool { return *failuresAll || *failuresTable }

const (
	// failureRate is the number of connections that the client opens per second, to all services
	// together. For the tables it is tableRate.
	failureRate, tableRate = 60, 200
	// answerLimit is how long a client waits for its complete answer.
	answerLimit = 3 * time.Second
	// aftermath is the minimum time for which connections are observed after all balancers have
	// noticed.
	aftermath = 1500 * time.Millisecond
)

// TestServerFailures injects one failure after the other into one of three servers, while a client
// opens connections. Every balancer must notice. No connection that begins after that may fail.
// When the failure has ended, the server gets connections again.
func TestServerFailures(t *testing.T) {
	t.Parallel()
	f := newFailing(t, "s3")
	var outcomes []*outcome
	for _, x := range failures {
		if !x.brief && !allFailures() {
			continue
		}
		t.Run(x.name, func(t *testing.T) { outcomes = append(outcomes, f.in(t).undergo(x)) })
		if t.Failed() {
			return // the server is not ready for the next failure
		}
	}
	if *failuresTable {
		must(t, documentFailures(outcomes))
	}
}

// failing is a lab with a server into which failures are injected.
type failing struct {
	*testing.T
	lab      *lab.Lab
	server   *lab.Node
	routes   [][]string // routes of the server through gateways
	arrivals *arrivals
	watch    *watch
	resetter net.Listener // the application that resets connections
	speedUp  func()       // ends slowApplication
}

// newFailing builds the lab and starts the client's connections.
func newFailing(t *testing.T, server string) *failing {
	t.Helper()
	topology := topology(probed...)
	for i := range topology.Services {
		topology.Services[i].Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: "/healthz"}}
	}
	l := up(t, topology)
	for _, name := range nodes(l, lab.RoleServer) {
		// A forwarding host that has lost a VIP sends the packets for this VIP back to the router,
		// in circles. Hosts with applications usually do not forward. The lab's servers do,
		// because other tests need it.
		command(t, l, name, "sysctl", "-w",
			"net.ipv6.conf.all.forwarding=0", "net.ipv4.ip_forward=0")
	}
	f := &failing{T: t, lab: l, server: l.Node(server), watch: startWatch(t, l, server)}
	f.routes = f.staticRoutes()
	rate := failureRate
	if allFailures() {
		rate = tableRate
	}
	f.arrivals = startArrivals(t, l, rate, answerLimit)
	return f
}

// in returns a copy of f that reports to a subtest.
func (f failing) in(t *testing.T) *failing {
	f.T = t
	return &f
}

// run runs a command on a node and returns its output.
func (f *failing) run(node, name string, args ...string) string {
	f.Helper()
	return command(f.T, f.lab, node, name, args...)
}

// undergo injects a failure, ends it, and returns the outcome.
func (f *failing) undergo(x failure) *outcome {
	f.Helper()
	f.awaitUse()
	if x.prepare != nil {
		x.prepare(f)
		f.awaitUse()
	}
	isHidden := func(service string) bool { return slices.Contains(x.hidden, service) }
	noticing := slices.DeleteFunc(slices.Clone(probed), isHidden)
	start := time.Now()
	x.inject(f)
	f.watch.await(f.T, false, noticing...)
	noticed := time.Now()
	f.arrivals.setLimit(patience / 2) // these must not fail on a slow machine
	lasts := aftermath
	if allFailures() {
		lasts = max(2*aftermath, x.lasts-time.Since(start))
	}
	pause(f.T, lasts)
	end := time.Now()
	f.arrivals.setLimit(answerLimit)
	if x.harmless {
		f.requireAllAnswered(start, end, probed...)
	}
	f.requireAllAnswered(noticed, end, noticing...)
	f.requireOut(noticed, end, noticing...)
	o := f.judge(x, start, end)
	o.requireConditions(f.T)
	x.heal(f)
	f.awaitUse()
	f.Logf("%v\nhealed after %.1f s", o, time.Since(end).Seconds())
	return o
}

// awaitUse waits until all balancers use the server again, and the server has answered connections
// to all services.
func (f *failing) awaitUse() {
	f.Helper()
	f.watch.await(f.T, true, probed...)
	f.watch.awaitStarted(f.T)
	used := time.Now()
	eventually(f.T, func() error {
		answered := map[string]bool{}
		for _, c := range f.arrivals.since(f.T, used) {
			answered[c.service] = answered[c.service] || c.server == f.server.Name
		}
		for _, s := range probed {
			if !answered[s] {
				return fmt.Errorf("%s gets no connection to %s", f.server.Name, s)
			}
		}
		return nil
	})
	f.requireAllAnswered(used, time.Now(), probed...)
}

// requireAllAnswered fails the test if a connection to the services that began between two times
// got no answer.
func (f *failing) requireAllAnswered(from, to time.Time, services ...string) {
	f.Helper()
	failed := 0
	for _, c := range f.arrivals.await(f.T, from, to) {
		if c.began.Before(from) || c.err == nil || !slices.Contains(services, c.service) {
			continue
		}
		if failed++; failed <= 5 {
			f.Errorf("a connection to %s that began %v after it had to work failed: %v",
				c.service, c.began.Sub(from), c.err)
		}
	}
	if failed > 5 {
		f.Errorf("and %d more", failed-5)
	}
}

// requireOut fails the test if the server got new connections between two times.
func (f *failing) requireOut(from, to time.Time, services ...string) {
	f.Helper()
	matters := func(service string, at time.Time) bool {
		return slices.Contains(services, service) && at.After(from) && at.Before(to)
	}
	for here, sights := range f.watch.since(f.T, from) {
		for _, s := range sights {
			if s.used && matters(here.service, s.at) {
				f.Errorf("%s uses %s in %s again %v after all had noticed: %s",
					here.balancer, f.server.Name, here.service, s.at.Sub(from), s.condition)
			}
		}
	}
	for _, c := range f.arrivals.since(f.T, from) {
		if c.server == f.server.Name && matters(c.service, c.began) {
			f.Errorf("%s has a connection to %s that began %v after all had noticed",
				c.server, c.service, c.began.Sub(from))
		}
	}
}

// outcome is the outcome of a failure.
type outcome struct {
	failure  failure
	lasted   time.Duration
	services map[string]*serviceOutcome
}

// serviceOutcome is the outcome for a service. Times count from the failure.
type serviceOutcome struct {
	// The time at which each balancer stopped using the server.
	noticed map[string]time.Duration
	found   map[inspect.Condition][]time.Duration // the times at which balancers knew of a cause
	// Conditions that balancers showed while they did not use the server, in order.
	told   []inspect.Condition
	before tally // connections until all balancers had noticed
	after  tally // connections after that
}

// tally counts connections.
type tally struct {
	offered int
	failed  map[string]int // number of connections by outcome
}

// judge collects the outcome of a failure between two times.
func (f *failing) judge(x failure, start, end time.Time) *outcome {
	f.Helper()
	o := &outcome{failure: x, lasted: end.Sub(start), services: map[string]*serviceOutcome{}}
	sights := f.watch.since(f.T, start)
	for _, name := range probed {
		o.services[name] = newServiceOutcome(name, sights, start, end)
	}
	for _, c := range f.arrivals.await(f.T, start, end) {
		o.services[c.service].count(c, len(nodes(f.lab, lab.RoleBalancer)), start)
	}
	return o
}

// newServiceOutcome returns the outcome for a service, without the connections.
func newServiceOutcome(
	name string, sights map[place][]sight, start, end time.Time,
) *serviceOutcome {
	o := &serviceOutcome{
		noticed: map[string]time.Duration{}, found: map[inspect.Condition][]time.Duration{},
		before: tally{failed: map[string]int{}}, after: tally{failed: map[string]int{}},
	}
	var all []sight
	for _, here := range slices.SortedFunc(maps.Keys(sights), comparePlaces) {
		if here.service != name {
			continue
		}
		seen := slices.DeleteFunc(sights[here], func(s sight) bool { return s.at.After(end) })
		o.see(here.balancer, seen, start)
		all = append(all, seen...)
	}
	slices.SortFunc(all, func(a, b sight) int { return a.at.Compare(b.at) })
	for _, s := range all {
		if !s.used && !slices.Contains(o.told, s.condition) {
			o.told = append(o.told, s.condition)
		}
	}
	return o
}

// see adds a balancer's observations of the server.
func (o *serviceOutcome) see(name string, sights []sight, start time.Time) {
	known := map[inspect.Condition]bool{}
	for _, s := range sights {
		if _, ok := o.noticed[name]; !ok && !s.used {
			o.noticed[name] = s.at.Sub(start)
		}
		for _, cause := range s.causes {
			if !known[cause] {
				known[cause] = true
				o.found[cause] = append(o.found[cause], s.at.Sub(start))
			}
		}
	}
}

// count adds a connection. balancers is the number of balancers of the service.
func (o *serviceOutcome) count(c arrival, balancers int, start time.Time) {
	t := &o.before
	times := slices.Collect(maps.Values(o.noticed))
	if len(times) == balancers && c.began.Sub(start) > slices.Max(times) {
		t = &o.after
	}
	t.offered++
	if what := c.outcome(answerLimit); what != "" {
		t.failed[what]++
	}
}

// requireConditions fails the test if status showed an unexpected condition.
func (o *outcome) requireConditions(t *testing.T) {
	t.Helper()
	for _, name := range probed {
		for _, condition := range o.services[name].told {
			if !slices.Contains(o.failure.tells, condition) {
				t.Errorf("%s: status says %s, want one of %v", name, condition, o.failure.tells)
			}
		}
	}
}

func comparePlaces(a, b place) int {
	return cmp.Or(cmp.Compare(a.balancer, b.balancer), cmp.Compare(a.service, b.service))
}
