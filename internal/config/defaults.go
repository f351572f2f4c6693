// SPDX-License-Identifier: Apache-2.0

package config

import (
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/tables"
)

// DefaultFlows is the default capacity of the flow table.
const DefaultFlows = 1 << 20

// setDefault sets a field without a value in the file. Zero in the file is a value.
func setDefault[T any](d *document, path string, into *T, value T) {
	if !d.has(path) {
		*into = value
	}
}

func (d *document) defaultBalancer(b *desired.Balancer) {
	setDefault(d, "node.instance", &b.Node.Instance, "lb")
	internal := b.Node.Inside == ""
	setDefault(d, "node.internal", &b.Node.Internal, &internal)
	setDefault(d, "node.limits.flows", &b.Node.Limits.Flows, DefaultFlows)
	setDefault(d, "node.state", &b.Node.State, "/var/lib/segue")
	setDefault(d, "node.limits.servers", &b.Node.Limits.Servers, 4096)
	for i := range b.Services {
		s, path := &b.Services[i], field.Item("services", i)
		d.defaultService(s, path)
		probes := s.Encapsulation.IsSRv6() && b.Node.TakesSignals()
		setDefault(d, field.Child(path, "probe"), &s.Probe, &probes)
	}
}

func (d *document) defaultService(s *desired.Service, path string) {
	setDefault(d, field.Child(path, "placement"), &s.Placement, desired.PlacementHash)
	setDefault(d, field.Child(path, "persistence"), &s.Persistence, desired.PersistenceTable)
	setDefault(d, field.Child(path, "encapsulation"), &s.Encapsulation, desired.SRv6Encap)
	candidates := 3
	if s.Placement == desired.PlacementHunt {
		candidates = 2
		setDefault(d, field.Child(path, "selection"), &s.Selection, desired.SelectConsistent)
	}
	setDefault(d, field.Child(path, "candidates"), &s.Candidates, candidates)
	setDefault(d, field.Child(path, "generations"), &s.Generations, 3)
	setDefault(d, field.Child(path, "buckets"), &s.Buckets, tables.DefaultBuckets)
	d.defaultTimeouts(&s.Timeouts, field.Child(path, "timeouts"), s)
	if s.Health != nil {
		d.defaultHealth(s.Health, field.Child(path, "health"), s.Port)
	}
	for i := range s.Servers {
		d.defaultServer(&s.Servers[i], field.Item(field.Child(path, "servers"), i))
	}
}

func (d *document) defaultTimeouts(t *desired.Timeouts, path string, s *desired.Service) {
	unconfirmed, established, closing := time.Minute, time.Hour, time.Minute
	if s.Protocol == desired.UDP {
		unconfirmed, established = 30*time.Second, 2*time.Minute
	}
	if s.Placement == desired.PlacementHunt { // the server has said that it is over: 6LB, section IV-C
		closing = 10 * time.Second
	}
	setDefault(d, field.Child(path, "new"), &t.New, unconfirmed)
	setDefault(d, field.Child(path, "established"), &t.Established, established)
	setDefault(d, field.Child(path, "closing"), &t.Closing, closing)
}

// defaultHealth leaves the port of a check 0 if the service is for all ports.
func (d *document) defaultHealth(h *desired.Health, path string, port desired.Port) {
	setDefault(d, field.Child(path, "interval"), &h.Interval, time.Second)
	setDefault(d, field.Child(path, "timeout"), &h.Timeout, h.Interval)
	setDefault(d, field.Child(path, "rise"), &h.Rise, 2)
	setDefault(d, field.Child(path, "fall"), &h.Fall, 3)
	if h.HTTP != nil {
		setDefault(d, field.Child(path, "http.path"), &h.HTTP.Path, "/")
		setDefault(d, field.Child(path, "http.port"), &h.HTTP.Port, port.Number())
	}
	if h.TCP != nil {
		setDefault(d, field.Child(path, "tcp.port"), &h.TCP.Port, port.Number())
	}
}

func (d *document) defaultServer(s *desired.Server, path string) {
	one := uint32(1)
	setDefault(d, field.Child(path, "weight"), &s.Weight, &one)
	setDefault(d, field.Child(path, "host"), &s.Host, s.Address)
}

func (d *document) defaultAgent(a *desired.Agent) {
	setDefault(d, "node.instance", &a.Node.Instance, "agent")
	yes := true
	setDefault(d, "node.internal", &a.Node.Internal, &yes)
	setDefault(d, "node.assign-vips", &a.Node.AssignVIPs, &yes)
	for i := range a.Services {
		d.defaultAgentService(&a.Services[i], field.Item("services", i))
	}
}

func (d *document) defaultAgentService(s *desired.AgentService, path string) {
	setDefault(d, field.Child(path, "encapsulation"), &s.Encapsulation, desired.SRv6Encap)
	if !s.Hunts() {
		return
	}
	setDefault(d, field.Child(path, "accept.policy"), &s.Accept.Policy, desired.AcceptDynamic)
	if s.Accept.Policy == desired.AcceptDynamic {
		setDefault(d, field.Child(path, "accept.window"), &s.Accept.Window, 50)
		epsilon, initial := 0.1, uint32(1)
		setDefault(d, field.Child(path, "accept.epsilon"), &s.Accept.Epsilon, &epsilon)
		setDefault(d, field.Child(path, "accept.initial"), &s.Accept.Initial, &initial)
	}
	setDefault(d, field.Child(path, "load.source"), &s.Load.Kind, desired.LoadConnections)
	setDefault(d, field.Child(path, "not-local"), &s.NotLocal, desired.NotLocalReset)
}
