// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"flag"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

var update = flag.Bool("update", false, "write testdata anew")

const regressionFile = "testdata/regression.txt"

// eventful is a small data centre with servers of all kinds. Servers and balancers are added and
// fail.
func eventful(t *testing.T, name string) *sim.Config {
	t.Helper()
	spec, err := placement.Named(name)
	testhost.Must(t, err)
	method, policy, err := spec.Build()
	testhost.Must(t, err)
	near := sim.Uniform(0.0001, 0.001)
	c := &sim.Config{
		Placement: method, Policy: policy, Connections: 4000, Timeout: 40,
		Jobs:      []sim.Job{{Share: 1, Stages: []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(0.2)}}}},
		Network:   sim.Network{ClientBalancer: near, BalancerServer: near, ServerServer: near, ServerClient: near},
		Balancers: []sim.Share{{Weight: 1}, {Weight: 2}, {Weight: 1, Absent: true}},
		Events: []sim.Event{
			{At: 10, Kind: sim.ServerFail, Servers: []int32{1, 8}, Detect: 0.5},
			{At: 15, Kind: sim.BalancerAdd, Balancers: []int32{2}},
			{At: 20, Kind: sim.ServerAdd, Servers: []int32{1, 15}, Detect: 0.5},
			{At: 25, Kind: sim.BalancerFail, Balancers: []int32{1}},
			{At: 30, Kind: sim.ServerDrain, Servers: []int32{2}, Detect: 0.5},
		},
	}
	for i := range 16 {
		s := sim.Server{Name: fmt.Sprintf("s%d", i+1), CPUs: 1 + int32(i%3), Speed: 1, Backlog: 64, Absent: i == 15}
		if i%2 == 0 {
			s.Discipline, s.Workers = sim.ProcessorSharing, 32
		}
		c.Servers = append(c.Servers, s)
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(0.8)}
	return c
}

// run returns a line with all results of a run.
func run(t *testing.T, name string, seed uint64) string {
	t.Helper()
	c, digest := eventful(t, name), fnv.New64a()
	c.Completed = func(_ int, f sim.Ended) {
		fmt.Fprintf(digest, "%d %d %d %d %d %x\n", f.Number, f.Server, f.Balancer, f.Hops, f.Outcome, f.Response)
	}
	result, err := sim.Run(t.Context(), c, sim.Options{Seed: seed, Runs: 1})
	testhost.Must(t, err)
	r := result.Runs[0]
	return fmt.Sprintf("%s seed=%d mean=%.9f p90=%.9f hops=%d outcomes=%v flows=%016x\n",
		name, seed, r.Response.Mean(), r.Response.Quantile(0.9), r.Hops, r.Outcomes, digest.Sum64())
}

// TestRegression runs every placement with three seeds and compares the results with earlier ones.
// After an intended change, run it with -update.
func TestRegression(t *testing.T) {
	var got strings.Builder
	for _, name := range placement.Names() {
		for seed := range uint64(3) {
			got.WriteString(run(t, name, seed+1))
		}
	}
	if *update {
		testhost.Must(t, os.MkdirAll(filepath.Dir(regressionFile), 0o755))
		testhost.Must(t, os.WriteFile(regressionFile, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(regressionFile)
	testhost.Must(t, err)
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")); diff != "" {
		t.Errorf("(-file +now)\n%s", diff)
	}
}

// TestEveryFlowEnds checks that no flow is left at the end, whatever changes, and that most flows
// are completed.
func TestEveryFlowEnds(t *testing.T) {
	for _, name := range placement.Names() {
		c := eventful(t, name)
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 4, Runs: 1})
		testhost.Must(t, err)
		if got := result.Flows(); got != c.Connections {
			t.Errorf("%s: %d flows ended of %d", name, got, c.Connections)
		}
		if share := result.Share(sim.Completed).Value; share < 0.85 {
			t.Errorf("%s: %v of flows completed: %v", name, share, result.Runs[0].Outcomes)
		}
	}
}

// TestNoServersAtFirst checks that flows are lost while there are no servers, and that nothing
// else remains of them.
func TestNoServersAtFirst(t *testing.T) {
	for _, name := range placement.Names() {
		c := eventful(t, name)
		all := make([]int32, len(c.Servers))
		rate := c.Rate(0.5)
		for i := range c.Servers {
			all[i], c.Servers[i].Absent = int32(i), true
		}
		c.Arrivals, c.Connections, c.Duration = sim.Poisson{Rate: rate}, 0, 20
		c.Events = []sim.Event{{At: 10, Kind: sim.ServerAdd, Servers: all}}
		c.Completed = func(_ int, f sim.Ended) {
			if lost := f.Outcome == sim.Lost; lost != (f.Sent < 9.999) && math.Abs(f.Sent-10) > 0.001 {
				t.Errorf("%s: a flow of %v s was %v", name, f.Sent, f.Outcome)
			}
		}
		if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 6, Runs: 1}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOnlyLiveServers checks that a server gets no flows once balancers know that it is draining
// or not there.
func TestOnlyLiveServers(t *testing.T) {
	for _, name := range placement.Names() {
		c := eventful(t, name)
		c.Arrivals = sim.Poisson{Rate: c.Rate(1.1)} // a rate at which every server is needed
		c.Events = []sim.Event{{At: 5, Kind: sim.ServerDrain, Servers: []int32{2, 4, 5}}}
		c.Completed = func(_ int, f sim.Ended) {
			if f.Outcome == sim.Lost || f.Sent > 5.1 && (f.Server == 2 || f.Server == 4 || f.Server == 5) {
				t.Errorf("%s: a flow of %v s went to server %d, and was %v", name, f.Sent, f.Server, f.Outcome)
			}
		}
		if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 6, Runs: 1}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLoadAwareBeatsChance checks that each placement that considers load or capacity is better
// than one that does not, on servers with one, two and three processors.
func TestLoadAwareBeatsChance(t *testing.T) {
	mean := func(name string) float64 {
		c := eventful(t, name)
		c.Events, c.Connections = nil, 8000
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 5, Runs: 3})
		testhost.Must(t, err)
		return result.Mean().Value
	}
	blind := mean("ecmp")
	for _, name := range placement.Names() {
		if slices.Contains([]string{"ecmp", "hash", "round-robin"}, name) {
			continue
		}
		if got := mean(name); got > 0.9*blind {
			t.Errorf("%s: %.0f ms in the mean, ecmp %.0f", name, 1000*got, 1000*blind)
		}
	}
}
