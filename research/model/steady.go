// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math"
)

const (
	// MaxThreshold is the largest acceptance threshold of the model.
	MaxThreshold = 256
	// MaxCores is the largest number of cores of a server in the model.
	MaxCores = 256
)

// Steady is the steady state of infinitely many servers: the fixed point of equation (1) of 6LB.
// Each flow is offered to two random servers. The first one takes it if it has fewer flows than
// the threshold (policy SRc, algorithm 1). Otherwise the second one takes it.
type Steady struct {
	// Load is the share of the cores that is busy, above 0 and below 1.
	Load float64
	// Cores is the number of cores of a server, k. It is 1 in 6LB.
	Cores int
	// Threshold is c of SRc.
	Threshold int
	// Rejected is the probability that the first server passes a flow on: s_c of equation (5), or
	// 0 if there is no second server.
	Rejected float64

	// second is the share of all flows that reach a server as the second candidate.
	second float64
	// share[n] is the probability that a server has n flows. After the last element, share[n+1] is
	// share[n]·ratio.
	share []float64
	ratio float64
}

// SRc returns the steady state under policy SRc with a threshold of 0 to MaxThreshold, at a load
// above 0 and below 1, of servers with 1 to MaxCores cores.
//
// It solves equation (5) of 6LB in a form with one solution. The printed form, s(1-λs) =
// (1-λ)(λ(1+s))^c, has a second solution, s = (1-λ)/λ. That one is not a fixed point of (1). It
// appears because (3) was multiplied by 1-λ(1+s), which is zero there.
func SRc(load float64, cores, threshold int) (*Steady, error) {
	if threshold < 0 || threshold > MaxThreshold {
		return nil, fmt.Errorf("threshold %d: must be 0 to %d", threshold, MaxThreshold)
	}
	if err := validLoad(load, cores); err != nil {
		return nil, err
	}
	s := &Steady{Load: load, Cores: cores, Threshold: threshold}
	s.Rejected = solve(func(rejected float64) float64 {
		s.settle(rejected)
		return rejected - s.AtLeast(threshold)
	}, 0, 1)
	s.settle(s.Rejected)
	return s, nil
}

// SingleChoice returns the steady state if each flow is offered to one server, which takes it: the
// baseline SC of 6LB. Every server is a queue M/M/k. With a single core, it has n flows with
// probability (1-λ)λ^n. The limits of load and cores are those of SRc.
func SingleChoice(load float64, cores int) (*Steady, error) {
	if err := validLoad(load, cores); err != nil {
		return nil, err
	}
	s := &Steady{Load: load, Cores: cores}
	s.settle(1) // as if every flow came from a first server that takes none
	return s, nil
}

// validLoad returns an error if the model cannot have this load or this number of cores.
func validLoad(load float64, cores int) error {
	if !(load > 0 && load < 1) {
		return fmt.Errorf("load %v: must be above 0 and below 1", load)
	}
	if cores < 1 || cores > MaxCores {
		return fmt.Errorf("%d cores: must be 1 to %d", cores, MaxCores)
	}
	return nil
}

// settle computes the shares of servers by their number of flows, for a given probability s
// (second) that a flow is passed on to its second server. Flows arrive at a server at rate λk(1+s)
// while it accepts and λks otherwise, as in equation (1). They leave at rate min(n, k). This is a
// birth-death process: its shares balance between each number and the next.
func (s *Steady) settle(second float64) {
	s.second = second
	s.share = append(s.share[:0], 1)
	s.ratio = s.Load * second
	last := max(s.Threshold, s.Cores)
	sum := 1.0
	for n := range last {
		s.share = append(s.share, s.share[n]*s.arrivals(n)/s.departures(n+1))
		sum += s.share[n+1]
	}
	sum += s.share[last] * s.ratio / (1 - s.ratio)
	for n := range s.share {
		s.share[n] /= sum
	}
}

// arrivals returns the rate of flows to a server with n flows.
func (s *Steady) arrivals(n int) float64 {
	return arrivals(s.Load, s.Cores, s.Threshold, s.second, n)
}

