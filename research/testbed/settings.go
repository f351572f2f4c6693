// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// settings is an experiment at one of its two sizes, with the values of one point.
type settings struct {
	Experiment
	present   int        // servers of the lab; the rate is that for Servers
	deviation float64    // of the work in seconds; 0: the work is as in the file
	removed   int        // servers to remove
	perSecond float64    // mean requests per second over the day; for KindDay
	meanTrip  float64    // mean round trip in seconds; for AxisRoundTrip
	recorded  *recording // the requests of the trace; for a Replay
}

// settings returns the experiment at one of its two sizes.
func (e *Experiment) settings(full bool) settings {
	s := settings{Experiment: *e, present: e.Servers}
	if !full {
		return s
	}
	s.Servers = cmp.Or(e.Full.Servers, e.Servers)
	s.Connections = cmp.Or(e.Full.Connections, e.Connections)
	s.Seeds = cmp.Or(e.Full.Seeds, e.Seeds)
	s.Speed = cmp.Or(e.Full.Speed, e.Speed)
	s.Day, s.Bin = cmp.Or(e.Full.Day, e.Day), cmp.Or(e.Full.Bin, e.Bin)
	if len(e.Full.Points) > 0 {
		s.Points = e.Full.Points
	}
	s.present = s.Servers
	return s
}

// at returns the settings at a point of the axis. A point of AxisFlows changes no setting.
func (s settings) at(point float64) settings {
	switch s.Axis {
	case AxisLoad:
		s.Load = point
	case AxisServers:
		s.present = int(point)
	case AxisBalancers:
		s.Balancers = int(point)
	case AxisBuckets:
		s.Buckets = int(point)
	case AxisDeviation:
		s.deviation = point
	case AxisSpeed:
		s.Speed = point
	case AxisRemoved:
		s.removed = int(point)
	case AxisConnections:
		s.Connections = int(point)
	case AxisRate:
		s.perSecond = point
	case AxisRoundTrip:
		s.meanTrip = point
	case AxisRatio:
		s.takeLayout(s.layout(point))
	}
	return s
}

// takeLayout replaces the servers by servers with these numbers of cores.
func (s *settings) takeLayout(cores []int) {
	s.Servers, s.present = len(cores), len(cores)
	s.Emulated.Exceptions = nil
	for i, n := range cores {
		s.Emulated.Exceptions = append(s.Emulated.Exceptions, lab.EmulatedException{
			Server: serverName(i + 1), EmulatedServer: lab.EmulatedServer{Cores: n},
		})
	}
}

// rate returns the requests per emulated second. With the file's own servers and work, they cause
// the load Load. Points with other servers or other work have the same rate, and so another load
// (6LB, sections VI-B3 and VI-B8).
func (s settings) rate() float64 {
	return s.Load * s.capacity(s.Servers) / s.baseWork().Mean()
}

// actualLoad returns the share of all present processors that the requests use.
func (s settings) actualLoad() float64 {
	work := s.work()
	return s.rate() * work.Mean() / s.capacity(s.present)
}

// capacity returns the work that a number of servers, from s1 on, do in an emulated second.
func (s settings) capacity(servers int) (sum float64) {
	for i := 1; i <= servers; i++ {
		sum += s.capacityOf(serverName(i))
	}
	return sum
}

// capacityOf returns the work that a server does in an emulated second. It is 0 if it is not known.
func (s settings) capacityOf(server string) float64 {
	if s.Kind == KindDay {
		return s.Apache.CPUsOf(server)
	}
	e := s.Emulated.Of(server)
	return float64(e.Cores) * speedOf(e)
}

func serverName(i int) string { return fmt.Sprintf("s%d", i) }

// serverNames returns the names of all present servers.
func (s settings) serverNames() (names []string) {
	for i := range s.present {
		names = append(names, serverName(i+1))
	}
	return names
}

func speedOf(e lab.EmulatedServer) float64 {
	if e.Speed == nil {
		return 1
	}
	return *e.Speed
}

// baseWork returns the distribution of the work in the file.
func (s settings) baseWork() *sim.Distribution {
	work, err := scenario.ParseDistribution(s.Work, ".")
	if err != nil {
		panic(err) // problems has checked it
	}
	return &work
}

