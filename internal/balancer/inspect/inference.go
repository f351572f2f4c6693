// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// InferenceState says how a service infers the loads of its servers.
type InferenceState struct {
	// Estimator is the method: a desired.Estimator, or the name of a placement that needs none,
	// such as least-queue.
	Estimator string        `json:"estimator"`
	Among     desired.Among `json:"among"`
	// Age is the time since the last estimates, in seconds. The process of the balancer makes them
	// at the interval of the service. Age is nil if there are none yet.
	Age *float64 `json:"age_seconds"`
}

// InferredServer is what the balancer knows of a server's load, if the service infers loads.
type InferredServer struct {
	// New and Established are the numbers of flows that count now: flows of which one packet was
	// seen not long ago, and flows with more packets that are not silent.
	New         uint32 `json:"new"`
	Established uint32 `json:"established"`
	// Placed counts flows that were placed on the server. Answered counts those of them that had a
	// second packet. Both are modulo 2^32.
	Placed   uint32 `json:"placed"`
	Answered uint32 `json:"answered"`
	// Delay is the expected delay of the next flow, on which the choice is based. The delay is 1
	// if the flow gets the server's last free unit of capacity.
	Delay float64 `json:"delay"`
	// Away tells that the server's home is another balancer.
	Away bool `json:"away"`
	// Estimate is nil before the first one.
	Estimate *EstimateState `json:"estimate"`
}

// EstimateState is an estimate of a server. Numbers are nil if the estimator does not have them.
type EstimateState struct {
	// Capacity is the number of flows that the server serves at once.
	Capacity *float64 `json:"capacity"`
	// Weight depends on the estimator. Under HLB and durations it is the speed relative to that of
	// the other servers. If the service polls, it is the weight relative to the highest one.
	// Otherwise it is the configured weight.
	Weight *float64 `json:"weight"`
	// Wait is the mean time that flows wait, for each second of service.
	Wait *float64 `json:"wait"`
	// Duration is a mean duration of flows in seconds. Under territories it is that of a flow while
	// it is the server's only one. Under durations it is that of the flows that have ended last, and
	// under HLB the mean of the server's reservoir.
	Duration *float64 `json:"duration_seconds"`
	// SlowStart, NoAnswers and SilentFlows are factors by which the server seems slower. Each is 1
	// or more, and has a reason of its own. SlowStart: the server has taken new flows only for a
	// short time. NoAnswers: it does not answer new flows as others do. SilentFlows: its flows fall
	// silent while flows of other servers end. Of the last two, only the larger one counts.
	SlowStart   float64 `json:"slow_start"`
	NoAnswers   float64 `json:"no_answers"`
	SilentFlows float64 `json:"silent_flows"`
	// Polled is the load by the server's own account. It is nil if the service does not poll, or
	// the server has told no load that counts.
	Polled *PolledLoad `json:"polled,omitempty"`
}

// PolledLoad is the load of a server in units of its load source.
type PolledLoad struct {
	Busy     uint32  `json:"busy"`
	Capacity *uint32 `json:"capacity"` // nil: the server does not know it
	// Age is the time since the server has told the load, in seconds.
	Age float64 `json:"age_seconds"`
}

// newInferenceState returns nil if the service of the label does not infer.
func newInferenceState(label dataplane.ServiceLabel, rule dataplane.ServiceRule) *InferenceState {
	among, infers := rule.Among()
	if !infers {
		return nil
	}
	return &InferenceState{Estimator: label.Estimator, Among: among}
}

// placementOf returns the placement as in a configuration.
func placementOf(
	rule dataplane.ServiceRule, inference *InferenceState,
) (desired.Placement, desired.Selection) {
	if inference != nil && desired.Placement(inference.Estimator).Infers() {
		return desired.Placement(inference.Estimator), ""
	}
	return rule.PlacementName()
}

// inferred reads what is known of the load of the slot's server. It also makes service.Age the age
// of the service's last estimate.
func (v *View) inferred(slot uint32, service *InferenceState) (*InferredServer, error) {
	s := v.loadOf(slot)
	estimate, ok, err := v.tables.Estimates.Of(slot)
	if !ok || err != nil {
		return s, err
	}
	now, err := dataplane.BootTime()
	if err != nil {
		return s, err
	}
	if age := (now - estimate.Time).Seconds(); service.Age == nil || age < *service.Age {
		service.Age = &age
	}
	s.Estimate = &EstimateState{
		Capacity: known(estimate.Capacity), Weight: known(estimate.Weight),
		Duration:  known(estimate.Duration),
		SlowStart: estimate.SlowStart, NoAnswers: estimate.NoAnswers,
		SilentFlows: estimate.SilentFlows,
	}
	if s.Estimate.Capacity != nil {
		s.Estimate.Wait = &estimate.Wait
	}
	if told := estimate.Told; told != nil {
		s.Estimate.Polled = &PolledLoad{
			Busy: uint32(told.Busy), Age: (now - estimate.ToldAt).Seconds(),
		}
		if capacity := uint32(told.Capacity); capacity > 0 {
			s.Estimate.Polled.Capacity = &capacity
		}
	}
	return s, nil
}

