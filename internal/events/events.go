// SPDX-License-Identifier: Apache-2.0

// Package events keeps the last events of a running balancer or agent, and delivers them to any
// number of readers. A slow reader delays nobody. If it is too slow, it misses events, and sees a
// gap between their numbers.
package events

import (
	"context"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Kind is what has happened.
type Kind string

// The kinds of events. docs/reference/api.md describes them.
const (
	Started         Kind = "started"          // the process has begun: earlier events are gone
	ServerDown      Kind = "server_down"      // a server is unfit for new flows
	ServerUp        Kind = "server_up"        // a server is fit for new flows again
	ServerDraining  Kind = "server_draining"  // a server was drained: it gets no new flows
	ServerDrained   Kind = "server_drained"   // a drained server has no flow left
	ServerUndrained Kind = "server_undrained" // a server was undrained: it gets new flows again
	ServiceDown     Kind = "service_down"     // no server of a service is fit for new flows
	ServiceUp       Kind = "service_up"       // a server of a service is fit again
	FlowsLost       Kind = "flows_lost"       // a server has lost flows
	VIPMissing      Kind = "vip_missing"      // a VIP is not an address of the agent's host
	VIPBack         Kind = "vip_back"         // a VIP is an address of the agent's host again
	RouteAnnounced  Kind = "route_announced"  // a VIP is announced to routers
	RouteWithdrawn  Kind = "route_withdrawn"  // a VIP is no longer announced
	VIPTaken        Kind = "vip_taken"        // the balancer answers for a VIP on its link
	VIPLeft         Kind = "vip_left"         // the balancer no longer answers for a VIP
	SessionUp       Kind = "session_up"       // a BGP session is established
	SessionDown     Kind = "session_down"     // a BGP session has ended
	Drained         Kind = "drained"          // the balancer itself is drained: all routes are withdrawn
	Undrained       Kind = "undrained"        // the balancer itself announces its routes again
	NotSaved        Kind = "not_saved"        // the balancer cannot write to its state directory
	Saved           Kind = "saved"            // the balancer can write to its state directory again
	Changed         Kind = "changed"          // the desired state has changed
	ReloadRefused   Kind = "reload_refused"   // the files are not valid, or cannot be followed
	StoreDown       Kind = "store_down"       // the store of the fleet does not answer
	StoreUp         Kind = "store_up"         // the store answers again
	StoreHeld       Kind = "store_held"       // the balancer does not follow the store
	StoreFollowed   Kind = "store_followed"   // the balancer follows the store again
)

// Event is something that has happened.
type Event struct {
	// ID grows by one with each event of a process. The events of a later process have higher
	// numbers.
	ID      uint64    `json:"id" doc:"grows by one with each event; after a restart it begins higher"`
	Time    time.Time `json:"time"`
	Kind    Kind      `json:"kind" example:"server_down"`
	Service string    `json:"service,omitempty"`
	Server  string    `json:"server,omitempty"`
	Prefix  string    `json:"prefix,omitempty" doc:"of a VIP"`
	Peer    string    `json:"peer,omitempty" doc:"of a BGP session"`
	// By is the actor of a change: a user, a signal, or the store.
	By string `json:"by,omitempty" example:"root (uid 0)" doc:"who made the change: a user of the API, signal, or store with the balancer and the user that wrote it"`
	// Reason says why, in plain words. It may be empty. Publish shortens it to longestReason.
	Reason  string   `json:"reason,omitempty" maxLength:"4096"`
	Flows   *uint64  `json:"flows,omitempty" doc:"the live flows that the server had"`
	Changes []string `json:"changes,omitempty" doc:"as segue apply prints them, at most 100, and the number of the others"`
}

// kept is the greatest number of events that a stream keeps. When it has so many, it forgets the
// oldest quarter.
const kept = 4096

// Stream keeps the last events. A nil stream drops them.
type Stream struct {
	mu   sync.Mutex
	last []Event // at most kept
	next uint64  // the ID of the next event
	// more is closed by the next event.
	more chan struct{}
}

// NewStream returns an empty stream. Its first ID is the time in microseconds, so its IDs are
// higher than those of an earlier process.
func NewStream() *Stream {
	return &Stream{next: uint64(time.Now().UnixMicro()), more: make(chan struct{})}
}

// Publish adds an event, with its ID and time.
func (s *Stream) Publish(e Event) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.ID, e.Time, e.Reason = s.next, time.Now(), shortened(e.Reason)
	s.next++
	if len(s.last) == kept {
		s.last = s.last[kept/4:] // does not move events, because a reader may still use their memory
	}
	s.last = append(s.last, e)
	close(s.more)
	s.more = make(chan struct{})
}

// longestReason is the size of the longest reason of an event, in bytes. An error of a reload can
// be much longer: it has a line for each error in a file.
const longestReason = 4096

// shortened returns a text of at most longestReason bytes that is valid UTF-8.
func shortened(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= longestReason {
		return text
	}
	const mark = "..."
	end := longestReason - len(mark)
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + mark
}

// Last returns the ID of the last event. If there is none, it returns the ID before that of the
// first event.
func (s *Stream) Last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next - 1
}

// Before returns an ID for After, which then returns the last n events, without events older than
// the time since. If n is greater than the number of kept events, After returns all of them. The
// zero time is before all events.
func (s *Stream) Before(n int, since time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.last[max(0, len(s.last)-n):]
	for len(last) > 0 && last[0].Time.Before(since) {
		last = last[1:]
	}
	return s.next - uint64(len(last)) - 1
}

// After returns the kept events with IDs above id. If there are none, it waits for one. If the
// context ends first, it returns the context's error.
//
// An ID that the stream has not given yet counts as 0. It comes from an earlier process whose clock
// was ahead.
func (s *Stream) After(ctx context.Context, id uint64) ([]Event, error) {
	for {
		events, more := s.after(id)
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// after returns the kept events with IDs above id, and a channel that the next event closes.
func (s *Stream) after(id uint64) ([]Event, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.next - uint64(len(s.last))
	if id >= s.next {
		id = 0
	}
	skip := 0
	if id >= first {
		skip = int(id - first + 1)
	}
	return s.last[skip:len(s.last):len(s.last)], s.more
}
