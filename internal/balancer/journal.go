// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
)

const (
	// journalDelay is how long changes of servers are gathered before they are logged. Servers that
	// fail together fail their checks within one interval of each other, one second by default.
	journalDelay = 2 * time.Second
	// mostLines is how many changes of one kind are logged each on a line of its own.
	mostLines = 3
)

// wording is a message about one server or service, and about many.
type wording struct{ one, many string }

// changeText is what the log says of a cause.
type changeText struct{ began, ended wording }

// change is something that the log does not say yet.
type change struct {
	service, server string // server is empty for a change of the service
	reason          string // empty: not known
}

func (c change) name() string {
	if c.server == "" {
		return c.service
	}
	return c.service + "/" + c.server
}

// transitions are the changes of one kind of cause, in the order of the log.
type transitions struct{ ended, began, endedSoon []change }

// note adds the changes of a server that had the cause before, has it now, or had it in between. A
// server that had the cause only in between is in began and in endedSoon.
func (t *transitions) note(cause, before, between, now dataplane.Causes, began, ended change) {
	switch {
	case before.Has(cause) && !now.Has(cause):
		t.ended = append(t.ended, ended)
	case before.Has(cause):
	case now.Has(cause):
		t.began = append(t.began, began)
	case between.Has(cause):
		t.began = append(t.began, began)
		t.endedSoon = append(t.endedSoon, ended)
	}
}

// log logs the changes, those for the worse at the given level.
func (t *transitions) log(log *slog.Logger, worse slog.Level, text changeText) {
	logAll(log, slog.LevelInfo, text.ended, t.ended)
	logAll(log, worse, text.began, t.began)
	logAll(log, slog.LevelInfo, text.ended, t.endedSoon)
}

// logChanges logs what has changed of servers and services since it was called last: which servers
// are unfit for new flows, and which services place flows on unfit servers.
func (s *services) logChanges(log *slog.Logger) {
	servers, services := make([]transitions, len(causeTexts)), make([]transitions, len(causeTexts))
	for _, name := range slices.Sorted(maps.Keys(s.byName)) {
		svc := s.byName[name]
		for _, m := range svc.members {
			now := s.causes(m)
			for i, kind := range causeTexts {
				servers[i].note(kind.cause, m.logged, m.unlogged, now,
					change{name, m.Name, m.reasons[kind.cause].began},
					change{name, m.Name, m.reasons[kind.cause].ended})
			}
			m.logged, m.unlogged = now, 0
		}
		ignored := s.ignored(svc)
		for i, kind := range causeTexts {
			services[i].note(kind.cause, svc.logged, 0, ignored, change{service: name}, change{service: name})
		}
		svc.logged = ignored
	}
	for i, kind := range causeTexts {
		servers[i].log(log, slog.LevelWarn, kind.server)
	}
	for i, kind := range causeTexts {
		services[i].log(log, slog.LevelError, kind.service)
	}
}

// logAll logs each of a few changes, and more of them as one line.
func logAll(log *slog.Logger, level slog.Level, text wording, all []change) {
	if len(all) > mostLines {
		log.Log(context.Background(), level, text.many, describeMany(all)...)
		return
	}
	for _, c := range all {
		attributes := []any{"service", c.service}
		if c.server != "" {
			attributes = append(attributes, "server", c.server)
		}
		if c.reason != "" {
			attributes = append(attributes, "reason", c.reason)
		}
		log.Log(context.Background(), level, text.one, attributes...)
	}
}

// describeMany counts changes, and names some of them and the most common reason.
func describeMany(all []change) []any {
	noun := "servers"
	if all[0].server == "" {
		noun = "services"
	}
	var names config.Names
	times := map[string]int{}
	for _, c := range all {
		names = append(names, c.name())
		times[c.reason]++
	}
	attributes := []any{"count", len(all), noun, names.String()}
	delete(times, "")
	if len(times) == 0 {
		return attributes
	}
	common := slices.MaxFunc(slices.Sorted(maps.Keys(times)), func(a, b string) int {
		return cmp.Compare(times[a], times[b])
	})
	if times[common] < len(all) {
		return append(attributes, "reasons", fmt.Sprintf("%d times: %s", times[common], common))
	}
	return append(attributes, "reason", common)
}
