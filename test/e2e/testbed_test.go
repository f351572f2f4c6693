// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/testbed"
)

const smallExperiment = `
title: A small experiment
points: [0.6]
servers: 2
seeds: 1
speed: 8
connections: 100
cases:
  - {name: direct, direct: true}
  - {name: sc, placement: hash}
  - {name: sr4, placement: hunt, accept: {policy: static, threshold: 4}}
`

// TestExperimentSurvivesAKill kills an experiment after its first run. Its lab must go away, and
// the next command must make the other runs only.
func TestExperimentSurvivesAKill(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "small.yaml")
	must(t, os.WriteFile(file, []byte(smallExperiment), 0o644))
	out := t.TempDir()
	experiment := func() (*exec.Cmd, *bytes.Buffer) {
		cmd := exec.CommandContext(interrupted, laboratory, "lab", "run", file, "--out", out, "--json")
		var output bytes.Buffer
		cmd.Stdout, cmd.Stderr = &output, &output
		must(t, cmd.Start())
		return cmd, &output
	}

	first, output := experiment()
	name := fmt.Sprintf("x%d", first.Process.Pid)
	ended := make(chan error, 1)
	go func() { ended <- first.Wait() }()
	t.Cleanup(func() { _ = first.Process.Kill() })
	eventually(t, func() error {
		select {
		case err := <-ended:
			t.Fatalf("the experiment ended before its first run: %v\n%s", err, output)
		default:
		}
		r, err := testbed.Read(out)
		if errors.Is(err, fs.ErrNotExist) || (err == nil && len(r.Runs) == 0) {
			return errors.New("there are no results yet")
		}
		return err
	})
	must(t, first.Process.Kill())
	<-ended
	eventually(t, func() error {
		names, err := lab.List()
		if err == nil && slices.Contains(names, name) {
			err = fmt.Errorf("lab %s is still up", name)
		}
		return err
	})
	r, err := testbed.Read(out)
	must(t, err)
	before := r.Runs

	second, output := experiment()
	must(t, second.Wait())
	r, err = testbed.Read(out)
	must(t, err)
	if len(before) == 3 || len(r.Runs) != 3 || r.Planned != 3 {
		t.Fatalf("%d runs before the kill, %d of %d runs at the end", len(before), len(r.Runs), r.Planned)
	}
	for _, run := range before {
		i := slices.IndexFunc(r.Runs, func(other testbed.Run) bool { return other.Case == run.Case })
		if r.Runs[i].Measured.Mean != run.Measured.Mean {
			t.Errorf("%s was made again", run.Case)
		}
	}
	requireExperiment(t, r, out)
	requireRows(t, output.Bytes())
}

// requireExperiment checks what each run must have.
func requireExperiment(t *testing.T, r *testbed.Results, out string) {
	t.Helper()
	for _, run := range r.Runs {
		if run.Requests != 100 || run.Failed != 0 || run.Simulated == nil || run.Measured.Mean <= 0 {
			t.Errorf("%s: %d requests, %d failed, mean %v, simulated %v", run.Case, run.Requests,
				run.Failed, run.Measured.Mean, run.Simulated)
		}
		responses, offers := uint64(0), uint64(0)
		for _, s := range run.Shares {
			responses += s.Responses
			offers += s.Accepted + s.Forced
		}
		if responses != 100 || (run.Case == "sr4") != (offers > 60) {
			t.Errorf("%s: servers answered %d requests, and took %d offers", run.Case, responses, offers)
		}
		for _, file := range []string{"arrivals.tsv", "requests.csv.gz", "loads.csv"} {
			if _, err := os.Stat(filepath.Join(out, run.Folder, file)); err != nil {
				t.Error(err)
			}
		}
	}
	// All cases have the same arrivals and the same work.
	var arrivals [][]byte
	for _, run := range r.Runs {
		text, err := os.ReadFile(filepath.Join(out, run.Folder, "arrivals.tsv"))
		must(t, err)
		arrivals = append(arrivals, text)
	}
	if !bytes.Equal(arrivals[0], arrivals[1]) || !bytes.Equal(arrivals[0], arrivals[2]) {
		t.Error("the cases have different arrivals")
	}
}

