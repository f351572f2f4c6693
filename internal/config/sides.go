// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Side is the file of a balancer or of an agent, for a comparison with files of the other role.
type Side struct {
	Balancer *desired.Balancer // nil for an agent's file
	Agent    *desired.Agent    // nil for a balancer's file
	file     string
	*document
}

// BalancerSide reads a balancer's file, which must be valid. file is its name, for errors.
func BalancerSide(file string, data []byte) *Side {
	b, d := readBalancer(data)
	return &Side{Balancer: b, file: file, document: d}
}

// AgentSide is BalancerSide for an agent's file.
func AgentSide(file string, data []byte) *Side {
	a, d := readAgent(data)
	return &Side{Agent: a, file: file, document: d}
}

// at returns the place of a field, such as "agent.yaml:7 (services[0].port)". A missing field has
// the line of its section.
func (s *Side) at(path string) string {
	e := s.document.at(path, "")
	return fmt.Sprintf("%s:%d (%s)", s.file, e.Line, path)
}

// comparison compares the files of balancers with those of agents.
type comparison struct {
	problems fieldpath.Errors // each would make servers lose or refuse flows
	warnings fieldpath.Errors
}

// CompareSides compares each balancer's file with each agent's. A problem is a field whose values
// do not fit together, and names both places. An agent whose host is not a server of any balancer
// is a problem, too. A warning is about something that cannot be compared, such as a server without
// an agent's file.
func CompareSides(sides []*Side) (problems, warnings fieldpath.Errors) {
	var c comparison
	var balancers, agents []*Side
	for _, s := range sides {
		if s.Balancer != nil {
			balancers = append(balancers, s)
		} else {
			agents = append(agents, s)
		}
	}
	if len(balancers) == 0 || len(agents) == 0 {
		return nil, nil
	}
	c.sameHosts(agents)
	for _, a := range agents {
		serves := false
		for _, b := range balancers {
			serves = c.pair(b, a) || serves
		}
		if !serves && !slices.ContainsFunc(balancers, (*Side).hasStore) {
			c.noServer(a)
		}
	}
	for _, b := range balancers {
		c.noAgents(b, agents)
	}
	return c.problems, c.warnings
}

func (s *Side) hasStore() bool { return s.Balancer.Store != nil }

// differ adds a problem with a field of a file. The text says how the field does not fit the other
// file.
func (c *comparison) differ(of *Side, path, format string, args ...any) {
	e := of.document.at(path, fmt.Sprintf(format, args...))
	e.File = of.file
	c.problems = append(c.problems, e)
}

// warn adds a warning about a field of a file.
func (c *comparison) warn(of *Side, path, format string, args ...any) {
	e := of.document.at(path, fmt.Sprintf(format, args...))
	e.File = of.file
	c.warnings = append(c.warnings, e)
}

// isHost tells whether a server of a balancer is the host of the agent s: by the locator or the
// address.
func (s *Side) isHost(server *desired.Server) bool {
	node := &s.Agent.Node
	return server.Locator.IsValid() && server.Locator == node.Locator ||
		server.Address.IsValid() && slices.Contains(node.Addresses, server.Address)
}

// addressPath returns the path of the field that says where a server is.
func addressPath(server *desired.Server, at string) string {
	if server.Locator.IsValid() {
		return fieldpath.Child(at, "locator")
	}
	return fieldpath.Child(at, "address")
}

// eachServer calls a function for each server of a balancer, with its path and the service's.
func (s *Side) eachServer(each func(service *desired.Service, server *desired.Server, serviceAt, at string)) {
	for i := range s.Balancer.Services {
		service := &s.Balancer.Services[i]
		serviceAt := fieldpath.Item("services", i)
		for j := range service.Servers {
			each(service, &service.Servers[j], serviceAt, fieldpath.Item(fieldpath.Child(serviceAt, "servers"), j))
		}
	}
}

// sameHosts reports each agent that has the locator of an agent before it.
func (c *comparison) sameHosts(agents []*Side) {
	first := map[netip.Prefix]*Side{}
	for _, a := range agents {
		locator := a.Agent.Node.Locator
		if before := first[locator]; locator.IsValid() && before != nil {
			c.differ(a, "node.locator", "is also that of %s", before.at("node.locator"))
		}
		first[locator] = a
	}
}

// pair compares a balancer with an agent. It returns whether the agent's host is a server of the
// balancer.
func (c *comparison) pair(b, a *Side) (isServer bool) {
	srv6, polls := false, false
	b.eachServer(func(service *desired.Service, server *desired.Server, serviceAt, at string) {
		if !a.isHost(server) {
			return
		}
		isServer = true
		srv6 = srv6 || service.Encapsulation.IsSRv6()
		polls = polls || service.Placement.Polls()
		c.service(b, a, service, server, serviceAt, at)
	})
	if !isServer {
		return false
	}
	if srv6 {
		c.trust(b, a)
	}
	if polls && a.Agent.Poll.Listen == "" {
		c.differ(a, "poll.listen", "missing, and a service polls its servers: %s", b.at("services"))
	}
	return true
}

