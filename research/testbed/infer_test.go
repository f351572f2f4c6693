// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim/placement"
)

// TestInferInTheSimulator checks that the simulator infers as the balancers do. Steps are as often
// in emulated time as the experiment says, but not more often than the balancer permits. Samples
// are at the balancer's own interval, which is longer in emulated time.
func TestInferInTheSimulator(t *testing.T) {
	const sampled, step = 80 * time.Millisecond, 500 * time.Millisecond
	mean := desired.Infer{Estimator: desired.EstimateHLBMean} // a former name
	hlb := desired.Infer{Estimator: desired.EstimateHLB, SlowStart: new(4 * time.Second)}
	candidates := desired.Infer{Among: desired.AmongCandidates}
	for name, test := range map[string]struct {
		Case
		speed float64
		want  placement.Spec
	}{
		"default": {Case{Placement: desired.PlacementInfer}, 4, &placement.Infer{
			Kind: infer.TerritoryLearned, Polled: sampled, Interval: step, SlowStart: 40 * time.Second,
			Silent: 40 * time.Second,
		}},
		"hlb": {Case{Placement: desired.PlacementInfer, Infer: &hlb}, 4, &placement.Infer{
			Kind: infer.HLB, Polled: sampled, Interval: step, SlowStart: 4 * time.Second,
			Silent: 40 * time.Second,
		}},
		"hlb-mean": {Case{Placement: desired.PlacementInfer, Infer: &mean}, 4, &placement.Infer{
			Kind: infer.DurationsMean, Polled: sampled, Interval: step, SlowStart: 40 * time.Second,
			Silent: 40 * time.Second,
		}},
		"too fast": {Case{Placement: desired.PlacementInfer}, 8, &placement.Infer{
			Kind: infer.TerritoryLearned, Polled: 2 * sampled, Interval: 800 * time.Millisecond, SlowStart: 80 * time.Second,
			Silent: 80 * time.Second,
		}},
		"least-queue": {Case{Placement: desired.PlacementLeastQueue}, 4, &placement.Infer{
			Kind: infer.LeastQueue, Polled: sampled, Interval: 2 * time.Second, SlowStart: 40 * time.Second,
			Silent: 40 * time.Second,
		}},
		"sed": {Case{Placement: desired.PlacementSED, Weighted: true}, 4, &placement.Infer{
			Kind: infer.SED, Polled: sampled, Interval: 2 * time.Second, SlowStart: 40 * time.Second,
			Silent: 40 * time.Second,
		}},
		"sed without weights": {Case{Placement: desired.PlacementSED}, 4, nil},
		"AWCMP": {Case{Placement: desired.PlacementAWCMP}, 4, &placement.AWCMP{
			Polled: placement.Polled{Interval: 500 * time.Millisecond},
		}},
		"GSQ2": {Case{Placement: desired.PlacementGSQ2}, 4, nil},
		"among two": {Case{
			Placement: desired.PlacementLeastQueue, Infer: &desired.Infer{Among: desired.AmongTwo},
		}, 4, nil},
		"among candidates": {
			Case{Placement: desired.PlacementInfer, Infer: &candidates}, 4, nil,
		},
	} {
		p := planned{Case: test.Case}
		p.Speed = test.speed
		got := p.spec()
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
		if got == nil {
			continue
		}
		if _, _, err := got.Build(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWeightsOfTerritories checks that weights are numbers of processors for territories, and in
// proportion to the capacities otherwise.
func TestWeightsOfTerritories(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
servers: 2
emulated: {cores: 1, exceptions: [{server: s2, cores: 3}]}
cases:
  - {name: sed, placement: sed, weighted: true}
  - {name: territory, placement: infer, infer: {estimator: territory}, weighted: true}
`)
	for i, want := range [][]uint32{{10, 30}, {1, 3}} {
		p := e.with(Options{}).plan()[i]
		if diff := cmp.Diff(want, p.weights()); diff != "" {
			t.Errorf("%s, -want +got:\n%s", p.Case.Name, diff)
		}
	}
}

// TestLargeServers checks the shares of the servers with the largest capacity, in measurements and
// in simulations.
func TestLargeServers(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
servers: 3
emulated: {cores: 1, exceptions: [{server: s2, cores: 2}, {server: s3, speed: 2}]}
cases: [{name: sc, placement: sed, weighted: true}]
`)
	p := e.with(Options{}).plan()[0]
	path := filepath.Join(t.TempDir(), requestsFile)
	file, err := os.Create(path)
	testhost.Must(t, err)
	zipped := gzip.NewWriter(file)
	_, err = zipped.Write([]byte("time,query,server,outcome,latency,exchange\n" +
		"0,/,s1,succeeded,1,1\n4.9,/,s2,succeeded,1,1\n12,/,s3,succeeded,1,1\n12,/,,reset,,\n"))
	if err != nil || zipped.Close() != nil || file.Close() != nil {
		t.Fatal("cannot write the requests")
	}
	tally := p.newTally()
	testhost.Must(t, tally.read(path))
	var r Response
	tally.setLarge(&r)
	want := Response{Large: 2. / 3, LargeOver: []float64{0.5, 0, 1}}
	if diff := cmp.Diff(want, r); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	arrivals := filepath.Join(t.TempDir(), "arrivals.tsv")
	text := "time\tquery\n0\t/?work=9000ms\n0.1\t/?work=9000ms\n6\t/?work=9000ms\n"
	testhost.Must(t, os.WriteFile(arrivals, []byte(text), 0o644))
	simulated, err := p.simulate(t.Context(), arrivals)
	testhost.Must(t, err)
	if got := simulated.LargeOver; len(got) != 2 || got[0] != 1 {
		t.Errorf("simulated shares %v: the large servers get the first two requests", got)
	}
	alike := parse(t, "title: t\npoints: [0.5]\ncases: [{name: sc, placement: hash}]\n")
	if tally := alike.with(Options{}).newTally(); tally != nil {
		t.Error("servers that are alike have large ones")
	}
}