// known returns nil for 0, which stands for a number that is not known.
func known(x float64) *float64 {
	if x == 0 {
		return nil
	}
	return &x
}

// loadOf returns the load of the slot's server without its estimate.
func (v *View) loadOf(slot uint32) *InferredServer {
	s := &InferredServer{}
	price := v.tables.Loads.Price(slot)
	s.New, s.Established = v.tables.Loads.Flows(slot)
	s.New -= min(s.New, price.Stale)
	s.Placed, s.Answered = v.tables.Loads.Placed(slot)
	s.Delay, s.Away = v.tables.Loads.Delay(slot), price.Away
	return s
}

// TracedScores are the servers from which a placement that infers chooses one for a new flow.
type TracedScores struct {
	Among desired.Among `json:"among"`
	// Servers are those with the lowest scores that take new flows, at most mostScored, in order.
	// If the flow goes to a random server, or to the next one in turn, only that server is listed.
	Servers []ScoredServer `json:"servers"`
	// Others is the number of the other servers that take new flows.
	Others int `json:"others"`
	// Equal is the number of other servers whose delay equals that of the first one. Each core
	// keeps to one of these servers. Equal is 0 unless the flow is placed among all servers.
	Equal int `json:"equal"`
}

// ScoredServer is a server that a flow can be given to.
type ScoredServer struct {
	Server string `json:"server"`
	*InferredServer
}

// mostScored is how many servers a trace lists.
const mostScored = 4

// describeScores returns the servers among which a new flow is placed. picked is the slot of the
// server that the data path has chosen. If the data path chooses by scores, the result lists the
// servers with the lowest scores at this moment. Otherwise it lists only the picked server.
// describeScores returns nil if the placement does not infer, and an error if the candidate table
// cannot be read.
func (v *View) describeScores(
	service uint32, rule dataplane.ServiceRule, bucket, picked uint32,
) (*TracedScores, error) {
	among, infers := rule.Among()
	if !infers {
		return nil, nil
	}
	slots, err := v.scored(service, rule, bucket)
	if err != nil {
		return nil, err
	}
	scores, best := &TracedScores{Among: among}, []uint32{picked}
	if among == desired.AmongAll || among == desired.AmongCandidates {
		order := func(slot uint32) uint64 {
			if slot == picked { // it comes first among the servers with the shortest delay
				return v.delayPart(slot)
			}
			return v.tables.Loads.Score(slot)
		}
		slices.SortFunc(slots, func(a, b uint32) int { return cmp.Compare(order(a), order(b)) })
		best = slots[:min(len(slots), mostScored)]
		if among == desired.AmongAll {
			scores.Equal = v.equalsOfFirst(slots)
		}
	}
	scores.Others = len(slots) - len(best)
	for _, slot := range best {
		server, err := v.inferred(slot, &InferenceState{})
		if err != nil {
			return nil, err
		}
		scores.Servers = append(scores.Servers, ScoredServer{v.serverName(slot), server})
	}
	return scores, nil
}

// equalsOfFirst returns how many of the other servers have the delay of the first one.
func (v *View) equalsOfFirst(slots []uint32) (equal int) {
	for _, slot := range slots[min(1, len(slots)):] {
		if v.delayPart(slot) == v.delayPart(slots[0]) {
			equal++
		}
	}
	return equal
}

// delayPart returns the score of the slot's server without the bits that decide between servers of
// equal delay.
func (v *View) delayPart(slot uint32) uint64 {
	return v.tables.Loads.Score(slot) &^ dataplane.ScoreTie
}

// scored returns the slots to which a flow of a bucket can be given. They are those of the bucket's
// row if the placement chooses among candidates, and those of all servers of the service otherwise.
// Servers that take no new flows are left out.
func (v *View) scored(
	service uint32, rule dataplane.ServiceRule, bucket uint32,
) (slots []uint32, err error) {
	all := v.tables.Servers.Of(service)
	if among, _ := rule.Among(); among == desired.AmongCandidates {
		entry := dataplane.ServiceEntry{Id: service, Rule: rule}
		table, err := v.tables.Candidates(entry.Table())
		if err != nil {
			return nil, fmt.Errorf("service %d: %w", service, err)
		}
		all = nil
		first := bucket * rule.Candidates() * rule.Generations()
		for i := range rule.Candidates() {
			if slot, ok := table.At(first + i); ok && slot != dataplane.NoServer {
				all = append(all, slot)
			}
		}
	}
	return slices.DeleteFunc(all, func(slot uint32) bool { return !v.tables.Servers.TakesFlows(slot) }), nil
}
