// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// valid is a scenario that uses all fields. The tests replace single lines of it.
const valid = `seed: 7
runs: 2
servers:
- {group: old, count: 2, cpus: 4, speed: 0.5, io-speed: 3, backlog: 9}
- {group: new, count: 1, discipline: processor-sharing, workers: 8, backlog: unlimited, absent: true}
balancers: {count: 2, shares: [1, 3], absent: [b2], affinity: {clients: 9, zipf: 1.5}}
flow-table: {buckets: 100, ways: 2}
network: {client-balancer: {constant: 1ms}, server-client: {uniform: {min: 1ms, max: 3ms}}}
clients: {timeout: 2s, overflow: drop}
arrivals: {poisson: {load: 0.5}}
jobs:
- {name: page, share: 3, exponential: 20ms}
- {name: picture, idle: {constant: 7s}, stages: [{lognormal: {median: 1ms, sigma: 1}}, {queue: io, pareto: {mean: 2ms, index: 3}}]}
placement: least-queue
measure: {connections: 1000, duration: 9s, warmup: 0.1, cooldown: 0.2}
events:
- {at: 1s, server-add: [s3], detect: 10ms}
- {at: 2s, server-drain: [old]}
- {at: 3s, server-fail: [s1, new], detect: 1s}
- {at: 4s, speed: {servers: [s2], to: 2}}
- {at: 5s, balancer-add: [b2]}
- {at: 6s, balancer-fail: [b1]}
cases:
- {name: first}
- {name: second, placement: hash, balancers: {count: 1}, events: [{at: 1s, server-fail: [s2]}]}
- {name: third, balancers: {}, flow-table: {}, network: {}, clients: {}, events: []}
assert:
- holds: mean(first) < 1s
- fails: p99 >= 5 * p50(second) + 2s
`

// TestParseFlood reads the fields that need servers that decide.
func TestParseFlood(t *testing.T) {
	s, err := Parse(
		[]byte("{servers: [{count: 2}], placement: {srdyn: {window-time: 2s}}, clients: {flood: "+
			"5}, arrivals: {poisson: {load: 0.5}}, jobs: [{constant: 1ms}], measure: "+
			"{connections: 10}, events: [{at: 1ms, application-fail: [s1]}]}"),
		".",
	)
	testhost.Must(t, err)
	c := s.Cases[0].Config
	if c.Flood != 5 || c.Events[0].Kind != sim.ApplicationFail ||
		c.Placement.(*placement.SRDyn).WindowTime != 2*time.Second {
		t.Errorf("flood %v, events %v, placement %+v", c.Flood, c.Events, c.Placement)
	}
}

