// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"hash/fnv"
	"io"
	"time"

	"github.com/cilium/ebpf"
)

// NameAfter gives a map of counters a name that tells what it counts, so that the counters of a build
// that counts something else are not taken for its own, even when there are as many. Of the 15 bytes
// that the kernel keeps of a name, the map's own can have 8.
func NameAfter(spec *ebpf.MapSpec, labels []string) {
	digest := fnv.New32a()
	for _, label := range labels {
		_, _ = io.WriteString(digest, label+"\n") // never fails
	}
	spec.Name = fmt.Sprintf("%.8s_%06x", spec.Name, digest.Sum32()>>8)
}

// Compatible returns an error, which is ebpf.ErrMapIncompatible, unless a map is one that the
// specification makes: with the same layout, size and name (see NameAfter).
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

// ReasonCount is how many packets left the data path for a reason since its tables were made.
type ReasonCount struct {
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"` // of layer 3, as received
	Rate    *Rate  `json:"rate,omitempty"`
}

// Rate is what a pair of counters grew by in a time.
type Rate struct {
	Packets float64 `json:"packets_per_second"`
	Bits    float64 `json:"bits_per_second"`
}

// CountReasons reads the counters of the reasons with the given names, all CPUs together.
func CountReasons(reasons *ebpf.Map, names []string) ([]ReasonCount, error) {
	if len(names) != int(reasons.MaxEntries()) {
		return nil, fmt.Errorf("the tables count %d reasons and this build knows %d: they are from another build",
			reasons.MaxEntries(), len(names))
	}
	var counts []ReasonCount
	for number := 1; number < len(names); number++ {
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

// NewRate is the growth of two counters in a time.
func NewRate(packets, bytes uint64, interval time.Duration) *Rate {
	return &Rate{Packets: PerSecond(packets, interval), Bits: 8 * PerSecond(bytes, interval)}
}

// PerSecond divides what was counted in an interval.
func PerSecond(count uint64, interval time.Duration) float64 {
	return float64(count) / interval.Seconds()
}

// Growth is by how much a counter grew; one that shrank was reset to zero meanwhile.
func Growth(now, before uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}
