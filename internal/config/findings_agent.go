// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

var agentRules = []rule[desired.Agent]{
	{"internal", func(i *inspection, a *desired.Agent) {
		srv6 := func(s desired.AgentService) bool { return s.Encapsulation.IsSRv6() }
		i.trustedInterface(slices.ContainsFunc(a.Services, srv6), "")
	}},
	{"tunnels", (*inspection).openTunnels},
	{"signal-key", (*inspection).noTags},
	{"key-file", func(i *inspection, a *desired.Agent) { i.keyFile(a.Node.SignalKey) }},
	{"overrides", func(i *inspection, a *desired.Agent) { i.invalidOverrides(a.OverridesFile()) }},
	{"writable", (*inspection).writableAgentFiles},
	{"metrics-listen", func(i *inspection, a *desired.Agent) { i.metricsEverywhere(a.Metrics) }},
	{"poll-listen", func(i *inspection, a *desired.Agent) {
		i.listensEverywhere("poll.listen", a.Poll.Listen, "strangers can send polls, also to the VIPs",
			"use the address that balancers have in servers[].host")
	}},
	{"never", (*inspection).neverAccepts},
	{"drained", (*inspection).drainedAgentServices},
	{"state", func(i *inspection, a *desired.Agent) { i.lostState(a.Node.State, "the agent then forgets overrides") }},
	{"mtu", (*inspection).impossibleMTU},
}

// openTunnels finds addresses at which tunnels end. The agent takes a packet of gre or ipip from
// any sender, even if no service has these encapsulations.
func (i *inspection) openTunnels(a *desired.Agent) {
	if len(a.Node.Addresses) > 0 {
		i.findf("node.addresses", "the agent takes gre and ipip packets to these addresses from any sender, with any "+
			"inner source; let routers pass such packets from the balancers' node.addresses only, and allow this rule")
	}
}

// noTags finds an agent without a key for signals, if a service of TCP has the field accept or load,
// and so probably hunts (see warnOfForgedQuestions). Servers of UDP send no signals.
func (i *inspection) noTags(a *desired.Agent) {
	if a.Node.SignalKey != "" {
		return
	}
	for n := range a.Services {
		path := fieldpath.Item("services", n)
		isSet := i.has(fieldpath.Child(path, "accept")) || i.has(fieldpath.Child(path, "load"))
		if isSet && a.Services[n].Protocol == desired.TCP {
			i.findf(desired.SignalKeyField, "missing: balancers cannot tell the signals of %s from forged ones; give "+
				"all nodes the same key", path)
			return
		}
	}
}

// writableAgentFiles finds files that too many users can write.
func (i *inspection) writableAgentFiles(a *desired.Agent) {
	i.writable("", i.file, "the configuration")
	i.writableByOthers("node.state", a.Node.State, "overrides")
	i.writableByOthers(desired.SignalKeyField, a.Node.SignalKey, "the key")
	for n, s := range a.Services {
		path := fieldpath.Child(fieldpath.Item("services", n), "load.path")
		switch s.Load.Kind {
		case desired.LoadSharedMemory, desired.LoadSharedMap, desired.LoadApache:
			i.writableByAll(path, s.Load.Path, "the load")
		}
	}
}

// neverAccepts finds services that refuse all connections by their policy.
func (i *inspection) neverAccepts(a *desired.Agent) {
	for n, s := range a.Services {
		if s.Accept.Policy == desired.AcceptNever {
			i.findf(fieldpath.Child(fieldpath.Item("services", n), "accept.policy"), "the server is still offered connections, "+
				"and gets those that no other candidate takes; drain the server at the balancers instead")
		}
	}
}

// drainedAgentServices finds services that the file drains.
func (i *inspection) drainedAgentServices(a *desired.Agent) {
	for n, s := range a.Services {
		if s.Drained {
			i.findf(fieldpath.Child(fieldpath.Item("services", n), "drained"), "a drain in the file is easily forgotten; use "+
				"`segue drain %s`", s.Name)
		}
	}
}

// impossibleMTU finds a node.mtu that is larger than the MTU of the interface.
func (i *inspection) impossibleMTU(a *desired.Agent) {
	if mtu, ok := i.host.MTU(a.Node.Interface); ok && a.Node.MTU > mtu {
		i.findf("node.mtu", "larger than the MTU of %s, which is %d: large packets of new connections are lost or "+
			"answered by ICMP; set at most that, or raise it", a.Node.Interface, mtu)
	}
}
