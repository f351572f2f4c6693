// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/l2"
)

// Speaker announces the VIPs of the balancer by BGP.
type Speaker interface {
	State(context.Context) (*bgp.State, error)
	drainable
}

// Link answers for the VIPs of the balancer by ARP and neighbour discovery.
type Link interface {
	State() *l2.LinkState
	drainable
}

// drainable announces VIPs, unless the balancer is drained.
type drainable interface {
	Drain(ctx context.Context, untilRestart bool) error
	Undrain(context.Context) error
}

// Self is the balancer itself.
type Self struct {
	Drained bool `json:"drained" doc:"whether no VIP is announced, so that no packets arrive"`
}

// SelfChange is a change of the balancer itself.
type SelfChange struct {
	Self
	UntilRestart bool `json:"until_restart,omitempty" doc:"of a drain: the next process of the balancer is not drained"`
}

// SelfState is the state of the balancer itself.
type SelfState struct {
	Self
	// Packets counts packets to servers since the data path was made, with those of the switch.
	Packets   uint64        `json:"packets" doc:"packets to servers, since the data path was made"`
	Uncounted string        `json:"uncounted,omitempty" doc:"why the packets of the switch in front of the balancer are missing"`
	BGP       *bgp.State    `json:"bgp,omitempty" doc:"missing: the balancer does not announce its VIPs by BGP"`
	L2        *l2.LinkState `json:"l2,omitempty" doc:"missing: the balancer does not announce its VIPs on its link"`
}

func (b *balancerAPI) registerSelf(api huma.API) {
	const path = "/v1/self"
	huma.Register(api, huma.Operation{
		OperationID: "get-self", Method: http.MethodGet, Path: path,
		Summary: "Show whether the balancer is drained, and which VIPs it announces",
		Errors:  []int{http.StatusServiceUnavailable},
	}, b.getSelf)
	huma.Register(api, huma.Operation{
		OperationID: "change-self", Method: http.MethodPatch, Path: path,
		Summary: "Drain the balancer, or end its drain",
		Description: "A drained balancer announces no VIP. A drain outlasts restarts, unless the " +
			"request says otherwise.",
		Errors: []int{
			http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
			http.StatusConflict, http.StatusServiceUnavailable,
		},
	}, b.changeSelf)
}

func (b *balancerAPI) getSelf(ctx context.Context, _ *struct{}) (*body[SelfState], error) {
	state, err := b.selfState(ctx)
	if err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	return &body[SelfState]{*state}, nil
}

// forwarded returns the number of packets to servers.
func forwarded(reasons []datapath.ReasonCount) (packets uint64) {
	for _, reason := range reasons {
		if strings.HasPrefix(reason.Reason, "forward_") {
			packets += reason.Packets
		}
	}
	return packets
}

// selfState reads the number of packets to servers from the data path and the switch, and the state
// of announcements.
func (b *balancerAPI) selfState(ctx context.Context) (*SelfState, error) {
	noService := func(string) bool { return false } // the counters of the whole data path suffice
	snapshot, err := b.snapshot(noService)
	if err != nil {
		return nil, err
	}
	state := SelfState{Packets: forwarded(snapshot.Reasons)}
	if b.Switch != nil {
		status := b.Switch.Status(ctx)
		state.Packets += forwarded(status.Reasons)
		state.Uncounted = status.Uncounted
	}
	if b.Link != nil {
		state.L2 = b.Link.State()
		state.Drained = state.L2.Drained != nil
	}
	if b.Speaker == nil {
		return &state, nil
	}
	if state.BGP, err = b.Speaker.State(ctx); err != nil {
		return nil, err
	}
	state.Drained = state.BGP.Drained != nil
	return &state, nil
}

// announcer returns what announces the VIPs, or nil.
func (b *balancerAPI) announcer() drainable {
	switch {
	case b.Speaker != nil:
		return b.Speaker
	case b.Link != nil:
		return b.Link
	}
	return nil
}

type selfChange struct{ Body SelfChange }

// changeSelf drains the balancer or undrains it, and returns the state after that.
func (b *balancerAPI) changeSelf(ctx context.Context, r *selfChange) (*body[SelfState], error) {
	announcer := b.announcer()
	if announcer == nil {
		return nil, huma.Error409Conflict("the balancer does not announce its VIPs: its file has no " +
			"section bgp or l2. Withdraw the routes to it where they are configured")
	}
	if r.Body.UntilRestart && !r.Body.Drained {
		return nil, huma.Error422UnprocessableEntity("until_restart is only for a drain: drained must be true")
	}
	// If the state cannot be read, the request must fail before it changes anything.
	if _, err := b.selfState(ctx); err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	change := announcer.Undrain
	if r.Body.Drained {
		change = func(ctx context.Context) error { return announcer.Drain(ctx, r.Body.UntilRestart) }
	}
	if err := change(ctx); err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	state, err := b.selfState(ctx)
	if err != nil {
		return nil, huma.Error503ServiceUnavailable("the change is made, but the state cannot be read: " + err.Error())
	}
	return &body[SelfState]{*state}, nil
}

// Self returns the state of the balancer itself.
func (c *Client) Self(ctx context.Context) (state *SelfState, err error) {
	return state, c.call(ctx, http.MethodGet, "/v1/self", nil, &state)
}

// ChangeSelf drains the balancer, or ends its drain.
func (c *Client) ChangeSelf(ctx context.Context, change SelfChange) (state *SelfState, err error) {
	return state, c.call(ctx, http.MethodPatch, "/v1/self", change, &state)
}
