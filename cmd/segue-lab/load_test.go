// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab/httpload"
)

// generate runs segue-lab load with the arguments.
func generate(t *testing.T, args ...string) (output, messages string, err error) {
	t.Helper()
	var out, progress bytes.Buffer
	cmd := newRoot()
	cmd.SetArgs(append([]string{"load"}, args...))
	cmd.SetOut(&out)
	cmd.SetErr(&progress)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), progress.String(), err
}

// webServer starts an HTTP server that calls itself s1. Its answer to /busy is status 503.
func webServer(t *testing.T) (url string) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Segue-Server", "s1")
		if r.URL.Path == "/busy" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprintln(w, "hello from", r.Host)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestLoadText(t *testing.T) {
	url := webServer(t)
	out, messages, err := generate(t, "--rate", "500", "--requests", "600", "--every", "500ms",
		"--idle", "3", "--progress", "--keep-alive", url+"/", url+"/busy")
	testhost.Must(t, err)
	for _, want := range []string{
		regexp.QuoteMeta(url+"/ "+url+"/busy") + `: 600 requests in \d\.\d s \(\d+\.\d/s\), seed 1`,
		`ms +mean +deviation +min +p50 +p90 +p95 +p99 +p99\.9 +max`,
		`latency( +[0-9.]+){9}`, `exchange( +[0-9.]+){9}`, `connect( +[0-9.]+){9}`,
		`lateness( +[0-9.]+){9}`,
		`outcome +requests +share`, `succeeded +[23]\d\d +\d\d\.\d\d%`,
		`wrong-status +[23]\d\d +\d\d\.\d\d% +first: /busy: status 503`,
		`server +responses +share +failed +mean ms +p50 +p99`, `s1 +600 +100\.0% +[23]\d\d( +[0-9.]+){3}`,
		`from s +to s +requests/s +failed +mean ms +p50 +p90 +p99 +max`,
		`0 +0\.5 +\d+\.0 +\d+( +[0-9.]+){5}`,
		`\d+ connections? for requests, \d\.\d MB received, generator used \d+% of a core`,
		`idle connections: 3 open at the end, 0 failed, 0 lost`,
	} {
		if !regexp.MustCompile(`(?m)^ *` + want + `$`).MatchString(out) {
			t.Errorf("no line is %s in\n%s", want, out)
		}
	}
	progress := regexp.MustCompile(`\d+ s: \d+ requests, \d+/s, \d+ failed, \d+ connections?, p50 `)
	if !progress.MatchString(messages) {
		t.Errorf("progress %q", messages)
	}
}

// TestUnfinishedHaveNoShare checks that shares are shares of the requests with an outcome.
func TestUnfinishedHaveNoShare(t *testing.T) {
	var out bytes.Buffer
	testhost.Must(t, printOutcomes(&out, &httpload.Report{Requests: 10, Succeeded: 9, Unfinished: 1}))
	const want = "outcome     requests  share\nsucceeded   9         100.00%\nunfinished  1         -\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
}

func TestLoadJSON(t *testing.T) {
	url := webServer(t)
	log := filepath.Join(t.TempDir(), "log.csv")
	out, _, err := generate(t, "--rate", "1000", "--arrivals", "constant", "--duration", "100ms",
		"--seed", "7", "--demand", "constant: 5ms", "--expect-body", "^hello from example.com\n$",
		"-H", "Host: example.com",
		"--log", log, "--json", url+"/?work={demand}")
	testhost.Must(t, err)
	var r httpload.Report
	testhost.Must(t, json.Unmarshal([]byte(out), &r))
	if r.Requests != 100 || r.Succeeded != 100 || r.Seed != 7 || r.Seconds != 0.1 || r.Rate != 1000 ||
		len(r.Servers) != 1 || r.Servers[0].Name != "s1" || r.Servers[0].Responses != 100 {
		t.Errorf("%s", out)
	}
	last := r.Distribution[len(r.Distribution)-1]
	if last.Share != 1 || last.Seconds < r.Latency.P999 {
		t.Errorf("the distribution ends with %+v", last)
	}
	text, err := os.ReadFile(log)
	const header = "time,query,server,outcome,latency,exchange\n"
	if err != nil || !strings.HasPrefix(string(text), header) ||
		strings.Count(string(text), ",/?work=5ms,s1,succeeded,0.") != 100 {
		t.Errorf("log, error %v:\n%s", err, text)
	}
}

func TestLoadCSV(t *testing.T) {
	url := webServer(t)
	for _, test := range []struct {
		args  []string
		lines int
	}{
		{nil, 2}, {[]string{"--every", "50ms"}, 3},
	} {
		args := append([]string{"--rate", "1000", "--duration", "100ms", "--csv", url}, test.args...)
		out, _, err := generate(t, args...)
		testhost.Must(t, err)
		// The reader requires that all lines have equally many fields.
		lines, err := csv.NewReader(strings.NewReader(out)).ReadAll()
		if err != nil || len(lines) != test.lines {
			t.Errorf("%v, error %v:\n%s", args, err, out)
		}
	}
}

