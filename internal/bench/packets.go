package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/segue-lb/segue/internal/config"
)

// PacketOptions say what a packet's way is measured with.
type PacketOptions struct {
	Flows   []uint32       // numbers of flows; each at least 1
	Case    *regexp.Regexp // which cases; nil: all. Null and floor are measured anyway
	Rounds  int            // of all cases in turn, at least 1
	Packets uint32         // of each case in each round, at least 1
	Room    uint32         // that flow tables have at least, in flows
}

// DefaultPacketOptions measure everything.
func DefaultPacketOptions() PacketOptions {
	return PacketOptions{Flows: []uint32{1, 1_000, 64_000, 1_000_000, 10_000_000}, Rounds: 9, Packets: 200_000, Room: config.DefaultFlows}
}

// PacketTime is what a packet of one kind costs, in nanoseconds of CPU time.
type PacketTime struct {
	Case          string               `json:"case"`
	Family        string               `json:"family"`
	Encapsulation config.Encapsulation `json:"encapsulation"`
	Flows         uint32               `json:"flows"`
	Median        float64              `json:"ns_median"`
	P10           float64              `json:"ns_p10"`
	P90           float64              `json:"ns_p90"`
	// Net is the median less that of the host program alone, in the same run.
	Net    float64 `json:"net_ns"`
	Rounds int     `json:"rounds"`
	// Instructions are those of the packet, net as well; absent where the processor does not count.
	Instructions *float64 `json:"instructions,omitempty"`
}

// measured is a case with what its rounds have shown.
type measured struct {
	benchCase
	rig          *rig
	sent         uint64 // packets so far
	times        []float64
	instructions []float64
}

// MeasurePackets measures what packets cost, all cases in turn and that over and over, so that what
// disturbs the machine disturbs all. It needs root, and for ten million flows some gigabytes.
func MeasurePackets(ctx context.Context, o PacketOptions) (_ []PacketTime, err error) {
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
	cases, err := prepareCases(ctx, h, rigs, &o)
	if err != nil {
		return nil, err
	}
	before, err := knownPackets(cases)
	if err != nil {
		return nil, err
	}
	for range o.Rounds {
		for _, m := range cases {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := m.round(h, o.Packets); err != nil {
				return nil, fmt.Errorf("%s, %s, %s, %d flows: %w", m.name, m.family, m.encapsulation, m.flows, err)
			}
		}
	}
	if err := requireKnown(cases, before); err != nil {
		return nil, err
	}
	return summarize(cases), nil
}

// prepareCases builds what the chosen cases need.
func prepareCases(ctx context.Context, h *host, rigs map[setup]*rig, o *PacketOptions) ([]*measured, error) {
	var cases []*measured
	for _, c := range allCases(o.Flows, o.Room) {
		if c.name != caseNull && c.name != caseFloor && o.Case != nil && !o.Case.MatchString(c.name) {
			continue
		}
		if rigs[c.setup] == nil {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			r, err := c.setup.build()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			rigs[c.setup] = r
			if err := r.fill(h, &c.setup); err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
		}
		cases = append(cases, &measured{benchCase: c, rig: rigs[c.setup]})
	}
	return cases, nil
}

// round measures once, after as many packets again that only warm the caches.
func (m *measured) round(h *host, packets uint32) error {
	t := m.traffic
	t.first += m.sent
	if err := h.prepare(m.rig.program, &t); err != nil {
		return err
	}
	if _, err := h.run(packets); err != nil {
		return err
	}
	cost, err := h.run(packets)
	if err != nil {
		return err
	}
	m.sent += 2 * uint64(packets)
	m.times = append(m.times, float64(cost.time.Nanoseconds())/float64(packets))
	m.instructions = append(m.instructions, float64(cost.instructions)/float64(packets))
	return nil
}

// measuresKnown tells whether the case's packets are of flows that a balancer's table has.
func (m *measured) measuresKnown() bool { return m.name == caseKnown || m.name == caseUDP }

// knownPackets counts the packets of known flows of every rig that a case of them uses.
func knownPackets(cases []*measured) (map[*rig]uint64, error) {
	counts := map[*rig]uint64{}
	for _, m := range cases {
		if !m.measuresKnown() {
			continue
		}
		known, err := m.rig.known()
		if err != nil {
			return nil, err
		}
		counts[m.rig] = known
	}
	return counts, nil
}

// requireKnown is an error unless nearly all packets of known flows were such: at capacity one flow in
// fifty finds no room.
func requireKnown(cases []*measured, before map[*rig]uint64) error {
	after, err := knownPackets(cases)
	if err != nil {
		return err
	}
	sent := map[*rig]uint64{}
	for _, m := range cases {
		if m.measuresKnown() {
			sent[m.rig] += m.sent
		}
	}
	for r, packets := range sent {
		if known := after[r] - before[r]; float64(known) < 0.96*float64(packets) {
			return fmt.Errorf("of %d packets %d were of known flows: the machine is too slow for the flow table's timeouts", packets, known)
		}
	}
	return nil
}

// summarize takes the host program's share off.
func summarize(cases []*measured) []PacketTime {
	null := map[family]*measured{}
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
		r.Net = r.Median - percentile(null[m.family].times, 50)
		if own := percentile(m.instructions, 50); own > 0 {
			net := own - percentile(null[m.family].instructions, 50)
			r.Instructions = &net
		}
		results = append(results, r)
	}
	return results
}

// percentile is the value at that rank, by the nearest-rank method.
func percentile(values []float64, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[(len(sorted)*p+99)/100-1]
}
