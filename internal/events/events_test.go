// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// Readers get all events in their order, each from the ID that it names.
func TestStream(t *testing.T) {
	s := NewStream()
	begin := s.Last()
	const readers, n = 8, 1000
	var group sync.WaitGroup
	for range readers {
		group.Go(func() {
			for id := begin; id < begin+n; {
				events, err := s.After(t.Context(), id)
				if err != nil {
					t.Error(err)
					return
				}
				for _, e := range events {
					if e.ID != id+1 {
						t.Errorf("event %d after %d", e.ID, id)
					}
					id = e.ID
				}
			}
		})
	}
	for range n {
		s.Publish(Event{Kind: ServerUp})
	}
	group.Wait()
}

// A reader that is too slow gets the events that are kept.
func TestSlowReader(t *testing.T) {
	s := NewStream()
	begin := s.Last()
	for range 3 * kept {
		s.Publish(Event{Kind: ServerUp})
	}
	events, err := s.After(t.Context(), begin)
	if err != nil || len(events) > kept || len(events) < kept*3/4 {
		t.Fatalf("%d events, error %v", len(events), err)
	}
	if last := events[len(events)-1].ID; last != s.Last() || last != begin+3*kept {
		t.Errorf("the last event is %d, want %d", last, begin+3*kept)
	}
	// Later events do not change the events that a reader has got.
	first := events[0]
	for range kept {
		s.Publish(Event{Kind: ServerDown})
	}
	if events[0].ID != first.ID || events[0].Kind != ServerUp {
		t.Errorf("%+v has become %+v", first, events[0])
	}
}

// A long reason is shortened between two characters. Readers get valid UTF-8 in any case.
func TestLongReason(t *testing.T) {
	s := NewStream()
	for _, c := range []struct{ reason, want string }{
		{strings.Repeat("a", longestReason), strings.Repeat("a", longestReason)},
		{strings.Repeat("a", longestReason+1), strings.Repeat("a", longestReason-3) + "..."},
		{strings.Repeat("ä", longestReason), strings.Repeat("ä", (longestReason-4)/2) + "..."},
		{"a\xffb", "a?b"},
	} {
		before := s.Last()
		s.Publish(Event{Kind: ReloadRefused, Reason: c.reason})
		list, err := s.After(t.Context(), before)
		testhost.Must(t, err)
		if got := list[0].Reason; got != c.want {
			t.Errorf("%d bytes %.10q...%q, want %d bytes", len(got), got, got[max(0, len(got)-10):], len(c.want))
		}
	}
}

// A reader can begin with a number of last events, without those from before a time.
func TestBefore(t *testing.T) {
	s := NewStream()
	begin := s.Last()
	if got := s.Before(100, time.Time{}); got != begin {
		t.Errorf("without events: %d, want %d", got, begin)
	}
	for range 5 {
		s.Publish(Event{Kind: ServerUp})
	}
	now := time.Unix(1000, 0)
	for i := range s.last {
		s.last[i].Time = now.Add(time.Duration(i) * time.Second)
	}
	for _, c := range []struct {
		n     int
		since time.Time
		want  uint64
	}{
		{0, time.Time{}, 5}, {1, time.Time{}, 4}, {5, time.Time{}, 0}, {100, time.Time{}, 0},
		{100, now, 0}, {100, now.Add(time.Second), 1}, {100, now.Add(1500 * time.Millisecond), 2},
		{100, now.Add(time.Hour), 5}, {2, now, 3}, {2, now.Add(4 * time.Second), 4},
	} {
		if got := s.Before(c.n, c.since); got != begin+c.want {
			t.Errorf("the last %d since %v: after %d, want %d", c.n, c.since, got-begin, c.want)
		}
	}
}

// The actor is known in its own context, and in a context from ByActor.
func TestActor(t *testing.T) {
	if by := ActorOf(t.Context()); by != "" {
		t.Errorf("%q without an actor", by)
	}
	ctx := WithActor(t.Context(), func() string { return User(0) })
	for _, ctx := range []context.Context{ctx, ByActor(t.Context(), ctx)} {
		if by := ActorOf(ctx); by != "root (uid 0)" {
			t.Errorf("%q", by)
		}
	}
	if by := User(4294967294); by != "uid 4294967294" {
		t.Errorf("%q", by)
	}
}

func TestWaitingReader(t *testing.T) {
	s := NewStream()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.After(ctx, s.Last()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	s.Publish(Event{Kind: ServerUp})
	// The number is of a process whose clock was ahead.
	if events, err := s.After(t.Context(), s.Last()+100); err != nil || len(events) != 1 {
		t.Errorf("%v, error %v", events, err)
	}
	var none *Stream
	none.Publish(Event{})
}
