// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/tables"
)

// MaxServices is the most services that a balancer has: MAX_SERVICES of bpf/balancer/services.h.
const MaxServices = 16384

// MaxGenerations is the most sets of servers that a candidate table holds: MAX_GENERATIONS of
// bpf/balancer/types.h.
const MaxGenerations = 4

// checkBalancer reports every rule that a decoded balancer breaks.
func (d *document) checkBalancer(b *Balancer) {
	d.checkHost(b.Node.Instance, b.Node.Interface, b.Node.Locator, b.Node.Addresses)
	d.checkTunnelSources(b.Node.Addresses)
	d.checkSignalKey(b.Node.SignalKey)
	if !filepath.IsAbs(b.Node.State) {
		d.failf("node.state", "must be absolute")
	}
	d.checkListen(b.Metrics.Listen)

	if n := len(b.Services); n > MaxServices {
		d.failf("services", "must have at most %d items, has %d", MaxServices, n)
	}

	common := make([]AgentService, len(b.Services))
	for i, s := range b.Services {
		common[i] = AgentService{Name: s.Name, VIP: s.VIP, Port: s.Port, Protocol: s.Protocol, Encapsulation: s.Encapsulation}
	}
	d.checkServices(common)
	d.checkLocatorNeeded(common, b.Node.Locator)
	total := 0
	for i := range b.Services {
		d.checkService(item("services", i), &b.Services[i])
		d.checkProbe(child(item("services", i), "probe"), &b.Services[i], &b.Node)
		d.checkServers(item("services", i), &b.Services[i], b.Node.Locator)
		total += len(b.Services[i].Servers)
	}
	if limit := b.Node.Limits.Servers; total > int(limit) {
		d.failf("node.limits.servers", "all services together have %d servers, and the limit is %d", total, limit)
	}
	d.checkTunnelsNeeded(b)
	d.checkInside(b)
	d.checkVIPs(b, newVIPs(common))
}

// checkInside checks node.internal and node.inside.
func (d *document) checkInside(b *Balancer) {
	hunting := slices.IndexFunc(b.Services, func(s Service) bool { return s.Placement == PlacementHunt })
	switch {
	case !d.has("node.inside"):
		if !b.Node.IsInternal() && hunting >= 0 {
			d.failf("node.internal", "must be true for %s, whose placement is %s: its signals arrive on node.interface, "+
				"unless node.inside is set", item("services", hunting), PlacementHunt)
		}
		return
	case b.Node.Inside == b.Node.Interface:
		d.failf("node.inside", "must differ from node.interface")
	default:
		d.checkInterface("node.inside", b.Node.Inside)
	}
	if b.Node.IsInternal() {
		d.failf("node.internal", "must be false or absent if node.inside is set: the domain is then reached by node.inside")
	}
}

// checkTunnelSources allows one source address of each family.
func (d *document) checkTunnelSources(addresses []netip.Addr) {
	first := make(map[string]string)
	for i, address := range addresses {
		at := item("node.addresses", i)
		if other, ok := first[family(address)]; ok {
			d.failf(at, "is a second %s address; the first is %s", family(address), other)
		} else if address.IsValid() {
			first[family(address)] = at
		}
	}
}

// checkService checks the fields of a service that only balancers have, except its servers.
func (d *document) checkService(path string, s *Service) {
	checkKnown(d, child(path, "placement"), s.Placement, PlacementHash, PlacementHunt)
	checkKnown(d, child(path, "persistence"), s.Persistence, PersistenceTable)
	at := child(path, "candidates")
	checkRange(d, at, s.Candidates, 1, tables.MaxCandidates)
	checkRange(d, child(path, "generations"), s.Generations, 1, MaxGenerations)
	d.checkHunt(path, s)
	at = child(path, "buckets")
	if err := tables.ValidBuckets(s.Buckets); err != nil {
		d.failf(at, "%v", err)
	} else if s.Buckets <= len(s.Servers) {
		d.failf(at, "%d must exceed the number of servers, %d", s.Buckets, len(s.Servers))
	}
	at = child(path, "timeouts")
	checkRange(d, child(at, "new"), s.Timeouts.New, 5*time.Second, 4*time.Hour)
	checkRange(d, child(at, "established"), s.Timeouts.Established, 5*time.Second, 4*time.Hour)
	checkRange(d, child(at, "closing"), s.Timeouts.Closing, 5*time.Second, 4*time.Hour)
	if s.Health != nil {
		d.checkHealth(child(path, "health"), s)
	}
}

// checkHunt checks the requirements and the own fields of placement hunt.
func (d *document) checkHunt(path string, s *Service) {
	at := child(path, "selection")
	if s.Placement != PlacementHunt {
		if s.Placement == PlacementHash && d.has(at) {
			d.failf(at, "not used by placement %s", s.Placement)
		}
		return
	}
	checkKnown(d, at, s.Selection, SelectConsistent, SelectRandom)
	if at := child(path, "protocol"); s.Protocol == UDP && !d.bad(at) {
		d.failf(at, "must be %s for placement %s: without a handshake, the balancer cannot learn which server accepts a flow",
			TCP, s.Placement)
	}
	if at := child(path, "encapsulation"); s.Encapsulation.isTunnel() && !d.bad(at) {
		d.failf(at, "must be %s or %s for placement %s: %s has no segment list",
			SRv6Insert, SRv6Encap, s.Placement, s.Encapsulation)
	}
}

// checkProbe checks the requirements of probes.
func (d *document) checkProbe(path string, s *Service, node *BalancerNode) {
	switch {
	case !s.Probes() || !d.has(path):
	case s.Encapsulation.isTunnel():
		d.failf(path, "must be false for encapsulation %s: probes need a locator", s.Encapsulation)
	case !node.TakesSignals():
		d.failf(path, "must be false if node.internal is false and node.inside is not set: "+
			"no interface takes the answers of agents")
	}
}