// requireRows checks the keys that --json promises.
func requireRows(t *testing.T, text []byte) {
	t.Helper()
	var rows []map[string]any
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	keys := "case rho balancers seeds mean_ms p50_ms p90_ms p99_ms failed connections " +
		"simulated_mean_ms bound_mean_ms"
	for _, row := range rows {
		for _, key := range strings.Fields(keys) {
			if _, found := row[key]; !found {
				t.Errorf("%v: %s is missing", row["case"], key)
			}
		}
	}
	if len(rows) != 3 {
		t.Errorf("%d rows, want 3", len(rows))
	}
}

// TestChangeExperiment removes a server while connections are open. With tables of earlier sets of
// servers, only connections of that server break.
func TestChangeExperiment(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: A change
kind: change
axis: removed
points: [1]
servers: 3
balancers: 2
seeds: 2
connections: 90
emulated: {workers: 50}
cases:
  - {name: present, placement: hash, candidates: 1, generations: 1}
  - {name: generations, placement: hunt, accept: {policy: static, threshold: 20}}
`)
	if len(r.Runs) != 4 {
		t.Fatalf("%d runs, want 4", len(r.Runs))
	}
	for _, run := range r.Runs {
		if run.Requests != 90 || run.Failures[testbed.ServerRemoved] == 0 ||
			run.Failures[testbed.ServerRemoved] == 90 || run.Failed != run.Failures[testbed.Broken] {
			t.Errorf("%s: %d connections, failures %v", run.Case, run.Requests, run.Failures)
		}
	}
	if broken := r.Runs[2].Failed + r.Runs[3].Failed; broken > 0 {
		t.Errorf("%d connections broke, though their servers are in earlier sets", broken)
	}
}

// TestHoldExperiment opens connections that stay open, and counts them by server.
func TestHoldExperiment(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: Open connections
kind: hold
axis: connections
points: [30, 90]
servers: 3
seeds: 1
emulated: {workers: 128}
cases:
  - {name: sc, placement: hash}
  - name: sr
    placement: hunt
    accept: {policy: static, threshold: 20}
    source: {source: connections}
`)
	if len(r.Runs) != 4 {
		t.Fatalf("%d runs, want 4", len(r.Runs))
	}
	for _, run := range r.Runs {
		responses, offers := uint64(0), uint64(0)
		for _, s := range run.Shares {
			responses += s.Responses
			offers += s.Accepted + s.Forced
		}
		if responses != uint64(run.Point) || run.Requests != responses || run.Failed > 0 {
			t.Errorf("%s, %v connections: servers have %d of %d, %d failed",
				run.Case, run.Point, responses, run.Requests, run.Failed)
		}
		if run.Case == "sr" && offers != responses {
			t.Errorf("%v connections: servers accepted %d offers", run.Point, offers)
		}
	}
}

