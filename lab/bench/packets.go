// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
)

// PacketOptions are the options of MeasurePackets.
type PacketOptions struct {
	Flows   []uint32       // numbers of known flows to measure; each at least 1
	Case    *regexp.Regexp // matches the names of cases to measure, beside null and floor; nil: all
	Rounds  int            // number of measurements of a case, at least 1; null and floor have more
	Packets uint32         // number of packets in a measurement, at least 1
	Room    uint32         // least capacity of flow tables, in flows

	Progress Progress
}

// DefaultPacketOptions returns options that measure all cases.
func DefaultPacketOptions() PacketOptions {
	return PacketOptions{
		Flows:  []uint32{1, 1_000, 64_000, 1_000_000, 10_000_000},
		Rounds: 15, Packets: 200_000, Room: desired.DefaultFlows,
	}
}

// PacketTime is the cost of one kind of packet, in nanoseconds of CPU time.
type PacketTime struct {
	Case          string                `json:"case"`
	Family        string                `json:"family"`
	Encapsulation desired.Encapsulation `json:"encapsulation"`
	Flows         uint32                `json:"flows"`
	Median        float64               `json:"ns_median"`
	P10           float64               `json:"ns_p10"`
	P90           float64               `json:"ns_p90"`
	// Net is the median minus the median of the host program alone, in the same run.
	Net float64 `json:"net_ns"`
	// Rounds is the number of measurements.
	Rounds int `json:"rounds"`
	// Instructions is the number of instructions that are executed for a packet, without those of
	// the host program. It is nil if the processor does not count instructions.
	Instructions *float64 `json:"instructions,omitempty"`
	// Cycles is the number of CPU cycles that a packet takes, without those of the host program. It
	// is nil if the processor does not count cycles.
	Cycles *float64 `json:"cycles,omitempty"`
}

// measured is a case with its measurements.
type measured struct {
	benchCase
	rig          *rig
	program      *ebpf.Program // nil: the host program runs alone
	sent         uint64        // number of packets so far, including those that warm the caches
	counted      uint64        // those of the sent packets that were counted under the case's reason
	times        []float64     // ns per packet, of each measurement
	instructions []float64     // per packet, of each measurement; 0 if they are not counted
	cycles       []float64     // likewise
}

// MeasurePackets measures the cost of packets. In each round it measures all cases, so that a
// disturbance of the machine affects all cases. It needs root, and some gigabytes of memory for ten
// million flows.
func MeasurePackets(ctx context.Context, o PacketOptions) (_ []PacketTime, err error) {
	chosen, err := o.chooseCases()
	if err != nil {
		return nil, err
	}
	h, err := newHost()
	if err != nil {
		return nil, err
	}
	rigs := map[setup]*rig{}
	defer func() {
		for _, r := range rigs {
			err = errors.Join(err, r.close())
		}
		err = errors.Join(err, h.close())
	}()
	cases, err := prepareCases(ctx, h, rigs, chosen, o.Progress)
	if err != nil {
		return nil, err
	}
	inRound := interleave(cases)
	for round := range o.Rounds {
		o.Progress.say("round %d of %d", round+1, o.Rounds)
		for _, m := range inRound {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := m.round(h, o.Packets); err != nil {
				return nil, m.explain(err)
			}
		}
	}
	for _, m := range cases {
		if err := m.requireCounted(); err != nil {
			return nil, m.explain(err)
		}
	}
	return summarize(cases), nil
}

// casesPerBase is the number of other cases between two measurements of the base cases.
const casesPerBase = 10

// interleave returns the order of cases in a round. Base cases occur several times, because their
// errors affect the results of all other cases.
func interleave[C interface{ isBase() bool }](cases []C) (inRound []C) {
	var bases, others []C
	for _, m := range cases {
		if m.isBase() {
			bases = append(bases, m)
		} else {
			others = append(others, m)
		}
	}
	inRound = slices.Clone(bases)
	for some := range slices.Chunk(others, casesPerBase) {
		inRound = slices.Concat(inRound, some, bases)
	}
	return inRound
}

// chooseCases returns the cases that the options select, and the base cases, which are always
// measured. It returns an error if the options select no case.
func (o *PacketOptions) chooseCases() (chosen []benchCase, err error) {
	anyMatches := false
	for _, c := range allCases(o.Flows, o.Room) {
		matches := o.Case == nil || o.Case.MatchString(c.name)
		if matches || c.isBase() {
			chosen = append(chosen, c)
		}
		anyMatches = anyMatches || matches
	}
	if !anyMatches {
		return nil, fmt.Errorf("no case is named by %q", o.Case)
	}
	return chosen, nil
}

// prepareCases builds the setups of the cases, adds them to rigs, and finds the program of each
// case. It builds the setups with flow tables last, because their flows age from the time at which
// the tables are filled. Hints do not age in a measurement, because nothing sweeps the hint tables.
func prepareCases(
	ctx context.Context, h *host, rigs map[setup]*rig, chosen []benchCase, progress Progress,
) ([]*measured, error) {
	var cases []*measured
	for _, c := range chosen {
		cases = append(cases, &measured{benchCase: c})
	}
	for _, withFlowTable := range []bool{false, true} {
		for _, m := range cases {
			if m.setup.hasFlowTable() != withFlowTable {
				continue
			}
			if err := m.prepare(ctx, h, rigs, progress); err != nil {
				return nil, m.explain(err)
			}
		}
	}
	return cases, nil
}

