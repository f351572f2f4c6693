// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/internal/version"
)

// A build is compared with itself. Disturbances of the machine can change the ratios, so the test
// only requires that they exist.
func TestCompareWithItself(t *testing.T) {
	testhost.NeedAgent(t)
	var said []string
	comparison, err := Compare(t.Context(), CompareOptions{
		PacketOptions: PacketOptions{
			Flows: []uint32{50}, Room: 64, Rounds: roundsPerStart + 1, Packets: 200,
			Case:     regexp.MustCompile("^signal-create$"),
			Progress: func(what string) { said = append(said, what) },
		},
		Old: thisBuild,
	})
	testhost.Must(t, err)
	if want := version.Read(); comparison.Old != want || comparison.New != want {
		t.Errorf("builds are %+v and %+v, want %+v", comparison.Old, comparison.New, want)
	}
	if len(comparison.OnlyOld)+len(comparison.OnlyNew) > 0 {
		t.Errorf("not in both: %v, %v", comparison.OnlyOld, comparison.OnlyNew)
	}
	if len(comparison.Cases) != 3+2 {
		t.Errorf("%d cases: %+v", len(comparison.Cases), comparison.Cases)
	}
	for _, c := range comparison.Cases {
		if !c.SameProgram {
			t.Errorf("%s: programs differ: %+v, %+v", c.CaseName, c.Old.Program, c.New.Program)
		}
		if c.Old.Median <= 0 || c.New.Median <= 0 || c.Ratio.P10 <= 0 ||
			c.Ratio.P10 > c.Ratio.Median || c.Ratio.Median > c.Ratio.P90 || math.IsInf(c.Ratio.P90, 0) {
			t.Errorf("%s: %+v", c.CaseName, c)
		}
	}
	// Both workers were restarted for the last round, in the other order.
	var order []string
	for _, what := range said {
		if name, _, ok := strings.Cut(what, ": signal-create: fill"); ok {
			order = append(order, name)
		}
	}
	if want := []string{"old", "new", "new", "old"}; !slices.Equal(order, want) {
		t.Errorf("tables were filled by %v, want %v", order, want)
	}
}

// script makes an executable that runs shell commands.
func script(t *testing.T, lines string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "segue")
	testhost.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+lines+"\n"), 0o755))
	return path
}

// greeting returns a shell command that prints a hello with a version of the protocol.
func greeting(protocol int) string {
	return fmt.Sprintf(`echo '{"segue_bench_worker": %d}'`, protocol)
}

