// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/p4switch"
)

// Switch is the switch in front of the balancer.
type Switch interface {
	Status(context.Context) *p4switch.Status
}

func (b *balancerAPI) registerSwitch(api huma.API) {
	huma.Register(api, huma.Operation{
		OperationID: "get-switch", Method: http.MethodGet, Path: "/v1/switch",
		Summary: "Show what the switch in front of the balancer has, and its counters",
		Errors:  []int{http.StatusNotFound},
	}, b.getSwitch)
}

func (b *balancerAPI) getSwitch(ctx context.Context, _ *struct{}) (*body[p4switch.Status], error) {
	if b.Switch == nil {
		return nil, huma.Error404NotFound("the balancer has no switch: its file has no section node.switch")
	}
	return &body[p4switch.Status]{*b.Switch.Status(ctx)}, nil
}

// Switch returns what the switch in front of the balancer has.
func (c *Client) Switch(ctx context.Context) (state *p4switch.Status, err error) {
	return state, c.call(ctx, http.MethodGet, "/v1/switch", nil, &state)
}
