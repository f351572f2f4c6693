// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// TestExperimentsAreValid reads all experiments, at both sizes.
func TestExperimentsAreValid(t *testing.T) {
	names := Names()
	if len(names) == 0 {
		t.Fatal("there are no experiments")
	}
	for _, name := range names {
		e, text, err := Load(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if e.Name != name || len(text) == 0 {
			t.Errorf("%s: has the name %q and %d bytes", name, e.Name, len(text))
		}
		for _, full := range []bool{false, true} {
			if s := e.settings(full); s.Servers >= 48 && s.Speed > 1 {
				t.Errorf("%s (full: %v): %d servers at speed %v", name, full, s.Servers, s.Speed)
			}
			if e.Duration(Options{Full: full}) <= 0 {
				t.Errorf("%s (full: %v): takes no time", name, full)
			}
		}
		for i, c := range e.Claims {
			if c.condition() == "" {
				t.Errorf("%s: claim %d has no condition", name, i)
			}
		}
	}
}

// Each text has a mistake. The error must contain the text that belongs to it.
func TestBadExperiments(t *testing.T) {
	good := "title: t\npoints: [0.5]\ncases: [{name: sc, placement: hash}]\n"
	one := "title: t\npoints: [0.5]\ncases: "
	claim := good + "claims: [{text: x, quantity: mean, "
	hold := "title: t\nkind: hold\naxis: connections\ncases: [{name: sc}]\n"
	for text, want := range map[string]string{
		"points: [0.5]\ncases: [{name: sc, placement: hash}]\n": "title: required",
		good + "axis: colour\n":                                 `line 4: axis "colour": must be load`,
		good + "work: fast\n":                                   `line 4: work "fast"`,
		good + "load: -1\n":                                     `line 4: load "-1": must be a positive number`,
		good + "speed: 0\n":                                     `line 4: speed "0": must be a positive number`,
		good + "servers: 200\n":                                 "servers",
		good + "colour: blue\n":                                 "line 4: colour: unknown field",
		good + "full: {seeds: -1}":                              "must not be negative",
		"title: t\npoints: [0.9, 0.5]\ncases: [{name: sc, placement: hash}]\n":                      "ascending",
		"title: t\npoints: [0.5]\ncases: [{name: sc, direct: true, placement: hash}]\n":             "cases[0].direct",
		"title: t\npoints: [0.5]\ncases: [{name: sc, placement: hunt, accept: {policy: static}}]\n": "threshold",
		"title: t\npoints: [0.5]\ncases: [{name: sc}, {name: sc}]\n":                                "cases[1].name",
		good + "claims: [{text: x, quantity: mean, of: sr4, ours: at most 2, rule: stated}]\n":      "claims[0].of",
		good + "claims: [{text: x, quantity: max, of: sc, ours: at most 2, rule: stated}]\n":        "claims[0].quantity",
		good + "full: {speed: -1}": "full.speed",
		good + "claims: [{text: x, quantity: mean, of: sc, at: 0.7, ours: at most 2, rule: stated}]\n":      "claims[0].at",
		good + "claims: [{text: x, quantity: mean, of: sc, over-at: 0.5, ours: at most 2, rule: stated}]\n": "claims[0].over-at",
		good + "emulated: {colocated: 50%}\n":                                                                  "emulated.colocated",
		good + "emulated: {exceptions: [{server: s1, demand: \"constant: 1s\"}]}\n":                            "emulated.exceptions[0].demand",
		"title: t\naxis: servers\npoints: [9.5]\ncases: [{name: sc, placement: hash}]\n":                       "must be a whole number",
		"title: t\nkind: change\naxis: removed\nbalancers: 2\npoints: [12]\ncases: [{name: sc}]\n":             "at least one of 12 servers must be left",
		"title: t\nkind: change\naxis: removed\nbalancers: 2\npoints: [1]\ncases: [{name: d, direct: true}]\n": "cases[0].direct",
		"title: t\nkind: day\naxis: rate\nspeed: 2\npoints: [1]\ncases: [{name: sc}]\n":                        "speed",
		good + "kind: change\n":                "axis: must be removed",
		good + "kind: sleep\n":                 "kind \"sleep\": must be load, change, hold, day or forward",
		good + "axis: removed\n":               "is not for the kind load",
		good + "kind: change\naxis: removed\n": "balancers: must be at least 2",

		good + "kind: hold\n":        "axis: must be connections",
		good + "axis: connections\n": "is not for the kind load",
		hold + "points: [30000]\n":   "must be at most 20000",
		hold + "points: [6.5]\n":     "must be a whole number",
		strings.Replace(hold, "sc}", "d, direct: true}", 1) + "points: [6]\n": "cases[0].direct",

		good + "emulated: {exceptions: [{server: s1, colocated: 50%}]}\n": "" +
			`exceptions[0].colocated "50%": "50%": must be SHARE@TIME`,
		hold + "points: [6]\nemulated: {colocated: 50%@60s}\n": "emulated.colocated",

		claim + "of: sc, rule: stated}]\n":                               "either paper or ours is required",
		claim + "of: sc, paper: 2, ours: 2, rule: stated}]\n":            "either paper or ours is required",
		claim + "of: sc, paper: around 2, rule: stated}]\n":              "claims[0].paper",
		claim + "of: sc, ours: around 2, rule: stated}]\n":               "claims[0].ours",
		claim + "of: sc, paper: equal, rule: stated}]\n":                 "claims[0].over",
		claim + "of: sc, over: sr4, paper: equal, rule: stated}]\n":      "claims[0].over",
		claim + "of: sc, paper: simulated, rule: stated}]\n":             "claims[0].paper",
		claim + "of: sc, paper: 2}]\n":                                   "claims[0].rule",
		claim + "of: sc, paper: 2, rule: five percent}]\n":               "claims[0].rule",
		claim + "of: sc, paper: 2, rule: digits, paper-runs: 2}]\n":      "claims[0].paper-runs",
		claim + "of: sc, ours: 2, rule: monte-carlo, paper-runs: 2}]\n":  "claims[0].paper-runs",
		claim + "of: sc, paper: 2, rule: digits, paper-requests: 2}]\n":  "claims[0].paper-requests",
		claim + "of: sc, paper: 2, rule: digits, since: 0.5}]\n":         "claims[0].since",
		claim + "of: sc, type: page, paper: 2, rule: stated}]\n":         "claims[0].type",
		claim + "of: sc, unjudged: why, paper: 2, rule: stated}]\n":      "claims[0].unjudged",
		good + "claims: [{text: x}]\n":                                   "claims[0].unjudged",
		"seeds: 1\n" + claim + "of: sc, paper: 2, rule: monte-carlo}]\n": "needs at least 2 seeds",
		good + "claims: [{text: x, quantity: failed, of: sc, ours: simulated, rule: stated}]\n": "" +
			"claims[0].ours",

		one + "[{name: p, proxy: {program: haproxy}}]\n": "" +
			`proxy.algorithm: must be one of [leastconn random(2)]`,
		one + "[{name: p, proxy: {program: nginx, algorithm: least_conn}, candidates: 2}]\n": "cases[0].proxy",
		"title: t\nkind: hold\naxis: connections\npoints: [9]\ncases: [{name: p, proxy: {program: nginx, algorithm: least_conn}}]\n": "" +
			"cases[0].proxy: is not for the kind hold",
		hold + "points: [6]\ncpu-time: true\n": "cpu-time",
		claim + "of: sc, minus: sr9, paper: 5, rule: stated}]\n": "" +
			"claims[0].minus",
		claim + "of: sc, minus: sc, over: sc, paper: 5, rule: stated}]\n": "" +
			"claims[0].minus",
		good + "claims: [{text: x, quantity: cycles, of: sc, ours: at most 2, rule: stated}]\n": "" +
			`claims[0].quantity "cycles": are only for the kind forward`,
		good + "claims: [{text: x, quantity: memory, of: sc, ours: at most 2, rule: stated}]\n": "" +
			`claims[0].quantity "memory": needs cpu-time`,
		good + "claims: [{text: x, quantity: lab-cpu, of: sc, ours: at most 2, rule: stated}]\n": "" +
			`claims[0].quantity "lab-cpu": needs cpu-time`,

		one + "[{name: sc, switches: 2}]\n":              `switches "2": must be 0 to 1, the number of balancers`,
		one + "[{name: d, direct: true, switches: 1}]\n": "cases[0].switches",

		good + "layouts: [{ratio: 1, cores: [1]}]\n":                "layouts: are only for the axis ratio",
		good + "axis: ratio\n":                                      "layouts: the ratio 0.5 is missing",
		good + "axis: ratio\nlayouts: [{ratio: 0.5, cores: [0]}]\n": "layouts[0].cores",
		good + "axis: ratio\nlayouts: [{ratio: 0.5, cores: [1]}]\nemulated: {exceptions: [{server: s1, cores: 2}]}\n": "" +
			"emulated.exceptions",
		one + "[{name: sc, placement: hash, packets: mix}]\n": "is only for the kind forward",
		"title: t\nkind: forward\naxis: flows\npoints: [1]\nseeds: 1\ncases: [{name: h, placement: hunt, packets: syn}]\n": "" +
			"of new flows need the placement hash or infer",
		one + "[{name: sc, packets: all}]\n":                                  "must be known, syn or mix",
		good + "round-trip: far\n":                                            `round-trip "far"`,
		good + "kind: hold\nround-trip: \"constant: 1s\"\n":                   "round-trip",
		good + "static: 0.5\n":                                                "is only for the kind day",
		good + "replay: {format: pcap, match: 'n=(.)'}\n":                     "replay.format",
		good + "replay: {format: queries, match: '(n)=(.)'}\n":                "replay.match",
		good + "axis: deviation\nreplay: {format: queries, match: 'n=(.)'}\n": "replay.match",

		one + "[{name: d, direct: true, weighted: true}]\n":                         "cases[0].weighted",
		"servers: 2\n" + one + "[{name: h, placement: hash, weights: [1, 0]}]\n":    "cases[0].weights: must be positive",
		"servers: 2\n" + one + "[{name: h, placement: hash, weights: [1, 2, 3]}]\n": "cases[0].weights: 3, but there are 2",
		one + "[{name: rr, placement: round-robin, feedback: 1s, weighted: true}]\n": "" +
			"cases[0].weighted",
	} {
		_, err := Parse("x", []byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		}
	}
}

// Options that an experiment cannot have are refused before anything is built.
func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name string
		Options
		want string
	}{
		{"6lb-12", Options{Speed: 4}, "speed 4: must be 1 for the kind day"},
		{"6lb-13", Options{Speed: 4}, "speed 4: must be 1 for the kind forward"},
		{"calibration", Options{Speed: 3}, "speed 3: the points are the speeds"},
		{"6lb-11d", Options{Speed: 3}, "speed 3: must be 1 for the kind change"},
		{"demo", Options{Full: true}, "full: the file has no values for it"},
		{"demo", Options{Speed: 1e10}, "speed 1e+10: must be at most 200"},
		{"demo", Options{Speed: math.NaN()}, "speed NaN: must be a positive number"},
		{"6lb-10", Options{Full: true, Speed: 2, Seeds: 5}, ""},
	} {
		e, _, err := Load(test.name)
		testhost.Must(t, err)
		err = e.Check(test.Options)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s, %+v:\n got %v\nwant %s", test.name, test.Options, err, test.want)
		}
	}
	ready, others, err := Ready(SetPapers, Options{})
	if err != nil || len(others) > 0 || !slices.Contains(ready, "6lb-10") || slices.Contains(ready, "6lb-12") {
		t.Errorf("experiments that need nothing: %v, left out %v, error %v", ready, others, err)
	}
	if ready, others, err = Ready(SetPapers, Options{Speed: 500}); err != nil || len(ready) > 0 || len(others) < 5 {
		t.Errorf("experiments at speed 500: %v, left out %v, error %v", ready, others, err)
	}
}

