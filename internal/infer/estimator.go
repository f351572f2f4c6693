// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Kind is a method by which an Estimator finds prices.
type Kind string

// The kinds.
const (
	// TerritoryLearned infers the capacities of servers, and the load of other balancers
	// (docs/research/placement.md). It is the default.
	TerritoryLearned Kind = "territory-learned"
	// TerritoryConfigured takes the configured weights for the capacities: the numbers of flows
	// that the servers serve at once. It infers the load of other balancers.
	TerritoryConfigured Kind = "territory"
	// HLB is the algorithm of "HLB: Toward Load-Aware Load Balancing" as it is printed (section
	// IV), except for the index of algorithm 1: see EveryPacket. Only flows in state CONN count.
	// There is no slow start, no suspicion and no trial. The paper does not say which of several
	// servers with the lowest score gets the flow: here random bits decide, as in the simulator.
	HLB Kind = "hlb"
	// HLBFixed is HLB-FIX, with a constant noise (section VI-D1).
	HLBFixed Kind = "hlb-fixed"
	// Durations infers weights as HLB does, from durations that are sampled at the ends of flows.
	// It counts new flows, and has slow start, suspicion and trials.
	Durations Kind = "durations"
	// DurationsFixed is Durations with a constant noise.
	DurationsFixed Kind = "durations-fixed"
	// DurationsMean is Durations with durations divided by their mean, not by their sum: see ByMean.
	DurationsMean Kind = "durations-mean"
	// LeastQueue takes all servers for equal.
	LeastQueue Kind = "least-queue"
	// SED takes the configured weights (section I-B).
	SED Kind = "sed"
	// AWCMP and WeightedRoundRobin take weights from the loads that servers tell ("HLB", section
	// I-B; "6LB", section VI-B7). They differ in how the data path draws a server by its weight.
	AWCMP              Kind = "awcmp"
	WeightedRoundRobin Kind = "weighted-round-robin"
	// GSQ2 takes the queues that servers tell (HLB, section I-B). The data path compares those of
	// two servers.
	GSQ2 Kind = "gsq2"
)

// Kinds returns all kinds, the default first.
func Kinds() []Kind {
	return []Kind{
		TerritoryLearned, TerritoryConfigured, HLB, HLBFixed, Durations, DurationsFixed,
		DurationsMean, LeastQueue, SED, AWCMP, WeightedRoundRobin, GSQ2,
	}
}

// isPrinted tells whether the kind is a form of HLB as it is printed.
func (k Kind) isPrinted() bool { return k == HLB || k == HLBFixed }

// Timing tells which durations of flows the data path samples for an Estimator.
type Timing uint8

// The timings. In bpf/balancer/types.h this is enum timing.
const (
	TimingNone    Timing = iota
	TimingEnds           // one duration of each flow, at its end: FlowEnds
	TimingPackets        // one of each packet of an established flow: EveryPacket
)

// DefaultSlowStart is the usual Settings.SlowStart, in seconds.
const DefaultSlowStart = 10

// DefaultSilent is the usual Settings.Silent, in seconds.
const DefaultSilent = 10

// Settings are the parameters of an Estimator.
type Settings struct {
	Kind Kind
	// SlowStart is the time in seconds in which a new server comes to its full share. 0 is none.
	SlowStart float64
	// Silent is the time in seconds after which a flow without packets does not count. 0 is
	// DefaultSilent.
	Silent float64
}

// Counters are what the data path counts for a server.
type Counters struct {
	// Established and New are numbers of flows at this moment: flows with two packets or more, and
	// flows with one.
	Established, New uint32
	// The other counters only increase, modulo 2^32. They begin anew at 0 if the data path does.
	//
	// Placed counts flows that were placed on the server, and Answered those of them whose client
	// has sent a second packet that is not a SYN.
	Placed, Answered uint32
	// Ended[i] counts established flows that ended with a FIN or RST while the server had i+1
	// established flows. The last element also counts ends with more flows.
	Ended [MostServed]uint32
	// EndedNew counts flows whose second packet was the FIN or RST.
	EndedNew uint32
}

// Estimator turns the counters of the data path into the prices of servers. It has no clock, draws
// no random numbers, and must not be used by several goroutines at a time. A server is an index of
// the list that Arrange got last. The control loop calls
//
//	Arrange                     at first, and whenever servers or balancers change;
//	Sample                      for each server every 10 to 20 ms;
//	Observe                     for each server before a Step, unless the Timing is TimingNone;
//	SetLoad                     for each server before a Step, if the kind IsPolled;
//	Step, then Price and Trials for each server every 0.5 s;
//	Forget, Restart             when a server is replaced, or is back.
type Estimator struct {
	settings   Settings
	servers    []server
	home       []int32     // indexes of the servers whose home is this balancer
	capacities *Capacities // of territories
	usual      bounds      // of learned capacities
	speeds     *Speeds     // of HLB
	numerator  float64     // of the units of SED, whose denominators are the weights
	window     float64     // age of the window in which events are counted, in seconds
	polled     polled      // of kinds that are polled
}

