// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/events"
)

// Agent is the running agent that the socket gives access to.
type Agent struct {
	// Source reads the state in the data path.
	Source func() (*agent.Snapshot, error)
	Reload Reload
	Events *events.Stream
}

// Handler returns the handler of all operations.
func (a Agent) Handler() http.Handler {
	api, handler := newAPI("Segue agent")
	var reading sync.Mutex // one request at a time uses the source
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services, with their loads and the connections that balancers have offered",
		Errors:  []int{http.StatusServiceUnavailable},
	}, func(context.Context, *struct{}) (*body[[]*agent.ServiceState], error) {
		reading.Lock()
		defer reading.Unlock()
		snapshot, err := a.Source()
		if err != nil {
			return nil, huma.Error503ServiceUnavailable(err.Error())
		}
		return &body[[]*agent.ServiceState]{snapshot.Services}, nil
	})
	register(api, a.Reload, a.Events)
	return handler
}
