// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/packet"
)

// sentFragments is a data path that records the fragments that are sent.
type sentFragments struct {
	firsts map[dataplane.FragmentKey]bool
	sent   []string
	err    error
}

func (s *sentFragments) FirstHasPassed(key dataplane.FragmentKey) bool { return s.firsts[key] }

func (s *sentFragments) Send(f dataplane.HeldFragment) error {
	s.sent = append(s.sent, string(f.Frame))
	return s.err
}

func newTestHolding() (*holding, *sentFragments) {
	path := &sentFragments{firsts: map[dataplane.FragmentKey]bool{}}
	return newHolding(path, slog.New(slog.DiscardHandler)), path
}

func packetNumber(id int) dataplane.FragmentKey {
	return dataplane.FragmentKey{Identification: uint32(id)}
}

func fragmentOf(id int, frame string) dataplane.HeldFragment {
	f := dataplane.HeldFragment{Key: packetNumber(id)}
	if frame != "" {
		f.Frame = []byte(frame)
	}
	return f
}

func (h *holding) requireCounts(t *testing.T, waiting int, released, expired, displaced uint64) {
	t.Helper()
	if h.order.Len() != waiting || h.released.Load() != released || h.expired.Load() != expired || h.displaced.Load() != displaced {
		t.Errorf("%d wait, %d released, %d expired, %d displaced; want %d, %d, %d, %d", h.order.Len(),
			h.released.Load(), h.expired.Load(), h.displaced.Load(), waiting, released, expired, displaced)
	}
}

