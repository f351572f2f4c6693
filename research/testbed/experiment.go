// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/experiments"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/lab/application"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// Experiment is what a file in experiments/ describes: cases that are compared at several points.
type Experiment struct {
	// Name is the name of the file without its ending.
	Name  string `yaml:"-"`
	Title string `yaml:"title"`
	Paper string `yaml:"paper"` // paper, section and figure
	About string `yaml:"about"`
	// Set is the set to which the experiment belongs.
	Set Set `yaml:"set"`
	// Needs names what the experiment needs beside root and nginx, for readers.
	Needs string `yaml:"needs"`

	// Kind is what a run does.
	Kind Kind `yaml:"kind"`
	// Axis is the quantity in which the points differ. At a point, its value is that of the point,
	// in place of the experiment's own value.
	Axis AxisKind `yaml:"axis"`
	Size `yaml:",inline"`
	// Full replaces sizes in a run of full length.
	Full Size `yaml:"full"`

	Balancers int                 `yaml:"balancers"`
	Emulated  lab.EmulatedServers `yaml:"emulated"`
	// Work is the distribution of the work of a request, as in a scenario of the simulator.
	Work string `yaml:"work"`
	// Load is the share of all processors that the requests use.
	Load    float64 `yaml:"load"`
	Buckets int     `yaml:"buckets"` // of the candidate tables; 0 stands for the default
	// CPUTime tells that runs also measure the CPU time of the lab, and the balancers' memory. Then each
	// case has a lab of its own.
	CPUTime bool `yaml:"cpu-time"`
	// RoundTrip is the distribution of the times after which replies reach the clients. Without it,
	// clients are near.
	RoundTrip string `yaml:"round-trip"`
	// Layouts are the servers of the points of AxisRatio.
	Layouts []Layout `yaml:"layouts"`
	// Replay takes the requests from a trace. If the trace has their work, only the mean of Work
	// counts.
	Replay *Replay `yaml:"replay"`

	// Amplitude is that of the rate's sine, for KindDay: with 0.5, the rate is between half and one
	// and a half of its mean.
	Amplitude float64 `yaml:"amplitude"`
	// Static is the share of the requests that are for static files, for KindDay. The others are
	// for pages.
	Static    float64              `yaml:"static"`
	Apache    lab.ApacheServers    `yaml:"apache"`
	MediaWiki lab.MediaWikiServers `yaml:"mediawiki"`

	Cases  []Case  `yaml:"cases"`
	Claims []Claim `yaml:"claims"`
}

// Size determines how long an experiment takes. The zero value of a field means that the field is
// not set.
type Size struct {
	Servers     int       `yaml:"servers"`
	Points      []float64 `yaml:"points"`
	Connections int       `yaml:"connections"` // requests of a run, each with its own connection
	Seeds       int       `yaml:"seeds"`       // runs of each case at each point
	// Speed is how many times faster than real time the experiment runs.
	Speed float64 `yaml:"speed"`
	// Day is the length of a day, and Bin that of the intervals in which the day is shown. Both are
	// for KindDay.
	Day time.Duration `yaml:"day"`
	Bin time.Duration `yaml:"bin"`
}

// Layout is a set of servers, for AxisRatio.
type Layout struct {
	// Ratio is the point: the capacity of a large server, relative to that of a small one.
	Ratio float64 `yaml:"ratio"`
	// Cores has the number of cores of each server.
	Cores []int `yaml:"cores"`
}

// fastest is the highest speed. At that speed, loads are sampled every millisecond.
const fastest = float64(sampleInterval / time.Millisecond)

// Set is a set of experiments that run one after the other.
type Set string

// The sets. SetPapers has the experiments of the papers other than HLB, and experiments that show
// how far to trust the testbed.
const (
	SetPapers Set = "papers"
	SetLeast  Set = "least" // servers that compare their loads
	SetInfer  Set = "infer" // balancers that infer the loads of servers
	SetHLB    Set = "hlb"   // the experiments of HLB, with its balancers that infer
)

