// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"slices"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
)

// Balancer is the running balancer that the socket gives access to.
type Balancer struct {
	Control *control.Controller
	// Source reads the state in the data path.
	Source func() (*inspect.Snapshot, error)
	Reload Reload
	Events *events.Stream
	// Speaker is nil if the balancer does not announce its VIPs.
	Speaker Speaker
}

// balancerAPI has the operations.
type balancerAPI struct {
	Balancer
	reading sync.Mutex // one request at a time uses the source
}

func (b *balancerAPI) snapshot() (*inspect.Snapshot, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	return b.Source()
}

// mostBytes bounds the size of a request: 100,000 servers need about 10 MB.
const mostBytes = 32 << 20

// Handler returns the handler of all operations.
func (balancer Balancer) Handler() http.Handler {
	api, handler := newAPI("Segue balancer")
	b := &balancerAPI{Balancer: balancer}
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services and their servers",
		Errors:  []int{http.StatusServiceUnavailable},
	}, b.listServices)
	huma.Register(api, huma.Operation{
		OperationID: "list-overrides", Method: http.MethodGet, Path: "/v1/overrides",
		Summary: "List overrides, also those of servers that do not exist",
	}, b.listOverrides)
	errorsOfChange := []int{
		http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
		http.StatusNotFound, http.StatusConflict, http.StatusPreconditionFailed,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout,
	}
	huma.Register(api, huma.Operation{
		OperationID: "change", Method: http.MethodPost, Path: "/v1/changes",
		Summary: "Add, set, remove and reset services and servers, in one transaction",
		Errors:  errorsOfChange, MaxBodyBytes: mostBytes,
	}, b.change)
	huma.Register(api, huma.Operation{
		OperationID: "apply", Method: http.MethodPut, Path: "/v1/services",
		Summary: "Make the services those of a configuration file, in one transaction",
		Description: "Servers that an override drains stay drained. Other sections of the file have no " +
			"effect.",
		Errors: errorsOfChange, MaxBodyBytes: mostBytes,
	}, b.applyFile)
	b.registerSelf(api)
	b.registerStore(api)
	register(api, balancer.Reload, balancer.Events)
	return handler
}

func (b *balancerAPI) listOverrides(context.Context, *struct{}) (*body[Overrides], error) {
	list, version := b.Control.Overrides()
	return &body[Overrides]{Overrides{version, overridesOf(list)}}, nil
}

// Terms are the conditions of a change. It is exported because the library cannot set the fields of
// an unexported embedded type.
type Terms struct {
	Version string `header:"If-Match" doc:"the version that must be in force; without it, any"`
	DryRun  bool   `query:"dry-run" doc:"tell what would change, and change nothing"`

	PermitsRemovals bool `query:"allow-removals" doc:"permit the change to remove more servers than the limit of the store"`
}

// Resolve refuses "?dry-run" without a value, and likewise the other switch. The library would take
// it for false, and make the change.
func (*Terms) Resolve(r huma.Context) (problems []error) {
	url := r.URL()
	for _, name := range []string{"dry-run", "allow-removals"} {
		if values, ok := url.Query()[name]; ok && slices.Contains(values, "") {
			problems = append(problems,
				&huma.ErrorDetail{Location: "query." + name, Message: "must be true or false", Value: ""})
		}
	}
	return problems
}

type changeRequest struct {
	Terms
	Body Change
}

func (b *balancerAPI) change(ctx context.Context, r *changeRequest) (*body[Changed], error) {
	return changed(b.Control.Change(ctx, editsOf(r.Body.Edits), control.Terms(r.Terms)))
}

type applyRequest struct {
	Terms
	RawBody []byte `contentType:"application/yaml"`
}

func (b *balancerAPI) applyFile(ctx context.Context, r *applyRequest) (*body[Changed], error) {
	return changed(b.Control.ApplyFile(ctx, r.RawBody, control.Terms(r.Terms)))
}

func changed(result *control.Result, err error) (*body[Changed], error) {
	if err != nil {
		return nil, refusal(err)
	}
	answer := Changed{
		Version: result.Version, Changes: []Difference{}, Losses: []Loss{},
		Warnings: textsOf(result.Warnings),
	}
	for _, c := range result.Changes {
		answer.Changes = append(answer.Changes, Difference{c.What, c.Names})
	}
	for _, l := range result.Losses {
		answer.Losses = append(answer.Losses, Loss{l.Service, l.Server, string(l.Cause), l.Flows})
	}
	return &body[Changed]{answer}, nil
}

func (b *balancerAPI) listServices(context.Context, *struct{}) (*body[[]Service], error) {
	snapshot, err := b.snapshot()
	if err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	cfg := b.Control.Desired()
	overrides := map[string]string{}
	for _, o := range cfg.Overrides {
		overrides[o.Target()] = o.Does()
	}
	services := []Service{}
	for _, s := range snapshot.Services {
		c := cfg.Service(s.Name)
		if c == nil {
			continue // it was removed at this moment
		}
		service := Service{
			Name: s.Name, VIP: c.VIP.String(), Port: c.Port.String(), Protocol: string(c.Protocol),
			Placement: string(c.Placement), Persistence: string(c.Persistence),
			Encapsulation: string(c.Encapsulation),
			TakesFlows:    s.TakesFlows, Servers: []Server{},
			HasFlowTable: s.Persistence == desired.PersistenceTable,
			Override:     overrides[s.Name],
		}
		servers := map[string]*desired.Server{}
		for i := range c.Servers {
			servers[c.Servers[i].Name] = &c.Servers[i]
		}
		for _, state := range s.Servers {
			server := Server{
				Name: state.Name, Address: state.Address, Condition: string(state.Condition),
				Flows: flowsOf(snapshot, s, state), Override: overrides[s.Name+"/"+state.Name],
			}
			if c := servers[state.Name]; c != nil {
				server.Drained, server.Weight = c.Drained, *c.Weight
			}
			service.Servers = append(service.Servers, server)
		}
		services = append(services, service)
	}
	return &body[[]Service]{services}, nil
}

// flowsOf returns the flows of a server, or nil if they are not known.
func flowsOf(of *inspect.Snapshot, service *inspect.ServiceState, server *inspect.ServerState) *Flows {
	if service.Persistence != desired.PersistenceTable || server.Flows == nil || of.FlowTable.Age == nil {
		return nil
	}
	f := &Flows{
		Live:    server.Flows.Total() - server.Flows.Closing,
		Closing: server.Flows.Closing, Age: *of.FlowTable.Age,
	}
	if server.Hunt != nil && server.Hunt.HalfOpen != nil {
		f.Live += *server.Hunt.HalfOpen
	}
	return f
}