// TestUnequalServersExperiment has a server with four times the cores of the other, and work beside
// the requests that takes half of its cores. Weights by capacity must last for the weighted case
// only. No server refuses an offer, so the shares do not depend on how busy this machine is.
func TestUnequalServersExperiment(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: Unequal servers
points: [0.2]
servers: 2
seeds: 1
speed: 8
work: "constant: 40ms"
connections: 400
emulated: {cores: 1, exceptions: [{server: s2, cores: 4, colocated: "50%@0s"}]}
cases:
  - {name: weighted, placement: hunt, accept: {policy: static, threshold: 400}, weighted: true}
  - {name: equal, placement: hash}
`)
	if len(r.Runs) != 2 {
		t.Fatalf("%d runs, want 2", len(r.Runs))
	}
	// With two candidates in each bucket, the large server comes first in 88% of the buckets.
	for i, want := range []uint64{350, 200} {
		run := r.Runs[i]
		large := run.Shares[1]
		if large.Responses < want-50 || large.Responses > want+50 {
			t.Errorf("%s: %d of 400 responses of the large server, want about %d",
				run.Case, large.Responses, want)
		}
		if large.Mean < 0.079 {
			t.Errorf("%s: 40 ms of work take %v s at half of the speed", run.Case, large.Mean)
		}
		if run.Simulated == nil || run.Simulated.P50 < 0.04 {
			t.Errorf("%s: simulated %+v", run.Case, run.Simulated)
		}
	}
}

// TestInferExperiment runs placements that infer, with servers that differ by a factor of four. The
// run with the second seed needs a new lab, in which balancers know nothing yet.
func TestInferExperiment(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: Balancers that infer
set: infer
axis: balancers
points: [2]
load: 0.5
servers: 2
seeds: 2
speed: 4
work: "exponential: 40ms"
connections: 300
emulated: {cores: 1, exceptions: [{server: s2, cores: 4}]}
cases:
  - {name: sed, placement: sed, weighted: true}
  - {name: infer, placement: infer, infer: {slow-start: 4s}}
`)
	if len(r.Runs) != 4 {
		t.Fatalf("%d runs, want 4", len(r.Runs))
	}
	for _, run := range r.Runs {
		if run.Failed > 0 || run.Simulated == nil || run.Measured.Large < 0.5 || run.Simulated.Large < 0.5 {
			t.Errorf("%s, seed %d: %d failed, %v of the large server, simulated %+v", run.Case, run.Seed,
				run.Failed, run.Measured.Large, run.Simulated)
		}
	}
}