func TestParse(t *testing.T) {
	s, err := Parse([]byte(valid), ".")
	testhost.Must(t, err)
	if s.Seed != 7 || s.Runs != 2 || len(s.Cases) != 3 || len(s.Assertions) != 2 {
		t.Fatalf("seed %d, %d runs, %d cases, %d assertions", s.Seed, s.Runs, len(s.Cases), len(s.Assertions))
	}
	first, second, third := s.Cases[0], s.Cases[1], s.Cases[2]
	if diff := cmp.Diff([]string{"old", "new"}, first.Groups); diff != "" {
		t.Errorf("groups:\n%s", diff)
	}
	old := sim.Server{Name: "s1", CPUs: 4, Speed: 0.5, IOSpeed: 3, Backlog: 9}
	added := sim.Server{
		Name: "s3", Group: 1, CPUs: 1, Speed: 1, IOSpeed: 1, Discipline: sim.ProcessorSharing, Workers: 8, Backlog: -1,
		Absent: true,
	}
	c := first.Config
	want := &sim.Config{
		Servers:   []sim.Server{old, old, added},
		Balancers: []sim.Share{{Weight: 1}, {Weight: 3, Absent: true}},
		Affinity:  &sim.Affinity{Clients: 9, Zipf: 1.5},
		FlowTable: sim.FlowTable{Buckets: 100, Ways: 2},
		Network:   sim.Network{ClientBalancer: sim.Constant(0.001), ServerClient: sim.Uniform(0.001, 0.003)},
		Arrivals:  sim.Poisson{Rate: 0.5 * 4 / (0.75*0.02 + 0.25*lognormalMean)},
		Jobs: []sim.Job{
			{Name: "page", Share: 3, Stages: []sim.Stage{{Work: sim.Exponential(0.02)}}},
			{Name: "picture", Share: 1, Idle: sim.Constant(7), Stages: []sim.Stage{
				{Work: sim.Lognormal(0.001, 1)}, {Queue: sim.IO, Work: sim.Pareto(0.002, 3)},
			}},
		},
		Placement: c.Placement,
		Timeout:   2, Silent: true,
		Connections: 1000, Duration: 9, Warmup: 0.1, Cooldown: 0.2,
		Events: []sim.Event{
			{At: 1, Kind: sim.ServerAdd, Servers: []int32{2}, Detect: 0.01},
			{At: 2, Kind: sim.ServerDrain, Servers: []int32{0, 1}},
			{At: 3, Kind: sim.ServerFail, Servers: []int32{0, 2}, Detect: 1},
			{At: 4, Kind: sim.SetSpeed, Servers: []int32{1}, Speed: 2},
			{At: 5, Kind: sim.BalancerAdd, Balancers: []int32{1}},
			{At: 6, Kind: sim.BalancerFail, Balancers: []int32{0}},
		},
	}
	want.Servers[1].Name = "s2"
	same := []cmp.Option{
		cmp.AllowUnexported(sim.Distribution{}),
		cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Placement" }, cmp.Ignore()),
		cmp.Comparer(func(a, b float64) bool { return a == b || (a-b)*(a-b) < 1e-20*b*b }),
	}
	if diff := cmp.Diff(want, c, same...); diff != "" {
		t.Errorf("first case (-want +got):\n%s", diff)
	}
	if n := len(second.Config.Balancers); n != 1 {
		t.Errorf("second case: %d balancers, want its own one", n)
	}
	if events := second.Config.Events; len(events) != 1 || events[0].Servers[0] != 1 {
		t.Errorf("second case: events %v, want its own one", events)
	}
	if c := third.Config; len(c.Balancers) != 1 || c.FlowTable.Buckets != 0 || c.Network.ClientBalancer.Mean() != 0 || c.Silent || len(c.Events) != 0 {
		t.Errorf("third case: %+v, want one balancer and nothing of the file's", c)
	}
}

// lognormalMean is the mean of the lognormal distribution with median 1 ms and sigma 1.
const lognormalMean = 0.001 * 1.6487212707001281468

