package sim_test

import (
	"compress/gzip"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/segue-lb/segue/internal/sim"
)

// arrivals are those of a trace, and their classes.
func arrivals(t *testing.T, trace sim.Trace) (at []float64, classes []int32, err error) {
	t.Helper()
	source, err := trace.Start(nil)
	if err != nil {
		t.Fatal(err)
	}
	for {
		when, class, ok := source.Next()
		if !ok {
			return at, classes, source.Close()
		}
		at, classes = append(at, when), append(classes, class)
	}
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

const (
	wikibench = "10 1194892290.000 http://en.wikipedia.org/wiki/A -\n" +
		"11 1194892290.500 http://en.wikipedia.org/skins/main.css -\n" +
		"12 1194892290.250 http://en.wikipedia.org/wiki/B save\n" +
		"13 1194892292.000 http://upload.wikimedia.org/x.png -\n"
	queries = "3.5\t/wiki/A\n4.0\t/skins/main.css\n3.75\t/wiki/B\n5.5\t/x.png\n"
)

func TestTraces(t *testing.T) {
	classes := []*regexp.Regexp{regexp.MustCompile("/wiki/"), nil, regexp.MustCompile("[.]png$")}
	compressed := filepath.Join(t.TempDir(), "trace.gz")
	file, err := os.Create(compressed)
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(file)
	for _, err := range []error{second(z.Write([]byte(queries))), z.Close(), file.Close()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, trace := range map[string]sim.Trace{
		"wikibench":  {File: write(t, "trace", wikibench), Format: sim.Wikibench},
		"queries":    {File: write(t, "trace", queries), Format: sim.TimedQueries},
		"compressed": {File: compressed, Format: sim.TimedQueries},
	} {
		t.Run(name, func(t *testing.T) {
			trace.Speed, trace.Classes = 2, classes
			at, of, err := arrivals(t, trace)
			if err != nil {
				t.Fatal(err)
			}
			if want := []float64{0, 0.25, 0.25, 1}; !cmp.Equal(at, want, cmpopts.EquateApprox(0, 1e-6)) {
				t.Errorf("arrivals %v, want %v", at, want)
			}
			if want := []int32{0, -1, 0, 2}; !cmp.Equal(of, want) {
				t.Errorf("classes %v, want %v", of, want)
			}
			extent, err := trace.Extent()
			want := sim.Extent{Seconds: 2, Matched: []uint64{2, 0, 1}, Drawn: 1}
			if diff := cmp.Diff(want, extent, cmpopts.EquateApprox(0, 1e-6)); diff != "" || err != nil {
				t.Errorf("extent, error %v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

func TestBadTraces(t *testing.T) {
	for _, test := range []struct{ text, problem string }{
		{"1.0\t/a\n2.0 /b\n", `:2: "2.0 /b": not a line of the format`},
		{"1.0\t/a\nx\t/b\n", `:2: time "x": must be a number of seconds`},
		{"nan\t/a\n", `:1: time "nan": must be a number of seconds`},
		{"1.0\t/a\ninf\t/b\n", `:2: time "inf": must be a number of seconds`},
		{"1.0\t/a\n2.0\t" + strings.Repeat("b", 1<<21), `:2: bufio.Scanner: token too long`},
	} {
		trace := sim.Trace{File: write(t, "trace", test.text), Format: sim.TimedQueries}
		if _, _, err := arrivals(t, trace); err == nil || err.Error() != trace.File+test.problem {
			t.Errorf("error %v, want ...%s", err, test.problem)
		}
		c := constantly(1, sim.FIFO)
		c.Arrivals = trace
		if _, err := sim.Run(t.Context(), c, sim.Options{Runs: 1}); err == nil {
			t.Error("a run does not fail")
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

// A curve changes how many arrive when, and their mean number follows it.
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
