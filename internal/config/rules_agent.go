// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"path/filepath"
	"slices"
)

// checkAgent reports every rule that a decoded agent breaks.
func (d *document) checkAgent(a *Agent) {
	d.checkHost(a.Node.Instance, a.Node.Interface, a.Node.Locator, a.Node.Addresses)
	d.checkBalancers(a.Node.Balancers, a.Services)
	d.checkSignalKey(a.Node.SignalKey)
	d.checkListen(a.Metrics.Listen)
	d.checkServices(a.Services)
	d.checkLocatorNeeded(a.Services, a.Node.Locator)
	for i, s := range a.Services {
		if s.Encapsulation.isTunnel() && len(a.Node.Addresses) == 0 {
			d.failf("node.addresses", "required by %s, whose encapsulation is %s", item("services", i), s.Encapsulation)
			break
		}
	}
	wrapped := slices.IndexFunc(a.Services, func(s AgentService) bool { return s.Encapsulation.isSRv6() })
	if !a.Node.IsInternal() && wrapped >= 0 {
		d.failf("node.internal", "must be true for %s, whose encapsulation is %s: the balancers' packets arrive on node.interface",
			item("services", wrapped), a.Services[wrapped].Encapsulation)
	}
	vips := newVIPs(a.Services)
	for i, address := range a.Node.Addresses {
		vips.checkNot(d, item("node.addresses", i), address)
	}
	for i, s := range a.Services {
		if a.Node.Locator.Contains(s.VIP) {
			d.failf(child(item("services", i), "vip"), "is in the locator of the agent")
		}
	}
	for i, s := range a.Services {
		d.checkHunting(item("services", i), s)
	}
}

// MostBalancers is how many prefixes of balancers an agent may name.
const MostBalancers = 1024

func (d *document) checkBalancers(prefixes []netip.Prefix, services []AgentService) {
	if !slices.ContainsFunc(services, AgentService.Hunts) {
		d.refuse("node.balancers", "only for TCP services in srv6-insert or srv6-encap: other services do not hunt")
	}
	if len(prefixes) > MostBalancers {
		d.failf("node.balancers", "must have at most %d prefixes", MostBalancers)
	}
	seen := make(map[netip.Prefix]string)
	for i, prefix := range prefixes {
		path := item("node.balancers", i)
		switch address := prefix.Addr(); {
		case !prefix.IsValid():
			continue
		case address.Is4() || prefix.Bits() > 64:
			d.failf(path, "must be an IPv6 prefix of at most 64 bits")
		case prefix != prefix.Masked():
			d.failf(path, "has bits set after the first %d; write it as %s", prefix.Bits(), prefix.Masked())
		case address.IsUnspecified() || address.IsMulticast() || address.IsLinkLocalUnicast():
			d.failf(path, "must be a unicast prefix that other hosts can reach")
		}
		checkUnique(d, seen, prefix, path)
	}
}

// checkHunting checks the fields about offered connections.
func (d *document) checkHunting(path string, s AgentService) {
	if !s.Hunts() {
		for _, name := range []string{"accept", "load", "not-local"} {
			d.refuse(child(path, name), "only for TCP in srv6-insert or srv6-encap: other services do not hunt")
		}
		return
	}
	d.checkAccept(child(path, "accept"), s.Accept)
	d.checkLoad(child(path, "load"), s.Load)
	checkKnown(d, child(path, "not-local"), s.NotLocal, NotLocalDrop, NotLocalReset)
}

// refuse reports a field that is present although it has no meaning.
func (d *document) refuse(path, format string, args ...any) {
	if d.has(path) {
		d.failf(path, format, args...)
	}
}

func (d *document) checkAccept(path string, a Accept) {
	checkKnown(d, child(path, "policy"), a.Policy, AcceptAlways, AcceptNever, AcceptStatic, AcceptDynamic)
	if a.Policy != AcceptStatic {
		d.refuse(child(path, "threshold"), "only for policy static")
	} else if !d.has(child(path, "threshold")) {
		d.failf(child(path, "threshold"), "required by policy static")
	}
	if a.Policy != AcceptDynamic {
		for _, name := range []string{"window", "epsilon", "initial"} {
			d.refuse(child(path, name), "only for policy dynamic")
		}
		return
	}
	if a.Epsilon != nil && (*a.Epsilon < 0 || *a.Epsilon >= 0.5) {
		d.failf(child(path, "epsilon"), "must be at least 0 and less than 0.5")
	}
}

func (d *document) checkLoad(path string, l Source) {
	checkKnown(d, child(path, "source"), l.Kind,
		LoadConnections, LoadAcceptQueue, LoadApache, LoadCgroup, LoadSharedMemory)
	if !slices.Contains([]LoadSource{LoadConnections, LoadApache}, l.Kind) {
		d.refuse(child(path, "workers"), "only for connections and apache-scoreboard: %s reports its own capacity", l.Kind)
	}
	switch l.Kind {
	case LoadApache, LoadCgroup, LoadSharedMemory:
		if l.Path == "" {
			d.failf(child(path, "path"), "required by source %s", l.Kind)
		} else if !filepath.IsAbs(l.Path) {
			d.failf(child(path, "path"), "must be absolute")
		}
	default:
		d.refuse(child(path, "path"), "not used by source %s", l.Kind)
	}
}
