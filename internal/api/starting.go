// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/store"
)

// Starting is the handler of a balancer that may not have started yet. Before the start, it answers
// only requests for the instance and the store, and lets an operator confirm a version of the
// store. Other requests wait for the start. While the balancer waits for the store, Starting
// refuses them, because it may wait for ever.
type Starting struct {
	control *control.Balancer
	api     huma.API
	early   http.Handler
	started chan struct{}
	full    http.Handler // set before the channel is closed
}

// NewStarting returns the handler of a balancer that starts. Before the call, a balancer with a
// store must have joined its fleet.
func NewStarting(c *control.Balancer) *Starting {
	s := &Starting{control: c, started: make(chan struct{})}
	s.api, s.early = newAPI(balancerTitle)
	registerInstance(s.api, selfOf(c))
	b := &balancerAPI{Balancer: Balancer{Control: c}}
	b.registerStore(s.api)
	return s
}

// Start hands all requests over to another handler. It must be called at most once.
func (s *Starting) Start(full http.Handler) {
	s.full = full
	close(s.started)
}

// ServeHTTP answers a request. Before Start, it answers only requests about the instance and the
// store. It refuses others while the balancer waits for the store, and otherwise delays them.
func (s *Starting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.started:
		s.full.ServeHTTP(w, r)
		return
	default:
	}
	switch r.URL.Path {
	case instancePath, storePath, confirmPath:
		s.early.ServeHTTP(w, r)
		return
	}
	if reason := s.waitsFor(); reason != "" {
		_ = huma.WriteErr(s.api, humago.NewContext(&huma.Operation{}, r, w), http.StatusServiceUnavailable,
			"the balancer has not started: it waits for the store of its services: "+reason)
		return
	}
	select {
	case <-s.started:
		s.full.ServeHTTP(w, r)
	case <-r.Context().Done():
	}
}

// waitsFor tells why the balancer has no services from the store yet. It is empty if the balancer
// has services, or has no store.
func (s *Starting) waitsFor() string {
	fleet := s.control.Fleet()
	if fleet == nil {
		return ""
	}
	status := fleet.Status()
	if status.Follows != (store.Version{}) {
		return ""
	}
	return cmp.Or(status.Held, status.Problem)
}