// Sets lists all sets.
func Sets() []Set { return []Set{SetPapers, SetLeast, SetInfer, SetHLB} }

// Kind is what a run does.
type Kind string

const (
	// KindLoad sends requests at a rate.
	KindLoad Kind = "load"
	// KindChange removes servers and changes the balancer of open connections, and counts the
	// connections that break.
	KindChange Kind = "change"
	// KindHold opens connections that stay open, and counts how many each server has.
	KindHold Kind = "hold"
	// KindDay replays a day of requests for MediaWiki.
	KindDay Kind = "day"
	// KindForward measures the CPU time of packets (Case.Packets), without a lab.
	KindForward Kind = "forward"
)

// Packets is the kind of the packets whose CPU time is measured.
type Packets string

// The kinds of packets. PacketsKnown is the default.
const (
	PacketsKnown Packets = "known" // of flows that the balancer knows
	PacketsSYN   Packets = "syn"   // of new flows
	PacketsMix   Packets = "mix"   // the SYN, a later packet and the FIN of new flows
)

// AxisKind is a quantity in which points differ.
type AxisKind string

// The quantities. AxisDeviation is the standard deviation of the work in seconds. On this axis, the
// work is lognormal, with the median of the experiment's own distribution (6LB, section VI-B8).
const (
	AxisLoad      AxisKind = "load"
	AxisServers   AxisKind = "servers"
	AxisBalancers AxisKind = "balancers"
	AxisBuckets   AxisKind = "buckets"
	AxisDeviation AxisKind = "deviation"
	AxisSpeed     AxisKind = "speed"
	AxisRemoved   AxisKind = "removed" // servers that are removed; for KindChange
	AxisRate      AxisKind = "rate"    // requests per second, in the mean of the day; for KindDay
	AxisFlows     AxisKind = "flows"   // for KindForward
	// AxisConnections is the number of connections that are open, for KindHold.
	AxisConnections AxisKind = "connections"
	// AxisRoundTrip is the mean of the round trips in seconds. On this axis, they have a Pareto
	// distribution.
	AxisRoundTrip AxisKind = "round-trip"
	// AxisRatio is the capacity of a large server relative to that of a small one (Layouts).
	AxisRatio AxisKind = "ratio"
)

// axisOf has the only axis that a kind of experiments may have. It is empty for KindLoad, which may
// have any axis that belongs to no other kind.
var axisOf = map[Kind]AxisKind{
	KindLoad: "", KindChange: AxisRemoved, KindHold: AxisConnections, KindDay: AxisRate,
	KindForward: AxisFlows,
}

// axisLabels has the labels of all axes.
var axisLabels = map[AxisKind]string{
	AxisLoad:      "load of the processors, ρ",
	AxisServers:   "servers",
	AxisBalancers: "balancers",
	AxisBuckets:   "buckets",
	AxisDeviation: "standard deviation of the work, s",
	AxisSpeed:     "speed",
	AxisRemoved:   "removed servers",
	AxisRate:      "requests per second, in the mean of the day",
	AxisFlows:     "flows",

	AxisConnections: "open connections",
	AxisRoundTrip:   "mean round trip of the clients, s",
	AxisRatio:       "capacity of a large server, relative to a small one",
}

