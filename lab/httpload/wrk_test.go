// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// wrkResult is what wrk reports.
type wrkResult struct {
	rate float64 // requests per second
	p50  float64 // seconds
}

var (
	wrkRate = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	wrkP50  = regexp.MustCompile(`50%\s+([0-9.]+[mu]?s)`)
)

// runWrk has wrk, a generator in a closed loop, send requests for a second: each connection sends
// the next one when the one before has been answered.
func runWrk(t *testing.T, url string, connections int) (result wrkResult) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "wrk", "-t1", "-c"+strconv.Itoa(connections), "-d1s",
		"--latency", url).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("needs wrk")
	}
	rate, p50 := wrkRate.FindSubmatch(out), wrkP50.FindSubmatch(out)
	if err != nil || rate == nil || p50 == nil {
		t.Fatalf("wrk: %v\n%s", err, out)
	}
	median, err := time.ParseDuration(string(p50[1]))
	testhost.Must(t, err)
	result.p50 = median.Seconds()
	if result.rate, err = strconv.ParseFloat(string(rate[1]), 64); err != nil {
		t.Fatal(err)
	}
	return result
}

// TestAgreesWithWrk measures a server that takes 200 ms for each request, whatever the load: both
// generators report the same median at the same rate. On a busy machine, a request waits some
// milliseconds for a core, which is much less than 200 ms. The machine may stand still in one of the
// two runs, so that they are repeated if they differ.
func TestAgreesWithWrk(t *testing.T) {
	const service, attempts = 200 * time.Millisecond, 5
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		time.Sleep(service)
	}))
	defer server.Close()
	for range attempts {
		wrk := runWrk(t, server.URL, 10)
		c := config(t, server.URL, 0)
		c.Arrivals, c.Duration, c.KeepAlive = Constant{Rate: wrk.rate}, time.Second, true
		report := run(t, c)
		t.Logf("%.1f/s, median %.2f ms; wrk: %.1f/s, %.2f ms",
			report.Rate, 1e3*report.Latency.P50, wrk.rate, 1e3*wrk.p50)
		if wrk.p50 < service.Seconds() || report.Latency.P50 < service.Seconds() {
			t.Fatalf("medians of %v s and %v s, and the server takes %v", wrk.p50, report.Latency.P50,
				service)
		}
		if math.Abs(report.Latency.P50-wrk.p50) < 0.1*wrk.p50 &&
			report.Succeeded == report.Requests {
			return
		}
	}
	t.Errorf("medians differed in %d attempts", attempts)
}

// TestDiffersFromWrkUnderOverload: a server that takes 5 ms for one request after the other answers
// 200 a second at most. At 300 a second, the queue grows without end, and so does the latency. wrk
// never has more requests under way than connections, so that it sends fewer, and reports the time
// that its own ten connections need.
func TestDiffersFromWrkUnderOverload(t *testing.T) {
	const service, rate, n = 5 * time.Millisecond, 300, 450
	var worker sync.Mutex
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		worker.Lock()
		defer worker.Unlock()
		time.Sleep(service)
	}))
	defer server.Close()
	wrk := runWrk(t, server.URL, 10)
	c := config(t, server.URL, n)
	c.Arrivals = Constant{Rate: rate}
	report := run(t, c)
	t.Logf("%.1f/s, median %.0f ms, max %.0f ms; wrk: %.1f/s, median %.0f ms", report.Rate,
		1e3*report.Latency.P50, 1e3*report.Latency.Max, wrk.rate, 1e3*wrk.p50)
	if wrk.rate > 1/service.Seconds() {
		t.Errorf("the server answered %v requests of wrk per second", wrk.rate)
	}
	// The last request is due at 1.497 s, and the server needs 2.25 s for all.
	if least := n*service.Seconds() - (n-1.0)/rate; report.Latency.Max < least {
		t.Errorf("the largest latency is %v s, want at least %v s", report.Latency.Max, least)
	}
	if report.Latency.P50 < 2*wrk.p50 {
		t.Errorf("the median is %v s, and %v s with wrk", report.Latency.P50, wrk.p50)
	}
}