func TestProblems(t *testing.T) {
	for _, test := range []struct{ old, new, problem string }{
		{"seed: 7", "sead: 7", `line 1: sead: unknown field; did you mean seed?`},
		{"seed: 7", "colour: 7", `line 1: colour: unknown field; must be one of: seed, runs, servers, balancers, flow-table, network,` +
			` clients, arrivals, jobs, placement, measure, events, cases, assert`},
		{"runs: 2", "runs: 0", `line 2: runs "0": must be 1 to 10000`},
		{"runs: 2", "runs: 1000000000", `line 2: runs "1000000000": must be 1 to 10000`},
		{"count: 2, cpus: 4", "count: 0, cpus: -1", `line 4: servers[0].count "0": must be 1 to 65535` + "\n" +
			`line 4: servers[0].cpus "-1": must be at least 1`},
		{"speed: 0.5", "speed: 0", `line 4: servers[0].speed "0": must be positive`},
		{"backlog: 9", "backlog: many", `line 4: servers[0].backlog "many": must be a whole number, or unlimited`},
		{"backlog: 9", "workers: 9", `line 4: servers[0].workers "9": only with discipline processor-sharing`},
		{"processor-sharing", "lifo", `line 5: servers[1].discipline "lifo": must be fifo or processor-sharing`},
		{"group: new", "group: old", `line 5: servers[1].group "old": used twice`},
		{"group: new", "group: s2", `line 5: servers[1].group "s2": must not be the name of a server`},
		{"absent: [b2]", "absent: [b3]", `line 6: balancers.absent[0] "b3": must be b1 to b2`},
		{"count: 2, shares: [1, 3]", "count: -1", `line 6: balancers.count "-1": must be 1 to 256`},
		{"count: 2, cpus: 4", "count: 2, cpus: 4000000", `line 4: servers: at most 4194304 processors of all servers are possible`},
		{"clients: 9", "clients: 0", `line 6: balancers.affinity.clients "0": must be 1 to 1000000`},
		{"zipf: 1.5", "zipf: -1", `line 6: balancers.affinity.zipf "-1": must be 0 to 10`},
		{"shares: [1, 3]", "shares: [1]", `line 6: balancers.shares: must have one share per balancer`},
		{"{constant: 1ms}", "{constant: 1}", `line 8: network.client-balancer.constant "1": must be a duration with a` +
			` unit, such as 500ms, 30s or 2h`},
		{"{constant: 1ms}", "{constant: 1ms, exponential: 1ms}", `line 8: network.client-balancer: must have one of` +
			` constant, exponential, uniform, lognormal, pareto and values`},
		{"max: 3ms", "max: 1us", `line 8: network.server-client.uniform: must have 0 <= min <= max`},
		{"overflow: drop", "overflow: block", `line 9: clients.overflow "block": must be reset or drop`},
		{"load: 0.5", "load: 50%", `line 10: arrivals.poisson.load "50%": must be a number`},
		{"load: 0.5", "load: 0.5, curve: [{at: 0s, factor: 0}]", `line 10: arrivals.poisson.curve: must not be 0 everywhere`},
		{"buckets: 100", "buckets: 0", `line 7: flow-table.buckets "0": must be 1 to 67108864`},
		{"poisson: {load: 0.5}", "queries: {speed: 2}", `line 10: arrivals.queries.file: is required`},
		{"load: 0.5", "load: 0.5, rate: 1", `line 10: arrivals.poisson: must have one of rate and load`},
		{"poisson: {load: 0.5}", "wikibench: {file: none}", `line 10: arrivals.wikibench.file "none": stat none: no such file or directory`},
		{"share: 3", "share: -3", `line 12: jobs[0].share "-3": must not be negative`},
		{"idle: {constant: 7s}", "idle: {constant: -7s}",
			`line 13: jobs[1].idle.constant "-7s": must not be negative`},
		{"name: picture", "name: page", `line 13: jobs[1].name "page": used twice`},
		{"share: 3", "match: '['", `line 12: jobs[0].match "[": error parsing regexp: missing closing ]: ` + "`[`"},
		{"exponential: 20ms", "values: none", `line 12: jobs[0].values "none": open none: no such file or directory`},
		{"exponential: 20ms", "factor: 35ns", `line 12: jobs[0].factor: unknown field; must be one of: name,` +
			` share, match, constant, exponential, uniform, lognormal, pareto, values, captured, stages, idle` +
			"\n" + `line 12: jobs[0]: must have one of constant, exponential, uniform, lognormal,` +
			` pareto, values and captured`},
		{"{constant: 1ms}", "{captured: {factor: 35ns}}", `line 8: network.client-balancer.captured:` +
			` unknown field; must be one of: constant, exponential, uniform, lognormal, pareto, values`},
		{"queue: io", "queue: gpu", `line 13: jobs[1].stages[1].queue "gpu": must be cpu or io`},
		{"index: 3", "index: 1", `line 13: jobs[1].stages[1].pareto.index "1": must be more than 1`},
		{"placement: least-queue", "placement: last", `line 14: placement "last": `},
		{"placement: least-queue", "placement: {least-queue: {x: 1}}", `line 14: placement.least-queue.x: unknown field; must be one of: `},
		{"placement: least-queue", "placement: {twf: {interval: 0.5}}", `line 14: placement.twf.interval "0.5": must be a duration with` +
			` a unit, such as 500ms, 30s or 2h`},
		{"placement: least-queue", "placement: {hlb: {interval: 0s, steps: -1}}", "line 14: placement.hlb: interval 0s: must be 1ms to 1h0m0s\n" +
			"line 14: placement.hlb: steps -1: must be 0 to 2147483647"},
		{"warmup: 0.1", "warmup: 0.9", `line 15: measure.cooldown "0.2": must be 0 to less than 1, together with warmup`},
		{"connections: 1000, duration: 9s, ", "", `line 15: measure: connections or duration is required`},
		{"server-add: [s3]", "server-add: [s4]", `line 17: events[0].server-add[0] "s4": no server or group has this name`},
		{"balancer-fail: [b1]", "balancer-fail: [b1], server-add: [s1]", `line 22: events[5]: must have one of` +
			` server-add, server-drain, server-fail, application-fail, speed, balancer-add and balancer-fail`},
		{"{at: 6s, balancer-fail: [b1]", "{at: 6s, detect: 1s, balancer-fail: [b1]", `line 22: events[5].detect "1s": ` +
			"only with server-add, server-drain, server-fail and application-fail"},
		{"overflow: drop", "flood: -1", `line 9: clients.flood "-1": must be 0 to 1e+09`},
		{"overflow: drop", "flood: 5", `line 9: clients.flood "5": only with a placement by which servers decide, such as sr`},
		{"to: 2", "to: 0", `line 20: events[3].speed.to "0": must be positive`},
		// A zero in the file is not replaced by a default.
		{"cpus: 4", "cpus: 0", `line 4: servers[0].cpus "0": must be at least 1`},
		{"workers: 8", "workers: 0", `line 5: servers[1].workers "0": must be at least 1`},
		{"count: 2, shares", "count: 0, shares", `line 6: balancers.count "0": must be 1 to 256`},
		{"ways: 2", "ways: 0", `line 7: flow-table.ways "0": must be 1 to 64`},
		{"buckets: 100, ways: 2", "buckets: 0", `line 7: flow-table.buckets "0": must be 1 to 67108864`},
		{"timeout: 2s, overflow: drop", "timeout: 0s", `line 9: clients.timeout "0s": must be positive`},
		{"load: 0.5", "load: 0", `line 10: arrivals.poisson.load "0": must be positive`},
		{"load: 0.5", "load: 0.5, rate: 0", `line 10: arrivals.poisson.rate "0": must be positive` + "\n" +
			`line 10: arrivals.poisson: must have one of rate and load`},
		{"load: 0.5", "load: 0.5, diurnal: {period: 0s, amplitude: 0.5}", `line 10: arrivals.poisson.diurnal.period "0s": must be positive`},
		{"connections: 1000", "connections: 0", `line 15: measure.connections "0": must be positive`},
		{"duration: 9s", "duration: 0s", `line 15: measure.duration "0s": must be positive`},
		// A missing value does not count as zero.
		{"max: 3ms", "mix: 3ms", `line 8: network.server-client.uniform.mix: unknown field; did you mean max?`},
		{"min: 1ms, ", "", `line 8: network.server-client.uniform: must have 0 <= min <= max`},
		{"load: 0.5", "load: 0.5, diurnal: {period: 1m}", `line 10: arrivals.poisson.diurnal.amplitude: must be more than 0, and at most 1`},
		{"load: 0.5", "load: 0.5, curve: [{at: 1s}]", `line 10: arrivals.poisson.curve[0]: must have at and factor`},
		{"median: 1ms, sigma: 1", "median: 1ms", `line 13: jobs[1].stages[0].lognormal: must have median and sigma, or mean and deviation`},
		{"median: 1ms, sigma: 1", "median: 0s, sigma: 1", `line 13: jobs[1].stages[0].lognormal.median "0s": must be positive`},
		{"{at: 2s, ", "{", `line 18: events[1].at: is required`},
		// These events change nothing.
		{"at: 6s", "at: 9s", `line 22: events[5].at "9s": must be before the end of arrivals, a duration of 9s`},
		{"server-add: [s3]", "server-add: [s1]", `line 17: events[0].server-add[0] "s1": changes nothing: at 1s it is already present, in case first`},
		{"server-drain: [old]", "server-drain: [s1, s1]", `line 18: events[1].server-drain[1] "s1": changes nothing: at 2s it is already drained, in case first`},
		{"at: 1s, server-add: [s3]", "at: 3500ms, server-add: [s3]", `line 19: events[2].server-fail[1] "new": changes nothing: at 3s it is not present, in case first`},
		{"[s2], to: 2", "[s2], to: 0.5", `line 20: events[3].speed.servers[0] "s2": changes nothing: at 4s it already has this speed, in case first`},
		{"balancer-add: [b2]", "balancer-add: [b1]", `line 21: events[4].balancer-add[0] "b1": changes nothing: at 5s it is already present, in case first`},
		{"balancer-fail: [b1]", "balancer-fail: [b1, b1]", `line 22: events[5].balancer-fail[1] "b1": changes nothing: at 6s it is not present, in case first`},
		{"server-fail: [s2]}", "server-fail: [s3]}", `line 25: cases[1].events[0].server-fail[0] "s3": changes nothing: at 1s it is not present`},
		{"balancers: {count: 1}, events: [{at: 1s, server-fail: [s2]}]", "events:", `line 25: cases[1].events: has no value: leave it out, or give it one such as [] or {}`},
		{"flow-table: {buckets: 100, ways: 2}", "flow-table:", `line 7: flow-table: has no value`},
		{"flow-table: {buckets: 100, ways: 2}", "flow-table: null", `line 7: flow-table: has no value`},
		// These parts are not used.
		{"absent: [b2]", "absent: [b2, b2]", `line 6: balancers.absent[1] "b2": used twice`},
		{"- {at: 5s, balancer-add: [b2]}\n", "", `line 6: balancers.absent[0] "b2": no event adds this balancer`},
		{"share: 3", "share: 3, match: wiki", `line 12: jobs[0].match "wiki": is not used: only flows of traces have a query`},
		{"placement: hash", "servers: []", `line 25: cases[1].servers: at least one group is required`},
		{"placement: hash", "jobs: []", `line 25: cases[1].jobs: at least one is required`},
		{"name: second", "name: first", `line 25: cases[1].name "first": used twice`},
		{"name: second", "name: 2nd", `line 25: cases[1].name "2nd": must be letters, digits and _ - . +, a letter first`},
		{"[{at: 1s, server-fail: [s2]}]", "[{at: -1s, server-fail: [s2]}]",
			`line 25: cases[1].events[0].at "-1s": must not be negative`},
		{"holds: mean(first) < 1s", "holds: mean(fourth) < 1s", `line 28: assert[0].holds "mean(fourth) < 1s": ` +
			`expected a case, found "fourth"; must be one of: first, second, third`},
		{"holds: mean(first) < 1s", "{}", `line 28: assert[0]: must have one of holds and fails`},
	} {
		text := strings.Replace(valid, test.old, test.new, 1)
		if text == valid {
			t.Fatalf("nothing to replace: %s", test.old)
		}
		_, err := Parse([]byte(text), ".")
		if err == nil {
			t.Errorf("%s: no problem found, want %s", test.new, test.problem)
			continue
		}
		if !strings.HasPrefix(err.Error(), test.problem) {
			t.Errorf("%s:\n got %v\nwant %s", test.new, err, test.problem)
		}
	}
}

