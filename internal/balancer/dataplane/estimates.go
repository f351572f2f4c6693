// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/bpfclock"
	"github.com/segue-lb/segue/internal/infer"
)

// Estimate is what a process has inferred about a server. It outlives the process. Numbers are 0 if
// they are not known.
type Estimate struct {
	// Time is the time of the estimate on the clock of BootTime.
	Time time.Duration
	// Capacity is the number of flows that the server serves at once.
	Capacity float64
	// Weight is the speed of the server relative to that of others.
	Weight float64
	// Wait is the mean time that flows wait, for each second of service.
	Wait float64
	// Duration is a mean duration of flows in seconds.
	Duration float64
	// SlowStart, NoAnswers and SilentFlows are the factors by which the server seems slower, as in
	// infer.Report.
	SlowStart, NoAnswers, SilentFlows float64
	// Told is the load by the server's own account, at the time ToldAt on the clock of BootTime. It
	// is nil if the server is not polled, or has told nothing that counts.
	Told   *infer.Load
	ToldAt time.Duration
	// State is the state of the estimator.
	State infer.Saved
}

// An estimator's state must fit into an element of the table: otherwise this does not compile.
var _ [len(balancerEstimate{}.State) - infer.StateSize]byte

// stored returns the form of the estimate in the table.
func (e *Estimate) stored() (s balancerEstimate) {
	s.Time = uint64(e.Time)
	s.Capacity, s.Weight, s.Wait = fixed(e.Capacity), fixed(e.Weight), fixed(e.Wait)
	s.Duration, s.SlowStart = fixed(e.Duration), fixed(e.SlowStart)
	s.NoAnswers, s.SilentFlows = fixed(e.NoAnswers), fixed(e.SilentFlows)
	if e.Told != nil {
		s.Told, s.Busy, s.Limit = uint64(e.ToldAt), uint32(e.Told.Busy), uint32(e.Told.Capacity)
	}
	copy(s.State[:], e.State[:])
	return s
}

// estimateOf returns an estimate from its form in the table.
func estimateOf(s *balancerEstimate) (e Estimate) {
	number := func(n uint32) float64 { return float64(n) / infer.PriceOne }
	e.Time = time.Duration(s.Time)
	e.Capacity, e.Weight, e.Wait = number(s.Capacity), number(s.Weight), number(s.Wait)
	e.Duration, e.SlowStart = number(s.Duration), number(s.SlowStart)
	e.NoAnswers, e.SilentFlows = number(s.NoAnswers), number(s.SilentFlows)
	if s.Told != 0 {
		e.Told, e.ToldAt = &infer.Load{Busy: float64(s.Busy), Capacity: float64(s.Limit)}, time.Duration(s.Told)
	}
	copy(e.State[:], s.State[:])
	return e
}

// fixed returns a number with 16 fractional bits, or the largest possible one.
func fixed(x float64) uint32 {
	return uint32(min(max(0, math.Round(x*infer.PriceOne)), math.MaxUint32))
}

// EstimateTable contains the estimates of servers, by slot: the map estimates of
// bpf/balancer/tables/maps.h. One goroutine may write to it.
type EstimateTable struct {
	estimates *ebpf.Map
	// slots and stored are reused by each Put.
	slots  []uint32
	stored []balancerEstimate
}

// Add adds an estimate for the next call of Put.
func (t *EstimateTable) Add(slot uint32, e *Estimate) {
	t.slots = append(t.slots, slot)
	t.stored = append(t.stored, e.stored())
}

// Put writes the estimates that were added since the last Put. If it fails, they are lost. Put
// returns an error if the table cannot be written.
func (t *EstimateTable) Put() error {
	slots, stored := t.slots, t.stored
	t.slots, t.stored = t.slots[:0], t.stored[:0]
	if len(slots) == 0 {
		return nil
	}
	if _, err := t.estimates.BatchUpdate(slots, stored, nil); err != nil {
		return fmt.Errorf("write %d estimates: %w", len(slots), err)
	}
	return nil
}

// Of returns the estimate of the slot's server. It returns false if there is none. It returns an
// error if the table cannot be read.
func (t *EstimateTable) Of(slot uint32) (e Estimate, ok bool, err error) {
	stored, err := t.read(slot)
	if stored == nil {
		return e, false, err
	}
	return estimateOf(stored), true, nil
}

// read returns the element of a slot, or nil if there is none.
func (t *EstimateTable) read(slot uint32) (*balancerEstimate, error) {
	stored := new(balancerEstimate)
	switch err := t.estimates.Lookup(slot, stored); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read the estimate of slot %d: %w", slot, err)
	}
	return stored, nil
}

// replace replaces the element of a slot. Nil removes it.
func (t *EstimateTable) replace(slot uint32, stored *balancerEstimate) error {
	if stored != nil {
		return t.estimates.Put(slot, stored)
	}
	if err := t.estimates.Delete(slot); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (p *Plane) forgetEstimate(slot uint32) error {
	if err := p.backup.keepEstimate(slot); err != nil {
		return err
	}
	if err := p.Estimates.replace(slot, nil); err != nil {
		return fmt.Errorf("remove the estimate of slot %d: %w", slot, err)
	}
	return nil
}

// BootTime returns the time since the system was booted. It is the clock of estimates. It returns
// an error if the clock cannot be read.
func BootTime() (time.Duration, error) { return bpfclock.Boot() }
