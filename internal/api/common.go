// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/danielgtaylor/huma/v2/sse"

	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/version"
)

// Reload reads the files of a process again, as SIGHUP does. If it returns an error, the
// configuration before stays in force.
type Reload func(context.Context) (warnings field.Errors, err error)

// newAPI returns an API without operations, and its handler.
func newAPI(title string) (huma.API, http.Handler) {
	mux := http.NewServeMux()
	settings := huma.DefaultConfig(title, version.String())
	settings.DocsPath = "" // it would load a program from elsewhere
	settings.RejectUnknownQueryParameters = true
	settings.CreateHooks = nil
	return humago.New(mux, settings), withoutReadDeadline(mux, eventsPath)
}

const eventsPath = "/v1/events"

// withoutReadDeadline lets requests for a path last longer than the server's timeout.
func withoutReadDeadline(handler http.Handler, path string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == path {
			// The server's connections have deadlines. Those of tests may not, and need none.
			_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		}
		handler.ServeHTTP(w, r)
	})
}

type body[T any] struct{ Body T }

// register adds the operations that balancers and agents have.
func register(api huma.API, self Instance, of overrider, reload Reload, stream *events.Stream) {
	registerInstance(api, self)
	registerOverrides(api, of)
	huma.Register(api, huma.Operation{
		OperationID: "reload", Method: http.MethodPost, Path: "/v1/reload",
		Summary: "Read the configuration again",
		Errors:  []int{http.StatusServiceUnavailable},
	}, func(ctx context.Context, _ *struct{}) (*body[Reloaded], error) {
		warnings, err := reload(ctx)
		if err != nil {
			return nil, refusal(err)
		}
		return &body[Reloaded]{Reloaded{textsOf(warnings)}}, nil
	})
	sse.Register(api, huma.Operation{
		OperationID: "watch-events", Method: http.MethodGet, Path: eventsPath,
		Summary: "Follow the events, as server-sent events",
		Description: "Begins after the event in Last-Event-ID, or with the next event. A reader that misses " +
			"events sees a gap between their numbers. The process keeps at least the last 3,000.",
	}, map[string]any{"message": events.Event{}}, func(ctx context.Context, r *eventsRequest, send sse.Sender) {
		sendEvents(ctx, stream, r.After, send)
	})
}

type eventsRequest struct {
	After uint64 `header:"Last-Event-ID" doc:"the number of the last event that the reader has got"`
}

// sendEvents sends the events after a number until the reader goes away; 0: from now on.
func sendEvents(ctx context.Context, stream *events.Stream, after uint64, send sse.Sender) {
	if after == 0 {
		after = stream.Last()
	}
	for {
		list, err := stream.After(ctx, after)
		if err != nil {
			return
		}
		for _, e := range list {
			if after = e.ID; send(sse.Message{ID: int(e.ID), Data: e}) != nil {
				return
			}
		}
	}
}

const instancePath = "/v1/instance"

func registerInstance(api huma.API, self Instance) {
	huma.Register(api, huma.Operation{
		OperationID: "get-instance", Method: http.MethodGet, Path: instancePath,
		Summary: "Tell whose socket this is",
	}, func(context.Context, *struct{}) (*body[Instance], error) { return &body[Instance]{self}, nil })
}

// refusal returns the answer to a change that was refused.
func refusal(err error) error {
	var problems field.Errors
	switch {
	case errors.Is(err, control.ErrVersion):
		return huma.Error412PreconditionFailed(err.Error())
	case errors.Is(err, control.ErrStored), errors.Is(err, control.ErrExists),
		errors.Is(err, control.ErrRemovals), errors.Is(err, control.ErrHeld):
		return huma.Error409Conflict(err.Error())
	case errors.Is(err, control.ErrNotFound):
		return huma.Error404NotFound(err.Error())
	case errors.As(err, &problems):
		return huma.Error422UnprocessableEntity(err.Error())
	case errors.Is(err, store.ErrUnknown):
		return huma.Error504GatewayTimeout(err.Error())
	}
	return huma.Error503ServiceUnavailable(err.Error())
}

func textsOf(problems field.Errors) []string {
	texts := []string{}
	for _, p := range problems {
		texts = append(texts, p.Error())
	}
	return texts
}