// TestUnused checks that a part of the file that no case uses is a problem, and a part that some
// case uses is not.
func TestUnused(t *testing.T) {
	const base = "servers: [{count: 1}, {count: 2, absent: true}]\njobs: [{constant: 1ms}]\nmeasure: {connections: 10}\n" +
		"arrivals: {poisson: {load: 0.5}}\nplacement: least-queue\nevents: [{at: 1s, server-add: [s3]}]\ncases:\n- {name: a}\n"
	for _, cases := range []string{"", "- {name: b, placement: hash, events: []}"} {
		if _, err := Parse([]byte(base+cases), "."); err != nil {
			t.Errorf("%s: %v", cases, err)
		}
	}
	for _, test := range []struct{ old, new, problem string }{
		{"{name: a}", "{name: a, placement: hash}", `line 5: placement "least-queue": is not used: every case has its own`},
		{"[{at: 1s, server-add: [s3]}]", "[]", `line 1: servers[1].absent "true": no event adds servers of this group`},
		{"{name: a}", "{name: a, events: []}", `line 6: events: is not used: every case has its own`},
	} {
		_, err := Parse([]byte(strings.Replace(base, test.old, test.new, 1)), ".")
		if err == nil || !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: %v, want %s", test.new, err, test.problem)
		}
	}
}

