// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
)

// Every case results in the expected verdict, for each number of flows.
func TestMeasurePackets(t *testing.T) {
	testhost.NeedAgent(t)
	o := PacketOptions{Flows: []uint32{1, 500}, Rounds: 1, Packets: 2000, Room: 1024}
	times, err := MeasurePackets(t.Context(), o)
	testhost.Must(t, err)
	if left, err := filepath.Glob(datapath.Dir(fmt.Sprintf("bench-%d-*", os.Getpid()))); err != nil || len(left) > 0 {
		t.Errorf("still pinned: %v, %v", left, err)
	}
	cases := allCases(o.Flows, o.Room)
	if len(times) != len(cases) {
		t.Fatalf("%d results of %d cases", len(times), len(cases))
	}
	rounds := map[string]int{}
	for _, c := range cases {
		rounds[c.name] = o.Rounds
	}
	others := len(cases) - 3 // all but floor, and null in both families
	chunks := (others + casesPerBase - 1) / casesPerBase
	bases := o.Rounds * (1 + chunks) // before the other cases, and after each chunk of them
	rounds[caseNull], rounds[caseFloor] = bases, bases
	for i, got := range times {
		want := PacketTime{
			Case: cases[i].name, Family: string(cases[i].family), Encapsulation: cases[i].encapsulation,
			Flows: cases[i].flows, Rounds: rounds[cases[i].name], Median: got.Median, P10: got.P10, P90: got.P90, Net: got.Net,
			Instructions: got.Instructions, Cycles: got.Cycles,
		}
		if got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got.P10 <= 0 || got.P10 > got.Median || got.Median > got.P90 {
			t.Errorf("%s: median %v is not between %v and %v", got.Case, got.Median, got.P10, got.P90)
		}
	}
}

// Cases that are not chosen are not built. Null and floor are always measured.
func TestChosenCases(t *testing.T) {
	testhost.NeedAgent(t)
	o := PacketOptions{Flows: []uint32{1}, Rounds: 1, Packets: 100, Room: 1, Case: regexp.MustCompile("^vip-miss$")}
	times, err := MeasurePackets(t.Context(), o)
	testhost.Must(t, err)
	counts := map[string]int{}
	for _, result := range times {
		counts[result.Case]++
	}
	if len(counts) != 3 || counts[caseNull] != 2 || counts[caseFloor] != 1 || counts[caseMiss] != 2 {
		t.Errorf("measured %v", counts)
	}
}

// TestCountersOfPackets counts another event in place of cycles, which not every processor counts:
// the nanoseconds in which the thread runs, which the kernel itself counts. So the count of a case is
// its time: net, without that of the host program. An event that does not exist is not counted.
func TestCountersOfPackets(t *testing.T) {
	testhost.NeedAgent(t)
	h, err := newHost()
	testhost.Must(t, err)
	defer h.close()
	null, floor := nullCase(ipv6), floorCase()
	rigs := map[setup]*rig{}
	cases, err := prepareCases(t.Context(), h, rigs, []benchCase{null, floor}, nil)
	testhost.Must(t, err)
	for _, r := range rigs {
		defer r.close()
	}
	measure := func() []PacketTime {
		for _, m := range cases {
			m.times, m.cycles = nil, nil
			testhost.Must(t, m.round(h, 20_000))
		}
		return summarize(cases)
	}
	h.cycles = event{unix.PERF_TYPE_SOFTWARE, unix.PERF_COUNT_SW_TASK_CLOCK}
	for i, got := range measure() {
		if got.Cycles == nil {
			t.Fatalf("%s: nothing was counted", got.Case)
		}
		// The counter also runs while the thread's CPU time is read.
		if own := cases[i].cycles[0]; own < 0.9*got.Median || own > 2*got.Median {
			t.Errorf("%s: counted %v ns of a packet, which took %v ns", got.Case, own, got.Median)
		}
		if want := cases[i].cycles[0] - cases[0].cycles[0]; *got.Cycles != want {
			t.Errorf("%s: %v net, want %v", got.Case, *got.Cycles, want)
		}
	}
	h.cycles = event{unix.PERF_TYPE_SOFTWARE, unix.PERF_COUNT_SW_MAX}
	for _, got := range measure() {
		if got.Cycles != nil {
			t.Errorf("%s: %v events of a kind that does not exist", got.Case, *got.Cycles)
		}
	}
}

// TestNetCount leaves out measurements that were not counted.
func TestNetCount(t *testing.T) {
	if got := netCount([]float64{0, 900, 0, 1000, 800}, []float64{100, 0}); got == nil || *got != 800 {
		t.Errorf("%v, want 900 - 100", got)
	}
	if got := netCount([]float64{900}, []float64{0, 0}); got != nil {
		t.Errorf("%v though the host program was not counted", *got)
	}
}

// A packet with another verdict causes an error.
func TestUnexpectedVerdict(t *testing.T) {
	testhost.NeedAgent(t)
	h, err := newHost()
	testhost.Must(t, err)
	defer h.close()
	c := nullCase(ipv6)
	c.traffic.verdict = xdpTX
	testhost.Must(t, h.prepare(nil, &c.traffic))
	if _, err := h.run(10); err == nil {
		t.Error("no error though no program says XDP_TX")
	}
}

// Known flows were confirmed, and new flows were not.
func TestFill(t *testing.T) {
	testhost.NeedAgent(t)
	h, err := newHost()
	testhost.Must(t, err)
	defer h.close()
	for content, established := range map[content]bool{newFlows: false, knownFlows: true} {
		s := setup{kind: setupBalancer, family: ipv6, capacity: 4096, content: content}
		r, err := s.build()
		testhost.Must(t, err)
		defer r.close()
		testhost.Must(t, r.fill(t.Context(), h, &s))
		testhost.Must(t, r.balancer.Sweep())
		state, err := r.view.Snapshot()
		testhost.Must(t, err)
		flows := state.FlowTable.Flows
		confirmed := float64(flows.Established) / float64(flows.Total())
		if r.next != 4096 || flows.Total() < 3900 || established != (confirmed > 0.98) || !established && confirmed > 0 {
			t.Errorf("content %d: next flow is %d, flows are %+v", content, r.next, flows)
		}
	}
}

func TestMeasureMemory(t *testing.T) {
	testhost.NeedAgent(t)
	all, err := MeasureMemory(t.Context(), []uint32{100_000}, nil)
	testhost.Must(t, err)
	m := all[0]
	if m.Capacity != 1<<17 || m.Entered != m.Capacity || math.Abs(m.BytesPerFlow-16) > 0.1 {
		t.Errorf("%+v: a table for 131,072 flows has 16 bytes for each", m)
	}
	// With a Poisson(4) distribution, 2% of the buckets overflow, and 0.6% of the flows find no
	// room (docs/understand/flow-table.md).
	if share := float64(m.Held) / float64(m.Entered); share < 0.985 || share > 1 {
		t.Errorf("%+v: holds %.3f of the flows that came", m, share)
	}
}

func TestPercentile(t *testing.T) {
	values := []float64{9, 1, 8, 2, 7, 3, 6, 4, 5}
	for p, want := range map[int]float64{10: 1, 50: 5, 90: 9} {
		if got := percentile(values, p); got != want {
			t.Errorf("percentile %d is %v, want %v", p, got, want)
		}
	}
}
