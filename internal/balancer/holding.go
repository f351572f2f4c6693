// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"container/list"
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

const (
	// holdTime is how long a later fragment waits for the first one of its packet. Fragments
	// travel together.
	holdTime = time.Second
	// mostHeld is the highest number of fragments that wait: 6 MB with the longest frames. If there
	// are more, the oldest ones are dropped. So a flood from many networks shortens the time for
	// which fragments wait, but does not end the holding. One network gets no more than the budget
	// in bpf/balancer/path/hold.h.
	mostHeld = 4096
)

// holding holds later fragments that came before the first fragment of their packet. When the first
// fragment has passed, holding sends the later ones through the data path, in the order in which
// they came. The goroutine in run owns it. Other goroutines may collect its metrics.
type holding struct {
	log     *slog.Logger
	path    fragmentPath
	order   *list.List // of held, in the order in which they came
	waiting map[dataplane.FragmentKey][]*list.Element
	// What became of the fragments that were held. Sent: released on the news of the first
	// fragment, or late, without the news. Not sent: dropped by the data path, expired, displaced
	// by others, or failed by an error.
	released, late, dropped, expired, displaced, failed atomic.Uint64
}

// fragmentPath is what holding needs of dataplane.HeldFragments.
type fragmentPath interface {
	FirstHasPassed(dataplane.FragmentKey) bool
	Send(dataplane.HeldFragment) error
}

// held is a fragment that waits.
type held struct {
	dataplane.HeldFragment
	until time.Time
}

func newHolding(path fragmentPath, log *slog.Logger) *holding {
	return &holding{
		log: log, path: path, order: list.New(),
		waiting: map[dataplane.FragmentKey][]*list.Element{},
	}
}

// run holds the fragments that come from the source until the context ends.
func (h *holding) run(ctx context.Context, source *dataplane.HeldFragments) error {
	stop := context.AfterFunc(ctx, func() { _ = source.Interrupt() })
	defer stop()
	for ctx.Err() == nil { // in a flood, Read always has a fragment, and never returns ErrFlushed
		f, err := source.Read(h.nextExpiry())
		switch {
		case errors.Is(err, ringbuf.ErrFlushed):
			return nil
		case err == nil:
			h.take(f, time.Now())
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
		h.expire(time.Now())
	}
	return nil
}

// nextExpiry returns the time at which the oldest fragment expires; zero: there is none.
func (h *holding) nextExpiry() time.Time {
	if oldest := h.order.Front(); oldest != nil {
		return oldest.Value.(held).until
	}
	return time.Time{}
}

// take holds a fragment. If f is the news that the first fragment of a packet has passed, take
// releases the fragments of this packet. The first fragment may pass on another core while the data
// path gives a later one to this process. The process may then get no news of the first fragment.
// So take looks for that fragment in the table.
func (h *holding) take(f dataplane.HeldFragment, now time.Time) {
	if f.Frame == nil { // f is the news that the first fragment has passed
		h.release(f.Key, &h.released)
		return
	}
	if h.order.Len() >= mostHeld {
		h.forgetOldest()
		h.displaced.Add(1)
	}
	h.waiting[f.Key] = append(h.waiting[f.Key], h.order.PushBack(held{f, now.Add(holdTime)}))
	if h.path.FirstHasPassed(f.Key) {
		h.release(f.Key, &h.released)
	}
}

// release sends the fragments of a packet, and counts those that are sent.
func (h *holding) release(key dataplane.FragmentKey, sent *atomic.Uint64) {
	for _, e := range h.waiting[key] {
		h.send(h.order.Remove(e).(held).HeldFragment, sent)
	}
	delete(h.waiting, key)
}

// send sends a fragment through the data path, and counts what becomes of it.
func (h *holding) send(f dataplane.HeldFragment, sent *atomic.Uint64) {
	err := h.path.Send(f)
	if err == nil {
		sent.Add(1)
		return
	}
	if errors.Is(err, dataplane.ErrNotForwarded) {
		h.dropped.Add(1)
		return
	}
	if h.failed.Add(1) == 1 { // a flood must not fill the log
		h.log.Error("send a held fragment; further errors are only counted", "error", err)
	}
}

// expire drops the fragments whose time is over. Before that, it looks for the first fragment of
// the packet in the table. Normally the news of the first fragment would have released the
// fragments already. But the news is lost if the ring buffer is full.
func (h *holding) expire(now time.Time) {
	for h.order.Len() > 0 && !now.Before(h.nextExpiry()) {
		if key := h.order.Front().Value.(held).Key; h.path.FirstHasPassed(key) {
			h.release(key, &h.late)
			continue
		}
		h.forgetOldest()
		h.expired.Add(1)
	}
}

// forgetOldest drops the fragment that has waited longest. It is also the first one in the list of
// its packet.
func (h *holding) forgetOldest() {
	key := h.order.Remove(h.order.Front()).(held).Key
	if h.waiting[key] = h.waiting[key][1:]; len(h.waiting[key]) == 0 {
		delete(h.waiting, key)
	}
}

var heldDesc = prometheus.NewDesc("segue_lb_held_fragments_total",
	"Later fragments that waited for the first one of their packet, by what became of them.",
	[]string{"result"}, nil)

// Describe implements prometheus.Collector.
func (h *holding) Describe(descs chan<- *prometheus.Desc) { descs <- heldDesc }

// Collect implements prometheus.Collector.
func (h *holding) Collect(metrics chan<- prometheus.Metric) {
	for result, n := range map[string]*atomic.Uint64{
		"released": &h.released, "late": &h.late, "dropped": &h.dropped,
		"expired": &h.expired, "displaced": &h.displaced, "failed": &h.failed,
	} {
		metrics <- prometheus.MustNewConstMetric(heldDesc, prometheus.CounterValue, float64(n.Load()), result)
	}
}

// HeldFragments returns the collector of metrics about held fragments.
func (b *Balancer) HeldFragments() prometheus.Collector { return b.holding }