// Case is a service of the lab. All cases of an experiment use the same servers, one after the
// other, unless the fields say otherwise.
type Case struct {
	Name string `yaml:"name"`
	// Direct sends requests to the servers' own addresses, each equally likely, without a balancer.
	Direct bool `yaml:"direct,omitempty"`
	// Proxy lets the balancers run a proxy instead of Segue. Such a case has a lab of its own.
	Proxy lab.Proxy `yaml:"proxy,omitempty"`
	// The other fields are those of a service of the lab. The default load source is the shared
	// memory of the emulated servers.
	Encapsulation desired.Encapsulation `yaml:"encapsulation,omitempty"`
	Placement     desired.Placement     `yaml:"placement,omitempty"`
	Selection     desired.Selection     `yaml:"selection,omitempty"`
	Persistence   desired.Persistence   `yaml:"persistence,omitempty"`
	BucketHash    desired.BucketHash    `yaml:"bucket-hash,omitempty"`
	Candidates    int                   `yaml:"candidates,omitempty"`
	Generations   int                   `yaml:"generations,omitempty"`
	// Switches is the number of balancers, from the first on, that stand behind a software switch.
	// Cases with different numbers of switches have different labs.
	Switches int `yaml:"switches,omitempty"`
	// Infer is for placements that infer. Its times are emulated.
	Infer  *desired.Infer `yaml:"infer,omitempty"`
	Accept desired.Accept `yaml:"accept,omitempty"`
	Source desired.Source `yaml:"source,omitempty"`
	// Weighted gives each server a weight in proportion to its capacity. Otherwise all servers have
	// the same weight.
	Weighted bool `yaml:"weighted,omitempty"`
	// Weights are the weights of the servers, one for each, in place of Weighted.
	Weights []uint32 `yaml:"weights,omitempty"`
	// Packets are those that KindForward measures.
	Packets Packets `yaml:"packets,omitempty"`
	// Feedback is the interval at which the weights of the servers follow their loads, in emulated
	// time; 0: weights stay as they are.
	Feedback time.Duration `yaml:"feedback,omitempty"`
}

// defaults are the values of fields that a file does not set. The servers are those of the papers:
// two processors, 32 workers, a backlog of 128 (6LB, section VI-A; SRLB, section IV).
func defaults() Experiment {
	topology := lab.DefaultTopology()
	return Experiment{
		Apache: topology.Apache, MediaWiki: topology.MediaWiki,
		Set: SetPapers, Kind: KindLoad, Axis: AxisLoad, Balancers: 1, Work: "exponential: 190ms", Load: 0.88,
		Amplitude: 0.33,
		Size: Size{
			Servers: 12, Connections: 20_000, Seeds: 3, Speed: 1,
			Day: 4 * time.Minute, Bin: 10 * time.Second,
		},
		Emulated: lab.EmulatedServers{EmulatedServer: lab.EmulatedServer{
			Workers: 32, Backlog: 128, Cores: 2,
		}},
	}
}

// Parse reads an experiment. The error is of type fieldpath.Errors.
func Parse(name string, text []byte) (*Experiment, error) {
	e := defaults()
	e.Name = name
	return &e, config.Decode(text, &e, e.problems)
}

// Load reads an experiment by its name in experiments/, with or without the ending .yaml, or by the
// path of a file. It also returns the text of the file.
func Load(name string) (*Experiment, []byte, error) {
	base := strings.TrimSuffix(filepath.Base(name), ".yaml")
	text, err := experiments.Files.ReadFile(name + ".yaml")
	if err != nil {
		text, err = os.ReadFile(name)
	}
	if err != nil {
		text, err = experiments.Files.ReadFile(name) // the name of an experiment with its ending
	}
	if err != nil {
		return nil, nil, fmt.Errorf("experiment %q: there is no such experiment and no such file; "+
			"the experiments are %s", name, strings.Join(Names(), ", "))
	}
	e, err := Parse(base, text)
	if err != nil {
		return nil, nil, fmt.Errorf("experiment %s:\n%w", name, err)
	}
	return e, text, nil
}

// Names lists the experiments in experiments/.
func Names() (names []string) {
	_ = fs.WalkDir(experiments.Files, ".", func(path string, _ fs.DirEntry, _ error) error {
		if base, found := strings.CutSuffix(path, ".yaml"); found {
			names = append(names, base)
		}
		return nil
	})
	return names
}

