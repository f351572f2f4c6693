// SPDX-License-Identifier: Apache-2.0

// Package health checks servers: it connects to each server at an interval, and reports when a
// server begins or stops failing. A check can take the path of clients' packets (HostPath).
package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// Result is the new state of a server of a service.
type Result struct {
	Service, Server string
	Healthy         bool
	Reason          string // in plain words, such as "connection refused"
}

// complaintInterval is the least time between two log lines that say that this host cannot check
// servers. Otherwise every check of every target would log the same.
const complaintInterval = 10 * time.Second

const (
	// crowd is the largest number of targets whose first checks are all made at once.
	crowd = 100
	// firstPace is the mean time between the first checks if there are more targets. One core can
	// make checks at this pace, so none fails because this host is too slow.
	firstPace = 100 * time.Microsecond
)

// Checker checks its targets, from the network namespace of its process.
type Checker struct {
	log     *slog.Logger
	path    Path
	attempt func(context.Context, *Target) error
	targets chan []Target
	changes chan stateChange
	untried chan error
	updates chan Result
	report  func(reason string) // tells why this host cannot check; nil: nobody wants to know
}

// stateChange is a change of a target's state.
type stateChange struct {
	watch   *watch
	healthy bool
	reason  string
}

// New returns a checker. It works while Run runs. Checks of targets with OnPath use path.
func New(path Path, log *slog.Logger) *Checker {
	c := &Checker{
		log: log, path: path, targets: make(chan []Target), changes: make(chan stateChange),
		untried: make(chan error), updates: make(chan Result),
	}
	c.attempt = c.tryOnce
	return c
}

// ReportUntried makes the checker call report whenever it logs that this host cannot check servers.
// The argument is the reason. The function must not block. Call ReportUntried before Run.
func (c *Checker) ReportUntried(report func(reason string)) { c.report = report }

// complain logs and reports why this host cannot check servers.
func (c *Checker) complain(err error) {
	c.log.Error("cannot check servers", "error", err)
	if c.report != nil {
		c.report(strings.TrimPrefix(err.Error(), ErrUntried.Error()+": "))
	}
}

// SetTargets replaces the targets. If a target equals a former one in all but State, its checks go
// on. Any other target, such as one whose check has changed, starts in its State, and keeps this
// state until checks show another. SetTargets returns when the checker has received the targets, or
// the context ends. No later update is about a former target.
func (c *Checker) SetTargets(ctx context.Context, targets []Target) {
	select {
	case c.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the state of a server whenever it differs from the state that the reader knows.
// The reader knows the last delivered state, and the State of a target in a later SetTargets. A
// change that is reversed before it is read is not delivered.
func (c *Checker) Updates() <-chan Result {
	return c.updates
}

// Run checks until the context ends, and returns nil.
func (c *Checker) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	var b *board
	b = newBoard(func(w *watch) { // begins to check a target
		var life context.Context
		life, w.stop = context.WithCancel(ctx)
		first := time.Duration(0)
		if n := b.wanted; n > crowd { // spread the first checks of many targets
			first = rand.N(min(w.target.Interval, time.Duration(n)*firstPace))
		}
		running.Go(func() { c.follow(life, w, first) })
	})
	var complained time.Time
	for {
		var out chan Result
		news, ok := b.news()
		if ok {
			out = c.updates
		}
		select {
		case <-ctx.Done():
			return nil
		case targets := <-c.targets:
			b.replace(targets)
		case change := <-c.changes:
			b.record(change)
		case err := <-c.untried:
			if time.Since(complained) >= complaintInterval {
				c.complain(err)
				complained = time.Now()
			}
		case out <- news:
			b.delivered(news)
		}
	}
}

// follow checks a target until the context ends. The first check is after the time first. The
// second one is at a random time in the interval after it, so that the checks of targets that were
// added together are spread. Then the target is checked at every interval, with jitter.
func (c *Checker) follow(ctx context.Context, w *watch, first time.Duration) {
	s := streak{state: w.target.State}
	timer, due := time.NewTimer(first), time.Now().Add(first)
	defer timer.Stop()
	for isFirst := true; ; isFirst = false {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		late := time.Since(due)
		wait := w.target.wait() // from the start of this check
		timer.Reset(wait)
		due = time.Now().Add(wait)
		c.check(ctx, w, &s, late)
		now := time.Now()
		if isFirst {
			wait = rand.N(w.target.Interval)
			timer.Reset(wait)
			due = now.Add(wait)
		} else if due.Before(now) { // a check that takes long delays the next one
			due = now
		}
	}
}

// wait returns the time from the start of a check to the start of the next one: the interval,
// changed by a random part of the jitter.
func (t *Target) wait() time.Duration {
	if t.Jitter == 0 {
		return t.Interval
	}
	return t.Interval - t.Jitter + rand.N(2*t.Jitter+1)
}

// errBusy marks a check that timed out after it had begun too late. This host then has too little
// CPU time, and may also read answers too late. So the timeout proves nothing about the server.
var errBusy = fmt.Errorf("%w: this host is too busy: a check began too late", ErrUntried)

// check checks a target once, and reports a change of its state. If this host could not make the
// check, check reports that to Run. The state of the target then changes only by giveUp. late is
// how long after its due time the check begins.
func (c *Checker) check(ctx context.Context, w *watch, s *streak, late time.Duration) {
	before, err := s.state, c.attempt(ctx, &w.target)
	if errors.Is(err, errTimeout) && late > w.target.Timeout/2 {
		err = errBusy
	}
	if errors.Is(err, ErrUntried) {
		select {
		case c.untried <- err:
		case <-ctx.Done():
		}
		// After errBusy, the next check may have a result. Other errors show that checks do not
		// work.
		if errors.Is(err, errBusy) || !s.giveUp(w.target.Fall) {
			return
		}
	} else if !s.observe(err == nil, w.target.Rise, w.target.Fall) {
		return
	}
	change := stateChange{watch: w, healthy: s.state == Healthy}
	switch {
	case err != nil:
		change.reason = err.Error()
	case before == Unchecked:
		change.reason = "the first successful check"
	default:
		change.reason = fmt.Sprintf("successful checks: %d", w.target.Rise)
	}
	select {
	case c.changes <- change:
	case <-ctx.Done():
	}
}

// streak is a state, and the number of successive checks that contradict it.
type streak struct {
	state   State
	length  int
	untried int // checks that this host could not make
}

// observe counts the result of a check, and tells whether the state has changed.
func (s *streak) observe(success bool, rise, fall int) bool {
	next, enough := stateOf(success), fall // enough: how many such results change the state
	switch {
	case next == s.state:
		s.length = 0
		return false
	case success && s.state == Unchecked:
		enough = 1
	case success:
		enough = rise
	}
	if s.length++; s.length < enough {
		return false
	}
	*s = streak{state: next}
	return true
}

// giveUp counts a check that this host could not make. After fall such checks, an unchecked target
// becomes healthy, and giveUp returns true: the checks do not work, so nobody must wait for a
// result.
func (s *streak) giveUp(fall int) bool {
	if s.state != Unchecked {
		return false
	}
	if s.untried++; s.untried < fall {
		return false
	}
	*s = streak{state: Healthy}
	return true
}
