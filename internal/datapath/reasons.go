// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"hash/fnv"
	"io"
	"time"

	"github.com/cilium/ebpf"
)

// NameAfter gives a map of counters a name that depends on its labels. So a build does not take the
// counters of another build for its own, even if both have the same number of counters. The kernel
// keeps 15 bytes of a name; the map's own name may have 8 of them.
func NameAfter(spec *ebpf.MapSpec, labels []string) {
	digest := fnv.New32a()
	for _, label := range labels {
		_, _ = io.WriteString(digest, label+"\n") // never fails
	}
	spec.Name = fmt.Sprintf("%.8s_%06x", spec.Name, digest.Sum32()>>8)
}

// Compatible returns ebpf.ErrMapIncompatible unless the map has the layout, size and name (see
// NameAfter) of the specification.
func Compatible(spec *ebpf.MapSpec, m *ebpf.Map) error {
	if err := spec.Compatible(m); err != nil {
		return err
	}
	info, err := m.Info()
	if err != nil {
		return err
	}
	if info.Name != spec.Name {
		return fmt.Errorf("named %s, not %s: %w", info.Name, spec.Name, ebpf.ErrMapIncompatible)
	}
	return nil
}

// ReasonCount is the number of packets counted under a reason since the tables were made.
type ReasonCount struct {
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"` // of layer 3, as received
	Rate    *Rate  `json:"rate,omitempty"`
}

// Rate is the growth of a pair of counters per second.
type Rate struct {
	Packets float64 `json:"packets_per_second"`
	Bits    float64 `json:"bits_per_second"`
}

// CountReasons reads the counters of the reasons with the given names, summed over all CPUs.
func CountReasons(reasons *ebpf.Map, names []string) ([]ReasonCount, error) {
	if len(names) != int(reasons.MaxEntries()) {
		return nil, fmt.Errorf("the tables count %d reasons and this build knows %d: they are from another build",
			reasons.MaxEntries(), len(names))
	}
	var counts []ReasonCount
	for number := 1; number < len(names); number++ { // 0 counts nothing
		var cpus []struct{ Packets, Bytes uint64 }
		if err := reasons.Lookup(uint32(number), &cpus); err != nil {
			return nil, fmt.Errorf("read the counters of %s: %w", names[number], err)
		}
		count := ReasonCount{Reason: names[number]}
		for _, cpu := range cpus {
			count.Packets += cpu.Packets
			count.Bytes += cpu.Bytes
		}
		counts = append(counts, count)
	}
	return counts, nil
}

// NewRate returns the rate for the growth of two counters over an interval.
func NewRate(packets, bytes uint64, interval time.Duration) *Rate {
	return &Rate{Packets: PerSecond(packets, interval), Bits: 8 * PerSecond(bytes, interval)}
}

// SetRates sets the rates of counts that were read an interval after the earlier ones.
func SetRates(counts, earlier []ReasonCount, interval time.Duration) {
	before := map[string]ReasonCount{}
	for _, count := range earlier {
		before[count.Reason] = count
	}
	for i := range counts {
		now := &counts[i]
		old := before[now.Reason]
		now.Rate = NewRate(Growth(now.Packets, old.Packets), Growth(now.Bytes, old.Bytes), interval)
	}
}

// PerSecond returns the rate of a count over an interval.
func PerSecond(count uint64, interval time.Duration) float64 {
	return float64(count) / interval.Seconds()
}

// Growth returns the growth of a counter. A counter that is lower than before was reset to zero
// meanwhile.
func Growth(now, before uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}