type server struct {
	WeightedServer
	price    Price
	position int  // in the order of preference
	away     bool // its home is another balancer
	last     Counters
	counted  bool    // last contains the counters of a sample
	age      float64 // time since the slow start began, in seconds
	since    events  // of this window
	answers  answers
	// endings is the belief that the clients of the server end their flows. If a server resets
	// connections or falls silent, its clients send nothing more, and its flows count no more after
	// Settings.Silent. If flows on other servers last longer than that, the faulty server would
	// seem to have few flows. An event is a flow that counts no more. It is good if the flow has
	// ended, and bad if it has fallen silent.
	endings   conduct
	isSuspect bool
	aftermath float64 // for how many seconds flows from the time of a fault may still be there
	credit    float64 // number of trials left: see Trials
	stale     uint32  // new flows that do not count: see Price.Stale
	load      *Load   // by the server's own account; nil: not known
}

// events are the numbers of flows to which something happened in this window.
type events struct {
	placed, answered float64 // see Counters
	left             float64 // flows that had been answered, and count no more
	ended            float64 // flows among those in left that ended with a FIN or RST
}

// suspicion returns the factor by which the server's unit is multiplied.
func (s *server) suspicion() float64 { return max(s.answers.factor(), s.endings.factor()) }

// newServer returns a server of which nothing is known.
func newServer(w WeightedServer, age float64) server {
	fresh := conduct{belief: unknown}
	return server{WeightedServer: w, age: age, answers: answers{conduct: fresh}, endings: fresh}
}

// NewEstimator returns an estimator without servers. It fails if the kind is unknown, or a time is
// negative or not finite.
func NewEstimator(s Settings) (*Estimator, error) {
	if !slices.Contains(Kinds(), s.Kind) {
		return nil, fmt.Errorf("kind %q: must be one of %v", s.Kind, Kinds())
	}
	for name, seconds := range map[string]float64{"slow start": s.SlowStart, "silent": s.Silent} {
		if !(seconds >= 0) || math.IsInf(seconds, 1) {
			return nil, fmt.Errorf("%s %v: must be 0 s or more", name, seconds)
		}
	}
	s.Silent = cmp.Or(s.Silent, DefaultSilent)
	e := &Estimator{settings: s}
	switch s.Kind {
	case TerritoryLearned, TerritoryConfigured:
		e.capacities = NewCapacities(0)
	case HLB, HLBFixed:
		e.speeds = NewSpeeds(0, Options{Sampling: EveryPacket, FixedNoise: s.Kind == HLBFixed})
	case Durations, DurationsFixed:
		e.speeds = NewSpeeds(0, Options{FixedNoise: s.Kind == DurationsFixed})
	case DurationsMean:
		e.speeds = NewSpeeds(0, Options{Norm: ByMean})
	}
	return e, nil
}

// Timing tells which durations Step needs (Observe).
func (e *Estimator) Timing() Timing {
	switch {
	case e.speeds == nil:
		return TimingNone
	case e.settings.Kind.isPrinted():
		return TimingPackets
	}
	return TimingEnds
}

// Arrange sets the servers and the balancers. What was learned of a server stays if the servers of
// the last Arrange have its name too. The weights are those of the configuration: 0 is a server
// that takes no new flows. Without balancers, or if there is only this one, all servers have their
// home here. A new server gets a slow start, unless there were no servers before. Arrange fails,
// and changes nothing, if names are not unique, a weight is negative or not finite, or self is not
// one of the balancers.
func (e *Estimator) Arrange(servers []WeightedServer, balancers []string, self string) error {
	if len(balancers) == 0 {
		balancers = []string{self}
	}
	here := slices.Index(balancers, self)
	if err := errors.Join(checkServers(servers), checkBalancers(balancers, here)); err != nil {
		return err
	}
	from := e.origins(servers)
	age := 0.0
	if len(e.servers) == 0 {
		age = math.Inf(1)
	}
	fresh := func(i int) server { return newServer(servers[i], age) }
	e.servers = rearranged(e.servers, from, fresh)
	for i := range servers {
		e.servers[i].WeightedServer = servers[i]
	}
	switch {
	case e.capacities != nil:
		e.capacities.Rearrange(from)
		e.settle(balancers, here)
	case e.speeds != nil:
		e.speeds.Rearrange(from)
	case e.settings.Kind == SED:
		e.numerator = numerator(servers)
	}
	e.setPrices()
	return nil
}