func TestLoadNamesTheExperiments(t *testing.T) {
	_, _, err := Load("nothing")
	if err == nil || !strings.Contains(err.Error(), "policies-quick") {
		t.Errorf("got %v, want an error with the names", err)
	}
}

// With the servers of the file, the rate of requests causes the load of the file, whatever the
// servers' speeds are.
func TestRate(t *testing.T) {
	e, err := Parse("x", []byte(`
title: t
points: [0.5]
servers: 4
work: "constant: 100ms"
load: 0.5
emulated: {exceptions: [{server: s1, cores: 1, speed: 0.5}]}
cases: [{name: sc, placement: hash}]
`))
	testhost.Must(t, err)
	s := e.settings(false).at(0.5)
	if got, want := s.rate(), 0.5*6.5/0.1; math.Abs(got-want) > 1e-9 {
		t.Errorf("the rate is %v/s, want %v/s", got, want)
	}
	s.Axis = AxisServers
	if fewer := s.at(2); fewer.rate() != s.rate() || fewer.actualLoad() <= s.actualLoad() {
		t.Errorf("with 2 servers: rate %v, load %v; want the rate of 4 servers, %v, and a higher load",
			fewer.rate(), fewer.actualLoad(), s.rate())
	}
}

// At a point of the axis deviation, the work has this deviation, and the same median as the
// experiment's own distribution.
func TestDeviationKeepsTheMedian(t *testing.T) {
	e, err := Parse("x", []byte("title: t\naxis: deviation\npoints: [0.3]\ncases: [{name: sc, placement: hash}]\n"))
	testhost.Must(t, err)
	work := e.settings(false).at(0.3).work()
	random := sim.NewRand(1, 1)
	sum, squares, below, n := 0.0, 0.0, 0, 1_000_000
	for range n {
		x := work.Sample(random.Uint64())
		sum, squares = sum+x, squares+x*x
		if x < 0.19*math.Ln2 {
			below++
		}
	}
	mean := sum / float64(n)
	if got := math.Sqrt(squares/float64(n) - mean*mean); math.Abs(got-0.3) > 0.02 {
		t.Errorf("the deviation is %v, want 0.3", got)
	}
	if share := float64(below) / float64(n); math.Abs(share-0.5) > 0.005 {
		t.Errorf("%v of the work is below the median of the exponential distribution, want 0.5", share)
	}
}

