// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/testhost"
)

func mustSRc(t testing.TB, load float64, cores, threshold int) *Steady {
	t.Helper()
	s, err := SRc(load, cores, threshold)
	testhost.Must(t, err)
	return s
}

func mustSingle(t testing.TB, load float64, cores int) *Steady {
	t.Helper()
	s, err := SingleChoice(load, cores)
	testhost.Must(t, err)
	return s
}

// near fails the test unless got differs from want by at most the share tolerance of want.
func near(t testing.TB, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Abs(want)) {
		t.Errorf("%s: %.12g, want %.12g ± %.0e of it", what, got, want, tolerance)
	}
}

// eachSteady calls f with steady states for which no denominator of the printed closed forms is
// zero.
func eachSteady(t *testing.T, f func(t *testing.T, lambda float64, c int, s *Steady)) {
	for _, lambda := range []float64{0.05, 0.3, 0.5, 0.71, 0.88, 0.95, 0.99} {
		for _, c := range []int{1, 2, 4, 5, 8, 16} {
			s, err := SRc(lambda, 1, c)
			testhost.Must(t, err)
			if math.Abs(1-lambda*(1+s.Rejected)) < 1e-3 {
				continue
			}
			t.Run(fmt.Sprintf("load=%v/c=%d", lambda, c), func(t *testing.T) { f(t, lambda, c, s) })
		}
	}
}

// TestPrintedForms compares with equations (3) to (6) and (8), and with the sum of section V-D of
// 6LB, as printed.
func TestPrintedForms(t *testing.T) {
	eachSteady(t, func(t *testing.T, l float64, c int, s *Steady) {
		sc, n := s.Rejected, float64(c)
		d := 1 - l*(1+sc)
		near(t, "(5)", sc*(1-l*sc), (1-l)*math.Pow(l*(1+sc), n), 1e-9)
		for i := 1; i <= c; i++ {
			near(t, fmt.Sprintf("(3), n = %d", i), s.AtLeast(i), ((1-l)*math.Pow(l*(1+sc), float64(i))-l*sc)/d, 1e-7)
		}
		for i := c; i < c+9; i++ {
			near(t, fmt.Sprintf("(4), n = %d", i), s.AtLeast(i), math.Pow(l*sc, float64(i-c))*sc, 1e-9)
		}
		near(t, "(6)", s.MeanResponse(), (1-n*sc*(1-l*sc)-l*sc*(1+sc))/((1-l*sc)*d), 1e-9)
		near(t, "(7)", s.MeanResponseWithDelay(0.25), s.MeanResponse()+0.25*sc, 1e-15)
		near(t, "(8)", s.WrongfullyRejected(), l*sc*sc*sc/(1+l*sc), 1e-9)

		head := (l*l*(sc+1)*((n-1)*(n-1)*sc+1) + l*sc*(2*n*sc-3*sc+2*n-n*n-2) - 2*n*sc + l + sc) / (d * d)
		tail := sc * (n*(2-2*l*sc) + 3*l*sc - 1) / ((1 - l*sc) * (1 - l*sc))
		_, square := s.moments()
		near(t, "E(X²)", square, head+tail, 1e-7)
	})
}

// TestFixedPoint checks, for random loads, cores and thresholds, that equation (1) changes
// nothing, that the number of flows stays the same, and that s_n decreases.
func TestFixedPoint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		load := rapid.Float64Range(0.01, 0.95).Draw(t, "load")
		cores := rapid.IntRange(1, 8).Draw(t, "cores")
		c := rapid.IntRange(0, 20).Draw(t, "threshold")
		s, err := SRc(load, cores, c)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(s.Rejected-s.AtLeast(c)) > 1e-9 {
			t.Fatalf("rejected %v, but %v have c flows", s.Rejected, s.AtLeast(c))
		}
		served := 0.0
		for n := 1; n < 600; n++ {
			arrivals := load * float64(cores) * s.Rejected
			if n <= c {
				arrivals += load * float64(cores)
			}
			in, out := arrivals*s.Share(n-1), float64(min(n, cores))*s.Share(n)
			if math.Abs(in-out) > 1e-9 {
				t.Fatalf("%v come to %d flows, %v leave", in, n, out)
			}
			if s.AtLeast(n) > s.AtLeast(n-1) {
				t.Fatalf("s_%d = %v above s_%d = %v", n, s.AtLeast(n), n-1, s.AtLeast(n-1))
			}
			served += out
		}
		if want := load * float64(cores); c > 0 && math.Abs(served-want) > 1e-6*want {
			t.Fatalf("%v flows are served, %v come", served, want)
		}
	})
}

