// SPDX-License-Identifier: Apache-2.0

package application

import (
	"errors"
	"math"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// table loads a table with this text. Errors begin behind the name of the file.
func table(t *testing.T, text string) (*Table, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "demands.tsv")
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
	loaded, err := LoadTable(path)
	if err != nil {
		err = errors.New(strings.TrimPrefix(err.Error(), path))
	}
	return loaded, err
}

func TestWorkOfRequests(t *testing.T) {
	queries, err := table(t, "query\twork\n"+
		"/wiki/A?x=1\t150ms\n/wiki/B\t1.5s\n/wiki/C\t0s\n/wiki/B\t1.5s\n")
	testhost.Must(t, err)
	constant := sim.Constant(0.25)
	none, byTable := Demand{}, Demand{Table: queries}
	drawn, both := Demand{Drawn: &constant}, Demand{Table: queries, Drawn: &constant}
	for _, test := range []struct {
		demand Demand
		target string
		want   float64
		err    string
	}{
		{none, "/", 0, ""},
		{none, "/?work=190ms", 0.19, ""},
		{none, "/page?user=1&work=2s", 2, ""},
		{none, "/?homework=190ms", 0, ""},
		{none, "/?work=1h", 3600, ""},
		{none, "/?work=1h1s", 0, `work "1h1s": must be a duration from 0s to 1h0m0s, such as 190ms`},
		{none, "/?work=-1s", 0, `work "-1s": must be a duration from 0s to 1h0m0s, such as 190ms`},
		{none, "/?work=3", 0, `work "3": must be a duration from 0s to 1h0m0s, such as 190ms`},
		{byTable, "/wiki/A?x=1", 0.15, ""},
		{byTable, "/wiki/B", 1.5, ""},
		{byTable, "/wiki/C", 0, ""},
		{byTable, "/wiki/A", 0, errUnknownQuery.Error()},
		{byTable, "/wiki/A?work=1s", 1, ""},
		{drawn, "/wiki/A?x=1", 0.25, ""},
		{both, "/wiki/A?x=1", 0.15, ""},
		{both, "/wiki/A", 0.25, ""},
	} {
		got, err := newDrawer(test.demand, "s1").work(httptest.NewRequest("GET", test.target, nil))
		text := ""
		if err != nil {
			text = err.Error()
		}
		if got != test.want || text != test.err {
			t.Errorf("%s: %v, %q; want %v, %q", test.target, got, text, test.want, test.err)
		}
	}
}

func TestTableErrors(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"/a 5ms\n", `: line 1: "/a 5ms": must be query<TAB>work, with a query that begins with /`},
		{"query\twork\nindex.html\t5ms\n",
			`: line 2: "index.html\t5ms": must be query<TAB>work, with a query that begins with /`},
		{"/a\t5ms\n/b\t5\n", `: line 2: work "5": must be a duration from 0s to 1h0m0s, such as 190ms`},
		{"/a\t5ms\n/b\tnone\n",
			`: line 2: work "none": must be a duration from 0s to 1h0m0s, such as 190ms`},
		{"/a\t5ms\n/b\t1ms\n/a\t6ms\n", ": a query has two different works, 5ms and 6ms"},
	} {
		if _, err := table(t, test.text); err == nil || err.Error() != test.want {
			t.Errorf("%q: %v, want %q", test.text, err, test.want)
		}
	}
}

// TestDrawnWork draws from a distribution. Servers with the same seed draw different numbers; the
// same server draws the same again.
func TestDrawnWork(t *testing.T) {
	exponential := sim.Exponential(0.19)
	draw := func(seed uint64, server string) (all []float64) {
		d := newDrawer(Demand{Drawn: &exponential, Seed: seed}, server)
		for range 20_000 {
			work, err := d.work(httptest.NewRequest("GET", "/", nil))
			testhost.Must(t, err)
			all = append(all, work)
		}
		return all
	}
	s1 := draw(1, "s1")
	sum := 0.0
	for _, x := range s1 {
		sum += x
	}
	// Six standard deviations of the mean.
	if mean := sum / float64(len(s1)); math.Abs(mean-0.19) > 6*0.19/math.Sqrt(float64(len(s1))) {
		t.Errorf("the mean is %v, want 0.19", mean)
	}
	if diff := cmp.Diff(s1, draw(1, "s1")); diff != "" {
		t.Error("the same seed and server draw other numbers")
	}
	if s1[0] == draw(1, "s2")[0] || s1[0] == draw(2, "s1")[0] {
		t.Error("another server, or another seed, draws the same numbers")
	}
}

func TestParseSchedule(t *testing.T) {
	for _, test := range []struct {
		text string
		want Schedule
		err  string
	}{
		{"", nil, ""},
		{"50%@60s", Schedule{{time.Minute, 0.5}}, ""},
		{"12.5%@0s,0%@2m", Schedule{{0, 0.125}, {2 * time.Minute, 0}}, ""},
		{"50%", nil, `"50%": ` + scheduleForm},
		{"0.5@60s", nil, `"0.5@60s": ` + scheduleForm},
		{"100%@60s", nil, `"100%@60s": ` + scheduleForm},
		{"NaN%@60s", nil, `"NaN%@60s": ` + scheduleForm},
		{"-1%@60s", nil, `"-1%@60s": ` + scheduleForm},
		{"50%@60", nil, `"50%@60": ` + scheduleForm},
		{"50%@-1s", nil, `"50%@-1s": ` + scheduleForm},
		{"50%@60s,", nil, `"": ` + scheduleForm},
		{"50%@60s,0%@60s", nil, `"0%@60s": the time must be after 1m0s, the time before it`},
	} {
		got, err := ParseSchedule(test.text)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if diff := cmp.Diff(test.want, got); diff != "" || text != test.err {
			t.Errorf("%q: %v, %q; want %v, %q", test.text, got, text, test.want, test.err)
		}
	}
}

func TestScheduleString(t *testing.T) {
	for _, want := range []string{"", "50%@1m0s", "12.5%@0s,7%@1.5s,0%@2m0s"} {
		schedule, err := ParseSchedule(want)
		testhost.Must(t, err)
		if got := schedule.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
