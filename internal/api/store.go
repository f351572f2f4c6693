// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/store"
)

// Store is the condition of a balancer's connection to the store of its fleet.
type Store struct {
	Reachable bool      `json:"reachable" doc:"whether the store answers"`
	Since     time.Time `json:"since" doc:"since when the store answers, or does not answer"`
	Problem   string    `json:"problem,omitempty" doc:"why the store does not answer"`
	Newest    string    `json:"newest,omitempty" doc:"the last version of the store that the balancer has read"`
	Follows   string    `json:"follows,omitempty" doc:"the version that the balancer follows; a newer one waits for generations"`
	FromCache bool      `json:"from_cache" doc:"whether the balancer has read the version that it follows from its own file"`
	Held      string    `json:"held,omitempty" doc:"why the balancer does not follow the store, or cannot follow its newest version, and what to do"`
	// Confirmable is set if Held is about a version that would remove too many servers.
	Confirmable string `json:"confirmable,omitempty" doc:"the version that confirm-store makes the balancer follow all the same"`
	Leader      string `json:"leader,omitempty" doc:"the balancer that makes the generations of the fleet"`
	Unsaved     string `json:"unsaved,omitempty" doc:"why the balancer could not write its own file"`
}

// StoreOf returns the status of a connection to a store in the form of the API.
func StoreOf(s store.Status) Store {
	state := Store{
		Reachable: s.Reachable, Since: s.Since, Problem: s.Problem, FromCache: s.FromCache, Held: s.Held,
		Leader: s.Leader, Unsaved: s.Unsaved,
	}
	state.Newest, state.Follows = textOfVersion(s.Newest), textOfVersion(s.Follows)
	state.Confirmable = textOfVersion(s.Confirmable)
	return state
}

// textOfVersion returns the text of a version. It is empty for the zero value.
func textOfVersion(v store.Version) string {
	if v == (store.Version{}) {
		return ""
	}
	return v.String()
}

const (
	storePath   = "/v1/store"
	confirmPath = storePath + "/confirm"
)

func (b *balancerAPI) registerStore(api huma.API) {
	huma.Register(api, huma.Operation{
		OperationID: "get-store", Method: http.MethodGet, Path: storePath,
		Summary: "Show the connection to the store of the fleet",
		Errors:  []int{http.StatusNotFound},
	}, b.getStore)
	huma.Register(api, huma.Operation{
		OperationID: "confirm-store", Method: http.MethodPost, Path: confirmPath,
		Summary: "Follow a version of the store although that removes more servers than the limit allows",
		Errors:  []int{http.StatusNotFound, http.StatusPreconditionFailed, http.StatusServiceUnavailable},
	}, b.confirmStore)
}

var errNoStore = huma.Error404NotFound("the balancer has no store: its services come from its file")

func (b *balancerAPI) getStore(context.Context, *struct{}) (*body[Store], error) {
	fleet := b.Control.Fleet()
	if fleet == nil {
		return nil, errNoStore
	}
	return &body[Store]{StoreOf(fleet.Status())}, nil
}

type confirmRequest struct {
	Version string `header:"If-Match" required:"true" doc:"the version to follow: the value of confirmable that get-store has shown"`
}

func (b *balancerAPI) confirmStore(ctx context.Context, r *confirmRequest) (*body[Store], error) {
	fleet := b.Control.Fleet()
	if fleet == nil {
		return nil, errNoStore
	}
	if err := fleet.Confirm(ctx, r.Version); err != nil {
		return nil, refusal(err)
	}
	return &body[Store]{StoreOf(fleet.Status())}, nil
}