// TestDescribe checks the texts about cases, and that all cases of all experiments have one.
func TestDescribe(t *testing.T) {
	for want, text := range map[string]string{
		"clients send requests to random servers, without a balancer": "{name: a, direct: true}",
		"SC, single choice: the first candidate of the flow's bucket; weights in proportion to the servers' capacities": "{name: a, placement: hash, " +
			"candidates: 1, weighted: true}",
		"a connection is offered to its 2 candidates in turn; a server accepts it while its load is below a " +
			"threshold, which it adapts (SRdyn)": "{name: a, placement: hunt, candidates: 2, accept: {policy: dynamic}}",
		"a connection is offered to 3 random servers in turn; the one with the lowest load accepts it": "{name: a, placement: hunt, " +
			"candidates: 3, selection: random}",
		"haproxy as a proxy, by random(2) of its own connections": "{name: a, proxy: {program: haproxy, algorithm: random(2)}}",
		"haproxy as a proxy, by leastconn of its own connections; at most 2 to a server at a time, and other " +
			"requests wait in the proxy": "{name: a, proxy: {program: haproxy, algorithm: leastconn, maxconn: 2}}",
		"the next server in turn; weights that follow the servers' loads every 200ms": "{name: a, placement: round-robin, feedback: 200ms}",
	} {
		e, err := Parse("a", []byte("title: A\npoints: [0.5]\ncases:\n  - "+text+"\n"))
		testhost.Must(t, err)
		if got := e.Cases[0].Describe(); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	for _, name := range Names() {
		e, _, err := Load(name)
		testhost.Must(t, err)
		for _, c := range e.Cases {
			if text := c.Describe(); len(text) < 20 || strings.ContainsAny(text, "`") {
				t.Errorf("%s, %s: %q", name, c.Name, text)
			}
		}
	}
}
