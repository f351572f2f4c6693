// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/segue-lb/segue/internal/events"
)

const eventsPath = "/v1/events"

const (
	// keepAlive is the time after which a stream without events gets a comment. A reader that gets
	// nothing for much longer knows that its connection is dead.
	keepAlive = 15 * time.Second
	// readerPatience is how long a write to a reader that does not read may take.
	readerPatience = time.Minute
	// endPatience is how long the last write to a stream may take when the process ends.
	endPatience = 100 * time.Millisecond
)

type eventsRequest struct {
	After uint64    `header:"Last-Event-ID" doc:"the number of the last event that the reader has got"`
	Last  int       `query:"last" minimum:"0" maximum:"4096" doc:"begin with so many of the events that the process keeps"`
	Since time.Time `query:"since" doc:"begin with the first kept event of this time or later"`
}

// begin returns the number of the event after which a stream begins.
func (r *eventsRequest) begin(stream *events.Stream) uint64 {
	switch {
	case r.After != 0:
		return r.After
	case r.Last == 0 && !r.Since.IsZero():
		return stream.Before(math.MaxInt, r.Since) // all kept events of this time or later
	}
	return stream.Before(r.Last, r.Since)
}

func registerEvents(api huma.API, stream *events.Stream) {
	event := api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[events.Event](), true, "Event")
	huma.Register(api, huma.Operation{
		OperationID: "watch-events", Method: http.MethodGet, Path: eventsPath,
		Summary: "Follow the events, as server-sent events",
		Description: "With Last-Event-ID, the stream begins after the event with this number. Without it, " +
			"last and since say with which of the kept events it begins; without both, it begins with the next " +
			"event. The process keeps at least the last 3,000 events. The answer begins at once with the " +
			"number of the event before the first one, without data: a reader that connects again with this " +
			"number misses no event. A reader that is too slow sees a gap between the numbers. The first event " +
			"of a process is of the kind started. Its number is higher than those of earlier processes: a " +
			"reader that gives the number of its last event gets no event twice.",
		Responses: map[string]*huma.Response{"200": {
			Description: "Events until the reader or the process ends the connection",
			Content: map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{
				Type: huma.TypeArray, Items: &huma.Schema{
					Type: huma.TypeObject, Required: []string{"id"}, Properties: map[string]*huma.Schema{
						"id": {Type: huma.TypeInteger, Description: "the number of the event"}, "data": event,
					},
				},
			}}},
		}},
	}, func(_ context.Context, r *eventsRequest) (*huma.StreamResponse, error) {
		return &huma.StreamResponse{Body: func(c huma.Context) {
			_, w := humago.Unwrap(c)
			// An error means that the reader has gone.
			_ = sendEvents(c.Context(), w, stream, r.begin(stream), keepAlive)
		}}, nil
	})
}

// sendEvents sends the events after a number, until the context ends or the reader goes away. It
// sends a comment after each interval without events.
func sendEvents(
	ctx context.Context, w http.ResponseWriter, stream *events.Stream, after uint64, interval time.Duration,
) error {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	send := func(text []byte) error { return sendText(ctx, w, text) }
	// A number without data is no event. A reader that is interrupted continues after this number.
	if err := send(fmt.Appendf(nil, ": the events of segue\nid: %d\n\n", after)); err != nil {
		return err
	}
	for {
		waiting, cancel := context.WithTimeout(ctx, interval)
		list, err := stream.After(waiting, after)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil { // there was no event in the interval
			if err := send([]byte(":\n\n")); err != nil {
				return err
			}
		}
		for _, e := range list {
			after = e.ID
			data, err := json.Marshal(e)
			if err == nil {
				err = send(fmt.Appendf(nil, "id: %d\ndata: %s\n\n", e.ID, data))
			}
			if err != nil {
				return err
			}
		}
	}
}

// sendText sends a text of a stream at once.
func sendText(ctx context.Context, w http.ResponseWriter, text []byte) error {
	connection := http.NewResponseController(w)
	err := connection.SetWriteDeadline(time.Now().Add(readerPatience))
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	// When the context ends, withStreams sets a shorter deadline. If the call above has just replaced
	// that deadline, a write could delay the end of the process.
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	return connection.Flush()
}

// withStreams lets streams of events last longer than the server's timeouts. It ends them at once
// when the context ends, because they must not delay the end of the process.
func withStreams(ctx context.Context, handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != eventsPath {
			handler.ServeHTTP(w, r)
			return
		}
		connection := http.NewResponseController(w)
		_ = connection.SetReadDeadline(time.Time{}) // none; a socket supports deadlines, so no error
		streaming, cancel := context.WithCancel(r.Context())
		defer cancel()
		stop := context.AfterFunc(ctx, func() {
			cancel()
			_ = connection.SetWriteDeadline(time.Now().Add(endPatience)) // the reader may read nothing
		})
		defer stop()
		handler.ServeHTTP(w, r.WithContext(streaming))
	})
}