// work returns the distribution of the work: that of the file or, at a point of AxisDeviation, a
// lognormal one with the same median.
func (s settings) work() *sim.Distribution {
	if s.deviation == 0 {
		return s.baseWork()
	}
	median := s.baseWork().Sample(1 << 63) // half of 2^64 is the median of the random bits
	work := sim.Lognormal(median, lognormalSigma(median, s.deviation))
	return &work
}

// tripIndex is the index of Pareto-distributed round trips. Their deviation is 0.58 of their mean.
const tripIndex = 3

// roundTrip returns the distribution of the round trips, or nil if clients are near.
func (s settings) roundTrip() *sim.Distribution {
	switch {
	case s.meanTrip > 0:
		return new(sim.Pareto(s.meanTrip, tripIndex))
	case s.RoundTrip == "":
		return nil
	}
	trip, err := scenario.ParseDistribution(s.RoundTrip, ".")
	if err != nil {
		panic(err) // problems has checked it
	}
	return &trip
}

// lognormalSigma returns sigma of a lognormal distribution with a median m and a standard deviation
// d: its variance is m²·x·(x-1), with x = exp(sigma²).
func lognormalSigma(m, d float64) float64 {
	x := (1 + math.Sqrt(1+4*d*d/(m*m))) / 2
	return math.Sqrt(math.Log(x))
}

// sampleInterval is the time between two samples of the servers' loads in emulated time (6LB,
// section VI-B7, polls loads as often).
const sampleInterval = 200 * time.Millisecond

// byTheClock returns how long an emulated time takes by the clock.
func (s settings) byTheClock(emulated time.Duration) time.Duration {
	return time.Duration(float64(emulated) / s.Speed)
}

// notBuilt is the name of a lab that is never built, because only its topology is of interest.
const notBuilt = "x"

// topology returns the lab for a run of a case. Each case that may share the lab is a service with a
// VIP of its own, except those that send requests directly to servers. If all do, the lab is bare:
// no balancers and agents run.
func (s settings) topology(name string, of Case) lab.Topology {
	t := lab.DefaultTopology()
	t.Name, t.Balancers, t.Servers = name, s.Balancers, s.present
	t.Applications = []lab.Application{lab.Emulated}
	if s.Kind == KindDay {
		t.Applications = []lab.Application{lab.MediaWiki}
	}
	t.Emulated, t.Apache, t.MediaWiki = s.emulated(), s.Apache, s.MediaWiki
	t.Services = nil
	t.Switches, t.Proxy = of.Switches, of.Proxy
	for i, c := range s.Cases {
		if !c.Direct && s.mayShare(c, of) {
			t.Services = append(t.Services, c.service(i, s))
		}
	}
	t.Bare = len(t.Services) == 0
	return t
}

// mayShare tells whether a lab may have the services of two cases: both have the same proxy, or none.
// If the CPU time and the memory of balancers are measured, each case has a lab of its own, because
// a service costs some even without requests.
func (s settings) mayShare(a, b Case) bool {
	return a.Proxy == b.Proxy && (!s.CPUTime || a.Name == b.Name)
}

// labs returns the labs of all cases, each once.
func (s settings) labs() (all []lab.Topology) {
	for i, c := range s.Cases {
		same := func(earlier Case) bool { return c.Switches == earlier.Switches && s.mayShare(c, earlier) }
		if !slices.ContainsFunc(s.Cases[:i], same) {
			all = append(all, s.topology(notBuilt, c))
		}
	}
	return all
}

// emulated returns the servers at the experiment's speed, without co-located work, which begins
// with each run.
func (s settings) emulated() lab.EmulatedServers {
	all := s.Emulated
	all.Colocated = ""
	faster := func(e lab.EmulatedServer) *float64 {
		speed := speedOf(e) * s.Speed
		return &speed
	}
	all.Speed = faster(all.EmulatedServer)
	all.Exceptions = nil
	for _, e := range s.Emulated.Exceptions {
		e.Colocated = ""
		if e.Speed != nil {
			e.Speed = faster(e.EmulatedServer)
		}
		all.Exceptions = append(all.Exceptions, e)
	}
	return all
}

// port is the port on which the services and the servers themselves listen.
const port = 80

