// SPDX-License-Identifier: Apache-2.0

package config

import (
	"time"

	"github.com/segue-lb/segue/internal/tables"
)

// DefaultFlows is the default capacity of the flow table.
const DefaultFlows = 1 << 20

// setDefault sets a field without a value in the file. Zero in the file is a value.
func setDefault[T any](d *document, path string, field *T, value T) {
	if !d.has(path) {
		*field = value
	}
}

func (b *Balancer) setDefaults(d *document) {
	setDefault(d, "node.instance", &b.Node.Instance, "lb")
	internal := !d.has("node.inside")
	setDefault(d, "node.internal", &b.Node.Internal, &internal)
	setDefault(d, "node.limits.flows", &b.Node.Limits.Flows, DefaultFlows)
	setDefault(d, "node.state", &b.Node.State, "/var/lib/segue")
	setDefault(d, "node.limits.servers", &b.Node.Limits.Servers, 4096)
	for i := range b.Services {
		s, path := &b.Services[i], item("services", i)
		s.setDefaults(d, path)
		probes := s.Encapsulation.isSRv6() && b.Node.TakesSignals()
		setDefault(d, child(path, "probe"), &s.Probe, &probes)
	}
}

func (s *Service) setDefaults(d *document, path string) {
	setDefault(d, child(path, "placement"), &s.Placement, PlacementHash)
	setDefault(d, child(path, "persistence"), &s.Persistence, PersistenceTable)
	setDefault(d, child(path, "encapsulation"), &s.Encapsulation, SRv6Encap)
	candidates := 3
	if s.Placement == PlacementHunt {
		candidates = 2
		setDefault(d, child(path, "selection"), &s.Selection, SelectConsistent)
	}
	setDefault(d, child(path, "candidates"), &s.Candidates, candidates)
	setDefault(d, child(path, "generations"), &s.Generations, 3)
	setDefault(d, child(path, "buckets"), &s.Buckets, tables.DefaultBuckets)
	s.Timeouts.setDefaults(d, child(path, "timeouts"), s)
	if s.Health != nil {
		s.Health.setDefaults(d, child(path, "health"), s.Port)
	}
	for i := range s.Servers {
		s.Servers[i].setDefaults(d, item(child(path, "servers"), i))
	}
}

func (t *Timeouts) setDefaults(d *document, path string, s *Service) {
	unconfirmed, established, closing := time.Minute, time.Hour, time.Minute
	if s.Protocol == UDP {
		unconfirmed, established = 30*time.Second, 2*time.Minute
	}
	if s.Placement == PlacementHunt { // the server has said that it is over: 6LB, section IV-C
		closing = 10 * time.Second
	}
	setDefault(d, child(path, "new"), &t.New, unconfirmed)
	setDefault(d, child(path, "established"), &t.Established, established)
	setDefault(d, child(path, "closing"), &t.Closing, closing)
}

// setDefaults leaves the port of a check 0 if the service is for all ports.
func (h *Health) setDefaults(d *document, path string, port Port) {
	setDefault(d, child(path, "interval"), &h.Interval, time.Second)
	setDefault(d, child(path, "timeout"), &h.Timeout, h.Interval)
	setDefault(d, child(path, "rise"), &h.Rise, 2)
	setDefault(d, child(path, "fall"), &h.Fall, 3)
	if h.HTTP != nil {
		setDefault(d, child(path, "http.path"), &h.HTTP.Path, "/")
		setDefault(d, child(path, "http.port"), &h.HTTP.Port, uint16(port))
	}
	if h.TCP != nil {
		setDefault(d, child(path, "tcp.port"), &h.TCP.Port, uint16(port))
	}
}

func (s *Server) setDefaults(d *document, path string) {
	one := uint32(1)
	setDefault(d, child(path, "weight"), &s.Weight, &one)
	setDefault(d, child(path, "host"), &s.Host, s.Address)
}

func (a *Agent) setDefaults(d *document) {
	setDefault(d, "node.instance", &a.Node.Instance, "agent")
	yes := true
	setDefault(d, "node.internal", &a.Node.Internal, &yes)
	setDefault(d, "node.assign-vips", &a.Node.AssignVIPs, &yes)
	for i := range a.Services {
		a.Services[i].setDefaults(d, item("services", i))
	}
}

func (s *AgentService) setDefaults(d *document, path string) {
	setDefault(d, child(path, "encapsulation"), &s.Encapsulation, SRv6Encap)
	if !s.Hunts() {
		return
	}
	setDefault(d, child(path, "accept.policy"), &s.Accept.Policy, AcceptDynamic)
	if s.Accept.Policy == AcceptDynamic {
		setDefault(d, child(path, "accept.window"), &s.Accept.Window, 50)
		epsilon, initial := 0.1, uint32(1)
		setDefault(d, child(path, "accept.epsilon"), &s.Accept.Epsilon, &epsilon)
		setDefault(d, child(path, "accept.initial"), &s.Accept.Initial, &initial)
	}
	setDefault(d, child(path, "load.source"), &s.Load.Kind, LoadConnections)
	setDefault(d, child(path, "not-local"), &s.NotLocal, NotLocalReset)
}
