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
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/testhost"
)

// reader reads the lines of a stream.
type reader struct {
	t     *testing.T
	lines *bufio.Reader
}

// read follows the events of a server after the one with a number. An empty number means from now
// on. The stream has begun when read returns.
func read(t *testing.T, url, after, query string) *reader {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+eventsPath+query, http.NoBody)
	testhost.Must(t, err)
	if after != "" {
		r.Header.Set("Last-Event-ID", after)
	}
	response, err := http.DefaultClient.Do(r)
	testhost.Must(t, err)
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

// A reader knows at once that it follows the events, and misses no later one. It gets the events
// after the one that it names, or those from now on.
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
		r := read(t, server.URL, after, "")
		if got, want := r.block(), ": the events of segue\nid: "+want[0]+"\n"; got != want {
			t.Errorf("after %q, it begins with %q, want %q", after, got, want)
		}
		id := first + 1
		if after == "" {
			id = stream.Last() + 1
			stream.Publish(events.Event{Kind: events.Changed})
		}
		block := r.block()
		if !strings.HasPrefix(block, fmt.Sprintf("id: %d\ndata: {", id)) || !strings.Contains(block, want[1]) {
			t.Errorf("after %q: %q, want the event %d of kind %s", after, block, id, want[1])
		}
	}
}

// A stream without events has comments.
func TestKeepAlive(t *testing.T) {
	t.Parallel()
	stream := events.NewStream()
	ended := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ended <- sendEvents(r.Context(), w, stream, stream.Last(), time.Millisecond)
	}))
	t.Cleanup(server.Close)
	r := read(t, server.URL, "", "")
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
	if err := <-ended; err == nil { // of the context, or of a write to the closed connection
		t.Error("the stream ended without an error")
	}
}

// patient is a connection to a reader. It notes how long each write may take, and ends after four
// writes.
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

// Each write to a reader may take about a minute: a pager does not read until somebody scrolls.
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

// interrupted is a process whose answers are cut off in the middle of an event. It also returns the
// numbers of the last events that clients have sent.
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
	err := client.Events(t.Context(), EventsFrom{}, func(e events.Event) error {
		got = append(got, fmt.Sprint(e.ID, " ", e.Kind))
		return nil
	}, func() { t.Error("the process has not ended") })
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

// A process ends, and another one starts later. The client tells once that it waits, and gets each
// event once. A process that ends may have taken a connection that it never answers. A process that
// starts may wait for its store.
func TestEventsOfNextProcess(t *testing.T) {
	t.Parallel()
	const first, second = ": begin\nid: 6\n\nid: 7\ndata: {\"id\":7,\"kind\":\"changed\"}\n\n",
		": begin\nid: 100\n\nid: 101\ndata: {\"id\":101,\"kind\":\"started\"}\n\n"
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.RawQuery+" "+r.Header.Get("Last-Event-ID"))
		switch len(asked) {
		case 1:
			_, _ = io.WriteString(w, first)
		case 2: // it ends before it answers
		case 3:
			http.Error(w, "waits for its store", http.StatusServiceUnavailable)
			return
		case 4: // it ends before it sends anything
			w.WriteHeader(http.StatusOK)
		case 5:
			_, _ = io.WriteString(w, second)
		default:
			http.Error(w, "no more", http.StatusTeapot)
			return
		}
		if len(asked) != 2 {
			_ = http.NewResponseController(w).Flush()
		}
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: http.Client{Transport: redirected{server}}}
	var got []string
	err := client.Events(t.Context(), EventsFrom{Last: 100, Since: time.Unix(0, 0).UTC()}, func(e events.Event) error {
		got = append(got, fmt.Sprint(e.ID, " ", e.Kind))
		return nil
	}, func() { got = append(got, "waits") })
	if err == nil || !strings.Contains(err.Error(), "418") {
		t.Errorf("error %v", err)
	}
	if want := []string{"7 changed", "waits", "101 started"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	if want := []string{"last=100&since=1970-01-01T00%3A00%3A00Z ", " 7", " 7", " 7", " 7", " 101"}; !slices.Equal(asked, want) {
		t.Errorf("the client asked %q, want %q", asked, want)
	}
}

// A client that waits for a process ends with its context.
func TestEventsOfEndedProcess(t *testing.T) {
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
	ctx, cancel := context.WithCancel(t.Context())
	if err := client.Events(ctx, EventsFrom{}, func(events.Event) error { return nil }, cancel); err != nil {
		t.Errorf("error %v", err)
	}
}

// A stream begins with the last events, with those since a time, or with the last of these.
func TestEventsBegin(t *testing.T) {
	t.Parallel()
	server, stream := serveEvents(t, &inspect.Snapshot{})
	before := stream.Last()
	var times []string
	for range 3 {
		stream.Publish(events.Event{Kind: events.Changed})
		list, err := stream.After(t.Context(), stream.Last()-1)
		testhost.Must(t, err)
		times = append(times, url.QueryEscape(list[0].Time.Format(time.RFC3339Nano)))
		for time.Now().Equal(list[0].Time) { // the next one is later
		}
	}
	for query, want := range map[string]uint64{
		"": 3, "?last=0": 3, "?last=1": 2, "?last=2": 1, "?last=3": 0, "?last=100": 0,
		"?since=" + times[0]: 0, "?since=" + times[1]: 1, "?since=" + times[2]: 2,
		"?since=2000-01-01T00:00:00Z": 0, "?since=2100-01-01T00:00:00Z": 3,
		"?last=1&since=" + times[1]: 2, "?last=3&since=" + times[1]: 1,
	} {
		r := read(t, server.URL, "", query)
		if got, want := r.block(), fmt.Sprintf(": the events of segue\nid: %d\n", before+want); got != want {
			t.Errorf("%s: it begins with %q, want %q", query, got, want)
		}
	}
	for _, query := range []string{"?last=-1", "?last=5000", "?last=x", "?since=yesterday"} {
		if status, answer := send(t, http.MethodGet, server.URL+eventsPath+query, ""); status != 422 {
			t.Errorf("%s: %d %s", query, status, answer)
		}
	}
}

// An interruption before the first line is an error, and no reason to ask again at once.
func TestEventsEndAtOnce(t *testing.T) {
	t.Parallel()
	handler, asked := interrupted("", "")
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client := &Client{instance: "edge", http: http.Client{Transport: redirected{server}}}
	err := client.Events(t.Context(), EventsFrom{}, func(events.Event) error { return nil }, func() {})
	if err == nil || !strings.Contains(err.Error(), "the stream of events has ended") || len(*asked) != 1 {
		t.Errorf("error %v after %d requests", err, len(*asked))
	}
}

// Streams end at once when the process ends, and do not delay the end. The client then knows that
// the process has ended.
func TestEndOfStreams(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "edge.sock")
	listener, err := net.Listen("unix", path)
	testhost.Must(t, err)
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
	response, err := client.openEvents(t.Context(), EventsFrom{}, "")
	testhost.Must(t, err)
	defer response.Body.Close()
	stream.Publish(events.Event{Kind: events.Changed})
	last, interruption, err := readEvents(response.Body, func(events.Event) error { end(); return nil })
	if want := strconv.FormatUint(stream.Last(), 10); last != want || interruption != io.EOF || err != nil {
		t.Errorf("the stream ended after %s by %v, error %v; want %s and EOF", last, interruption, err, want)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	_, err = client.openEvents(t.Context(), EventsFrom{}, last)
	if !hasEnded(err) {
		t.Errorf("error %v", err)
	}
}