// checkServers returns an error if two servers have the same name, or if a weight is negative or
// not finite.
func checkServers(servers []WeightedServer) error {
	seen := make(map[string]bool, len(servers))
	for _, s := range servers {
		switch {
		case seen[s.Name]:
			return fmt.Errorf("server %q: there are two of this name", s.Name)
		case !(s.Weight >= 0) || math.IsInf(s.Weight, 1):
			return fmt.Errorf("server %q: weight %v: must be 0 or more", s.Name, s.Weight)
		}
		seen[s.Name] = true
	}
	return nil
}

// checkBalancers returns an error if two balancers have the same name, or if this balancer is not
// among them: here is its index, or negative.
func checkBalancers(balancers []string, here int) error {
	sorted := slices.Sorted(slices.Values(balancers))
	if len(slices.Compact(sorted)) < len(balancers) {
		return fmt.Errorf("balancers %v: two have the same name", balancers)
	}
	if here < 0 {
		return fmt.Errorf("balancers %v: this one is not there", balancers)
	}
	return nil
}

// origins returns, for each server, the index that the server of its name has had since the last
// Arrange, or -1 if the server is new.
func (e *Estimator) origins(servers []WeightedServer) []int32 {
	index := make(map[string]int32, len(e.servers))
	for i := range e.servers {
		index[e.servers[i].Name] = int32(i)
	}
	from := make([]int32, len(servers))
	for i, s := range servers {
		from[i] = -1
		if at, ok := index[s.Name]; ok {
			from[i] = at
		}
	}
	return from
}

// rearranged returns list[from[0]], list[from[1]] and so on, with a fresh element for -1.
func rearranged[T any](list []T, from []int32, fresh func(i int) T) []T {
	now := make([]T, len(from))
	for i, at := range from {
		if at >= 0 {
			now[i] = list[at]
		} else {
			now[i] = fresh(i)
		}
	}
	return now
}

// settle gives servers their homes and their order. Balancers have to agree about homes, but they
// learn different capacities. So if capacities are learned, all servers that take new flows count
// as 1.
func (e *Estimator) settle(balancers []string, here int) {
	servers := make([]WeightedServer, len(e.servers))
	for i := range servers {
		servers[i] = e.servers[i].WeightedServer
		if e.settings.Kind == TerritoryLearned {
			servers[i].Weight = min(1, math.Ceil(servers[i].Weight))
		}
	}
	homes := Homes(servers, balancers)
	e.home = e.home[:0]
	for at, s := range Order(servers, balancers, homes, here) {
		e.servers[s].position = at
		e.servers[s].away = int(homes[s]) != here
		if !e.servers[s].away {
			e.home = append(e.home, s)
		}
	}
}

// Sample takes the counters of a server. It should be called at times that do not depend on the
// flows, so that the numbers of flows that it sees are representative. The last argument is the
// time since the last sample of this server, in seconds. Sample uses the differences between two
// samples, so the first one has no effect of its own.
func (e *Estimator) Sample(server int, c Counters, seconds float64) {
	s := &e.servers[server]
	last := s.last
	s.last = c
	if !s.counted || !(seconds >= 0) { // NaN is not >= 0
		s.counted = true
		return
	}
	if c.restarted(&last) {
		last = Counters{}
	}
	s.since.add(&c, &last)
	if e.capacities == nil || s.aftermath > 0 {
		// Either no capacities are learned, or the server is ill, or was ill until recently. Flows
		// that an ill server does not serve would not show its capacity.
		return
	}
	e.capacities.Had(int32(server), count(c.Established), seconds)
	for i, n := range c.Ended {
		if n != last.Ended[i] {
			e.capacities.Ended(int32(server), i+1, float64(n-last.Ended[i]))
		}
	}
}

// add adds what has happened between two samples. Flows have left if they were answered, but are
// not among those that are established now.
func (e *events) add(c, last *Counters) {
	answered := float64(c.Answered - last.Answered)
	e.placed += float64(c.Placed - last.Placed)
	e.answered += answered
	e.left += answered - float64(count(c.Established)-count(last.Established))
	e.ended += float64(c.EndedNew - last.EndedNew)
	for i, n := range c.Ended {
		e.ended += float64(n - last.Ended[i])
	}
}

// count returns a number of flows. A counter that has passed below 0 counts as 0.
func count(flows uint32) int { return int(max(0, int32(flows))) }

// restarted tells whether the counters began anew since the last sample. Then one of them is less
// than before. Between two samples a counter grows by less than 2^31, so a difference that is
// negative as a signed number shows this.
func (c *Counters) restarted(last *Counters) bool {
	less := int32(c.Placed-last.Placed) < 0 || int32(c.Answered-last.Answered) < 0 ||
		int32(c.EndedNew-last.EndedNew) < 0
	for i := 0; i < len(c.Ended) && !less; i++ {
		less = int32(c.Ended[i]-last.Ended[i]) < 0
	}
	return less
}