// trust compares what a balancer and an agent need to take each other's packets.
func (c *comparison) trust(b, a *Side) {
	locator := b.Balancer.Node.Locator
	accepted := func(p netip.Prefix) bool { return p.Bits() <= locator.Bits() && p.Contains(locator.Addr()) }
	if list := a.Agent.Node.Balancers; locator.IsValid() && len(list) > 0 && !slices.ContainsFunc(list, accepted) {
		c.differ(a, "node.balancers", "contains no prefix with the locator %s of the balancer: %s", locator,
			b.at("node.locator"))
	}
	c.underlay(b, a)
	c.keys(b, a)
}

// underlay compares the underlays of both sides.
func (c *comparison) underlay(b, a *Side) {
	const at, port, sources = "node.underlay", "node.underlay.port", "node.underlay.sources"
	own, other := b.Balancer.Node.Underlay, a.Agent.Node.Underlay
	switch {
	case own == nil && other == nil:
	case other == nil:
		c.differ(a, at, "missing, and the balancer has one: %s", b.at(sources))
	case own == nil:
		c.differ(b, at, "missing, and the agent has one: %s", a.at(sources))
	case own.Port != other.Port:
		c.differ(a, port, "is %d on the balancer: %s", own.Port, b.at(port))
	case !other.Accepts(desired.UnderlayAddress(b.Balancer.Node.Locator.Addr())):
		c.differ(a, sources, "contains no prefix with the address of the balancer, which is in its locator: %s",
			b.at("node.locator"))
	}
}

// keys compares the keys for signals. It never shows them. It does not compare files that do not
// exist on this host: the command may run on another one.
func (c *comparison) keys(b, a *Side) {
	const path = desired.SignalKeyField
	file, other := b.Balancer.Node.SignalKey, a.Agent.Node.SignalKey
	switch {
	case file == other: // none, or the same path on two hosts: only one of the files can be here
		return
	case other == "":
		c.differ(a, path, "missing, and the balancer has one: %s", b.at(path))
		return
	case file == "":
		c.differ(b, path, "missing, and the agent has one: %s", a.at(path))
		return
	}
	keys := c.keysOf(b, file)
	if keys == nil {
		return
	}
	others := c.keysOf(a, other)
	switch { // a node signs by its first key, so the other node must have this key
	case others == nil:
	case !slices.Contains(keys, others[0]):
		c.differ(a, path, "the first key in the file is not among those of the balancer: %s", b.at(path))
	case !slices.Contains(others, keys[0]):
		c.differ(b, path, "the first key in the file is not among those of the agent: %s", a.at(path))
	}
}

// keysOf reads the file with the keys of a side. It returns nil if the file cannot be read. If the
// file exists, it warns about that.
func (c *comparison) keysOf(s *Side, file string) desired.SignalKeys {
	keys, err := ReadSignalKeys(file)
	var problem *fieldpath.Error
	if errors.As(err, &problem) && problem.Problem != unix.ENOENT.Error() {
		c.warn(s, desired.SignalKeyField, "the keys of both sides were not compared: %s", problem.Problem)
	}
	return keys
}

// service compares a service of a balancer with those of the agent on one of its servers: the agent
// may have a service for each VIP and port. serviceAt and at are the paths of the service and the
// server in the balancer's file.
func (c *comparison) service(
	b, a *Side, service *desired.Service, server *desired.Server, serviceAt, at string,
) {
	var own []int
	for _, vip := range service.AllVIPs() {
		for _, port := range service.AllPorts() {
			i := agentService(a.Agent, vip, port, service.Protocol)
			if i < 0 {
				c.missing(b, a, service, netip.AddrPortFrom(vip, port.Number()), server, serviceAt, at)
				return
			}
			if !slices.Contains(own, i) {
				own = append(own, i)
			}
		}
	}
	for _, i := range own {
		c.serviceFields(b, a, service, server, serviceAt, at, i)
	}
}