// Ready checks the experiments of the set that need nothing beside root and nginx. names are those
// that can run with the options. others has an error for each that cannot.
func Ready(set Set, o Options) (names []string, others []error, err error) {
	for _, name := range Names() {
		e, _, err := Load(name)
		if err != nil {
			return nil, nil, err
		}
		if e.Set != set || e.Needs != "" {
			continue
		}
		if err := e.Check(o); err != nil {
			others = append(others, err)
		} else {
			names = append(names, name)
		}
	}
	return names, others, nil
}

// problems checks an experiment. It checks the topologies with the lab's own checks, but only if
// everything else is right.
func (e *Experiment) problems() (errs fieldpath.Errors) {
	require := func(ok bool, path, format string, args ...any) {
		if !ok {
			errs.Addf(path, format, args...)
		}
	}
	ownAxis, known := axisOf[e.Kind]
	require(e.Title != "", "title", "required")
	require(slices.Contains(Sets(), e.Set), "set", "must be papers, least, infer or hlb")
	require(known, "kind", "must be load, change, hold, day or forward")
	require(axisLabels[e.Axis] != "", "axis", "must be load, servers, balancers, buckets, "+
		"deviation, speed, removed, connections, rate, flows, ratio or round-trip")
	if ownAxis != "" {
		require(e.Axis == ownAxis, "axis", "must be %s for the kind %s", ownAxis, e.Kind)
	} else {
		require(!e.Axis.ofOneKind(), "axis", "is not for the kind %s", e.Kind)
	}
	require(e.Amplitude >= 0 && e.Amplitude <= 1, "amplitude", "must be from 0 to 1")
	require(e.Static >= 0 && e.Static <= 1, "static", "must be from 0 to 1")
	require(e.Kind == KindDay || e.Static == 0, "static", "is only for the kind day")
	require(!e.CPUTime || e.sendsRequests(), "cpu-time", "is only for the kinds load and day")
	require(e.Kind != KindChange || e.Balancers > 1, "balancers",
		"must be at least 2 for the kind change")
	require(e.Load > 0 && !math.IsInf(e.Load, 0), "load", "must be a positive number")
	require(e.Speed != 0, "speed", "must be a positive number")
	require(e.Day > 0 && e.Bin > 0 && e.Bin <= e.Day, "bin", "must be more than 0 and at most the day")
	require(len(e.Points) > 0, "points", "at least one is required")
	require(len(e.Cases) > 0, "cases", "at least one is required")
	if _, err := scenario.ParseDistribution(e.Work, "."); err != nil {
		errs.Addf("work", "%v", err)
	}
	// under returns a function that reports a problem of a field of the part at the path.
	under := func(path string) func(name, problem string) {
		return func(name, problem string) { errs.Addf(fieldpath.Child(path, name), "%s", problem) }
	}
	e.Size.problems(e, e.Servers, under(""))
	e.Full.problems(e, cmp.Or(e.Full.Servers, e.Servers), under("full"))
	emulatedProblems(e.Kind, e.Emulated, under("emulated"))
	if e.RoundTrip != "" {
		if _, err := scenario.ParseDistribution(e.RoundTrip, "."); err != nil {
			errs.Addf("round-trip", "%v", err)
		}
	}
	require(e.Kind == KindLoad || e.RoundTrip == "" && e.Axis != AxisRoundTrip, "round-trip",
		"is only for the kind load")
	e.layoutProblems(func(name, problem string) { errs.Addf(name, "%s", problem) })
	if e.Replay != nil {
		e.Replay.problems(e, under("replay"))
	}
	names := map[string]bool{} // of the earlier cases
	for i, c := range e.Cases {
		path := fieldpath.Item("cases", i)
		c.problems(e.Kind, under(path))
		require(!names[c.Name], fieldpath.Child(path, "name"), "is already used")
		require(c.Weights == nil || len(c.Weights) == e.Servers, fieldpath.Child(path, "weights"),
			"%d, but there are %d servers", len(c.Weights), e.Servers)
		names[c.Name] = true
	}
	for i, c := range e.Claims {
		c.problems(e, under(fieldpath.Item("claims", i)))
	}
	if len(errs) > 0 {
		return errs
	}
	return e.topologyProblem()
}

