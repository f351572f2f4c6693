// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/events"
)

// reader reads the lines of a stream.
type reader struct {
	t     *testing.T
	lines *bufio.Reader
}

// read follows the events of a server after one; empty: from now on. The stream has begun when read
// returns.
func read(t *testing.T, url, after string) *reader {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+eventsPath, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	if after != "" {
		r.Header.Set("Last-Event-ID", after)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != 200 || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("%s, %v", response.Status, response.Header)
	}
	return &reader{t, bufio.NewReader(response.Body)}
}

// block returns the lines until the next empty one.
func (r *reader) block() string {
	r.t.Helper()
	var block strings.Builder
	for {
		line, err := r.lines.ReadString('\n')
		if err != nil {
			r.t.Fatalf("%v after %q", err, block.String())
		}
		if line == "\n" {
			return block.String()
		}
		block.WriteString(line)
	}
}

// A reader knows at once that it follows the events, and misses none of those that come then. It gets
// the events after the one that it names, or those from now on.
func TestEventsOfAPI(t *testing.T) {
	t.Parallel()
	server, stream := serveEvents(t, &inspect.Snapshot{})
	stream.Publish(events.Event{Kind: events.ServerDown, Service: "web", Server: "s1", Reason: "failing"})
	first := stream.Last()
	stream.Publish(events.Event{Kind: events.ServerUp, Service: "web", Server: "s1"})
	for after, want := range map[string][2]string{
		"":                            {fmt.Sprint(first + 1), "changed"},
		strconv.FormatUint(first, 10): {fmt.Sprint(first), "server_up"},
	} {
		r := read(t, server.URL, after)
		if got, want := r.block(), ": the events of segue\nid: "+want[0]+"\n"; got != want {
			t.Errorf("after %q, it begins with %q, want %q", after, got, want)
		}
		before := stream.Last()
		if after == "" {
			stream.Publish(events.Event{Kind: events.Changed})
			before++
		} else {
			before = first + 1
		}
		block := r.block()
		if !strings.HasPrefix(block, fmt.Sprintf("id: %d\ndata: {", before)) || !strings.Contains(block, want[1]) {
			t.Errorf("after %q: %q, want the event %d of kind %s", after, block, before, want[1])
		}
	}
}

// A stream without events has comments.
func TestKeepAlive(t *testing.T) {
	t.Parallel()
	stream := events.NewStream()
	ended := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ended <- sendEvents(r.Context(), w, stream, 0, time.Millisecond)
	}))
	t.Cleanup(server.Close)
	r := read(t, server.URL, "")
	r.block()
	for range 3 {
		if block := r.block(); block != ":\n" {
			t.Errorf("%q, want a comment", block)
		}
	}
	stream.Publish(events.Event{Kind: events.Changed})
	for block := r.block(); block != ":\n"; block = r.block() {
		if !strings.HasPrefix(block, fmt.Sprintf("id: %d\n", stream.Last())) {
			t.Errorf("%q after an event", block)
		}
	}
	server.CloseClientConnections()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ended with %v", err)
	}
}

// patient is a connection to a reader. It notes how long each write may take at least, and ends after
// some writes.
type patient struct {
	httptest.ResponseRecorder
	deadline time.Time
	patience []time.Duration
	end      context.CancelFunc
}

func (p *patient) SetWriteDeadline(deadline time.Time) error {
	p.deadline = deadline
	return nil
}

func (p *patient) Write(text []byte) (int, error) {
	p.patience = append(p.patience, time.Until(p.deadline))
	if p.deadline = (time.Time{}); len(p.patience) == 4 {
		p.end()
	}
	return p.ResponseRecorder.Write(text)
}