// TestLoadRecord checks that equal seeds record equal files, and that segue-lab sim can read them.
func TestLoadRecord(t *testing.T) {
	url := webServer(t)
	dir := t.TempDir()
	record := func(name string) string {
		file := filepath.Join(dir, name)
		_, _, err := generate(t, "--rate", "2000", "--requests", "100", "--demand", "exponential: 190ms",
			"--record", file, url+"/?work={demand}")
		testhost.Must(t, err)
		text, err := os.ReadFile(file)
		testhost.Must(t, err)
		return string(text)
	}
	if one, two := record("one.tsv"), record("two.tsv"); one != two {
		t.Errorf("two runs recorded\n%s\n%s", one, two)
	}
	scenario := filepath.Join(dir, "recorded.yaml")
	text := "servers: [{count: 12, cpus: 2}]\nplacement: least-queue\nruns: 1\n" +
		"arrivals: {queries: {file: one.tsv}}\n" +
		"jobs: [{match: 'work=([0-9.]+)ms', captured: {factor: 1ms}}]\n"
	testhost.Must(t, os.WriteFile(scenario, []byte(text), 0o644))
	out, err := simulate(t, "--csv", scenario)
	if err != nil || !strings.Contains(out.String(), "recorded,result,1,1,100,") {
		t.Errorf("error %v:\n%s", err, out)
	}
}

func TestLoadTrace(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace")
	const lines = "1 10.0 http://a/busy -\n2 10.1 http://a/b -\n"
	testhost.Must(t, os.WriteFile(trace, []byte(lines), 0o644))
	out, _, err := generate(t, "--trace", trace, "--format", "wikibench", "--speed", "10",
		webServer(t))
	if err != nil || !strings.Contains(out, ": 2 requests in 0.0 s") ||
		!strings.Contains(out, "first: /busy: status 503") {
		t.Errorf("error %v:\n%s", err, out)
	}
}

// TestLoadFails checks that the command fails after its report if no request succeeds.
func TestLoadFails(t *testing.T) {
	out, _, err := generate(t, "--rate", "1000", "--requests", "5", webServer(t)+"/busy")
	if err == nil || err.Error() != "no request succeeded" ||
		!strings.Contains(out, "wrong-status  5") {
		t.Errorf("error %v:\n%s", err, out)
	}
}

func TestLoadErrors(t *testing.T) {
	const url = "http://127.0.0.1:9/"
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace")
	testhost.Must(t, os.WriteFile(trace, []byte("0\tx\n"), 0o644))
	for args, want := range map[string]string{
		url:                                 "load: missing --rate or --trace",
		"--rate 0 " + url:                   "--rate 0: must be more than 0",
		"--rate NaN " + url:                 "--rate NaN: must be more than 0",
		"--rate 1 --timeout 0 " + url:       "--timeout 0s: must be more than 0",
		"--rate 1 --duration 0 " + url:      "--duration 0s: must be more than 0",
		"--rate 1 --warmup 10s " + url:      "--warmup 10s: must be less than the duration of 10s",
		"--rate 1 --every 1us " + url:       "--every 1µs: must be at least 1ms",
		"--rate 1 --idle -1 " + url:         "--idle -1: must not be negative",
		"--rate 1 --arrivals bursts " + url: `--arrivals "bursts": must be poisson or constant`,
		"--rate 1 --arrivals constant --curve sine:1 " + url: "--curve: needs --arrivals poisson",
		"--rate 1 --curve sine:2 " + url:                     `--curve "sine:2": the amplitude must be a number above 0, and at most 1`,
		"--rate 1 --curve sine:1 --start 25 " + url:          `--start: time "25": must be a time of day, such as 06:30`,
		"--rate 1 --curve " + dir + "/none " + url: "--curve: open " + dir +
			"/none: no such file or directory",
		"--rate 1 --demand exponential:1s " + url: `--demand "exponential:1s": ` +
			`must be a mapping of field names to values, such as "exponential: 190ms"`,
		"--rate 1 --expect-status 99 " + url:         "--expect-status 99: must be from 200 to 599",
		"--rate 1 --expect-body ( " + url:            `--expect-body "(": must be a regular expression: missing closing ): (`,
		"--rate 1 --source x " + url:                 `--source "x": must be an address or a prefix, such as 2001:db8:c::100/120`,
		"--rate 1 ftp://x":                           `URL "ftp://x": must begin with http://`,
		"--rate 1 --demand {\"constant\":1s} " + url: `URL "` + url + `": must contain {demand} or {demand-us}, because a distribution of it is given`,
		"--rate 1 --record " + dir + "/a/b " + url:   "open " + dir + "/a/b: no such file or directory",
		"--trace " + trace + " " + url:               "--trace: " + trace + `:1: "0\tx": the query must be a URL, or begin with /`,
		"--trace " + trace + " --speed 0 " + url:     "--speed 0: must be more than 0",
		"--trace " + trace + " --format x " + url:    `--format "x": must be queries or wikibench`,
		"--trace " + trace + " --rate 1 " + url:      "--rate: not allowed with --trace, which has times and queries",
		"--rate 1 --speed 2 " + url:                  "--speed: needs --trace",
		"--rate 1 --day 1m " + url:                   "--day: needs --curve",
	} {
		if _, _, err := generate(t, strings.Fields(args)...); err == nil || err.Error() != want {
			t.Errorf("segue-lab load %s\n got %v\nwant %s", args, err, want)
		}
	}
}