func (d *document) checkHealth(path string, s *Service) {
	h := s.Health
	if (h.HTTP == nil) == (h.TCP == nil) {
		d.failf(path, "must have exactly one of http and tcp; tcp: {} uses the defaults")
	}
	// An unreadable port of the service is reported already.
	all := s.Port == AllPorts && d.decoded(child(parent(path), "port"))
	if h.HTTP != nil {
		at := child(path, "http")
		if _, err := url.ParseRequestURI(h.HTTP.Path); err != nil || h.HTTP.Path[0] != '/' {
			d.failf(child(at, "path"), "must be a URL path that begins with /")
		}
		d.checkHealthPort(child(at, "port"), h.HTTP.Port, all)
	}
	if h.TCP != nil {
		d.checkHealthPort(child(child(path, "tcp"), "port"), h.TCP.Port, all)
	}
	if h.Interval < 100*time.Millisecond {
		d.failf(child(path, "interval"), "must be at least 100ms")
	} else {
		checkRange(d, child(path, "timeout"), h.Timeout, time.Millisecond, h.Interval)
	}
}

func (d *document) checkHealthPort(path string, port uint16, all bool) {
	if port == 0 && all {
		d.failf(path, "required, because the service's port is all")
	}
}

// checkServers checks the servers of a service, apart from conflicts with other services.
func (d *document) checkServers(path string, s *Service, own netip.Prefix) {
	names := make(map[string]string)
	locators := make(map[netip.Prefix]string)
	addresses := make(map[netip.Addr]string)
	for i, server := range s.Servers {
		at := item(child(path, "servers"), i)
		d.checkName(child(at, "name"), server.Name)
		checkUnique(d, names, server.Name, child(at, "name"))

		d.checkPresence(child(at, "locator"), s.Encapsulation.isSRv6(), s.Encapsulation)
		d.checkLocator(child(at, "locator"), server.Locator)
		checkUnique(d, locators, server.Locator, child(at, "locator"))
		if server.Locator.IsValid() && server.Locator == own {
			d.failf(child(at, "locator"), "is the balancer's own")
		}

		d.checkPresence(child(at, "address"), s.Encapsulation.isTunnel(), s.Encapsulation)
		d.checkAddress(child(at, "address"), server.Address)
		checkUnique(d, addresses, server.Address, child(at, "address"))

		if d.has(child(at, "host")) {
			d.checkCheckedHost(child(at, "host"), server.Host)
		} else if s.Health != nil && s.Encapsulation.isSRv6() {
			d.failf(child(at, "host"), "required by the health checks of a service whose encapsulation is %s", s.Encapsulation)
		}
	}
}

// checkPresence checks that a field is present if and only if an encapsulation needs it.
func (d *document) checkPresence(path string, needed bool, e Encapsulation) {
	switch {
	case !e.isSRv6() && !e.isTunnel():
	case needed && !d.has(path):
		d.failf(path, "required by encapsulation %s", e)
	case !needed && d.has(path):
		d.failf(path, "not used by encapsulation %s", e)
	}
}

// checkCheckedHost checks an address that only this host must reach.
func (d *document) checkCheckedHost(path string, host netip.Addr) {
	switch {
	case host.Is4In6():
		d.failf(path, "is IPv4-mapped; write it as %s", host.Unmap())
	case host.IsUnspecified() || host.IsMulticast():
		d.failf(path, "is %s; must be a unicast address", kind(host))
	}
}

// checkTunnelsNeeded reports a missing source address once for each family, naming the first
// server that needs it.
func (d *document) checkTunnelsNeeded(b *Balancer) {
	have := make(map[string]bool)
	for _, address := range b.Node.Addresses {
		have[family(address)] = true
	}
	for i, s := range b.Services {
		for j, server := range s.Servers {
			if !s.Encapsulation.isTunnel() || !server.Address.IsValid() || have[family(server.Address)] {
				continue
			}
			have[family(server.Address)] = true
			d.failf("node.addresses", "needs an %s address, because %s.address is one", family(server.Address),
				item(child(item("services", i), "servers"), j))
		}
	}
}

// checkVIPs reports VIPs that are also in locators, or addresses of nodes.
func (d *document) checkVIPs(b *Balancer, all vips) {
	locators := locatorsOf(b)
	own := make(map[netip.Addr]bool)
	for i, address := range b.Node.Addresses {
		own[address] = true
		all.checkNot(d, item("node.addresses", i), address)
	}
	for i, s := range b.Services {
		path := item("services", i)
		if prefix, err := s.VIP.Prefix(64); err == nil && locators[prefix] != "" {
			d.failf(child(path, "vip"), "is in the locator of %s", locators[prefix])
		}
		for j, server := range s.Servers {
			at := item(child(path, "servers"), j)
			all.checkNot(d, child(at, "address"), server.Address)
			if d.has(child(at, "host")) {
				all.checkNot(d, child(at, "host"), server.Host)
			}
			if own[server.Address] {
				d.failf(child(at, "address"), "is the balancer's own")
			}
		}
	}
}

// locatorsOf returns the owner of each locator.
func locatorsOf(b *Balancer) map[netip.Prefix]string {
	locators := make(map[netip.Prefix]string)
	for i, s := range b.Services {
		for j, server := range s.Servers {
			if _, ok := locators[server.Locator]; !ok {
				locators[server.Locator] = item(child(item("services", i), "servers"), j)
			}
		}
	}
	locators[b.Node.Locator] = "the balancer"
	delete(locators, netip.Prefix{})
	return locators
}
