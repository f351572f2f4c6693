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
	"github.com/segue-lb/segue/internal/desired"
)

const (
	// journalDelay is how long changes of servers are collected before they are logged. The health
	// checks of servers that fail together fail within one interval, which is one second by
	// default.
	journalDelay = 2 * time.Second
	// mostLines is the highest number of changes of one kind that are logged on a line each. More
	// changes share one line.
	mostLines = 3
)

// wording is a message about one server or service, and about many.
type wording struct{ one, many string }

// changeText contains the messages about one cause: when it begins, and when it ends.
type changeText struct{ began, ended wording }

// change is a change that was not logged yet.
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

// transitions are the changes of one cause, in the order in which they are logged. A cause in
// endedSoon has begun and ended since the last log.
type transitions struct{ ended, began, endedSoon []change }

// note adds the changes of a server. The arguments before, between and now are the causes at the
// last log, since then, and at present. If the server had the cause only in between, note adds the
// server to the two lists began and endedSoon.
func (t *transitions) note(cause, before, between, now dataplane.Causes, began, ended change) {
	switch {
	case before.Has(cause) && !now.Has(cause):
		t.ended = append(t.ended, ended)
	case before.Has(cause): // the server has had the cause all the time
	case now.Has(cause):
		t.began = append(t.began, began)
	case between.Has(cause):
		t.began = append(t.began, began)
		t.endedSoon = append(t.endedSoon, ended)
	}
}

// log logs the changes. Causes that began are logged at the given level, all others at level Info.
func (t *transitions) log(log *slog.Logger, worse slog.Level, text changeText) {
	logAll(log, slog.LevelInfo, text.ended, t.ended)
	logAll(log, worse, text.began, t.began)
	logAll(log, slog.LevelInfo, text.ended, t.endedSoon)
}

// logChanges logs the changes of servers and services since its last call: which servers have
// become unfit for new flows or fit again, and which services place new flows on unfit servers.
func (s *services) logChanges(log *slog.Logger) {
	servers, services := make([]transitions, len(causeTexts)), make([]transitions, len(causeTexts))
	var refusals transitions
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
		switch refuses := s.refuses(svc); {
		case refuses && !svc.refused:
			refusals.began = append(refusals.began, change{service: name})
			svc.refused = true
		case !refuses && svc.refused:
			refusals.ended = append(refusals.ended, change{service: name})
			svc.refused = false
		}
	}
	for i, kind := range causeTexts {
		servers[i].log(log, slog.LevelWarn, kind.server)
	}
	refusals.log(log, slog.LevelError, refusalText)
	for i, kind := range causeTexts {
		services[i].log(log, slog.LevelError, kind.service)
	}
}

// logAll logs changes of one kind. If there are at most mostLines, each has a line. If there are
// more, all share one line.
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

// describeMany returns the attributes of a line about many changes: their number, the names of
// some of the servers or services, and the most common known reason. The attribute is "reason" if
// all changes have this reason. Otherwise it is "reasons", and tells how many have it.
func describeMany(all []change) []any {
	noun := "servers"
	if all[0].server == "" {
		noun = "services"
	}
	var names desired.Names
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