// arrivals returns the rate of flows to a server with n flows. second is the probability that a
// flow is passed on to its second server.
func arrivals(load float64, cores, threshold int, second float64, n int) float64 {
	rate := load * float64(cores)
	if n < threshold {
		return rate * (1 + second)
	}
	return rate * second
}

// departures returns the rate of flows from a server with n flows.
func (s *Steady) departures(n int) float64 { return float64(min(n, s.Cores)) }

// Share returns the probability that a server has n flows, s_n - s_(n+1) in 6LB.
func (s *Steady) Share(n int) float64 {
	last := len(s.share) - 1
	if n <= last {
		return s.share[n]
	}
	return s.share[last] * math.Pow(s.ratio, float64(n-last))
}

// AtLeast returns the probability that a server has n flows or more: s_n of equations (3) and (4).
func (s *Steady) AtLeast(n int) float64 {
	last := len(s.share) - 1
	if n > last {
		return s.Share(n) / (1 - s.ratio)
	}
	sum := s.share[last] / (1 - s.ratio)
	for i := last - 1; i >= n; i-- {
		sum += s.share[i]
	}
	return sum
}

// moments returns E[X] and E[X²], where X is the number of flows of a server (6LB, V-B and V-D).
func (s *Steady) moments() (first, second float64) {
	last := len(s.share) - 1
	for n := range last {
		first += float64(n) * s.share[n]
		second += float64(n*n) * s.share[n]
	}
	// The geometric tail, q^j from last on: its weight, and the means of j and j² in it.
	q, n := s.ratio, float64(last)
	sum := s.share[last] / (1 - q)
	mean := q / (1 - q)
	square := q * (1 + q) / ((1 - q) * (1 - q))
	return first + sum*(n+mean), second + sum*(n*n+2*n*mean+square)
}

// MeanFlows returns the mean number of flows of a server.
func (s *Steady) MeanFlows() float64 {
	mean, _ := s.moments()
	return mean
}

// MeanResponse returns E[T], the mean time that a flow is on its server: equation (6) of 6LB, by
// Little's law. It holds for first come, first served and for processor sharing.
func (s *Steady) MeanResponse() float64 { return s.MeanFlows() / (s.Load * float64(s.Cores)) }

// MeanResponseWithDelay returns MeanResponse plus the cost of passing flows on, which is delay for
// each: equation (7) of 6LB.
func (s *Steady) MeanResponseWithDelay(delay float64) float64 {
	return s.MeanResponse() + delay*s.Rejected
}

// Fairness returns Jain's index of the servers' numbers of flows, E[X]²/E[X²] (6LB, section V-D).
// The paper defines the index over N servers, so N cancels out. In the sums that the paper prints,
// N does not cancel out: E(X)² has the factor N², and E(X²) has the factor N.
func (s *Steady) Fairness() float64 {
	mean, square := s.moments()
	return mean * mean / square
}

// WrongfullyRejected returns the probability that a server passes a flow on to a server with more
// flows: equation (8) of 6LB. It is 0 if there is no second server.
func (s *Steady) WrongfullyRejected() float64 {
	if s.Rejected == 0 {
		return 0
	}
	// Σ Share(n)·AtLeast(n+1) from n = c. Both factors are geometric from the last share on.
	last := len(s.share) - 1
	sum := 0.0
	for n := s.Threshold; n < last; n++ {
		sum += s.share[n] * s.AtLeast(n+1)
	}
	return sum + s.share[last]*s.AtLeast(last+1)/(1-s.ratio*s.ratio)
}

// solve finds a zero of f between low and high by bisection, to the last bit. f must not be
// positive at low, and not negative at high.
func solve(f func(float64) float64, low, high float64) float64 {
	for {
		middle := low + (high-low)/2
		if middle <= low || middle >= high {
			return middle
		}
		if f(middle) < 0 {
			low = middle
		} else {
			high = middle
		}
	}
}