// TestOrderOfProblems checks that the problems of one line always have the same order.
func TestOrderOfProblems(t *testing.T) {
	want := ""
	for range 20 {
		_, err := Parse([]byte("{servers: [{count: 1}, {count: 1, absent: true}, {count: 1, absent: true}], placement: least-queue,"+
			" jobs: [{constant: 1ms, match: a}, {constant: 1ms, match: b}], arrivals: {poisson: {rate: 1}}, measure: {duration: 1s}}"), ".")
		if err == nil || want != "" && err.Error() != want {
			t.Fatalf("%v\nbefore:\n%s", err, want)
		}
		want = err.Error()
	}
}

// TestConsequences checks that problems that only follow from other problems are not reported, and
// that a problem of several cases is reported once.
func TestConsequences(t *testing.T) {
	for _, test := range []struct{ old, new, problem string }{
		{"[s1, new], detect", "[s1, nobody], detect", `line 19: events[2].server-fail[1] "nobody": no server or group has this name`},
		{"absent: true", "absent: yes", `line 5: servers[1].absent "yes": must be true or false`},
		{"to: 2", "to: 0.5", `line 20: events[3].speed.servers[0] "s2": changes nothing: at 4s it already has this speed, in case first`},
	} {
		text := strings.Replace(valid, test.old, test.new, 1) + "- holds: max(fourth) < 1s\n"
		text = strings.Replace(text, "cases:\n- {name: first}\n", "cases:\n- {name: first}\n- {name: fourth, placement: hash}\n", 1)
		if _, err := Parse([]byte(text), "."); err == nil || err.Error() != test.problem {
			t.Errorf("%s:\n got %v\nwant %s", test.new, err, test.problem)
		}
	}
}

