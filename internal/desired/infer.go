// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"cmp"
	"os"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Infer configures a placement that gives a new flow to the server with the lowest score (infer,
// least-queue and sed), or follows the loads that servers tell (awcmp, weighted-round-robin and
// gsq2).
type Infer struct {
	// Estimator is the method by which the balancer estimates the servers. It is for placement infer
	// only, where the default is territory-learned.
	Estimator Estimator `yaml:"estimator,omitempty"`
	// Interval is the time between two estimates, 100 ms to 10 s. It is for placement infer only,
	// where the default is DefaultInferInterval.
	Interval time.Duration `yaml:"interval,omitempty"`
	// SlowStart is the time in which a server that begins to take new flows comes to its full
	// share, 0 to 10 minutes. Default 10 s.
	SlowStart *time.Duration `yaml:"slow-start,omitempty"`
	// Among are the servers that a flow can be given to. Default all. Placements that poll have one
	// value each.
	Among Among `yaml:"among,omitempty"`
	// Poll is the time between two polls of a server, 50 ms to 10 s. It is for placements that poll
	// only, where the default is 500 ms (HLB, section V-C).
	Poll time.Duration `yaml:"poll,omitempty"`
	// PollPort is the port of the agents' poll.listen. It is for placements that poll only, where
	// the default is DefaultPollPort.
	PollPort uint16 `yaml:"poll-port,omitempty"`
}

// Estimator is a method by which a balancer estimates the speeds and the loads of servers (package
// infer).
type Estimator string

// Among names the servers among which a placement that infers chooses.
type Among string

// The values that Infer may name.
const (
	// EstimateTerritoryLearned learns how many flows a server serves at once, and how long flows
	// wait.
	EstimateTerritoryLearned Estimator = "territory-learned"
	// EstimateTerritory takes the configured weight for the number of flows that a server serves at
	// once.
	EstimateTerritory Estimator = "territory"
	// EstimateHLB is HLB as it is printed, and EstimateHLBFixed is HLB-FIX: with a constant noise.
	EstimateHLB      Estimator = "hlb"
	EstimateHLBFixed Estimator = "hlb-fixed"
	// EstimateDurations takes weights from the durations of whole flows, as HLB does from those of
	// packets; the next one has a constant noise, and the last one durations relative to their mean.
	EstimateDurations      Estimator = "durations"
	EstimateDurationsFixed Estimator = "durations-fixed"
	EstimateDurationsMean  Estimator = "durations-mean"
	// EstimateHLBMean is the former name of EstimateDurationsMean.
	EstimateHLBMean Estimator = "hlb-mean"

	AmongAll        Among = "all"        // all servers of the service
	AmongCandidates Among = "candidates" // the candidates of the flow's bucket
	AmongTwo        Among = "two"        // two random servers
	AmongThree      Among = "three"      // three random servers
	AmongFour       Among = "four"       // four random servers
	AmongWeighted   Among = "weighted"   // a random server by weights, under awcmp
	AmongTurns      Among = "turns"      // the next one in turn, under weighted-round-robin
)

// ShortestPoll is the shortest time between two polls of a server.
const ShortestPoll = 50 * time.Millisecond

// DefaultPollPort is the default port of the agents' endpoints for polls.
const DefaultPollPort = 7460

const (
	// DefaultInferInterval is the default time between two estimates (HLB, section IV-B).
	DefaultInferInterval = 500 * time.Millisecond
	// ShortestInferInterval is the shortest permitted time between two estimates.
	ShortestInferInterval = 100 * time.Millisecond
)

// DefaultSlowStart is the default time in which a server comes to its full share.
const DefaultSlowStart = 10 * time.Second

// DefaultSilent is the default time after which a silent flow does not count as a load.
const DefaultSilent = 10 * time.Second

// Infers tells whether the placement chooses by prices that user space writes (package infer).
func (p Placement) Infers() bool {
	return p.Method().Infers()
}

// Polls tells whether the placement asks servers for their loads.
func (p Placement) Polls() bool { return p.Method().Polls }

// EstimatorName returns the name of the method that finds the scores: that of the estimator or,
// under least-queue and sed, of the placement. It is empty if the service does not infer.
func (s *Service) EstimatorName() string {
	switch {
	case !s.Placement.Infers() || s.Infer == nil:
		return ""
	case len(s.Placement.Method().Estimators) > 0:
		return string(cmp.Or(s.Infer.Estimator.Method().StandsFor, s.Infer.Estimator))
	}
	return string(s.Placement)
}

// IsPrintedHLB tells whether the service's estimator is HLB as it is printed.
func (s *Service) IsPrintedHLB() bool {
	return s.EstimatorName() != "" && s.Infer.Estimator.Method().IsPrinted
}

// IgnoresWeights tells whether the placement infers, and does not assume that a server with a
// greater weight is faster.
func (s *Service) IgnoresWeights() bool {
	return s.EstimatorName() != "" && !s.Placement.Method().TakesWeights &&
		!s.Infer.Estimator.Method().TakesWeights
}

// HeaviestWeight returns the largest weight of the servers, or 0 without servers.
func (s *Service) HeaviestWeight() (weight uint32) {
	for _, server := range s.Servers {
		weight = max(weight, *server.Weight)
	}
	return weight
}

// HasTerritories tells whether each server has a home balancer. Then the names of balancers matter.
func (s *Service) HasTerritories() bool {
	return s.Placement.Infers() && s.Infer != nil && s.Infer.Estimator.Method().Territories
}

// Balancers returns the sorted names of all balancers: the peers and this one.
func (n *BalancerNode) Balancers() []string {
	all := append(slices.Clone(n.Peers), n.Name)
	slices.Sort(all)
	return slices.Compact(all)
}

// hostName returns the first maxName bytes of the name of this host. It is empty if the host has
// no name.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name[:min(len(name), maxName)]
}