// The fragments of a packet are sent in the order in which they came, when its first one has
// passed. Those of other packets wait.
func TestHoldingReleasesInOrder(t *testing.T) {
	h, path := newTestHolding()
	now := time.Now()
	for _, f := range []dataplane.HeldFragment{
		fragmentOf(1, "1c"), fragmentOf(2, "2c"), fragmentOf(1, "1b"), fragmentOf(2, "2b"), fragmentOf(3, ""), fragmentOf(2, ""),
	} {
		h.take(f, now)
	}
	if want := []string{"2c", "2b"}; !slices.Equal(path.sent, want) {
		t.Errorf("sent %q, want %q", path.sent, want)
	}
	h.take(fragmentOf(1, ""), now)
	h.take(fragmentOf(1, ""), now)
	if want := []string{"2c", "2b", "1c", "1b"}; !slices.Equal(path.sent, want) {
		t.Errorf("sent %q, want %q", path.sent, want)
	}
	h.requireCounts(t, 0, 4, 0, 0)
	if len(h.waiting) > 0 {
		t.Errorf("packets are left: %v", h.waiting)
	}
	want := `
# HELP segue_lb_held_fragments_total Later fragments that waited for the first one of their packet, by what became of them.
# TYPE segue_lb_held_fragments_total counter
segue_lb_held_fragments_total{result="displaced"} 0
segue_lb_held_fragments_total{result="dropped"} 0
segue_lb_held_fragments_total{result="expired"} 0
segue_lb_held_fragments_total{result="failed"} 0
segue_lb_held_fragments_total{result="late"} 0
segue_lb_held_fragments_total{result="released"} 4
`
	if err := testutil.CollectAndCompare(h, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// If the first fragment has passed while the data path gave a later one to the process, there may
// be no news of it.
func TestHoldingLooksForTheFirst(t *testing.T) {
	h, path := newTestHolding()
	h.take(fragmentOf(1, "1c"), time.Now())
	path.firsts[packetNumber(1)] = true
	h.take(fragmentOf(1, "1b"), time.Now())
	if want := []string{"1c", "1b"}; !slices.Equal(path.sent, want) {
		t.Errorf("sent %q, want %q", path.sent, want)
	}
}

// A fragment waits for one second, and is not sent after that.
func TestHoldingExpires(t *testing.T) {
	h, path := newTestHolding()
	start := time.Now()
	h.take(fragmentOf(1, "1c"), start)
	h.take(fragmentOf(1, "1b"), start.Add(holdTime/2))
	h.expire(start.Add(holdTime - 1))
	h.requireCounts(t, 2, 0, 0, 0)
	h.expire(h.nextExpiry())
	h.requireCounts(t, 1, 0, 1, 0)
	h.take(fragmentOf(1, ""), start.Add(holdTime))
	if want := []string{"1b"}; !slices.Equal(path.sent, want) {
		t.Errorf("sent %q, want %q", path.sent, want)
	}
	h.take(fragmentOf(2, "2c"), start)
	h.expire(start.Add(holdTime))
	h.requireCounts(t, 0, 1, 2, 0)
	if len(h.waiting) > 0 || !h.nextExpiry().IsZero() {
		t.Errorf("packets are left: %v", h.waiting)
	}
}

// The news of a first fragment may be lost. Then the later ones are sent when their time is over,
// and counted apart.
func TestHoldingLosesTheNews(t *testing.T) {
	h, path := newTestHolding()
	start := time.Now()
	for _, f := range []dataplane.HeldFragment{fragmentOf(1, "1c"), fragmentOf(2, "2c"), fragmentOf(1, "1b")} {
		h.take(f, start)
	}
	path.firsts[packetNumber(1)] = true
	h.expire(start.Add(holdTime))
	if want := []string{"1c", "1b"}; !slices.Equal(path.sent, want) {
		t.Errorf("sent %q, want %q", path.sent, want)
	}
	h.requireCounts(t, 0, 0, 1, 0)
	if late := h.late.Load(); late != 2 || len(h.waiting) > 0 {
		t.Errorf("%d late, want 2; packets that are left: %v", late, h.waiting)
	}
}

// The number of fragments is bounded. The oldest ones make room.
func TestHoldingIsBounded(t *testing.T) {
	h, path := newTestHolding()
	now := time.Now()
	for id := range mostHeld + 100 {
		h.take(fragmentOf(id, "later"), now)
	}
	h.requireCounts(t, mostHeld, 0, 0, 100)
	h.take(fragmentOf(99, ""), now)
	h.take(fragmentOf(100, ""), now)
	if len(path.sent) != 1 || len(h.waiting) != mostHeld-1 {
		t.Errorf("%d fragments are sent and %d packets wait", len(path.sent), len(h.waiting))
	}
}

// A fragment that cannot be sent is counted, and does not stay.
func TestHoldingCannotSend(t *testing.T) {
	h, path := newTestHolding()
	path.err = errors.New("no program is attached")
	h.take(fragmentOf(1, "1c"), time.Now())
	h.take(fragmentOf(1, ""), time.Now())
	h.requireCounts(t, 0, 0, 0, 0)
	if h.failed.Load() != 1 {
		t.Errorf("%d failed, want 1", h.failed.Load())
	}
}

// A fragment that the data path drops is not counted as sent. In generic mode, the process knows the
// verdict.
func TestHeldFragmentIsDropped(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	const arrival = 1
	f.plane.Held.SetArrivals([]int{arrival}, []datapath.Mode{datapath.Generic})
	h := newHolding(f.plane.Held, slog.New(slog.DiscardHandler))
	later := dataplane.HeldFragment{Ifindex: arrival, Frame: packet.Fragments(datagram(dns), 1440, 7)[1]}
	h.take(later, time.Now())
	before := f.counters()
	h.take(dataplane.HeldFragment{}, time.Now()) // of no packet that has passed
	if grown := difference(before.reasons, f.counters().reasons); grown["drop_fragment_unknown"].Packets != 1 {
		t.Errorf("the data path counts %v", grown)
	}
	h.requireCounts(t, 0, 0, 0, 0)
	if h.dropped.Load() != 1 || h.failed.Load() != 0 {
		t.Errorf("%d dropped, %d failed; want 1, 0", h.dropped.Load(), h.failed.Load())
	}
}