// layoutProblems checks that each point of AxisRatio has its servers.
func (e *Experiment) layoutProblems(fail func(name, problem string)) {
	if e.Axis != AxisRatio {
		if len(e.Layouts) > 0 {
			fail("layouts", "are only for the axis ratio")
		}
		return
	}
	if len(e.Emulated.Exceptions) > 0 {
		fail("emulated.exceptions", "are not for the axis ratio, whose servers are in layouts")
	}
	for _, point := range slices.Concat(e.Points, e.Full.Points) {
		if e.layout(point) == nil {
			fail("layouts", fmt.Sprintf("the ratio %v is missing", point))
		}
	}
	for i, l := range e.Layouts {
		if len(l.Cores) == 0 || slices.Min(l.Cores) < 1 {
			fail(fieldpath.Child(fieldpath.Item("layouts", i), "cores"), "must have at least one server, with 1 core or more each")
		}
	}
}

// layout returns the numbers of cores of the servers at a point of AxisRatio, or nil.
func (e *Experiment) layout(ratio float64) []int {
	i := slices.IndexFunc(e.Layouts, func(l Layout) bool { return l.Ratio == ratio })
	if i < 0 {
		return nil
	}
	return e.Layouts[i].Cores
}

// problems checks the size s of an experiment. servers is the number of servers that the experiment
// has with this size.
func (s Size) problems(e *Experiment, servers int, fail func(name, problem string)) {
	for name, n := range map[string]int{
		"servers": s.Servers, "connections": s.Connections, "seeds": s.Seeds,
	} {
		if n < 0 {
			fail(name, "must not be negative")
		}
	}
	switch {
	case !(s.Speed >= 0):
		fail("speed", "must be a positive number")
	case s.Speed > fastest:
		fail("speed", fmt.Sprintf("must be at most %v", fastest))
	case e.inRealTime() && s.Speed != 0 && s.Speed != 1:
		fail("speed", fmt.Sprintf("must be 1 for the kind %s, which cannot be faster", e.Kind))
	}
	if !slices.IsSorted(s.Points) {
		fail("points", "must be in ascending order")
	}
	whole := slices.Contains([]AxisKind{ // points must be whole numbers
		AxisServers, AxisBalancers, AxisBuckets, AxisRemoved, AxisConnections, AxisFlows,
	}, e.Axis)
	for _, p := range s.Points {
		switch {
		case !(p > 0) || math.IsInf(p, 0):
			fail("points", "must be positive numbers")
		case whole && p != math.Trunc(p):
			fail("points", fmt.Sprintf("%v: must be a whole number", p))
		case e.Axis == AxisRemoved && p >= float64(servers):
			fail("points", fmt.Sprintf("%v: at least one of %d servers must be left", p, servers))
		case e.Axis == AxisConnections && p > mostHeld:
			fail("points", fmt.Sprintf("%v: must be at most %v", p, mostHeld))
		case e.Axis == AxisSpeed && p > fastest:
			fail("points", fmt.Sprintf("%v: must be at most %v", p, fastest))
		}
	}
}

// mostHeld is the largest number of connections that an experiment of KindHold opens: all have the
// same client address, and a client has some 28,000 ports.
const mostHeld = 20_000

// ofOneKind tells whether the axis belongs to one kind of experiments.
func (a AxisKind) ofOneKind() bool {
	for _, own := range axisOf {
		if own != "" && own == a {
			return true
		}
	}
	return false
}

// sendsRequests tells whether the runs measure the response times of requests.
func (e *Experiment) sendsRequests() bool { return e.Kind == KindLoad || e.Kind == KindDay }

// inRealTime tells whether the experiment cannot run faster than real time.
func (e *Experiment) inRealTime() bool { return e.Kind != KindLoad }

