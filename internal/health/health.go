// SPDX-License-Identifier: Apache-2.0

// Package health checks servers actively: it connects to each at its interval,
// and tells when one has stopped answering or answers again.
package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// Result is the new state of a server of a service.
type Result struct {
	Service, Server string
	Healthy         bool
	Reason          string // in plain words, such as "connection refused"
}

// complaintInterval is the least time between two lines of log that say that
// this host cannot probe: every probe of every target finds that out.
const complaintInterval = 10 * time.Second

// Checker probes its targets, from the network namespace of its process.
type Checker struct {
	log      *slog.Logger
	probe    func(context.Context, Target) error
	targets  chan []Target
	verdicts chan verdict
	untried  chan error
	updates  chan Result
}

// verdict is a change of a target's state that its probes have brought about.
type verdict struct {
	watch   *watch
	healthy bool
	reason  string
}

// New returns a checker; it works while Run does.
func New(log *slog.Logger) *Checker {
	return &Checker{
		log:      log,
		probe:    probe,
		targets:  make(chan []Target),
		verdicts: make(chan verdict),
		untried:  make(chan error),
		updates:  make(chan Result),
	}
}

// SetTargets says what to check from now on. A target that was there before, the
// same in every value, goes on as if nothing had happened; any other is healthy
// until its probes say otherwise. SetTargets returns when the checker has taken
// note, or the context ends; no later update is about a target that has gone.
func (c *Checker) SetTargets(ctx context.Context, targets []Target) {
	select {
	case c.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the state of a server whenever it differs from what was
// delivered last, or from healthy when nothing was since its service and name
// became a target. What comes and goes while nobody reads is not delivered.
func (c *Checker) Updates() <-chan Result {
	return c.updates
}

// Run checks until the context ends, and returns nil.
func (c *Checker) Run(ctx context.Context) error {
	var probers sync.WaitGroup
	defer probers.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	b := newBoard(func(w *watch) {
		var life context.Context
		life, w.stop = context.WithCancel(ctx)
		probers.Go(func() { c.follow(life, w) })
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
		case v := <-c.verdicts:
			b.record(v)
		case err := <-c.untried:
			if time.Since(complained) >= complaintInterval {
				c.log.Error("cannot check servers", "error", err)
				complained = time.Now()
			}
		case out <- news:
			b.delivered(news)
		}
	}
}

// follow probes a target until the context ends: at once, then at a random time
// in the interval after, which spreads the probes of targets that came together,
// then at every interval.
func (c *Checker) follow(ctx context.Context, w *watch) {
	s := streak{healthy: !w.target.Failing}
	c.check(ctx, w, &s)
	timer := time.NewTimer(rand.N(w.target.Interval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			timer.Reset(w.target.Interval)
			c.check(ctx, w, &s)
		}
	}
}

// check probes a target once, and passes on what follows from it.
func (c *Checker) check(ctx context.Context, w *watch, s *streak) {
	err := c.probe(ctx, w.target)
	if errors.Is(err, errUntried) {
		select {
		case c.untried <- err:
		case <-ctx.Done():
		}
		return
	}
	if !s.observe(err == nil, w.target.Rise, w.target.Fall) {
		return
	}
	v := verdict{watch: w, healthy: s.healthy}
	if err != nil {
		v.reason = err.Error()
	} else {
		v.reason = fmt.Sprintf("successful checks: %d", w.target.Rise)
	}
	select {
	case c.verdicts <- v:
	case <-ctx.Done():
	}
}

// streak is a state and how many probes in a row have contradicted it.
type streak struct {
	healthy bool
	length  int
}

// observe takes note of a probe, and says whether it has changed the state.
func (s *streak) observe(success bool, rise, fall int) bool {
	if success == s.healthy {
		s.length = 0
		return false
	}
	s.length++
	if s.healthy && s.length < fall || !s.healthy && s.length < rise {
		return false
	}
	*s = streak{healthy: success}
	return true
}