// An executable without a worker of this protocol is refused before the measurements.
func TestCompareRefuses(t *testing.T) {
	notExecutable := filepath.Join(t.TempDir(), "notes")
	testhost.Must(t, os.WriteFile(notExecutable, nil, 0o644))
	for name, test := range map[string]struct{ old, want string }{
		"no file": {
			"/no/such/segue", "start the old build: fork/exec /no/such/segue: no such file",
		},
		"not executable": {notExecutable, "permission denied"},
		"an older build": {
			script(t, `echo "segue: bench: unknown command \"$2\"" >&2; exit 1`),
			"has no `bench worker`: it is not segue-lab, or a build from before --against " +
				`(it wrote: segue: bench: unknown command "worker")`,
		},
		"another program": {script(t, "echo Hello.; cat"), "has no `bench worker`"},
		"other JSON":      {script(t, "echo {}; cat"), "has no `bench worker`"},
		"another protocol": {
			script(t, greeting(workerProtocol+1)+"; cat"),
			fmt.Sprintf("speaks version %d of the worker protocol, this build version %d",
				workerProtocol+1, workerProtocol),
		},
		"a failed request": {
			script(t, greeting(workerProtocol)+`; read line; echo '{"error": "no room"}'; cat`),
			"old build: no room",
		},
		"a worker that dies": {
			script(t, greeting(workerProtocol)+"; read line; echo Ouch >&2; exit 3"),
			"it wrote: Ouch",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Compare(t.Context(), CompareOptions{
				PacketOptions: PacketOptions{Flows: []uint32{1}, Room: 1, Rounds: 1, Packets: 1},
				Old:           test.old,
			})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// The end of the context ends a worker during a request, and is the only error.
func TestCompareEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	busy := script(t, greeting(workerProtocol)+`
		read line
		echo '{"progress": "working"}'
		exec cat >/dev/null`)
	_, err := Compare(ctx, CompareOptions{
		PacketOptions: PacketOptions{
			Flows: []uint32{1}, Room: 1, Rounds: 1, Packets: 1,
			Progress: func(what string) {
				if what == "old: working" {
					cancel()
				}
			},
		},
		Old: busy,
	})
	if !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "worker") {
		t.Errorf("error %v, want that of the context alone", err)
	}
}

// named returns a case of a worker with this name and program.
func named(name string, program programIdentity) workerCase {
	return workerCase{CaseName{Case: name, Family: "ipv6", Flows: 1}, program}
}

func TestMatchCases(t *testing.T) {
	p, q := programIdentity{10, "p"}, programIdentity{11, "q"}
	both, onlyOld, onlyNew := matchCases(
		[]workerCase{named("a", p), named("b", p), named("c", p)},
		[]workerCase{named("c", q), named("a", p), named("d", p)})
	if len(both) != 2 || both[0].Case != "c" || both[0].programs != [2]programIdentity{p, q} ||
		both[1].Case != "a" || both[1].programs != [2]programIdentity{p, p} {
		t.Errorf("in both: %+v", both)
	}
	if len(onlyOld) != 1 || onlyOld[0].Case != "b" || len(onlyNew) != 1 || onlyNew[0].Case != "d" {
		t.Errorf("in one: %v, %v", onlyOld, onlyNew)
	}
}

// sampled returns a case with the times of its rounds. Each row has the times of a round: old, new,
// old, new.
func sampled(name string, rounds ...[]float64) *comparedCase {
	m := &comparedCase{CaseName: CaseName{Case: name, Family: "ipv6"}}
	for round, row := range rounds {
		for pair := range slices.Chunk(row, 2) {
			costs := [2]workerCost{{Nanoseconds: pair[0]}, {Nanoseconds: pair[1]}}
			m.samples = append(m.samples, sample{round, costs})
		}
	}
	return m
}

func TestSummarizeComparison(t *testing.T) {
	null := sampled(caseNull,
		[]float64{10, 10, 20, 40, 60, 50}, []float64{100, 100}, []float64{30, 30})
	known := sampled(caseKnown, []float64{120, 140}, []float64{300, 200}, []float64{20, 30})
	known.programs = [2]programIdentity{{10, "p"}, {10, "q"}}
	results := summarizeComparison([]*comparedCase{null, known})
	if r := results[0]; r.NetRatio != nil || r.Ratio != (Spread{1, 50.0 / 60, 2}) || !r.SameProgram {
		t.Errorf("null: %+v", r)
	}
	r := results[1]
	if want := (Spread{140.0 / 120, 200.0 / 300, 1.5}); r.Ratio != want {
		t.Errorf("ratio is %v, want %v", r.Ratio, want)
	}
	// In the first round the host program's medians 20 and 40 are subtracted. The third round is
	// left out.
	if want := (Spread{0.5, 0.5, 1}); *r.NetRatio != want {
		t.Errorf("net ratio is %v, want %v", *r.NetRatio, want)
	}
	if r.Old.Median != 120 || r.New.Median != 140 || r.SameProgram || r.Old.Instructions != nil {
		t.Errorf("known flow: %+v", r)
	}
	for i := range known.samples {
		known.samples[i].costs[newBuild].Instructions = float64(100 + i)
	}
	if cost := known.costOf(newBuild); cost.Instructions == nil || *cost.Instructions != 101 {
		t.Errorf("instructions: %+v", cost)
	}
}

// If the host program always takes longer than the case, there is no net ratio. JSON could not
// represent it.
func TestNoNetRatio(t *testing.T) {
	null, miss := sampled(caseNull, []float64{10, 10}), sampled(caseMiss, []float64{10, 9})
	results := summarizeComparison([]*comparedCase{null, miss})
	if r := results[1]; r.NetRatio != nil || r.Ratio.Median != 0.9 {
		t.Errorf("%+v", r)
	}
}