// serviceFields compares a service of a balancer with service i of the agent.
func (c *comparison) serviceFields(
	b, a *Side, service *desired.Service, server *desired.Server, serviceAt, at string, i int,
) {
	own, ownAt := &a.Agent.Services[i], fieldpath.Item("services", i)
	mustBeSame := func(name string, value, other fmt.Stringer) {
		if value.String() != other.String() {
			c.differ(b, fieldpath.Child(serviceAt, name), "is %s, but %s on the server %s: %s", value, other,
				server.Name, a.at(fieldpath.Child(ownAt, name)))
		}
	}
	mustBeSame("encapsulation", text(service.Encapsulation), text(own.Encapsulation))
	if service.ServersDecide() && own.Protocol == desired.UDP && !own.Hunts() {
		c.differ(a, fieldpath.Child(ownAt, "load"), "missing, and the balancer offers connections of the service, which "+
			"the server then passes on: %s", b.at(fieldpath.Child(serviceAt, "placement")))
	}
	if service.QUIC != nil {
		form := fmt.Stringer(text("missing"))
		if own.QUIC != nil {
			form = own.QUIC
		}
		mustBeSame("quic", service.QUIC, form)
		if own.QUICID != server.QUICID {
			c.differ(b, fieldpath.Child(at, "quic-id"), "differs from that of the agent: %s",
				a.at(fieldpath.Child(ownAt, "quic-id")))
		}
	}
}

// text is a string that is a fmt.Stringer.
type text string

func (t text) String() string { return string(t) }

// agentService returns the index of the agent's service that gets the packets to a VIP and port of a
// balancer's service: the one for the same port or, without one, the one for all ports. It returns -1
// if there is none.
func agentService(a *desired.Agent, vip netip.Addr, port desired.Port, protocol desired.Protocol) int {
	found := -1
	for i := range a.Services {
		s := &a.Services[i]
		switch {
		case !slices.Contains(s.AllVIPs(), vip) || s.Protocol != protocol:
		case slices.Contains(s.AllPorts(), port):
			return i
		case s.Port == desired.AllPorts:
			found = i
		}
	}
	return found
}

// missing reports that an agent has no service for a VIP and port of a balancer's service. Port 0
// means all ports. If the agent has a service with the same name, the problems name the fields that
// differ.
func (c *comparison) missing(
	b, a *Side, service *desired.Service, to netip.AddrPort, server *desired.Server, serviceAt, at string,
) {
	vip, port := to.Addr(), desired.PortOf(to.Port())
	isNamed := func(own desired.AgentService) bool { return own.Name == service.Name }
	if i := slices.IndexFunc(a.Agent.Services, isNamed); i >= 0 {
		own := &a.Agent.Services[i]
		differs := func(fits bool, name, is string) {
			if !fits {
				c.differ(b, fieldpath.Child(serviceAt, name), "is %s on the server %s: %s", is, server.Name,
					a.at(fieldpath.Child(fieldpath.Item("services", i), name)))
			}
		}
		lacks := func(fits bool, name, what string) {
			if !fits {
				c.differ(b, fieldpath.Child(serviceAt, name), "%s is missing on the server %s: %s", what,
					server.Name, a.at(fieldpath.Item("services", i)))
			}
		}
		hasVIP, hasPort := slices.Contains(own.AllVIPs(), vip), slices.Contains(own.AllPorts(), port)
		if len(service.VIPs)+len(own.VIPs) == 0 {
			differs(hasVIP, "vip", own.VIP.String())
		} else {
			lacks(hasVIP, "vips", vip.String())
		}
		if len(service.Ports)+len(own.Ports) == 0 {
			differs(hasPort || own.Port == desired.AllPorts, "port", own.Port.String())
		} else {
			lacks(hasPort || own.Port == desired.AllPorts, "ports", port.String())
		}
		differs(service.Protocol == own.Protocol, "protocol", string(own.Protocol))
		return
	}
	c.differ(b, addressPath(server, at), "the agent of the server %s has no service with the VIP %s, port %s and "+
		"protocol %s: %s", server.Name, vip, port, service.Protocol, a.at("services"))
}

// noServer reports an agent whose host is not a server of any balancer.
func (c *comparison) noServer(a *Side) {
	path := "node.locator"
	if !a.Agent.Node.Locator.IsValid() {
		path = "node.addresses"
	}
	c.differ(a, path, "no balancer's file has a server there")
}

// noAgents warns about each host that has servers of a balancer, but no agent's file.
func (c *comparison) noAgents(b *Side, agents []*Side) {
	if b.hasStore() {
		c.warn(b, "store", "the services are in the store, and are not compared")
	}
	type host struct {
		locator netip.Prefix
		address netip.Addr
	}
	warned := map[host]bool{}
	b.eachServer(func(_ *desired.Service, server *desired.Server, _, at string) {
		isHost := func(a *Side) bool { return a.isHost(server) }
		of := host{server.Locator, server.Address}
		if !warned[of] && !slices.ContainsFunc(agents, isHost) {
			warned[of] = true
			c.warn(b, addressPath(server, at), "no agent's file is for this server")
		}
	})
}