// Observe takes the data path's sample of durations of a server's flows, in seconds. They last from
// the first data packet to the end, or under HLB as printed from the SYN to any later packet. The
// sample replaces the last one. Only the first ReservoirSize durations count.
func (e *Estimator) Observe(server int, durations []float64) {
	if e.speeds != nil {
		e.speeds.SetDurations(int32(server), durations)
	}
}

// Step computes new prices. The first argument is the time since the last step, in seconds. The
// random bits decide between servers of equal delay, except in territories.
func (e *Estimator) Step(seconds float64, random uint64) {
	if !e.settings.Kind.isPrinted() {
		e.suspect(seconds)
	}
	switch {
	case e.capacities != nil:
		e.capacities.Step(seconds, e.home)
		e.boundCapacities()
	case e.speeds != nil:
		e.speeds.Step()
	}
	if e.capacities == nil {
		for s, at := range rand.New(rand.NewPCG(random, 0)).Perm(len(e.servers)) {
			e.servers[s].position = at
		}
	}
	for i := range e.servers {
		e.servers[i].age += seconds
	}
	e.setPrices()
}

// Price returns the price of a server as of the last Step, Arrange, Forget or Restart.
func (e *Estimator) Price(server int) Price { return e.servers[server].price }

// Forget removes all that was learned of a server, because another one has its name now. The next
// sample is a first one. A slow start begins.
func (e *Estimator) Forget(server int) {
	s := &e.servers[server]
	position, away := s.position, s.away
	*s = newServer(s.WeightedServer, 0)
	s.position, s.away = position, away
	if e.capacities != nil {
		e.capacities.Forget(int32(server))
	}
	if e.speeds != nil {
		e.speeds.Forget(int32(server))
	}
	e.setPrice(server)
}

// Restart begins a slow start of a server that takes new flows again. What was learned stays.
func (e *Estimator) Restart(server int) {
	e.servers[server].age = 0
	e.setPrice(server)
}

// setPrices sets the prices of all servers from the present state.
func (e *Estimator) setPrices() {
	if e.settings.Kind.IsPolled() {
		e.comparePolled()
	}
	for i := range e.servers {
		e.setPrice(i)
	}
}

// setPrice sets the price of a server from the present state. Slow start and suspicion multiply its
// unit.
func (e *Estimator) setPrice(server int) {
	s := &e.servers[server]
	unit, extra := e.base(server)
	unit *= e.slow(s.age, unit) * s.suspicion()
	// With more servers than positions, neighbours share one.
	position := s.position
	if n := len(e.servers); n > Positions {
		position = position * Positions / n
	}
	s.price = NewPrice(unit, extra, position, s.away)
	s.price.Stale = s.stale
	if e.settings.Kind.isPrinted() { // only flows in CONN count (section IV-A2)
		s.price.Stale = math.MaxUint32
	}
}

// base returns the unit of a server without slow start and suspicion, and its extra delay. The unit
// is the inverse of the server's capacity or weight, whichever the kind has. It is infinite for a
// server that takes no new flows.
func (e *Estimator) base(server int) (unit, extra float64) {
	s := &e.servers[server]
	switch {
	case s.Weight == 0:
		return math.Inf(1), 0
	case e.settings.Kind.IsPolled():
		unit, extra = e.polledPrice(s)
	case e.settings.Kind == TerritoryLearned:
		unit = 1 / e.capacity(server)
	case e.speeds != nil:
		unit = 1 / (e.speeds.Weight(int32(server)) * float64(len(e.servers)))
	case e.settings.Kind == LeastQueue:
		unit = 1
	case e.settings.Kind == SED:
		unit = e.numerator / s.Weight
	default: // TerritoryConfigured
		unit = 1 / s.Weight
	}
	if s.away { // only in a territory
		extra = e.capacities.Wait(int32(server))
	}
	return unit, extra
}

// leastShare is the share of a new server at the beginning of its slow start.
const leastShare = 1. / 16

// slow returns the factor by which the slow start multiplies the unit of a server. The inverse of
// the factor, which is the server's share, increases linearly. In a territory, slow start reduces a
// capacity no further than to one flow. With less, the server would get nothing while other servers
// are idle.
func (e *Estimator) slow(age, unit float64) float64 {
	if age >= e.settings.SlowStart || e.settings.Kind.isPrinted() {
		return 1
	}
	factor := 1 / max(leastShare, age/e.settings.SlowStart)
	if e.capacities != nil {
		factor = min(factor, max(1, 1/unit))
	}
	return factor
}