// emulatedProblems calls fail for each setting of the emulated servers that is wrong or does not
// fit the kind of the experiment.
func emulatedProblems(kind Kind, all lab.EmulatedServers, fail func(name, problem string)) {
	check := func(path string, s lab.EmulatedServer) {
		if s.Demand != "" || s.DemandTable != "" {
			fail(fieldpath.Child(path, "demand"), "is not allowed, because each request tells its work")
		}
		if _, err := application.ParseSchedule(s.Colocated); err != nil {
			fail(fieldpath.Child(path, "colocated"), err.Error())
		}
		if s.Colocated != "" && kind != KindLoad {
			fail(fieldpath.Child(path, "colocated"), "is only for the kind load")
		}
	}
	check("", all.EmulatedServer)
	for i, s := range all.Exceptions {
		check(fieldpath.Item("exceptions", i), s.EmulatedServer)
	}
}

// problems calls fail for each field of the case that is wrong or does not fit the kind of the
// experiment.
func (c Case) problems(kind Kind, fail func(name, problem string)) {
	if c.Name == "" || !fieldpath.IsPlain(c.Name) {
		fail("name", "must have letters, digits, - and _")
	}
	if c.Direct && c.Placement != "" {
		fail("direct", "a balancer places no request that goes to its server directly")
	}
	if c.Direct && (kind == KindChange || kind == KindHold || kind == KindForward) {
		fail("direct", fmt.Sprintf("is not for the kind %s, which needs a balancer", kind))
	}
	c.proxyProblems(kind, fail)
	if c.Feedback != 0 && c.Placement != desired.PlacementRoundRobin {
		fail("feedback", "only the placement round-robin uses weights that change all the time")
	}
	sendsRequests := kind == KindLoad || kind == KindDay
	for field, given := range map[string]bool{"weighted": c.Weighted, "weights": c.Weights != nil} {
		if given && (!sendsRequests || c.Direct || c.Feedback != 0) {
			fail(field, "is only for the kinds load and day, with a balancer and without feedback")
		}
	}
	if c.Weights != nil && (c.Weighted || slices.Contains(c.Weights, 0)) {
		fail("weights", "must be positive, and exclude weighted")
	}
	if c.Feedback < 0 {
		fail("feedback", "must not be negative")
	}
	if c.Switches != 0 && (c.Direct || kind == KindForward) {
		fail("switches", "is only for cases with balancers in a lab")
	}
	switch c.Packets {
	case "":
	case PacketsKnown, PacketsSYN, PacketsMix:
		if kind != KindForward {
			fail("packets", "is only for the kind forward")
		}
		if c.Packets != PacketsKnown && c.Placement != desired.PlacementHash && c.Placement != desired.PlacementInfer {
			fail("packets", "of new flows need the placement hash or infer")
		}
	default:
		fail("packets", "must be known, syn or mix")
	}
}

// proxyProblems calls fail if the case has a proxy, and the kind or another field does not permit it.
func (c Case) proxyProblems(kind Kind, fail func(name, problem string)) {
	switch {
	case !c.hasProxy():
	case kind != KindLoad && kind != KindDay:
		fail("proxy", fmt.Sprintf("is not for the kind %s", kind))
	case !reflect.DeepEqual(c, Case{Name: c.Name, Proxy: c.Proxy}):
		fail("proxy", "cannot be used with the fields of Segue's services, or with direct")
	}
}

// hasProxy tells whether the balancers run a proxy.
func (c Case) hasProxy() bool { return c.Proxy != lab.Proxy{} }

// topologyProblem returns the lab's first error about the topology of a point, first at the short
// size and then at the full one. It returns nil if the lab accepts all topologies.
func (e *Experiment) topologyProblem() (errs fieldpath.Errors) {
	for _, full := range []bool{false, true} {
		s := e.settings(full)
		for _, point := range s.Points {
			for _, topology := range s.at(point).labs() {
				if err := topology.Validate(); err != nil {
					errs.Addf("", "at the point %v: %v", point, err)
					return errs
				}
			}
		}
	}
	return nil
}
