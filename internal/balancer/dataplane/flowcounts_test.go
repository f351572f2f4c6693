// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"iter"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// Readers get the counts of one sweep, while the balancer stores those of the next.
func TestCountsAreOfOneSweep(t *testing.T) {
	t.Parallel()
	const slots = 4096
	table := &FlowCountTable{bySlot: make([]balancerFlowCount, slots), sweep: &balancerFlowCount{}}
	kept := make([]SweptServer, slots)
	var isStored atomic.Bool
	ended, turn := make(chan error, 1), make(chan struct{}, 1)
	go func() {
		defer isStored.Store(true)
		for sweep := range uint32(200) {
			for slot := range kept {
				kept[slot].Flows[FlowEstablished] = sweep
			}
			if err := table.store(kept, upTo(slots)); err != nil {
				ended <- err
				return
			}
			<-turn // so the next counts are stored during a read
		}
		ended <- nil
	}()
	reads := 0
	for ; !isStored.Load(); reads++ {
		counts := table.Read()
		first, _ := counts.Of(0)
		total, _, ok, err := counts.Total()
		if want := slots * first.Flows.Established; err != nil || ok && total.Flows.Total() != want {
			t.Errorf("read %d: %d flows, want %d: %v", reads, total.Flows.Total(), want, err)
		}
		select {
		case turn <- struct{}{}:
		default:
		}
	}
	testhost.Must(t, <-ended)
}

// If a process was killed while it stored counts, readers still get counts. The next process
// completes them, and makes the version even again.
func TestCountsAfterAKill(t *testing.T) {
	t.Parallel()
	table := &FlowCountTable{bySlot: make([]balancerFlowCount, 2), sweep: &balancerFlowCount{}}
	table.sweep.Flows[0] = 7
	kept := make([]SweptServer, 2)
	kept[1].Flows[FlowNew] = 3
	table.Read()
	testhost.Must(t, table.store(kept, upTo(2)))
	if version := table.sweep.Flows[0]; version != 8 {
		t.Errorf("version %d", version)
	}
	if total, _, ok, err := table.Read().Total(); total.Flows != (FlowCounts{New: 3}) || !ok || err != nil {
		t.Errorf("%+v, %v, %v", total, ok, err)
	}
}

// upTo iterates over the first slots.
func upTo(n uint32) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for slot := range n {
			if !yield(slot) {
				return
			}
		}
	}
}