// TestOneFixedPoint searches for a second solution for servers with several cores. For one core
// there is none, because s_n of (3) decreases with s_c.
func TestOneFixedPoint(t *testing.T) {
	for _, cores := range []int{1, 2, 3, 8} {
		for _, c := range []int{1, 2, 4, 8, 16} {
			for load := 0.05; load < 1; load += 0.05 {
				s := &Steady{Load: load, Cores: cores, Threshold: c}
				signs, below := 0, true
				for x := 0.0005; x < 1; x += 0.001 {
					s.settle(x)
					if now := x < s.AtLeast(c); now != below {
						signs, below = signs+1, now
					}
				}
				if signs > 1 {
					t.Errorf("load %.2f, %d cores, c = %d: %d solutions", load, cores, c, signs)
				}
			}
		}
	}
}

// TestSingleChoice compares with M/M/1, with SR0, whose first server never accepts, and with
// Erlang's formula for M/M/k.
func TestSingleChoice(t *testing.T) {
	for _, load := range []float64{0.1, 0.5, 0.88, 0.99} {
		s := mustSingle(t, load, 1)
		near(t, "E[T] of M/M/1", s.MeanResponse(), 1/(1-load), 1e-9)
		near(t, "fairness of M/M/1", s.Fairness(), load/(1+load), 1e-9)
		near(t, "E[T] of SR0", mustSRc(t, load, 1, 0).MeanResponse(), 1/(1-load), 1e-9)
		if s.Rejected != 0 || s.WrongfullyRejected() != 0 {
			t.Errorf("load %v: there is no second server, but %v are passed on", load, s.Rejected)
		}
		for _, k := range []int{2, 5, 30} {
			offered := load * float64(k)
			term, sum := 1.0, 0.0
			for n := range k {
				sum += term
				term *= offered / float64(n+1)
			}
			wait := term / (1 - load) / (sum + term/(1-load))
			near(t, fmt.Sprintf("E[T] of M/M/%d", k), mustSingle(t, load, k).MeanResponse(), 1+wait/(float64(k)*(1-load)), 1e-9)
		}
	}
}

// TestTheorem1 checks that SRc is no worse than single choice if the delay is at most the duration
// of a flow (6LB, section V-C).
func TestTheorem1(t *testing.T) {
	eachSteady(t, func(t *testing.T, l float64, c int, s *Steady) {
		if got, most := s.MeanResponseWithDelay(1), 1/(1-l); got > most*(1+1e-12) {
			t.Errorf("E[T] with delay %v, above %v", got, most)
		}
	})
}

// TestBestThreshold checks that small thresholds are better under light loads, and large ones under
// heavy loads (SRLB, section III-A).
func TestBestThreshold(t *testing.T) {
	best := func(load float64) (threshold int) {
		shortest := math.Inf(1)
		for c := 1; c <= 16; c++ {
			s, err := SRc(load, 1, c)
			testhost.Must(t, err)
			if mean := s.MeanResponse(); mean < shortest {
				threshold, shortest = c, mean
			}
		}
		return threshold
	}
	former := 1
	for _, load := range []float64{0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99} {
		if c := best(load); c < former {
			t.Errorf("the best threshold is %d at the load %v, and %d at a lower one", c, load, former)
		} else {
			former = c
		}
	}
	if best(0.1) != 1 || former < 4 {
		t.Errorf("the best threshold is %d at the load 0.1, and %d at 0.99", best(0.1), former)
	}
}

func TestSteadyErrors(t *testing.T) {
	for _, test := range []struct {
		load             float64
		cores, threshold int
		want             string
	}{
		{0, 1, 4, "load 0: must be above 0 and below 1"},
		{1, 1, 4, "load 1: must be above 0 and below 1"},
		{math.NaN(), 1, 4, "load NaN: must be above 0 and below 1"},
		{0.5, 0, 4, "0 cores: must be 1 to 256"},
		{0.5, 1, -1, "threshold -1: must be 0 to 256"},
		{0.5, 1, 257, "threshold 257: must be 0 to 256"},
	} {
		if _, err := SRc(test.load, test.cores, test.threshold); err == nil || err.Error() != test.want {
			t.Errorf("SRc(%v, %d, %d): error %v, want %q", test.load, test.cores, test.threshold, err, test.want)
		}
	}
}