// TestEmptyElement checks that an empty element is reported once.
func TestEmptyElement(t *testing.T) {
	_, err := Parse([]byte(valid+"-\n"), ".")
	if err == nil || err.Error() != "line 30: assert[2]: empty list element" {
		t.Error(err)
	}
}

// TestAllProblems checks that each of several problems in different places is reported, and only
// once.
func TestAllProblems(t *testing.T) {
	text := strings.NewReplacer("cpus: 4", "cpus: 0.5", "load: 0.5", "load: 50%, curve: [{at: 2s, factor: 1}, {at: 1s, factor: 0}]",
		"placement: least-queue", "placement: last").Replace(valid)
	_, err := Parse([]byte(text), ".")
	var problems fieldpath.Errors
	if !errors.As(err, &problems) {
		t.Fatalf("error %v", err)
	}
	var paths []string
	for _, problem := range problems {
		paths = append(paths, problem.Path)
	}
	want := []string{
		"servers[0].cpus", "arrivals.poisson.load", "arrivals.poisson.curve[1].at", "arrivals.poisson.curve", "placement",
	}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("problems (-want +got):\n%s\nof\n%v", diff, err)
	}
}

func TestConditions(t *testing.T) {
	result := func(mean float64) *sim.Result {
		r := &sim.Result{Runs: []*sim.RunResult{{}}}
		r.Response.Add(mean)
		return r
	}
	s := &Scenario{Cases: []RunnableCase{{Name: "a"}, {Name: "b-1"}}}
	all := []*sim.Result{result(0.5), result(2)}
	for _, test := range []struct {
		text   string
		holds  bool
		values string
	}{
		{"mean(a) < 600ms", true, "0.5 < 0.6"},
		{"mean(a) < 0.5s", false, "0.5 < 0.5"},
		{"mean(a) <= 500ms", true, "0.5 <= 0.5"},
		{"mean(b-1) / mean(a) >= 4", true, "4 >= 4"},
		{"mean(b-1) - mean(a) * 2 > 1s", false, "1 > 1"},
		{"(mean(b-1) - mean(a)) * 2 > 1s", true, "3 > 1"},
		{"mean(b-1)/mean(a) within 5% of 4.2", true, "4 within 5% of 4.2"},
		{"mean(b-1)/mean(a) within 5 % of 4.3", false, "4 within 5% of 4.3"},
		{"mean < 3s", true, "b-1: 2 < 3"},
		{"mean < 1s", false, "b-1: 2 < 1"},
		{"mean > 1s", false, "a: 0.5 > 1"},
		{"p50(a) + p99.9(a) within 1% of 1s", true, "1 within 1% of 1"},
	} {
		b := builder{result: *s}
		if b.assertion("assert[0]", Assertion{Holds: test.text}); len(b.errs) > 0 {
			t.Errorf("%s: %v", test.text, b.errs)
			continue
		}
		v := b.result.Judge(all)[0]
		if v.Holds != test.holds || v.Values != test.values || v.OK() != test.holds {
			t.Errorf("%s: holds %t with %q, want %t with %q", test.text, v.Holds, v.Values, test.holds, test.values)
		}
		b = builder{result: *s}
		b.assertion("assert[0]", Assertion{Fails: test.text})
		if v := b.result.Judge(all)[0]; v.OK() == test.holds {
			t.Errorf("%s, said to fail: as expected is %t", test.text, v.OK())
		}
	}
}