// Each write to a reader has the time of a pager that nobody scrolls for a while.
func TestSlowReaderOfEvents(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	w := &patient{ResponseRecorder: *httptest.NewRecorder(), end: cancel}
	stream := events.NewStream()
	before := stream.Last()
	stream.Publish(events.Event{Kind: events.Changed})
	stream.Publish(events.Event{Kind: events.Changed})
	if err := sendEvents(ctx, w, stream, before, time.Millisecond); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	for i, patience := range w.patience {
		if patience < readerPatience/2 {
			t.Errorf("write %d may take %s, want about %s", i, patience, readerPatience)
		}
	}
}

// interrupted is a process whose answers are cut off in the middle of an event.
func interrupted(answers ...string) (http.Handler, *[]string) {
	var asked []string
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Header.Get("Last-Event-ID"))
		if len(answers) == 0 {
			http.Error(w, "no more", http.StatusTeapot)
			return
		}
		_, _ = io.WriteString(w, answers[0])
		answers = answers[1:]
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}), &asked
}

// A client continues after an interruption with the next event, if the process still answers.
func TestEventsContinue(t *testing.T) {
	t.Parallel()
	handler, asked := interrupted(
		": begin\nid: 7\n\n",
		": begin\nid: 7\n\nid: 8\ndata: {\"id\":8,\"kind\":\"changed\"}\n\nid: 9\ndata: {\"id\":9,\"ki",
		":\n\nid: 9\ndata: {\"id\":9,\"kind\":\"server_up\"}\n\n:\n\n",
	)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: http.Client{Transport: redirected{server}}}
	var got []string
	err := client.Events(t.Context(), func(e events.Event) error {
		got = append(got, fmt.Sprint(e.ID, " ", e.Kind))
		return nil
	})
	if err == nil || err.Error() != `instance "edge" answers 418 I'm a teapot` {
		t.Errorf("error %v", err)
	}
	if want := []string{"8 changed", "9 server_up"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	if want := []string{"", "7", "8", "9"}; !slices.Equal(*asked, want) {
		t.Errorf("the client asked for the events after %q, want %q", *asked, want)
	}
}

// A process that ends may have taken the connection by which a client continues, and never answers.
func TestEventsOfEndingProcess(t *testing.T) {
	t.Parallel()
	begun := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !begun {
			begun = true
			_, _ = io.WriteString(w, ": begin\nid: 7\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: http.Client{Transport: redirected{server}}}
	err := client.Events(t.Context(), func(events.Event) error { return nil })
	if err == nil || err.Error() != `the process of the instance "edge" has ended` {
		t.Errorf("error %v", err)
	}
}

// An interruption before the first line is an error, and no reason to ask again at once.
func TestEventsEndAtOnce(t *testing.T) {
	t.Parallel()
	handler, asked := interrupted("", "")
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: http.Client{Transport: redirected{server}}}
	err := client.Events(t.Context(), func(events.Event) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "the stream of events has ended") || len(*asked) != 1 {
		t.Errorf("error %v after %d requests", err, len(*asked))
	}
}

// Streams end by themselves when the process ends: they need not be aborted, which would delay the end
// by the time that other requests have. A client knows then that the process has ended.
func TestEndOfStreams(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "edge.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	stream := events.NewStream()
	api, handler := newAPI("Segue")
	registerEvents(api, stream)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- (&Socket{slog.New(slog.DiscardHandler), listener}).Run(ctx, handler) }()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	client := &Client{instance: "edge", http: http.Client{Transport: &http.Transport{DialContext: dial}}}
	response, err := client.openEvents(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	stream.Publish(events.Event{Kind: events.Changed})
	last, interruption, err := readEvents(response.Body, func(events.Event) error { end(); return nil })
	if want := strconv.FormatUint(stream.Last(), 10); last != want || interruption != io.EOF || err != nil {
		t.Errorf("the stream ended after %s by %v, error %v; want %s and EOF", last, interruption, err, want)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	_, err = client.openEvents(t.Context(), last)
	if !hasEnded(err) {
		t.Errorf("error %v", err)
	}
}
