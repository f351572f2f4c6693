// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/version"
)

// Balancer is the running balancer to which the API gives access.
type Balancer struct {
	Control *control.Balancer
	// Source reads the state of the data path, for the wanted services only (inspect.View.List). Only
	// one goroutine at a time may call it.
	Source func(wanted func(service string) bool) (*inspect.Snapshot, error)
	Reload Reload
	Events *events.Stream
	// Speaker is nil if the balancer does not announce its VIPs by BGP.
	Speaker Speaker
	// Link is nil if the balancer does not announce its VIPs on its link.
	Link Link
	// Switch is nil if there is no switch in front of the balancer.
	Switch Switch
}

// balancerAPI implements the operations.
type balancerAPI struct {
	Balancer
	reading sync.Mutex // held while Source reads
}

func (b *balancerAPI) snapshot(wanted func(service string) bool) (*inspect.Snapshot, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	return b.Source(wanted)
}

// Handler returns the handler of all operations.
func (balancer Balancer) Handler() http.Handler {
	api, handler := newAPI(balancerTitle)
	b := &balancerAPI{Balancer: balancer}
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services and their servers",
		Errors:  []int{http.StatusUnprocessableEntity, http.StatusServiceUnavailable},
	}, b.listServices)
	huma.Register(api, changeOperation, b.change)
	huma.Register(api, applyOperation, b.applyFile)
	b.registerSelf(api)
	b.registerSwitch(api)
	b.registerStore(api)
	register(api, selfOf(balancer.Control), balancer.Control, balancer.Reload, balancer.Events)
	return handler
}

const balancerTitle = "Segue balancer"

func selfOf(c *control.Balancer) Instance {
	return Instance{c.Desired().Node.Instance, RoleBalancer, version.String()}
}

type fleetChangeRequest struct {
	RemovalTerms
	Body Change
}

func (b *balancerAPI) change(ctx context.Context, r *fleetChangeRequest) (*body[Changed], error) {
	return changed(b.Control.Change(ctx, editsOf(r.Body.Edits), r.terms()))
}

func (b *balancerAPI) applyFile(ctx context.Context, r *applyRequest) (*body[Changed], error) {
	return changed(b.Control.ApplyFile(ctx, r.RawBody, r.terms()))
}

type listRequest struct {
	Name string `query:"name" doc:"list only the service of this name, if there is one"`
}

// listServices joins the state of the data path with the desired state, for each service that both
// have.
func (b *balancerAPI) listServices(_ context.Context, r *listRequest) (*body[[]Service], error) {
	snapshot, err := b.snapshot(func(service string) bool { return r.Name == "" || r.Name == service })
	if err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	cfg, inForce := b.Control.InForce()
	overrides := effectsOf(inForce)
	services := []Service{}
	for _, s := range snapshot.Services {
		wanted := cfg.Service(s.Name)
		if wanted == nil {
			continue // the desired state, which was read later, has the service no more
		}
		services = append(services, Service{
			Name: s.Name, VIP: wanted.VIP.String(), VIPs: stringsOf(wanted.VIPs),
			Port: wanted.Port.String(), Ports: stringsOf(wanted.Ports),
			Sources:   stringsOf(wanted.Sources),
			Protocol:  string(wanted.Protocol),
			Placement: string(wanted.Placement), Persistence: string(wanted.Persistence),
			Encapsulation: string(wanted.Encapsulation), OnDrain: string(wanted.OnDrain),
			TakesFlows:   s.TakesFlows,
			HasFlowTable: s.Persistence.Method().HasFlowTable,
			Override:     overrides[s.Name],
			Servers:      serversOf(snapshot, s, wanted, overrides),
		})
	}
	return &body[[]Service]{services}, nil
}

// serversOf returns the servers of a service. A server that the desired state, which was read
// later, no longer has is neither drained nor has a weight.
func serversOf(
	all *inspect.Snapshot, service *inspect.ServiceState, wanted *desired.Service,
	overrides map[string]string,
) []Server {
	wantedServers := map[string]*desired.Server{}
	for i := range wanted.Servers {
		wantedServers[wanted.Servers[i].Name] = &wanted.Servers[i]
	}
	servers := []Server{}
	for _, state := range service.Servers {
		server := Server{
			Name: state.Name, Address: state.Address, Condition: string(state.Condition),
			Flows: flowsOf(all, service, state), Override: overrides[service.Name+"/"+state.Name],
		}
		if w := wantedServers[state.Name]; w != nil {
			server.Drained, server.Weight = w.Drained, *w.Weight
		}
		servers = append(servers, server)
	}
	return servers
}

// flowsOf returns the numbers of flows of a server, or nil if they are unknown. Half-open flows are
// live, but they have a number of their own in the tables.
func flowsOf(
	all *inspect.Snapshot, service *inspect.ServiceState, server *inspect.ServerState,
) *Flows {
	if !service.Persistence.Method().HasFlowTable || server.Flows == nil || all.FlowTable.Age == nil {
		return nil
	}
	f := &Flows{
		Live:    server.Flows.Total() - server.Flows.Closing,
		Closing: server.Flows.Closing, Age: *all.FlowTable.Age,
	}
	if server.Hunt != nil && server.Hunt.HalfOpen != nil {
		f.Live += *server.Hunt.HalfOpen
	}
	return f
}
