// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestPrintEvent(t *testing.T) {
	flows, one := uint64(12), uint64(1)
	var out bytes.Buffer
	for i, e := range []events.Event{
		{Kind: events.ServerDown, Service: "web", Server: "s2", Reason: "failing (status 500)"},
		{Kind: events.ServerUp, Service: "web", Server: "s2"},
		{Kind: events.ServiceDown, Service: "web"},
		{Kind: events.FlowsLost, Service: "web", Server: "s1", Flows: &flows},
		{Kind: events.FlowsLost, Service: "web", Server: "s1", Flows: &one},
		{Kind: events.VIPMissing, Reason: "2001:db8:80::1"},
		{Kind: events.RouteWithdrawn, Prefix: "2001:db8:80::1/128", Reason: "drained"},
		{Kind: events.SessionDown, Peer: "192.0.2.1", Reason: "hold time expired"},
		{Kind: events.Drained, By: "root (uid 0)"},
		{Kind: events.Started, Reason: "version 1.2"},
		{Kind: events.Changed, By: "root (uid 0)", Changes: []string{"server web/s1 removed"}},
		{Kind: events.Changed, By: "store: uid 1000 on lb1", Changes: []string{"server web/s1 added", "server web/s2 added"}},
		{Kind: events.Changed, Changes: []string{"server web/s3 (drained false to true) changed"}},
		{Kind: events.Changed, Changes: []string{"server web/s4 added", "server web/s1 removed"}},
		{Kind: events.ReloadRefused, Reason: "lb.yaml:2: node: required"},
	} {
		e.ID, e.Time = uint64(i), time.Date(2026, 11, 26, 12, 16, i, 0, time.UTC)
		testhost.Must(t, printEvent(&out, &e))
	}
	clitest.Golden(t, "events.txt", &out)
}

func TestEvents(t *testing.T) {
	p := startAgent(t)
	p.stream.Publish(events.Event{Kind: events.VIPMissing, Reason: "2001:db8:80::1"})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	reader, writer := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		root := newRoot()
		root.SetOut(writer)
		root.SetArgs([]string{"events", "--json", "--instance", p.instance})
		err := root.ExecuteContext(ctx)
		_ = writer.Close()
		ended <- err
	}()
	var e events.Event
	err := json.NewDecoder(reader).Decode(&e) // the event from before the start of the command
	if err != nil || e.Kind != events.VIPMissing || e.Reason != "2001:db8:80::1" || e.ID == 0 {
		t.Errorf("event %+v, error %v", e, err)
	}
	go func() { _, _ = io.Copy(io.Discard, reader) }()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := runSegue(t.Context(), "events", "--instance", "none"); err == nil ||
		!strings.Contains(err.Error(), `instance "none"`) {
		t.Errorf("error %v", err)
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	local := time.Date(2026, 11, 26, 9, 30, 0, 0, time.Local)
	for text, want := range map[string]time.Time{
		"1h30m": now.Add(-90 * time.Minute), "2026-11-26T09:30:00+01:00": now.Add(-210 * time.Minute),
		"2026-11-26 09:30": local, "2026-11-26 09:30:00": local, "2026-11-26": local.Add(-9*time.Hour - 30*time.Minute),
	} {
		if got, err := parseSince(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %v, error %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "yesterday", "-1h", "0s", "10", "2026-13-01"} {
		if _, err := parseSince(text, now); err == nil || !strings.Contains(err.Error(), "--since") {
			t.Errorf("%q: error %v", text, err)
		}
	}
}