// prepare finds the case's program. If no earlier case has the same setup, it first builds the
// setup, fills its flow table, and adds it to rigs.
func (m *measured) prepare(
	ctx context.Context, h *host, rigs map[setup]*rig, progress Progress,
) (err error) {
	if rigs[m.setup] == nil {
		if err := ctx.Err(); err != nil {
			return err
		}
		if m.setup.content != noFlows {
			progress.say("%s: fill a table for %d flows", m.name, m.setup.capacity)
		}
		r, err := m.setup.build()
		if err != nil {
			return err
		}
		rigs[m.setup] = r
		if err := r.fill(ctx, h, &m.setup); err != nil {
			return err
		}
	}
	m.rig = rigs[m.setup]
	m.program, err = m.rig.upTo(m.step)
	return err
}

// explain adds the case to an error.
func (m *measured) explain(err error) error {
	return fmt.Errorf("%s, %s, %s, %d flows: %w", m.name, m.family, m.encapsulation, m.flows, err)
}

// round makes one measurement of the case, and stores it in times, instructions and cycles. First
// it changes the balancer's service for the case, if necessary, and sends the same number of
// packets to warm the caches.
func (m *measured) round(h *host, packets uint32) error {
	if err := m.rig.serve(h, m.service); err != nil {
		return err
	}
	var err error
	if m.program, err = m.rig.upTo(m.step); err != nil { // another service may have replaced it
		return err
	}
	t := m.traffic
	t.first = m.rig.next
	if err := h.prepare(m.program, &t); err != nil {
		return err
	}
	before, err := m.count()
	if err != nil {
		return err
	}
	if _, err := m.rig.run(h, packets); err != nil {
		return err
	}
	cost, err := m.rig.run(h, packets)
	if err != nil {
		return err
	}
	after, err := m.count()
	if err != nil {
		return err
	}
	sent := 2 * uint64(packets) // with those that warm the caches
	m.sent += sent
	m.counted += after - before
	if t.order != random { // the packets were of flows that were not used before
		m.rig.next += sent / t.order.packetsPerFlow()
	}
	m.times = append(m.times, float64(cost.time.Nanoseconds())/float64(packets))
	m.instructions = append(m.instructions, float64(cost.instructions)/float64(packets))
	m.cycles = append(m.cycles, float64(cost.cycles)/float64(packets))
	return nil
}

// count returns the number of packets that were counted under the case's reason so far. It is 0 if
// the case has no reason.
func (m *measured) count() (uint64, error) {
	if m.reason == "" {
		return 0, nil
	}
	return m.rig.count(m.reason)
}

// isOfNewFlows tells whether each packet is the first one of its flow, and enters the flow in the
// flow table. The reason of such a case is that of known flows, but no packet should be counted
// under it (requireCounted).
func (c *benchCase) isOfNewFlows() bool {
	name := strings.TrimRight(c.name, "0123456789")
	names := []string{caseSYN, caseTurnSYN, caseUnknown, caseHashSYN, caseInferSYN, caseHLBSYN}
	return slices.Contains(names, name) || c.placement.Polls()
}

// requireCounted returns an error if too many packets were not of the kind that the case measures.
// With new flows, nearly no packet may be counted under the reason of known flows. In other cases
// with a reason, nearly all packets must be counted under it: in a full flow table one flow in
// fifty finds no room, and in a full hint table one in forty follows no hint.
func (m *measured) requireCounted() error {
	const most, least = 0.001, 0.96
	share := float64(m.counted) / float64(m.sent)
	switch {
	case m.isOfNewFlows():
		if share > most {
			return fmt.Errorf("of %d packets of new flows %d were of known ones", m.sent, m.counted)
		}
	case m.reason != "" && share < least:
		return fmt.Errorf("of %d packets %d were counted as %s: "+
			"the machine is too slow for the flow table's timeouts", m.sent, m.counted, m.reason)
	}
	return nil
}

// summarize computes the result of each case. It subtracts the host program's time,
// instructions and cycles.
func summarize(cases []*measured) []PacketTime {
	null := map[family]*measured{} // case null, which comes before the other cases of its family
	var results []PacketTime
	for _, m := range cases {
		if m.name == caseNull {
			null[m.family] = m
		}
		r := PacketTime{
			Case: m.name, Family: string(m.family), Encapsulation: m.encapsulation, Flows: m.flows,
			Median: percentile(m.times, 50), P10: percentile(m.times, 10), P90: percentile(m.times, 90),
			Rounds: len(m.times),
		}
		host := null[m.family]
		r.Net = r.Median - percentile(host.times, 50)
		r.Instructions = netCount(m.instructions, host.instructions)
		r.Cycles = netCount(m.cycles, host.cycles)
		results = append(results, r)
	}
	return results
}

// netCount returns the median of what the processor has counted in the measurements of a case, minus
// that of the host program. It leaves out measurements that were not counted, and returns nil if
// none of the case or of the host program was.
func netCount(own, host []float64) *float64 {
	counted := func(all []float64) []float64 {
		return slices.DeleteFunc(slices.Clone(all), func(n float64) bool { return n == 0 })
	}
	own, host = counted(own), counted(host)
	if len(own) == 0 || len(host) == 0 {
		return nil
	}
	return new(percentile(own, 50) - percentile(host, 50))
}

// percentile returns the pth percentile of the values, by the nearest-rank method.
func percentile(values []float64, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	rank := (len(sorted)*p + 99) / 100 // rounded up
	return sorted[rank-1]
}