// service returns the i-th case as a service of the lab.
func (c Case) service(i int, s settings) lab.Service {
	if c.hasProxy() {
		return lab.Service{Name: c.Name, VIP: vip(i), Port: port, Protocol: desired.TCP}
	}
	service := lab.Service{
		Name: c.Name, VIP: vip(i), Port: port, Protocol: desired.TCP,
		Encapsulation: cmp.Or(c.Encapsulation, desired.SRv6Insert),
		Placement:     c.Placement, Selection: c.Selection, Persistence: c.Persistence, Candidates: c.Candidates,
		Generations: c.Generations, Infer: c.infer(s), Buckets: s.Buckets, BucketHash: c.BucketHash,
		Accept: c.accept(s), Load: c.source(s),
	}
	needsLoad := c.Placement == desired.PlacementHunt || c.Placement.Polls()
	switch {
	case !needsLoad || c.Source != (desired.Source{}): // no default needed
	case s.Kind == KindDay:
		service.Load = desired.Source{Kind: desired.LoadApache}
	default:
		service.Load = Case{Source: desired.Source{Kind: desired.LoadSharedMemory}}.source(s)
	}
	return service
}

// source returns the load source of the case, with its interval by the clock.
func (c Case) source(s settings) desired.Source {
	source := c.Source
	if source.Kind == desired.LoadSharedMemory {
		source.Interval = cmp.Or(source.Interval, readInterval)
	}
	if source.Interval != 0 {
		source.Interval = max(s.byTheClock(source.Interval), shortestInterval)
	}
	return source
}

// accept returns the accept policy of the case, with times by the clock. The window of the policy
// dynamic has no shortest time, as in algorithm 2 of 6LB, unless the experiment sets one.
func (c Case) accept(s settings) desired.Accept {
	a := c.Accept
	if a.Policy == desired.AcceptDynamic {
		a.WindowTime = new(s.byTheClock(c.windowTime()))
	}
	return a
}

// infer returns the section infer of the case's service, with times by the clock. Times that cannot
// be configured, such as that between two samples, stay the same at all speeds.
func (c Case) infer(s settings) *desired.Infer {
	if !c.Placement.Infers() {
		return c.Infer
	}
	var i desired.Infer
	if c.Infer != nil {
		i = *c.Infer
	}
	if i.SlowStart != nil {
		i.SlowStart = new(s.byTheClock(*i.SlowStart))
	}
	if infer.Kind(c.Placement).IsPolled() {
		i.Poll = max(s.byTheClock(c.poll()), desired.ShortestPoll)
	}
	if c.Placement == desired.PlacementInfer {
		i.Interval = max(s.byTheClock(cmp.Or(i.Interval, desired.DefaultInferInterval)),
			desired.ShortestInferInterval)
	}
	return &i
}

// poll returns the time between two polls of a server, in emulated time.
func (c Case) poll() time.Duration {
	if c.Infer == nil {
		return desired.DefaultInferInterval
	}
	return cmp.Or(c.Infer.Poll, desired.DefaultInferInterval)
}

// windowTime returns the shortest time of a window of the policy dynamic, in emulated time.
func (c Case) windowTime() time.Duration {
	if c.Accept.WindowTime == nil {
		return 0
	}
	return *c.Accept.WindowTime
}

const (
	// readInterval is the emulated time between two readings of a server's load by its agent: the
	// agent's default.
	readInterval = 10 * time.Millisecond
	// shortestInterval is the shortest interval that agents permit.
	shortestInterval = time.Millisecond
)

// vip returns the VIP of the i-th case.
func vip(i int) netip.Addr {
	address := netip.MustParseAddr("2001:db8:80::").As16()
	address[15] = byte(i + 1)
	return netip.AddrFrom16(address)
}

// urls returns the URLs to which a case sends its requests: those of all servers for a direct case,
// and otherwise that of the case's VIP. A case that is not direct must be one of s.Cases.
func (s settings) urls(c Case) (urls []string) {
	path := "/?work={demand}"
	if s.playsTrace() {
		path = "" // the trace has the paths
	}
	url := func(address netip.Addr) string {
		return fmt.Sprintf("http://%s%s", netip.AddrPortFrom(address, port), path)
	}
	if !c.Direct {
		i := slices.IndexFunc(s.Cases, func(other Case) bool { return other.Name == c.Name })
		return []string{url(vip(i))}
	}
	for _, spec := range s.topology(notBuilt, c).Specs() {
		if spec.Role == lab.RoleServer {
			urls = append(urls, url(spec.IPv6))
		}
	}
	return urls
}