// defaultInfer sets the defaults of the section infer, if the placement infers.
func (given Given) defaultInfer(s *Service, path string) {
	placement := s.Placement.Method()
	if !placement.Infers() {
		return
	}
	at := fieldpath.Child(path, "infer")
	setDefault(given, at, &s.Infer, &Infer{})
	slowStart := DefaultSlowStart
	setDefault(given, fieldpath.Child(at, "slow-start"), &s.Infer.SlowStart, &slowStart)
	among := placement.Amongs[0]
	if row := placement.amongRow(); s.FindsByColumn() && row != "" {
		among = row
	}
	setDefault(given, fieldpath.Child(at, "among"), &s.Infer.Among, among)
	if placement.Polls {
		setDefault(given, fieldpath.Child(at, "poll"), &s.Infer.Poll, DefaultInferInterval)
		setDefault(given, fieldpath.Child(at, "poll-port"), &s.Infer.PollPort, DefaultPollPort)
	}
	if len(placement.Estimators) > 0 {
		setDefault(given, fieldpath.Child(at, "estimator"), &s.Infer.Estimator, placement.Estimators[0])
		setDefault(given, fieldpath.Child(at, "interval"), &s.Infer.Interval, DefaultInferInterval)
	}
}

// checkInfer checks the requirements and the fields of placements that infer.
func (r *rules) checkInfer(path string, s *Service) {
	at := fieldpath.Child(path, "infer")
	switch {
	case !s.Placement.Infers():
		if s.Infer != nil && slices.Contains(placements, s.Placement) {
			r.failf(at, "not used by placement %s", s.Placement)
		}
		return
	case s.Infer == nil:
		r.failf(at, "required by placement %s", s.Placement)
		return
	}
	r.checkEstimator(at, s)
	if slowStart := s.Infer.SlowStart; slowStart == nil {
		r.failf(fieldpath.Child(at, "slow-start"), "required")
	} else {
		checkRange(r, fieldpath.Child(at, "slow-start"), *slowStart, 0, 10*time.Minute)
	}
	checkKnown(r, fieldpath.Child(at, "among"), s.Infer.Among, s.Placement.Method().Amongs...)
	r.checkPolls(at, s)
	if !s.FindsByColumn() {
		return
	}
	switch {
	case s.Placement.Method().amongRow() == "":
		r.failf(fieldpath.Child(path, "persistence"), "must be %s for placement %s: the server that it "+
			"picks is in no column of the flow's bucket", PersistenceTable, s.Placement)
	case !s.Infer.Among.Method().InRow:
		r.failf(fieldpath.Child(at, "among"), "must be %s for persistence %s: another server is in no "+
			"column of the flow's bucket", s.Placement.Method().amongRow(), s.Persistence)
	}
}

// checkEstimator checks the fields that only placement infer has.
func (r *rules) checkEstimator(path string, s *Service) {
	estimator, interval := fieldpath.Child(path, "estimator"), fieldpath.Child(path, "interval")
	if known := s.Placement.Method().Estimators; len(known) > 0 {
		checkKnown(r, estimator, s.Infer.Estimator, known...)
		checkRange(r, interval, s.Infer.Interval, ShortestInferInterval, 10*time.Second)
		return
	}
	if s.Infer.Estimator != "" {
		r.failf(estimator, "not used by placement %s", s.Placement)
	}
	if s.Infer.Interval != 0 {
		r.failf(interval, "not used by placement %s", s.Placement)
	}
}

// checkPolls checks the fields that only placements that poll have.
func (r *rules) checkPolls(path string, s *Service) {
	every, port := fieldpath.Child(path, "poll"), fieldpath.Child(path, "poll-port")
	if s.Placement.Polls() {
		checkRange(r, every, s.Infer.Poll, ShortestPoll, 10*time.Second)
		if s.Infer.PollPort == 0 {
			r.failf(port, "must be from 1 to 65535")
		}
		return
	}
	r.refuse(every, s.Infer.Poll != 0, "not used by placement %s", s.Placement)
	r.refuse(port, s.Infer.PollPort != 0, "not used by placement %s", s.Placement)
}

// checkPollKey checks that there is a key if servers are polled.
func (r *rules) checkPollKey(b *Balancer) {
	i := slices.IndexFunc(b.Services, func(s Service) bool { return s.Placement.Polls() })
	if i >= 0 && b.Node.SignalKey == "" {
		r.failf(SignalKeyField, "required by %s, whose placement is %s: agents answer only balancers "+
			"with the key", fieldpath.Item("services", i), b.Services[i].Placement)
	}
}

// checkPeers checks the names of the balancers.
func (r *rules) checkPeers(n *BalancerNode) {
	if n.Name != "" || len(n.Peers) > 0 {
		r.checkName("node.name", n.Name)
	}
	seen := make(map[string]string)
	for i, peer := range n.Peers {
		at := fieldpath.Item("node.peers", i)
		r.checkName(at, peer)
		checkUnique(r, seen, peer, at)
	}
	if len(n.Peers) > MaxPeers {
		r.failf("node.peers", "must have at most %d items, has %d", MaxPeers, len(n.Peers))
	}
}

// MaxPeers is the maximum number of a balancer's peers.
const MaxPeers = 1024