// TestUndefined checks that a comparison with a value that does not exist neither holds nor fails.
func TestUndefined(t *testing.T) {
	s := &Scenario{Cases: []RunnableCase{{Name: "a"}}}
	for _, a := range []Assertion{{Holds: "p99(a) < 1s"}, {Fails: "p99(a) < 1s"}, {Fails: "mean within 5% of 1s"}, {Fails: "1s >= max"}} {
		b := builder{result: *s}
		if b.assertion("assert[0]", a); len(b.errs) > 0 {
			t.Fatal(b.errs)
		}
		v := b.result.Judge([]*sim.Result{{Runs: []*sim.RunResult{{}}}})[0]
		if v.OK() || v.Holds || v.Defined {
			t.Errorf("%+v: %+v, of no flows", a, v)
		}
	}
}

// TestUndefinedOfACase checks that a condition about each case is undefined if it is undefined for
// any case, whatever its position.
func TestUndefinedOfACase(t *testing.T) {
	slow, none := &sim.Result{}, &sim.Result{}
	slow.Response.Add(2)
	for i, all := range [][]*sim.Result{{slow, none}, {none, slow}} {
		s := &Scenario{Cases: []RunnableCase{{Name: "a"}, {Name: "b"}}}
		b := builder{result: *s}
		b.assertion("assert[0]", Assertion{Fails: "max < 1s"})
		want := []string{"b: NaN < 1", "a: NaN < 1"}[i]
		if v := b.result.Judge(all)[0]; v.OK() || v.Defined || v.Values != want {
			t.Errorf("%+v, want %s", v, want)
		}
	}
}

func TestNoConditions(t *testing.T) {
	if v := (&Scenario{}).Judge(nil); v == nil || len(v) != 0 {
		t.Errorf("%#v, want an empty list", v)
	}
}

func TestBadConditions(t *testing.T) {
	const known = "; must be one of: broken, deviation, failed, fairness, flows, hops, instant-fairness, lost, max, mean," +
		" open, recovered, refused, timed-out, untracked, utilisation, wrongful, or a percentile such as p99.9"
	for text, problem := range map[string]string{
		"mean":                    "expected <, <=, >, >= or within, found the end",
		"mean < 1 2":              `expected the end, found "2"`,
		"mean = 1":                `expected <, <=, >, >= or within, found "="`,
		"median < 1":              `"median" is not a metric` + known,
		"p100 < 1":                `"p100" is not a metric` + known,
		"mean <":                  "expected a number or a metric, found the end",
		"mean(a < 1":              `expected ")", found "<"`,
		"(mean < 1":               `expected ")", found "<"`,
		"mean within x% of 1":     `expected a number, found "x"`,
		"mean within inf% of 1":   `expected a number, found "inf"`,
		"mean < infinity":         `"infinity" is not a metric` + known,
		"mean < nan":              `"nan" is not a metric` + known,
		"mean within 5 of 1":      `expected "%", found "of"`,
		"mean within 5% 1":        `expected "of", found "1"`,
		"mean(a) + 1.2.3 < 1":     `"1.2.3" is not a metric` + known,
		"mean < 350":              "a time is compared with a number: times have units, such as 350ms",
		"failed < 5ms":            "a number is compared with a time: times have units, such as 350ms",
		"mean + 1 < p50":          "a time + a number: times have units, such as 350ms",
		"mean * mean < 1s":        "time to the power of 2 is compared with a time: times have units, such as 350ms",
		"mean / p50 < 2s":         "a number is compared with a time: times have units, such as 350ms",
		"1s < 2s":                 "contains no metric",
		"mean(a) < mean(nowhere)": `expected a case, found "nowhere"; must be one of: a`,
	} {
		b := builder{result: Scenario{Cases: []RunnableCase{{Name: "a"}}}}
		b.assertion("assert[0]", Assertion{Holds: text})
		if len(b.errs) != 1 || b.errs[0].Problem != problem {
			t.Errorf("%s: %v, want %s", text, b.errs, problem)
		}
	}
}

