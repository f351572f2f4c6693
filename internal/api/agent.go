// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
)

// Agent is the running agent that the socket gives access to.
type Agent struct {
	// Source reads the state in the data path.
	Source func() (*agent.Snapshot, error)
	Reload Reload
	Events *events.Stream
}

// AgentService is a service of an agent.
type AgentService struct {
	Name     string  `json:"name"`
	VIP      string  `json:"vip"`
	Port     string  `json:"port" doc:"a number or all"`
	Protocol string  `json:"protocol"`
	Accept   *Accept `json:"accept,omitempty" doc:"missing: the service cannot be offered connections"`
}

// Accept is how a service decides about offered connections.
type Accept struct {
	Policy    string  `json:"policy"`
	Source    string  `json:"source,omitempty" doc:"the load source; missing: the policy does not use the load"`
	Busy      *uint32 `json:"busy,omitempty" doc:"the load, in units of its source; missing: not known"`
	Capacity  *uint32 `json:"capacity,omitempty" doc:"missing: not known"`
	Threshold *uint32 `json:"threshold,omitempty" doc:"missing: the policy has none"`
	Offered   uint64  `json:"offered" doc:"connections"`
	Accepted  uint64  `json:"accepted" doc:"by the policy; forced connections do not count"`
}

func agentServiceOf(s *agent.ServiceState) AgentService {
	service := AgentService{
		Name: s.Name, VIP: s.VIP.String(), Port: desired.PortOf(s.Port).String(), Protocol: string(s.Protocol),
	}
	if a := s.Accept; a != nil {
		service.Accept = &Accept{
			Policy: string(a.Policy), Source: a.Source, Threshold: a.Threshold,
			Offered: a.Offered, Accepted: a.Accepted(),
		}
		if a.Load != nil {
			service.Accept.Busy, service.Accept.Capacity = &a.Load.Busy, a.Load.Capacity
		}
	}
	return service
}

// Handler returns the handler of all operations.
func (a Agent) Handler() http.Handler {
	api, handler := newAPI("Segue agent")
	var reading sync.Mutex // one request at a time uses the source
	huma.Register(api, huma.Operation{
		OperationID: "list-services", Method: http.MethodGet, Path: "/v1/services",
		Summary: "List services, with their loads and the connections that balancers have offered",
		Errors:  []int{http.StatusServiceUnavailable},
	}, func(context.Context, *struct{}) (*body[[]AgentService], error) {
		reading.Lock()
		defer reading.Unlock()
		snapshot, err := a.Source()
		if err != nil {
			return nil, huma.Error503ServiceUnavailable(err.Error())
		}
		services := []AgentService{}
		for _, s := range snapshot.Services {
			services = append(services, agentServiceOf(s))
		}
		return &body[[]AgentService]{services}, nil
	})
	register(api, a.Reload, a.Events)
	return handler
}
