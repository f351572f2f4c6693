// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"sync"

	"github.com/segue-lb/segue/research/sim"
)

// largeServers tells for each server whether it has the largest capacity at the beginning of a run.
// It is nil if all servers have the same capacity.
func (s settings) largeServers() map[string]bool {
	least, most := s.capacityOf(serverName(1)), 0.0
	for _, name := range s.serverNames() {
		least = min(least, s.capacityOf(name))
		most = max(most, s.capacityOf(name))
	}
	if least == most {
		return nil
	}
	large := map[string]bool{}
	for _, name := range s.serverNames() {
		large[name] = s.capacityOf(name) == most
	}
	return large
}

// EstimateRatio returns the mean estimate for the servers with the largest capacity, divided by
// that for the other servers. It is NaN if the balancers do not infer, or if all servers have the
// same capacity.
func (r *Run) EstimateRatio() float64 {
	large, others := r.byCapacity()
	estimate := func(s *Share) float64 { return s.Estimate }
	return meanOver(large, estimate) / meanOver(others, estimate) // 0/0 without estimates
}

// responsesRatio returns the mean number of responses of a server with the largest capacity,
// divided by that of the other servers. It is NaN if all servers have the same capacity.
func (r *Run) responsesRatio() float64 {
	large, others := r.byCapacity()
	responses := func(s *Share) float64 { return float64(s.Responses) }
	return meanOver(large, responses) / meanOver(others, responses)
}

// slowdown returns the mean response time of the other servers, divided by that of the servers with
// the largest capacity. It is NaN if all servers have the same capacity.
func (r *Run) slowdown() float64 {
	large, others := r.byCapacity()
	mean := func(shares []*Share) float64 {
		sum := func(s *Share) float64 { return float64(s.Responses) * s.Mean }
		responses := func(s *Share) float64 { return float64(s.Responses) }
		return meanOver(shares, sum) / meanOver(shares, responses)
	}
	return mean(others) / mean(large)
}

// byCapacity divides the servers into those with the largest capacity and the others.
func (r *Run) byCapacity() (large, others []*Share) {
	most := 0.0
	for _, s := range r.Shares {
		most = max(most, s.Capacity)
	}
	for i := range r.Shares {
		if s := &r.Shares[i]; s.Capacity == most {
			large = append(large, s)
		} else {
			others = append(others, s)
		}
	}
	return large, others
}

// meanOver returns the mean of a value over servers. It is NaN if there are none.
func meanOver(shares []*Share, value func(*Share) float64) float64 {
	sum := 0.0
	for _, s := range shares {
		sum += value(s)
	}
	return sum / float64(len(shares))
}

// LargeInterval is the length of the intervals of Response.LargeOver, in seconds.
const LargeInterval = 5

// tally counts requests that succeeded, and those of them that large servers served, by the
// interval in which they were sent. Several goroutines may use it.
type tally struct {
	large map[string]bool // by server

	mu      sync.Mutex
	all     []float64 // by interval: requests that succeeded
	byLarge []float64 // by interval: those of them that large servers served
}

// newTally returns a tally of the requests that large servers serve, or nil if all servers have the
// same capacity.
func (s settings) newTally() *tally {
	large := s.largeServers()
	if large == nil {
		return nil
	}
	return &tally{large: large}
}

// add counts a request that succeeded. A nil tally counts nothing.
func (t *tally) add(sent float64, server string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := int(sent / LargeInterval)
	for len(t.all) <= i {
		t.all, t.byLarge = append(t.all, 0), append(t.byLarge, 0)
	}
	t.all[i]++
	if t.large[server] {
		t.byLarge[i]++
	}
}

// setLarge sets the share of the requests that large servers served: of all requests (Large), and
// in each interval (LargeOver). A nil tally leaves these fields as they are.
func (t *tally) setLarge(r *Response) {
	if t == nil {
		return
	}
	all, byLarge := 0.0, 0.0
	for i, n := range t.all {
		all, byLarge = all+n, byLarge+t.byLarge[i]
		r.LargeOver = append(r.LargeOver, t.byLarge[i]/max(n, 1))
	}
	r.Large = byLarge / max(all, 1)
}

// completed returns a function for sim.Config.Completed that counts the completed flows of the
// simulator. For a nil tally it returns nil.
func (t *tally) completed(servers []sim.Server) func(int, sim.Ended) {
	if t == nil {
		return nil
	}
	return func(_ int, f sim.Ended) {
		if f.Outcome == sim.Completed {
			t.add(f.Sent, servers[f.Server].Name)
		}
	}
}

// read counts the successful requests in the file requests.csv.gz.
func (t *tally) read(path string) error {
	if t == nil {
		return nil
	}
	return eachSuccess(path, func(sent float64, row []string) error {
		t.add(sent, row[columnServer])
		return nil
	})
}
