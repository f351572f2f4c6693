// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

const replaying = `
title: t
points: [0.5]
servers: 4
seeds: 2
connections: 100
work: "exponential: 100ms"
replay: {format: queries, match: 'n=([0-9]+)$'}
cases: [{name: sc, placement: hash}]
`

// authorsTrace writes requests in the format of the traces that HLB's authors publish: a header,
// and lines of time<TAB>/dummy.php/?n=ITERATIONS. The second hundred is ten times as fast, and has
// ten times the work.
func authorsTrace(t *testing.T, n int) string {
	t.Helper()
	var text strings.Builder
	text.WriteString("time\tquery\n")
	at := 0.11515061509231506
	for i := range n {
		work, gap := 1_000_000*(1+i%3), 0.01*float64(1+i%2)
		if i >= 100 {
			work, gap = 10*work, gap/10
		}
		at += gap
		fmt.Fprintf(&text, "%v\t/dummy.php/?n=%d\n", at, work)
	}
	path := filepath.Join(t.TempDir(), "rate_150.csv")
	testhost.Must(t, os.WriteFile(path, []byte(text.String()), 0o644))
	return path
}

// TestReplay checks that each seed has a part of the trace, at the experiment's rate and with its
// mean work. Gaps and works must have the same proportions as in the trace.
func TestReplay(t *testing.T) {
	s, err := parse(t, replaying).with(Options{}).replayed(authorsTrace(t, 200))
	testhost.Must(t, err)
	for _, p := range s.plan() {
		path := filepath.Join(t.TempDir(), arrivalsFile)
		testhost.Must(t, p.writeReplay(path))
		source, err := sim.Trace{
			File: path, Format: sim.TimedQueries, MustMatch: true,
			Classes: []sim.TraceClass{{Match: workOf, Sized: true}},
		}.Start(nil)
		testhost.Must(t, err)
		var at, work []float64
		for next, ok := source.Next(); ok; next, ok = source.Next() {
			at, work = append(at, next.At), append(work, next.Size)
		}
		if err := source.Close(); err != nil || len(at) != 100 {
			t.Fatalf("%d requests, error %v; want 100", len(at), err)
		}
		// 0.5 of eight processors do 40 requests of 100 ms in a second.
		if last := at[99]; math.Abs(last-2.5) > 1e-6 {
			t.Errorf("seed %d: the last of 100 requests is at %v s, want 2.5 s", p.seed, last)
		}
		if mean := sum(work) / 100; math.Abs(mean-100) > 0.01 {
			t.Errorf("seed %d: the mean work is %v ms, want 100 ms", p.seed, mean)
		}
		if gaps := (at[2] - at[1]) / (at[1] - at[0]); math.Abs(gaps-0.5) > 1e-6 && math.Abs(gaps-2) > 1e-6 {
			t.Errorf("seed %d: the second gap is %v of the first, want 2 or a half", p.seed, gaps)
		}
		want := map[uint64]float64{1: 2, 2: 1.5}[p.seed]
		if ratio := work[1] / work[0]; math.Abs(ratio-want) > 1e-4 {
			t.Errorf("seed %d: the second work is %v of the first, want %v", p.seed, ratio, want)
		}
	}
	if s.recorded.digest == "" || newResults(s, nil, false).Trace != s.recorded.digest {
		t.Error("the results do not name the trace")
	}
}

// TestReplayWithoutWork checks that the work is drawn if the trace does not have it, as with pages.
func TestReplayWithoutWork(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hour20.csv")
	var text strings.Builder
	for i := range 200 {
		fmt.Fprintf(&text, "%d\t/wiki/index.php/A\n", i)
	}
	testhost.Must(t, os.WriteFile(path, []byte(text.String()), 0o644))
	e := parse(t, strings.Replace(replaying, "n=([0-9]+)$", "^/wiki/", 1))
	s, err := e.with(Options{}).replayed(path)
	testhost.Must(t, err)
	_, size := s.part(1)
	_, other := s.part(2)
	if size[0] == size[1] || size[0] == other[0] || min(size[0], size[1]) <= 0 {
		t.Errorf("the work is not drawn: %v and %v", size[:2], other[0])
	}
}

// TestBadTraces refuses traces before anything is built.
func TestBadTraces(t *testing.T) {
	path := func(text string) string {
		path := filepath.Join(t.TempDir(), "trace")
		testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	same := strings.Repeat("1\t/?n=1\n", 200)
	for name, c := range map[string]struct{ experiment, trace, want string }{
		"none":         {replaying, "", "a file with the requests is required"},
		"not needed":   {twoCases, "x", "the experiment replays no trace"},
		"missing":      {replaying, "/nonexistent", "no such file"},
		"too short":    {replaying, authorsTrace(t, 150), "has 150 requests, and 2 seeds of 100 requests need 200"},
		"other query":  {replaying, path("1\t/index.html\n"), `:1: "1\t/index.html": the query matches no job`},
		"at one time":  {replaying, path(same), "requests 1 to 100 are all at the same time"},
		"without work": {replaying, path(strings.ReplaceAll(same, "n=1", "n=0")), "or without work"},
	} {
		_, err := parse(t, c.experiment).with(Options{}).replayed(c.trace)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", name, err, c.want)
		}
	}
}
