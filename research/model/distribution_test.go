// SPDX-License-Identifier: Apache-2.0

package model

import (
	"math"
	"math/cmplx"
	"testing"

	"gonum.org/v1/gonum/mathext"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestInvert inverts the transforms of known functions.
func TestInvert(t *testing.T) {
	for name, f := range map[string]struct {
		transform func(z complex128) complex128
		want      func(t float64) float64
	}{
		"exponential": {
			func(z complex128) complex128 { return 1 / (1 + z) },
			func(t float64) float64 { return math.Exp(-t) },
		},
		"Erlang 5": {
			func(z complex128) complex128 { return cmplx.Pow(1+z, -5) },
			func(t float64) float64 { return math.Pow(t, 4) / 24 * math.Exp(-t) },
		},
		"distribution function of Erlang 20": {
			func(z complex128) complex128 { return cmplx.Pow(1+z, -20) / z },
			func(t float64) float64 { return mathext.GammaIncReg(20, t) },
		},
		"sine": {
			func(z complex128) complex128 { return 1 / (1 + z*z) },
			math.Sin,
		},
	} {
		for _, x := range []float64{0.01, 0.1, 0.5, 1, 2, 3, 5} {
			if got, want := invert(f.transform, x), f.want(x); math.Abs(got-want) > 2e-9 {
				t.Errorf("%s at %v: %v, want %v", name, x, got, want)
			}
		}
	}
}

// TestTransform compares with equation (9) of 6LB as printed, for z = -iθ.
func TestTransform(t *testing.T) {
	eachSteady(t, func(t *testing.T, l float64, c int, s *Steady) {
		sc := complex(s.Rejected, 0)
		a, b := 1-complex(l, 0)*(1+sc), 1-complex(l, 0)*sc
		for _, theta := range []float64{0, 0.1, 1, 7} {
			z := complex(0, -theta)
			want := complex(1-l, 0)*(1+sc)/(a+z) - sc*b/((b+z)*(a+z)*cmplx.Pow(1+z, complex(float64(c-1), 0)))
			if got := s.Transform(z); cmplx.Abs(got-want) > 1e-8 {
				t.Errorf("θ = %v: %v, want %v", theta, got, want)
			}
		}
	})
}

// TestCDF compares with the mixture of Erlang distributions that section V-F of 6LB describes
// before it turns to characteristic functions: a flow is the k-th in a queue with probability (s_k
// - s_(k+1))/λ.
func TestCDF(t *testing.T) {
	eachSteady(t, func(t *testing.T, l float64, c int, s *Steady) {
		for _, x := range []float64{0.01, 0.3, 1, 4, 10, 40, 200} {
			want := 0.0
			for k := 1; k < 3000; k++ {
				if s.Share(k) < 1e-15 {
					break
				}
				want += s.Share(k) / l * mathext.GammaIncReg(float64(k), x)
			}
			if got := s.CDF(x); math.Abs(got-want) > 1e-8 {
				t.Errorf("Pr(T ≤ %v) = %v, want %v", x, got, want)
			}
		}
	})
}

// TestMeanOfDistribution checks that the integral of 1-CDF is Little's E[T], also for several
// cores.
func TestMeanOfDistribution(t *testing.T) {
	for _, cores := range []int{1, 2, 6} {
		for _, s := range []*Steady{mustSRc(t, 0.8, cores, 4), mustSRc(t, 0.8, cores, 9), mustSingle(t, 0.8, cores)} {
			const step = 0.02
			sum := step / 2
			for x := step; x < 100; x += step {
				sum += step * (1 - s.CDF(x))
			}
			near(t, "∫ 1-CDF", sum, s.MeanResponse(), 1e-4)
		}
	}
}

// TestPercentile compares with ln(10)/(1-λ), which 6LB gives for single choice, and checks that
// CDF is the inverse.
func TestPercentile(t *testing.T) {
	for _, load := range []float64{0.1, 0.5, 0.88, 0.99} {
		got, err := mustSingle(t, load, 1).Percentile(90)
		testhost.Must(t, err)
		near(t, "π90 of M/M/1", got, math.Ln10/(1-load), 1e-6)
	}
	for _, x := range []float64{0.1, 50, 99, 99.99} {
		s := mustSRc(t, 0.88, 2, 4)
		got, err := s.Percentile(x)
		testhost.Must(t, err)
		near(t, "CDF of a percentile", s.CDF(got), x/100, 1e-8)
	}
	for _, x := range []float64{0, 100, -1, math.NaN()} {
		if _, err := mustSingle(t, 0.5, 1).Percentile(x); err == nil {
			t.Errorf("percentile %v: no error", x)
		}
	}
}

// TestCompareServers checks the number in section V-G of 6LB: 71 servers instead of 100 at μ0 = 6.
func TestCompareServers(t *testing.T) {
	got, err := CompareServers(90, 6, 1, 4)
	testhost.Must(t, err)
	near(t, "load with single choice", got.SingleChoiceLoad, 1-math.Ln10/6, 1e-6)
	if servers := math.Ceil(100 * got.Ratio); servers != 71 {
		t.Errorf("%v servers instead of 100, want 71", servers)
	}
	percentile, err := mustSRc(t, got.Load, 1, 4).Percentile(90)
	testhost.Must(t, err)
	near(t, "π90 at the load found", percentile, 6, 1e-6)

	for _, limit := range []float64{0, 2.3, math.NaN(), math.Inf(1)} {
		if _, err := CompareServers(90, limit, 1, 4); err == nil {
			t.Errorf("limit %v: no error", limit)
		}
	}
}
