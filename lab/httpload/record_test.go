// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// replay simulates a recorded file with one server that has a processor for each flow. So a flow's
// time is its work.
func replay(t *testing.T, file string) *scenario.CaseReport {
	t.Helper()
	text := fmt.Sprintf(`servers: [{count: 1, cpus: 1000}]
placement: least-queue
runs: 1
arrivals: {queries: {file: %s}}
jobs: [{match: 'work=([0-9.]+)ms', captured: {factor: 1ms}}]
`, file)
	s, err := scenario.Parse([]byte(text), filepath.Dir(file))
	testhost.Must(t, err)
	report, err := s.Run(t.Context(), 1, nil)
	testhost.Must(t, err)
	return &report.Cases[0]
}

// TestRecord: the simulator replays exactly the requests that the server saw.
func TestRecord(t *testing.T) {
	const n = 200
	file := filepath.Join(t.TempDir(), "recorded.tsv")
	record, err := os.Create(file)
	testhost.Must(t, err)
	var mu sync.Mutex
	total, seen := time.Duration(0), 0
	c := config(t, listen(t, func(conn net.Conn, r *http.Request) {
		work, err := time.ParseDuration(r.URL.Query().Get("work"))
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			t.Error(err)
		}
		total += work
		seen++
		conn.Write([]byte(answer))
	})+"/?work={demand}", n)
	demand := sim.Exponential(0.19)
	c.Arrivals, c.Demand, c.Record = sim.Poisson{Rate: 2000}, &demand, record
	_, log := runLogged(t, c)
	testhost.Must(t, record.Close())
	simulated := replay(t, file)
	mu.Lock()
	defer mu.Unlock()
	if mean := total.Seconds() / n; seen != n || simulated.Flows != n ||
		math.Abs(float64(simulated.Mean.Value)-mean) > 1e-6 {
		t.Errorf("the server saw %d requests of %v s on average, the simulator %d of %v s",
			seen, mean, simulated.Flows, simulated.Mean.Value)
	}
	// The times are those at which the requests were due.
	text, err := os.ReadFile(file)
	testhost.Must(t, err)
	recorded := map[string]float64{}
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n")[1:] {
		at, query, _ := strings.Cut(line, "\t")
		if recorded[query], err = strconv.ParseFloat(at, 64); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range log {
		if at, found := recorded[l.query]; !found || math.Abs(at-l.time) > 1e-9 {
			t.Errorf("%s was due at %v s, and is recorded at %v s", l.query, l.time, at)
		}
	}
}

// TestReplayOfRecord: a recorded file is a trace for the generator, too.
func TestReplayOfRecord(t *testing.T) {
	url := listen(t, respond(answer))
	demand := sim.Exponential(0.19)
	var first, second bytes.Buffer
	c := config(t, url+"/?work={demand}", 50)
	c.Arrivals, c.Demand, c.Record = Constant{Rate: 2000}, &demand, &first
	run(t, c)
	c = config(t, url, 0)
	c.Arrivals, c.Record = Trace(write(t, "trace", first.String()), sim.TimedQueries, 1), &second
	run(t, c)
	if first.String() != second.String() {
		t.Errorf("recorded:\n%sreplayed:\n%s", &first, &second)
	}
}

// TestScale: if a run is faster than real time, its files have emulated times, and the report has
// times by the clock.
func TestScale(t *testing.T) {
	var record bytes.Buffer
	c := config(t, listen(t, respond(answer)), 3)
	c.Arrivals, c.Record, c.Scale = Constant{Rate: 100}, &record, 4
	report, log := runLogged(t, c)
	want := "time\tquery\n0.000000000\t/\n0.040000000\t/\n0.080000000\t/\n"
	if record.String() != want {
		t.Errorf("recorded:\n%s\nwant:\n%s", &record, want)
	}
	latency, exchange := 0.0, 0.0
	for _, line := range log {
		latency += line.latency / 3
		exchange += line.exchange / 3
	}
	// The histograms of the report have three digits.
	if ratio := latency / report.Latency.Mean; math.Abs(ratio-4) > 0.01 {
		t.Errorf("latencies in the log are %v times those of the report, want 4", ratio)
	}
	if ratio := exchange / report.Exchange.Mean; math.Abs(ratio-4) > 0.01 {
		t.Errorf("exchanges in the log are %v times those of the report, want 4", ratio)
	}
	slices.SortFunc(log, func(a, b logged) int { return cmp.Compare(a.time, b.time) })
	if log[2].time != 0.08 {
		t.Errorf("the last request is due at %v s in the log, want 0.08 s", log[2].time)
	}
}