// TestExperimentResetsThresholds: a run begins with the first threshold of the policy dynamic, not
// with the one to which the run before has adapted it.
func TestExperimentResetsThresholds(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: Thresholds
points: [0.6]
servers: 2
seeds: 2
speed: 8
connections: 100
cases:
  - {name: srdyn, placement: hunt, accept: {policy: dynamic, initial: 7, window: 5}}
`)
	if len(r.Runs) != 2 {
		t.Fatalf("%d runs, want 2", len(r.Runs))
	}
	adapted := false
	for _, run := range r.Runs {
		for _, s := range run.Shares {
			if s.FirstThreshold == nil || s.LastThreshold == nil {
				t.Fatalf("seed %d, %s: the threshold is missing", run.Seed, s.Server)
			}
			if *s.FirstThreshold != 7 {
				t.Errorf("seed %d, %s: begins with the threshold %d, want 7", run.Seed, s.Server, *s.FirstThreshold)
			}
			adapted = adapted || *s.LastThreshold != 7
		}
	}
	if !adapted {
		t.Error("no threshold has adapted")
	}
}

// TestForwardExperiment measures packets of known flows by both placements.
func TestForwardExperiment(t *testing.T) {
	t.Parallel()
	r := runExperiment(t, `
title: Packets
kind: forward
axis: flows
points: [10]
connections: 2
seeds: 1
cases:
  - {name: hash, placement: hash, encapsulation: gre}
  - {name: hunt, placement: hunt, encapsulation: srv6-insert}
`)
	for _, run := range r.Runs {
		// The time of the host is subtracted, so on a busy machine the rest can be below 0.
		if run.Measured.Mean == 0 || math.Abs(run.Measured.Mean) > 1e-3 {
			t.Errorf("%s: a packet takes %v s", run.Case, run.Measured.Mean)
		}
	}
	if len(r.Runs) != 2 {
		t.Errorf("%d runs, want 2", len(r.Runs))
	}
}

// runExperiment runs an experiment, and returns its results.
func runExperiment(t *testing.T, text string) *testbed.Results {
	t.Helper()
	file, out := filepath.Join(t.TempDir(), "experiment.yaml"), t.TempDir()
	must(t, os.WriteFile(file, []byte(text), 0o644))
	output, err := exec.CommandContext(interrupted, laboratory, "lab", "run", file, "--out", out).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	r, err := testbed.Read(out)
	must(t, err)
	return r
}

// TestExperimentReplaysATrace replays requests on servers of two sizes, for distant clients. What
// balancers have inferred, and how far they differ, is in the results.
func TestExperimentReplaysATrace(t *testing.T) {
	t.Parallel()
	file, trace := filepath.Join(t.TempDir(), "replay.yaml"), filepath.Join(t.TempDir(), "trace.csv")
	must(t, os.WriteFile(file, []byte(`
title: A replay
axis: ratio
points: [2]
layouts: [{ratio: 2, cores: [1, 2]}]
seeds: 1
speed: 4
load: 0.5
balancers: 2
connections: 100
work: "constant: 100ms"
round-trip: "constant: 200ms"
replay: {format: queries, match: 'n=([0-9]+)$'}
cases: [{name: infer, placement: infer}]
`), 0o644))
	var requests strings.Builder
	requests.WriteString("time\tquery\n")
	for i := range 100 {
		fmt.Fprintf(&requests, "%v\t/dummy.php/?n=%d\n", 0.02*float64(i), 1000+i%7)
	}
	must(t, os.WriteFile(trace, []byte(requests.String()), 0o644))
	out := t.TempDir()
	_, err := exec.CommandContext(interrupted, laboratory, "lab", "run", file, "--trace", trace, "--out", out).Output()
	must(t, err)
	r, err := testbed.Read(out)
	must(t, err)
	run := r.Runs[0]
	if run.Requests != 100 || run.Failed > 0 || run.Measured.P50 < 0.45 {
		t.Errorf("%d requests, %d failed, median %v s; want 100 of two round trips and 100 ms or less of work",
			run.Requests, run.Failed, run.Measured.P50)
	}
	if o := run.Observations; o == nil || o.Flows <= 0 {
		t.Errorf("observations of two balancers: %+v, want numbers of flows that differ", o)
	}
	for i, share := range run.Shares {
		if share.Estimate == 0 || share.Capacity != float64(i+1) {
			t.Errorf("%s: %+v, want the capacity %d and an estimate", share.Server, share, i+1)
		}
	}
}

// TestProxyExperiment runs cases with proxies beside one with Segue. Clients have no failures, and
// the CPU time and the memory of each case are those of its own programs.
func TestProxyExperiment(t *testing.T) {
	t.Parallel()
	testhost.NeedCommand(t, "haproxy", "haproxy")
	r := runExperiment(t, `
title: Proxies
points: [0.5]
servers: 2
balancers: 2
seeds: 1
speed: 8
connections: 200
cpu-time: true
cases:
  - {name: sc, placement: hash}
  - {name: random2, proxy: {program: haproxy, algorithm: random(2)}}
  - {name: least_conn, proxy: {program: nginx, algorithm: least_conn}}
`)
	if len(r.Runs) != 3 {
		t.Fatalf("%d runs, want 3", len(r.Runs))
	}
	for _, run := range r.Runs {
		if run.Requests != 200 || run.Failed > 0 || run.Simulated == nil || run.Shares[0].Responses < 40 {
			t.Errorf("%s: %d requests, %d failed, simulated %v, %d responses of s1", run.Case, run.Requests,
				run.Failed, run.Simulated, run.Shares[0].Responses)
		}
		c := run.CPU
		proxied := run.Case != "sc"
		if c.Balancers <= 0 || (c.BalancerPrograms > 0) == proxied || (c.AgentPrograms > 0) == proxied ||
			proxied && c.Agents > 0 || c.All <= c.Balancers+c.Agents {
			t.Errorf("%s: CPU times %+v", run.Case, c)
		}
		// The flow table of the default size alone takes 16 MiB.
		if m := run.Memory; m.Processes < 1<<20 || (m.Kernel > 16<<20) == proxied || proxied && m.Kernel > 0 {
			t.Errorf("%s: memory %+v", run.Case, m)
		}
	}
}