func TestTraceAtALoad(t *testing.T) {
	dir := t.TempDir()
	lines := "0\ta\n1\tb\n2\tc\n3\td\n4\te\n"
	testhost.Must(t, os.WriteFile(filepath.Join(dir, "trace"), []byte(lines), 0o644))
	testhost.Must(t, os.WriteFile(filepath.Join(dir, "values"), []byte("0.1\n0.3\n"), 0o644))
	text := "servers: [{count: 1}]\nplacement: least-queue\njobs: [{match: '[ab]', values: values}, {constant: 1s}]\n" +
		"arrivals: {queries: {file: trace, load: 0.5}}\n"
	s, err := Parse([]byte(text), dir)
	testhost.Must(t, err)
	// Two flows of 0.2 s of work and three of 0.6 s, the mean of both classes, take 2.2 s. At half
	// the load they take 4.4 s.
	want := sim.Trace{
		File: filepath.Join(dir, "trace"), Format: sim.TimedQueries, Speed: 4 / 4.4,
		Classes: []sim.TraceClass{{Match: regexp.MustCompile("[ab]")}, {}},
	}
	got := s.Cases[0].Config.Arrivals.(sim.Trace)
	same := cmp.Comparer(func(a, b *regexp.Regexp) bool { return a == b || a != nil && b != nil && a.String() == b.String() })
	near := cmp.Comparer(func(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 })
	if diff := cmp.Diff(want, got, same, near); diff != "" {
		t.Errorf("trace (-want +got):\n%s", diff)
	}
}

// TestImpossibleLoads has loads that would mean no flows at all, or all flows at once.
func TestImpossibleLoads(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"trace": "0\ta\n1\tb\n", "values": "1\n", "infinite": "1\ninf\n"} {
		testhost.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	const io = "{match: a, stages: [{queue: io, constant: 1s}]}"
	for _, test := range []struct{ servers, arrivals, jobs, problem string }{
		{"count: 1, absent: true", "poisson: {load: 0.5}", "{constant: 1s}",
			"arrivals.poisson.load \"0.5\": not possible, because no server is present at the start"},
		{"count: 1", "poisson: {load: 0.5}", io,
			"arrivals.poisson.load \"0.5\": not possible, because the jobs have no work for processors"},
		{"count: 1, absent: true", "queries: {file: trace, load: 0.5}", "{constant: 1s}",
			"arrivals.queries.load \"0.5\": not possible, because no server is present at the start"},
		{"count: 1", "queries: {file: trace, load: 0.5}", io + ", {share: 2, match: b, constant: 0s}, {constant: 1s, share: 0}",
			"arrivals.queries.load \"0.5\": not possible, because the trace has no work for processors"},
		{"count: 1", "queries: {file: trace, load: 0.5}", io + ", {match: b, constant: 0s}, {constant: 1s}",
			"arrivals.queries.load \"0.5\": not possible, because the trace has no work for processors"},
		{"count: 1", "queries: {file: values, load: 0.5}", "{constant: 1s}",
			`arrivals.queries.file "values": ` + filepath.Join(dir, "values") + `:1: "1": must be time<TAB>query`},
		{"count: 1", "poisson: {load: 0.5}", "{values: infinite}",
			`jobs[0].values "infinite": line 2 of the file, "inf": must be a number of seconds`},
		// One problem does not hide others.
		{"count: 0", "poisson: {load: -1}", "{match: '[', constant: 1s}", "arrivals.poisson.load \"-1\": must be positive"},
	} {
		text := fmt.Sprintf("servers: [{%s}]\nplacement: least-queue\nmeasure: {connections: 10}\narrivals: {%s}\njobs: [%s]\n",
			test.servers, test.arrivals, test.jobs)
		if _, err := Parse([]byte(text), dir); err == nil || !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s\n got %v\nwant %s", text, err, test.problem)
		}
	}
}

// The files that the documentation shows must be valid.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../../docs/examples/sim/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d examples found, %v", len(files), err)
	}
	for _, file := range files {
		if _, err := Load(file); err != nil {
			t.Error(err)
		}
	}
}
