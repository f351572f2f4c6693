// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/version"
)

// Agent is the running agent to which the API gives access.
type Agent struct {
	Control *control.Agent
	// Source reads the state of the data path. Only one goroutine at a time may call it.
	Source func() (*agent.Snapshot, error)
	Reload Reload
	Events *events.Stream
}

// AgentService is a service of an agent.
type AgentService struct {
	Name     string   `json:"name"`
	VIP      string   `json:"vip" doc:"the first, if there are several"`
	VIPs     []string `json:"vips,omitempty" doc:"missing: the service has one VIP"`
	Port     string   `json:"port" doc:"a number or all; the first, if there are several"`
	Ports    []string `json:"ports,omitempty" doc:"missing: the service has one port, or all"`
	Protocol string   `json:"protocol"`
	// Encapsulation and the next fields are those of the desired state.
	Encapsulation string  `json:"encapsulation"`
	Drained       bool    `json:"drained" doc:"the service refuses the connections that balancers offer"`
	Override      string  `json:"override,omitempty" doc:"what the override of the service does; missing: it has none"`
	Connections   *uint32 `json:"connections,omitempty" doc:"open connections since the first start of the agent; missing: not counted"`
	Accept        *Accept `json:"accept,omitempty" doc:"missing: the service cannot be offered connections"`
}

// Accept says how a service decides about offered connections.
type Accept struct {
	Policy    string  `json:"policy"`
	Source    string  `json:"source,omitempty" doc:"the load source; missing: the policy does not use the load"`
	Busy      *uint32 `json:"busy,omitempty" doc:"the load, in units of its source; missing: not known"`
	Capacity  *uint32 `json:"capacity,omitempty" doc:"missing: not known"`
	Threshold *uint32 `json:"threshold,omitempty" doc:"missing: the policy has none"`
	Offered   uint64  `json:"offered" doc:"connections"`
	Accepted  uint64  `json:"accepted" doc:"by the policy; forced connections do not count"`
}

// portsOf returns the ports with numbers of the data path.
func portsOf(numbers []uint16) (ports []desired.Port) {
	for _, number := range numbers {
		ports = append(ports, desired.PortOf(number))
	}
	return ports
}

// stringsOf returns the texts of the items of a list.
func stringsOf[T fmt.Stringer](list []T) (texts []string) {
	for _, item := range list {
		texts = append(texts, item.String())
	}
	return texts
}

// agentServiceOf returns a service with the fields that the data path knows. The caller sets those
// of the desired state.
func agentServiceOf(s *agent.ServiceState) AgentService {
	service := AgentService{
		Name: s.Name, VIP: s.VIP.String(), VIPs: stringsOf(s.VIPs),
		Port: desired.PortOf(s.Port).String(), Ports: stringsOf(portsOf(s.Ports)), Protocol: string(s.Protocol),
		Connections: s.Connections,
	}
	if a := s.Accept; a != nil {
		service.Accept = &Accept{
			Policy: string(a.Policy), Source: a.Source, Threshold: a.Threshold,
			Offered: a.Offered, Accepted: a.Accepted,
		}
		if a.Load != nil {
			service.Accept.Busy, service.Accept.Capacity = &a.Load.Busy, a.Load.Capacity
		}
	}
	return service
}

// agentAPI implements the operations.
type agentAPI struct {
	Agent
	reading sync.Mutex // held while Source reads
}

// Handler returns the handler of all operations.
func (agent Agent) Handler() http.Handler {
	api, handler := newAPI("Segue agent")
	a := &agentAPI{Agent: agent}
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services, with their loads and the connections that balancers have offered",
		Errors:  []int{http.StatusServiceUnavailable},
	}, a.listServices)
	huma.Register(api, changeOperation, a.change)
	huma.Register(api, applyOperation, a.applyFile)
	self := Instance{agent.Control.Desired().Node.Instance, RoleAgent, version.String()}
	register(api, self, agent.Control, agent.Reload, agent.Events)
	return handler
}

func (a *agentAPI) snapshot() (*agent.Snapshot, error) {
	a.reading.Lock()
	defer a.reading.Unlock()
	return a.Source()
}

// listServices joins the state of the data path with the desired state, for each service that both
// have.
func (a *agentAPI) listServices(context.Context, *struct{}) (*body[[]AgentService], error) {
	snapshot, err := a.snapshot()
	if err != nil {
		return nil, huma.Error503ServiceUnavailable(err.Error())
	}
	cfg, inForce := a.Control.InForce()
	wanted := map[string]*desired.AgentService{}
	for i := range cfg.Services {
		wanted[cfg.Services[i].Name] = &cfg.Services[i]
	}
	overrides := effectsOf(inForce)
	services := []AgentService{}
	for _, s := range snapshot.Services {
		w := wanted[s.Name]
		if w == nil {
			continue // the desired state, which was read later, has the service no more
		}
		service := agentServiceOf(s)
		service.Encapsulation, service.Drained = string(w.Encapsulation), w.Drained
		service.Override = overrides[s.Name]
		services = append(services, service)
	}
	return &body[[]AgentService]{services}, nil
}

type changeRequest struct {
	Terms
	Body Change
}

func (a *agentAPI) change(ctx context.Context, r *changeRequest) (*body[Changed], error) {
	return changed(a.Control.Change(ctx, editsOf(r.Body.Edits), r.terms()))
}

func (a *agentAPI) applyFile(ctx context.Context, r *applyRequest) (*body[Changed], error) {
	return changed(a.Control.ApplyFile(ctx, r.RawBody, r.terms()))
}
