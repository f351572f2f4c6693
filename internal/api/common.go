// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/version"
)

// Reload reads the files of a process again, as SIGHUP does. If it returns an error, the earlier
// configuration stays in force.
type Reload func(context.Context) (warnings fieldpath.Errors, err error)

// newAPI returns an API without operations, and its handler.
func newAPI(title string) (huma.API, http.Handler) {
	mux := http.NewServeMux()
	settings := huma.DefaultConfig(title, version.String())
	settings.DocsPath = "" // the page with documentation loads a program from the Internet
	settings.RejectUnknownQueryParameters = true
	settings.CreateHooks = nil // the default hook adds a link to the schema to each answer
	api := humago.New(mux, settings)
	return api, withProblems(api, mux)
}

// withProblems makes the handler answer a request for an unknown path, or with a method that the
// path does not take, in the form of all other errors (RFC 9457). The mux would answer with plain
// text.
func withProblems(api huma.API, mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ofMux, pattern := mux.Handler(r)
		if pattern != "" { // there is an operation for the request
			mux.ServeHTTP(w, r)
			return
		}
		answer := statusAndHeader{header: http.Header{}} // the answer of the mux, which is replaced
		ofMux.ServeHTTP(&answer, r)
		detail := fmt.Sprintf("the process runs version %s of segue, which has no path %s: "+
			"/openapi.json lists all", version.String(), r.URL.Path)
		switch allowed := answer.header.Get("Allow"); answer.status {
		case http.StatusNotFound:
		case http.StatusMethodNotAllowed:
			w.Header().Set("Allow", allowed)
			detail = fmt.Sprintf("%s takes %s, not %s", r.URL.Path, allowed, r.Method)
		default: // a redirection to a path without // or ..
			ofMux.ServeHTTP(w, r)
			return
		}
		_ = huma.WriteErr(api, humago.NewContext(&huma.Operation{}, r, w), answer.status, detail)
	})
}

// statusAndHeader keeps the status and the header of an answer, and drops the text.
type statusAndHeader struct {
	header http.Header
	status int
}

func (s *statusAndHeader) Header() http.Header { return s.header }

func (s *statusAndHeader) WriteHeader(status int) { s.status = status }

func (s *statusAndHeader) Write(text []byte) (int, error) { return len(text), nil }

// body is an answer with a body, in the form that the library wants.
type body[T any] struct{ Body T }

// register adds the operations that both balancers and agents have.
func register(api huma.API, self Instance, source overrider, reload Reload, stream *events.Stream) {
	registerInstance(api, self)
	registerOverrides(api, source)
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
	registerEvents(api, stream)
}

const instancePath = "/v1/instance"

func registerInstance(api huma.API, self Instance) {
	huma.Register(api, huma.Operation{
		OperationID: "get-instance", Method: http.MethodGet, Path: instancePath,
		Summary: "Tell whose socket this is",
	}, func(context.Context, *struct{}) (*body[Instance], error) { return &body[Instance]{self}, nil })
}

// refusal returns the answer to a request that failed with an error: the error with a status.
func refusal(err error) error {
	var problems fieldpath.Errors
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

func textsOf(problems fieldpath.Errors) []string {
	texts := []string{}
	for _, p := range problems {
		texts = append(texts, p.Error())
	}
	return texts
}
