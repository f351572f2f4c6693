// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"compress/gzip"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// arrivals returns the arrivals of a trace.
func arrivals(t *testing.T, trace sim.Trace) (all []sim.Arrival, err error) {
	t.Helper()
	source, err := trace.Start(nil)
	testhost.Must(t, err)
	for {
		next, ok := source.Next()
		if !ok {
			return all, source.Close()
		}
		all = append(all, next)
	}
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

const (
	wikibench = "10 1194892290.000 http://en.wikipedia.org/wiki/A -\n" +
		"11 1194892290.500 http://en.wikipedia.org/skins/main.css -\n" +
		"12 1194892290.250 http://en.wikipedia.org/wiki/B save\n" +
		"13 1194892292.000 http://upload.wikimedia.org/x.png -\n"
	dated = "1 2010-05-27T23:59:59.5 http://en.m.wikipedia.org/wiki/A -\n" +
		"2 2010-05-28T00:00:00 http://en.wikipedia.org/skins/main.css -\n" +
		"3 2010-05-27T23:59:59.75 http://en.wikipedia.org/wiki/B save\n" +
		"4 2010-05-28T00:00:01.50 http://upload.wikimedia.org/x.png -\n"
	queries = "3.5\t/wiki/A\n4.0\t/skins/main.css\n3.75\t/wiki/B\n5.5\t/x.png\n"
)

func TestTraces(t *testing.T) {
	classes := []sim.TraceClass{
		{Match: regexp.MustCompile("/wiki/")}, {}, {Match: regexp.MustCompile("[.]png$")},
	}
	const header = "time\tquery\n"
	compressed := filepath.Join(t.TempDir(), "trace.gz")
	file, err := os.Create(compressed)
	testhost.Must(t, err)
	z := gzip.NewWriter(file)
	for _, err := range []error{second(z.Write([]byte(queries))), z.Close(), file.Close()} {
		testhost.Must(t, err)
	}
	for name, test := range map[string]struct {
		format sim.TraceFormat
		text   string
	}{
		"wikibench":              {sim.Wikibench, wikibench},
		"wikibench, header":      {sim.Wikibench, "counter epoch url save\n" + wikibench},
		"wikibench, dates":       {sim.Wikibench, dated},
		"queries":                {sim.TimedQueries, queries},
		"queries, header":        {sim.TimedQueries, header + queries},
		"queries, DOS's newline": {sim.TimedQueries, strings.ReplaceAll(header+queries, "\n", "\r\n")},
		"compressed":             {sim.TimedQueries, ""},
	} {
		trace := sim.Trace{File: compressed, Format: test.format}
		if test.text != "" {
			trace.File = write(t, "trace", test.text)
		}
		t.Run(name, func(t *testing.T) {
			trace.Speed, trace.Classes = 2, classes
			got, err := arrivals(t, trace)
			testhost.Must(t, err)
			paths := []string{"/wiki/A", "/skins/main.css", "/wiki/B", "/x.png"}
			for i := range got {
				if !strings.HasSuffix(got[i].Query, paths[i]) {
					t.Errorf("query %q, want one that ends with %s", got[i].Query, paths[i])
				}
				got[i].Query = ""
			}
			want := []sim.Arrival{
				{At: 0, Class: 0}, {At: 0.25, Class: -1}, {At: 0.25, Class: 0}, {At: 1, Class: 2},
			}
			near := cmpopts.EquateApprox(0, 1e-6)
			if diff := cmp.Diff(want, got, near); diff != "" {
				t.Errorf("arrivals (-want +got):\n%s", diff)
			}
			extent, err := trace.Extent()
			total := sim.Extent{
				Seconds: 2, Matched: []uint64{2, 0, 1}, Sizes: []float64{0, 0, 0}, Drawn: 1,
			}
			if diff := cmp.Diff(total, extent, near); diff != "" || err != nil {
				t.Errorf("extent, error %v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

// sized matches the queries of HLB, which contain the number of iterations of a loop.
var sized = sim.TraceClass{Match: regexp.MustCompile(`^/dummy[.]php/[?]n=(.*)$`), Sized: true}

// TestSizes checks the work of a flow: in each stage, the number in its query times a factor, plus
// the work that the stage has for all flows.
func TestSizes(t *testing.T) {
	c := constantly(1, sim.FIFO)
	c.Jobs = []sim.Job{
		{Stages: []sim.Stage{{PerUnit: 0.5}, {Queue: sim.IO, PerUnit: 0.25, Work: sim.Constant(2)}}},
		{Share: 1, Stages: []sim.Stage{{Work: sim.Constant(3)}}},
	}
	const lines = "time\tquery\n0\t/dummy.php/?n=4\n100\t/other\n200\t/dummy.php/?n=1.6e1\n" +
		"300\t/dummy.php/?n=0\n"
	trace := sim.Trace{
		File: write(t, "trace", lines), Format: sim.TimedQueries, Classes: []sim.TraceClass{sized, {}},
	}
	c.Arrivals = trace
	all, _ := flows(t, c)
	var got []float64
	for _, f := range all {
		got = append(got, f.Response)
	}
	times := []float64{2 + 1 + 2, 3, 8 + 4 + 2, 2}
	if diff := cmp.Diff(times, got, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Errorf("response times (-want +got):\n%s", diff)
	}
	extent, err := trace.Extent()
	want := sim.Extent{Seconds: 300, Matched: []uint64{3, 0}, Sizes: []float64{20, 0}, Drawn: 1}
	if diff := cmp.Diff(want, extent); diff != "" || err != nil {
		t.Errorf("extent, error %v (-want +got):\n%s", err, diff)
	}
	if work := c.Jobs[0].Work(20); work != 10 {
		t.Errorf("work of the size 20: %v s at the processors, want 10", work)
	}
}

// TestSizesOfManyFlows checks that each flow has its own size when many flows are under way.
func TestSizesOfManyFlows(t *testing.T) {
	for _, discipline := range []sim.Discipline{sim.FIFO, sim.ProcessorSharing} {
		var text strings.Builder
		want := 0.0
		for i := range 1000 {
			n := 1 + i*7919%100
			fmt.Fprintf(&text, "%g\t/dummy.php/?n=%d\n", float64(i)/10, n)
			want += float64(n) / 1000
		}
		c := constantly(1, discipline)
		c.Jobs = []sim.Job{{Stages: []sim.Stage{{PerUnit: 0.001}}}}
		c.Arrivals = sim.Trace{
			File: write(t, "trace", text.String()), Format: sim.TimedQueries,
			Classes: []sim.TraceClass{sized}, MustMatch: true,
		}
		_, r := flows(t, c)
		// All flows arrive within 99.9 s. Meanwhile the server completes their work.
		if got := r.Utilisation * r.LastArrival; math.Abs(got-want) > 0.1 {
			t.Errorf("discipline %d: busy for %.3f s, want %.3f", discipline, got, want)
		}
	}
}

// TestSizesAreNeeded checks that a configuration whose work depends on sizes is refused if some
// flows would have no size.
func TestSizesAreNeeded(t *testing.T) {
	trace := sim.Trace{
		File: write(t, "trace", queries), Format: sim.TimedQueries,
		Classes: []sim.TraceClass{sized}, MustMatch: true,
	}
	unsized, noGroup := trace, trace
	unsized.Classes = []sim.TraceClass{{Match: sized.Match}}
	noGroup.Classes = []sim.TraceClass{{Match: regexp.MustCompile("n="), Sized: true}}
	const problem = `job "": work by the size: needs a trace that tells sizes, and the share 0`
	for _, test := range []struct {
		arrivals sim.Arrivals
		share    float64
	}{{sim.Poisson{Rate: 1}, 1}, {trace, 1}, {unsized, 0}, {noGroup, 0}} {
		c := constantly(1, sim.FIFO)
		c.Arrivals = test.arrivals
		c.Jobs = []sim.Job{{Share: test.share, Stages: []sim.Stage{{PerUnit: 0.5}}}}
		if err := c.Validate(); err == nil || err.Error() != problem {
			t.Errorf("%+v, share %v: %v, want %s", test.arrivals, test.share, err, problem)
		}
	}
}

func TestBadTraces(t *testing.T) {
	const (
		badTime   = "must be seconds, or such as 2010-05-27T09:31:55.63"
		badNumber = "must be a number, 0 or more"
		ok        = "1.0\t/a\n"
		dummy     = "1.0\t/dummy.php/?n="
		queries   = sim.TimedQueries
	)
	long := "x\t" + strings.Repeat("b", 1<<10)
	for _, test := range []struct {
		format        sim.TraceFormat
		text, problem string
	}{
		{queries, ok + "2.0 /b\n", `:2: "2.0 /b": must be time<TAB>query`},
		{queries, "time query\n1.0\t/a\n", `:1: "time query": must be time<TAB>query`},
		{queries, ok + "x\t/b\n", `:2: "x\t/b": time "x": ` + badTime},
		{queries, "time\tquery\ntime\tagain\n", `:2: "time\tagain": time "time": ` + badTime},
		{queries, "x1.0\t/a\n", `:1: "x1.0\t/a": time "x1.0": ` + badTime},
		{queries, "-\t/a\n", `:1: "-\t/a": time "-": ` + badTime},
		{queries, "nan\t/a\n", `:1: "nan\t/a": time "nan": ` + badTime},
		{queries, ok + "inf\t/b\n", `:2: "inf\t/b": time "inf": ` + badTime},
		{queries, ok + strings.Repeat("b", 1<<21), `:2: bufio.Scanner: token too long`},
		{queries, ok + long, `:2: ` + strconv.Quote(long[:200]) + `: time "x": ` + badTime},
		{sim.Wikibench, "1 1.0 /a -\n2 2.0\n",
			`:2: "2 2.0": must be counter, time and URL, with blanks between`},
		{sim.Wikibench, "1 1.0 /a -\n2 2010-05-27T09:31:65 /b -\n",
			`:2: "2 2010-05-27T09:31:65 /b -": time "2010-05-27T09:31:65": ` + badTime},
		{queries, "time\tquery\n" + dummy + "x\n", `:2: "1.0\t/dummy.php/?n=x": captured "x": ` + badNumber},
		{queries, dummy + "-1\n", `:1: "1.0\t/dummy.php/?n=-1": captured "-1": ` + badNumber},
		{queries, dummy + "nan\n", `:1: "1.0\t/dummy.php/?n=nan": captured "nan": ` + badNumber},
		{queries, dummy + "1e999\n", `:1: "1.0\t/dummy.php/?n=1e999": captured "1e999": ` + badNumber},
		{queries, dummy + "1\n2.0\t/b\n", `:2: "2.0\t/b": the query matches no job`},
	} {
		trace := sim.Trace{
			File: write(t, "trace", test.text), Format: test.format,
			Classes: []sim.TraceClass{sized, {Match: regexp.MustCompile("^/a")}}, MustMatch: true,
		}
		if _, err := arrivals(t, trace); err == nil || err.Error() != trace.File+test.problem {
			t.Errorf("error %v\n want ...%s", err, test.problem)
		}
		if _, err := trace.Extent(); err == nil || err.Error() != trace.File+test.problem {
			t.Errorf("Extent: error %v\n want ...%s", err, test.problem)
		}
		c := constantly(1, sim.FIFO)
		c.Arrivals = trace
		c.Jobs = []sim.Job{
			{Stages: []sim.Stage{{PerUnit: 1e-9}}}, {Stages: []sim.Stage{{Work: sim.Constant(1)}}},
		}
		_, err := sim.Run(t.Context(), c, sim.Options{Runs: 1})
		if err == nil || !strings.Contains(err.Error(), test.problem) {
			t.Errorf("a run: error %v\n want ...%s", err, test.problem)
		}
	}
}

func TestCurves(t *testing.T) {
	points := sim.Points{{At: 10, Factor: 1}, {At: 20, Factor: 3}, {At: 20, Factor: 0.5}, {At: 40, Factor: 0.5}}
	for at, want := range map[float64]float64{0: 1, 10: 1, 15: 2, 20: 0.5, 30: 0.5, 100: 0.5} {
		if got := points.Factor(at); got != want {
			t.Errorf("factor at %v: got %v, want %v", at, got, want)
		}
	}
	if points.Max() != 3 {
		t.Errorf("Max: got %v, want 3", points.Max())
	}
	day := sim.Diurnal{Period: 100, Amplitude: 0.5, Phase: 25}
	for at, want := range map[float64]float64{0: 1.5, 25: 1, 50: 0.5, 100: 1.5} {
		if got := day.Factor(at); math.Abs(got-want) > 1e-9 {
			t.Errorf("factor at %v: got %v, want %v", at, got, want)
		}
	}
}

// TestArrivalsFollowTheCurve checks that a curve changes the mean number of arrivals over time.
func TestArrivalsFollowTheCurve(t *testing.T) {
	c := one(1, sim.FIFO, 0.1, sim.Constant(0.0001))
	c.Arrivals = sim.Poisson{Rate: 100, Curve: sim.Points{{At: 0, Factor: 2}, {At: 500, Factor: 2}, {At: 500, Factor: 0.5}}}
	c.Connections, c.Duration, c.Warmup = 0, 1000, 0
	all, _ := flows(t, c)
	early := 0
	for _, f := range all {
		if f.Sent < 500 {
			early++
		}
	}
	late := len(all) - early
	if math.Abs(float64(early)-100_000) > 4*math.Sqrt(100_000) || math.Abs(float64(late)-25_000) > 4*math.Sqrt(25_000) {
		t.Errorf("%d flows before the step, %d after; want 100,000 and 25,000", early, late)
	}
}
