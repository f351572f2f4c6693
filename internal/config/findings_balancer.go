// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/serversets"
)

var balancerRules = []rule[desired.Balancer]{
	{"seed", (*inspection).publicSeed},
	{"internal", func(i *inspection, b *desired.Balancer) {
		i.trustedInterface(b.Node.Locator.IsValid(), b.Node.Inside)
	}},
	{"signal-key", (*inspection).unsignedSignals},
	{"key-file", (*inspection).balancerKeyFiles},
	{"overrides", func(i *inspection, b *desired.Balancer) { i.invalidOverrides(b.OverridesFile()) }},
	{"writable", (*inspection).writableBalancerFiles},
	{"metrics-listen", func(i *inspection, b *desired.Balancer) { i.metricsEverywhere(b.Metrics) }},
	{"state", func(i *inspection, b *desired.Balancer) {
		i.lostState(b.Node.State, "the balancer then forgets former servers and overrides")
	}},
	{"reject", (*inspection).noReject},
	{"removed-vips", (*inspection).passedVIPs},
	{"plain-store", (*inspection).plainStore},
	{"plain-switch", (*inspection).plainSwitch},
	{"store-limit", (*inspection).unlimitedStore},
	{"flows", (*inspection).smallFlowTable},
	{"server-slots", (*inspection).fewServerSlots},
	{"hints", (*inspection).noHints},
	{"one-server", eachService((*inspection).oneServer)},
	{"drained", eachService((*inspection).drainedServers)},
	{"on-drain", eachService((*inspection).movingFlows)},
	{"health", eachService((*inspection).noHealth)},
	{"slow-detection", eachService((*inspection).slowDetection)},
	{"probe", eachService((*inspection).noProbes)},
	{"generations", eachService((*inspection).fewGenerations)},
	{"buckets", eachService((*inspection).fewBuckets)},
	{"bucket-hash", (*inspection).chosenBuckets},
	{"affinity", (*inspection).unequalSharers},
	{"switch", (*inspection).notOnSwitch},
	{"candidates", eachService((*inspection).fewCandidates)},
	{"several-balancers", (*inspection).unrecoverableFlows},
	{"idle-timeout", eachService((*inspection).shortIdleTimeout)},
	{"mtu", (*inspection).narrowPath},
	{"xdp-mode", (*inspection).unfitDriver},
	{"bgp-password", eachPeer((*inspection).noPassword)},
	{"bgp-hold-time", eachPeer((*inspection).holdTime)},
	{"bgp-restart-time", (*inspection).shortRestartTime},
	{"bgp-one-peer", (*inspection).onePeer},
	{"bgp-communities", (*inspection).harmfulCommunities},
	{"bgp-announce", eachService((*inspection).uselessUsable)},
}

// noReject finds a balancer that drops packets for which there is no service or server, without an
// answer to the client.
func (i *inspection) noReject(b *desired.Balancer) {
	if !b.Node.Reject {
		i.findf("node.reject", "false: clients of a port without a service, or of a service without a server, "+
			"wait until they give up; leave it true")
	}
}

// passedVIPs finds a balancer that does not drop packets to removed VIPs for some time, but passes
// them at once.
func (i *inspection) passedVIPs(b *desired.Balancer) {
	if b.Node.DropRemovedVIPs == 0 {
		i.findf("node.drop-removed-vips", "0s: while routers still send packets to a removed VIP, a host that "+
			"forwards sends them back; set the time in which routers forget a route")
	}
}

// plainStore finds a store on another host to which connections are without TLS.
func (i *inspection) plainStore(b *desired.Balancer) {
	if b.Store == nil || b.Store.Etcd.UsesTLS() {
		return
	}
	for n, endpoint := range b.Store.Etcd.Endpoints {
		if parsed, err := url.Parse(endpoint); err == nil && !isThisHost(parsed.Hostname()) {
			i.findf(fieldpath.Item("store.etcd.endpoints", n), "http: whoever is on the way can change where the "+
				"traffic of all services goes; use https")
		}
	}
}

// plainSwitch finds a switch on another host to which the connection is without TLS.
func (i *inspection) plainSwitch(b *desired.Balancer) {
	to := b.Node.Switch
	if to == nil || to.UsesTLS() || strings.HasPrefix(to.Address, "unix:") {
		return
	}
	host, _, err := net.SplitHostPort(to.Address)
	if err == nil && !isThisHost(host) {
		i.findf("node.switch.address", "%s without TLS: whoever is on the way, or reaches that port, can change where "+
			"the traffic of all services goes; set ca-file, cert-file and key-file", to.Address)
	}
}

// isThisHost tells whether the host of an address is certainly the one on which the process runs.
func isThisHost(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && address.IsLoopback()
}

// unlimitedStore finds a store with no limit for the servers that a change may remove.
func (i *inspection) unlimitedStore(b *desired.Balancer) {
	if b.Store != nil && b.Store.MaxRemovedPercent == 100 {
		i.findf("store.max-removed-percent", "100: a store that has lost its servers removes them from all "+
			"balancers; set the share that a change may remove")
	}
}

// eachService makes a rule for balancers of a rule for services: it calls find for each service.
func eachService(
	find func(i *inspection, path string, s *desired.Service),
) func(*inspection, *desired.Balancer) {
	return func(i *inspection, b *desired.Balancer) {
		for n := range b.Services {
			find(i, fieldpath.Item("services", n), &b.Services[n])
		}
	}
}

// publicSeed finds a balancer without a secret seed.
func (i *inspection) publicSeed(b *desired.Balancer) {
	if b.Node.Seed == 0 {
		i.findf("node.seed", "0: a client can compute its bucket, and choose its server by its port; set the "+
			"same secret random number on all balancers")
	}
}

// unsignedSignals finds a balancer that hunts with an interface inside, and has no key for signals.
// Without an interface inside, warnOfForgedSignals warns.
func (i *inspection) unsignedSignals(b *desired.Balancer) {
	if b.Node.Inside == "" || b.Node.SignalKey != "" {
		return
	}
	for n, s := range b.Services {
		if s.IsAnswered() {
			i.findf(desired.SignalKeyField, "missing: any host that can send packets to %s through %s can pose as "+
				"a server of %s; give all nodes the same key", b.Node.Locator, b.Node.Inside, fieldpath.Item("services", n))
			return
		}
	}
}

// writableBalancerFiles finds files that too many users can write.
func (i *inspection) writableBalancerFiles(b *desired.Balancer) {
	i.writable("", i.file, "the configuration")
	i.writableByOthers("node.state", b.Node.State, "generations and overrides")
	i.writableByOthers(desired.SignalKeyField, b.Node.SignalKey, "the key")
	eachPeer(func(i *inspection, path string, p *desired.BGPPeer) {
		i.writableByOthers(fieldpath.Child(path, "password-file"), p.PasswordFile, "the password")
	})(i, b)
	eachTLSFiles(b, func(path string, f *desired.TLSFiles) {
		i.writableByOthers(fieldpath.Child(path, "ca-file"), f.CAFile, "whom the balancer trusts")
		i.writableByOthers(fieldpath.Child(path, "cert-file"), f.CertFile, "the certificate")
		i.writableByOthers(fieldpath.Child(path, "key-file"), f.KeyFile, "the key")
	})
}

// eachTLSFiles calls find for each section of a balancer's file that can name files of TLS.
func eachTLSFiles(b *desired.Balancer, find func(path string, f *desired.TLSFiles)) {
	if b.Node.Switch != nil {
		find("node.switch", &b.Node.Switch.TLSFiles)
	}
	if b.Store != nil {
		find("store.etcd", &b.Store.Etcd.TLSFiles)
	}
}

// balancerKeyFiles finds files with a key, a certificate or a password that the balancer would refuse.
func (i *inspection) balancerKeyFiles(b *desired.Balancer) {
	i.keyFile(b.Node.SignalKey)
	eachPeer(func(i *inspection, path string, p *desired.BGPPeer) {
		i.passwordFile(fieldpath.Child(path, "password-file"), p.PasswordFile)
	})(i, b)
	eachTLSFiles(b, i.tlsFiles)
}

// lostState finds a directory for state that does not outlast a reboot. lost says what is lost with
// it.
func (i *inspection) lostState(state, lost string) {
	if isVolatile(state) {
		i.findf("node.state", "does not outlast a reboot: %s; use a directory on a disk", lost)
	}
}

// leastFlows is how many flows a table should hold for each server.
const leastFlows = 1000

// smallFlowTable finds a flow table that is small for the number of servers.
func (i *inspection) smallFlowTable(b *desired.Balancer) {
	servers := 0
	for _, s := range b.Services {
		if s.Persistence.Method().HasFlowTable {
			servers += len(s.Servers)
		}
	}
	if least := servers * leastFlows; uint64(b.Node.Limits.Flows) < uint64(least) {
		i.findf("node.limits.flows", "%d for %d servers: flows without room in the table may lose their server "+
			"when servers change; set at least %d", b.Node.Limits.Flows, servers, least)
	}
}

// fewServerSlots finds a balancer that uses more than 80 percent of its server slots.
func (i *inspection) fewServerSlots(b *desired.Balancer) {
	servers := 0
	for _, s := range b.Services {
		servers += len(s.Servers)
	}
	if 5*servers > 4*int(b.Node.Limits.Servers) {
		i.findf("node.limits.servers", "%d, of which %d are in use: more servers need another limit, and to change "+
			"it forgets all flows; set at least %d", b.Node.Limits.Servers, servers, 2*servers)
	}
}

// noHints finds a balancer that has a service with cookies, but no hint table.
func (i *inspection) noHints(b *desired.Balancer) {
	if b.Node.Limits.Hints > 0 {
		return
	}
	for n, s := range b.Services {
		if s.Persistence.Method().HasCookies {
			i.findf("node.limits.hints", "0: clients without TCP timestamps are offered only one candidate of %s; "+
				"leave the default", fieldpath.Item("services", n))
			return
		}
	}
}

// oneServer finds a service with only one server that takes new connections.
func (i *inspection) oneServer(path string, s *desired.Service) {
	taking := 0
	for _, server := range s.Servers {
		if server.Takes() {
			taking++
		}
	}
	if taking == 1 {
		i.findf(fieldpath.Child(path, "servers"), "only one server takes new connections: %s fails with it; "+
			"add another server", s.Name)
	}
}

// drainedServers finds servers that the file drains, or that have the weight 0.
func (i *inspection) drainedServers(path string, s *desired.Service) {
	for n, server := range s.Servers {
		at := fieldpath.Item(fieldpath.Child(path, "servers"), n)
		switch {
		case *server.Weight == 0:
			i.findf(fieldpath.Child(at, "weight"), "the server is drained by the file, and its weight changed the "+
				"candidate table; use `segue drain %s/%s`, or remove the server", s.Name, server.Name)
		case server.Drained:
			i.findf(fieldpath.Child(at, "drained"), "a drain in the file is easily forgotten; use `segue drain %s/%s`, "+
				"or remove the server", s.Name, server.Name)
		}
	}
}

// movingFlows finds services of UDP whose flows move away from drained servers only because the
// file lacks on-drain. In releases that did not know on-drain, flows stayed, so an operator may
// expect that they stay.
func (i *inspection) movingFlows(path string, s *desired.Service) {
	at := fieldpath.Child(path, "on-drain")
	if s.Protocol == desired.UDP && s.OnDrain == desired.OnDrainMoveUDP && !i.has(at) {
		i.findf(at, "missing: a client of UDP moves to another server when its server is drained, in the midst of "+
			"what both do, such as a QUIC connection; write %s if servers keep nothing about clients, or else %s",
			desired.OnDrainMoveUDP, desired.OnDrainKeep)
	}
}

// noHealth finds a service without a health check.
func (i *inspection) noHealth(path string, s *desired.Service) {
	if s.Health != nil {
		return
	}
	gap := "a server that fails still gets connections"
	switch {
	case s.ServersDecide():
		gap = "an application that accepts connections and does not answer still gets them"
	case s.Probes():
		gap = "probes find a failed host or agent, but an application that fails still gets connections"
	}
	i.findf(fieldpath.Child(path, "health"), "missing: %s; add a check", gap)
}

// slowestDetection is the longest time for which a failed server should still get connections.
const slowestDetection = 10 * time.Second

// slowDetection finds a service whose health checks need a long time to find a failure. In the
// worst case, the server fails just after a check has passed, and the last of the checks that must
// fail ends by its timeout.
func (i *inspection) slowDetection(path string, s *desired.Service) {
	h := s.Health
	if h == nil {
		return
	}
	if takes := time.Duration(h.Fall)*h.Interval + h.Timeout; takes > slowestDetection {
		i.findf(fieldpath.Child(path, "health"), "a failed server gets connections for up to %s (fall × interval + "+
			"timeout); choose values that make at most %s", takes, slowestDetection)
	}
}

// noProbes finds a service of SRv6 that turns probes off.
func (i *inspection) noProbes(path string, s *desired.Service) {
	if i.has(fieldpath.Child(path, "probe")) && !s.Probes() && s.Encapsulation.IsSRv6() {
		i.findf(fieldpath.Child(path, "probe"), "the balancer does not notice agents that are down, and packets of "+
			"unknown connections do not find their server; run agents, and remove the field")
	}
}

// leastGenerations is how many generations a service should keep if balancers find the server of a
// flow without a flow table.
const leastGenerations = 8

// fewGenerations finds a service that keeps too few generations.
func (i *inspection) fewGenerations(path string, s *desired.Service) {
	switch {
	case s.FindsByColumn() && s.Generations < leastGenerations:
		i.findf(fieldpath.Child(path, "generations"), "connections that outlive %d changes of the servers break; set at "+
			"least %d", s.Generations-1, leastGenerations)
	case s.Generations == 1 && s.Probes():
		i.findf(fieldpath.Child(path, "generations"), "after a change of the servers, another balancer does not find "+
			"connections from before; set at least 2")
	}
}

// fewBuckets finds a service with too few buckets for its servers, if its placement uses buckets.
func (i *inspection) fewBuckets(path string, s *desired.Service) {
	if placement := s.Placement.Method(); placement.TakesTurns() || placement.Infers() {
		return
	}
	if least := 100 * len(s.Servers); s.Buckets < least {
		i.findf(fieldpath.Child(path, "buckets"), "fewer than 100 for each of %d servers: shares differ by more than 1 %%, "+
			"and changes move more connections; set a prime or a power of two from %d", len(s.Servers), least)
	}
}

// chosenBuckets finds services whose clients can choose their buckets, although no switch needs that.
func (i *inspection) chosenBuckets(b *desired.Balancer) {
	why := whyNotOnSwitch(b)
	for n, s := range b.Services {
		isOnSwitch := b.Node.Switch != nil && why[s.Name] == ""
		if s.BucketHash == desired.BucketHashCRC32 && !isOnSwitch {
			i.findf(fieldpath.Child(fieldpath.Item("services", n), "bucket-hash"), "%s has no key: clients can choose "+
				"ports that lead to one row of servers; use it only if a switch balances the service, too", s.BucketHash)
		}
	}
}

// unequalSharers finds services that share the affinity of their VIP, and have other candidate tables
// than the first such service of the VIP. Then a client can get another server there.
func (i *inspection) unequalSharers(b *desired.Balancer) {
	first := map[netip.Addr]int{}
	for n := range b.Services {
		s := &b.Services[n]
		if !s.ClientAffinity().IsWanted() || s.Affinity.Scope != desired.ScopeVIP {
			continue
		}
		for _, vip := range s.AllVIPs() {
			other, ok := first[vip]
			if !ok {
				first[vip] = n
				continue
			}
			if !serversets.SetOf(s).GivesSameServers(serversets.SetOf(&b.Services[other])) {
				i.findf(fieldpath.Child(fieldpath.Item("services", n), "affinity.scope"), "%s: the names or weights "+
					"of servers, the placement, the buckets, the bucket hash or the prefix differ from those of %s, so "+
					"a client can get different servers; make them equal",
					s.Affinity.Scope, fieldpath.Item("services", other))
				break
			}
		}
	}
}

// notOnSwitch finds services that the switch in front of the balancer does not balance.
func (i *inspection) notOnSwitch(b *desired.Balancer) {
	var names []string
	why := whyNotOnSwitch(b)
	for _, s := range b.Services {
		if why[s.Name] != "" {
			names = append(names, fmt.Sprintf("%s (%s)", s.Name, why[s.Name]))
		}
	}
	if b.Node.Switch != nil && len(names) > 0 {
		i.findf("node.switch", "passes all packets of %s to this host; a switch balances persistence stateless with "+
			"bucket-hash crc-32 and placement hash or hunt, and persistence quic with srv6-insert or srv6-encap",
			strings.Join(names, ", "))
	}
}

// whyNotOnSwitch returns why a switch would not balance services of the file, by their names.
func whyNotOnSwitch(b *desired.Balancer) map[string]string {
	var services []*desired.Service
	for n := range b.Services {
		services = append(services, &b.Services[n])
	}
	return desired.WhyNotOnSwitch(services, nil)
}

// fewCandidates finds a service with too few candidates.
func (i *inspection) fewCandidates(path string, s *desired.Service) {
	at := fieldpath.Child(path, "candidates")
	switch {
	case len(s.Servers) <= s.Candidates:
	case s.ServersDecide() && s.Candidates == 1:
		i.findf(at, "the only candidate cannot refuse, so servers do not decide; set at least 2")
	case s.Placement.Method().FollowsFlow && s.Candidates < 3:
		i.findf(at, "if the %d of a bucket fail, another balancer finds their connections only while they fail; "+
			"set at least 3", s.Candidates)
	}
}

// unrecoverableFlows finds services for whose flows other balancers do not find the server. It
// leaves out services that infer: warnOfSeveralBalancers warns about them.
func (i *inspection) unrecoverableFlows(b *desired.Balancer) {
	if len(b.Node.Balancers()) < 2 {
		return
	}
	for n, s := range b.Services {
		path := fieldpath.Item("services", n)
		switch {
		case len(s.Servers) <= s.Candidates:
		case s.ServersDecide() && !s.Selection.Method().FollowsFlow:
			i.findf(fieldpath.Child(path, "selection"), "another balancer finds the server of only %d in %d connections; "+
				"use consistent, or a single balancer", s.Candidates, len(s.Servers))
		case s.Placement.Method().TakesTurns():
			i.findf(fieldpath.Child(path, "placement"), "another balancer finds the server of only %d in %d connections; "+
				"use hash or hunt, or a single balancer", s.Candidates, len(s.Servers))
		}
	}
}

// shortestIdle is how long a balancer should at least keep the entry of an idle TCP connection, if
// it does not probe the agents of the servers.
const shortestIdle = 15 * time.Minute

// shortIdleTimeout finds a service that forgets idle TCP connections early.
func (i *inspection) shortIdleTimeout(path string, s *desired.Service) {
	isForgotten := s.Protocol == desired.TCP && s.Persistence.Method().HasFlowTable && !s.Probes()
	if isForgotten && s.Timeouts.Established < shortestIdle {
		i.findf(fieldpath.Child(path, "timeouts.established"), "idle connections are forgotten after %s, and may then "+
			"lose their server, but hosts ask an idle peer after 2 h (RFC 9293 section 3.8.4); set at least %s, or "+
			"shorten the keepalive of the servers", s.Timeouts.Established, shortestIdle)
	}
}

// clientMTU is the length of the largest packets that clients usually send.
const clientMTU = 1500

// The faults of drivers in native mode. docs/reference/kernels-and-nics.md names the sources.
const (
	sendsNothing = "does not transmit frames that XDP has redirected: probes, held fragments, and packets to " +
		"servers behind another interface are lost"
	leavesNoRoom = "leaves too little room in front of a frame for SRv6: packets are dropped as drop_no_headroom"
)

// unfitDrivers are drivers whose native mode does not suffice for a balancer.
var unfitDrivers = map[string]string{
	"fbnic": sendsNothing, "mlx4_en": sendsNothing, "nfp": sendsNothing,
	"ixgbevf": leavesNoRoom + "; it also " + sendsNothing,
}

// unfitDriver finds an interface whose driver does not suffice in native mode, if that mode is not
// excluded.
func (i *inspection) unfitDriver(b *desired.Balancer) {
	if b.Node.XDPMode == desired.XDPGeneric {
		return
	}
	for _, name := range b.Node.Interfaces() {
		driver := i.host.Driver(name)
		if fault := unfitDrivers[driver]; fault != "" {
			i.findf("node.xdp-mode", "the driver of %s, %s, %s; write generic, or use another card", name, driver, fault)
		}
	}
}

// narrowPath finds services whose packets, with the headers of the encapsulation, are larger than
// the MTU of the interface to the servers.
func (i *inspection) narrowPath(b *desired.Balancer) {
	out := b.Node.Interface
	if b.Node.Inside != "" {
		out = b.Node.Inside
	}
	mtu, ok := i.host.MTU(out)
	if !ok {
		return
	}
	for n, s := range b.Services {
		var tunnels []netip.Addr
		for _, server := range s.Servers {
			tunnels = append(tunnels, server.Address)
		}
		// Where an agent clamps the MSS, clients send no packets that do not fit.
		isUnclamped := s.Protocol == desired.UDP || s.Encapsulation.IsTunnel()
		if need := clientMTU + b.Node.Overhead(s.Encapsulation, tunnels); isUnclamped && mtu < need {
			i.findf(fieldpath.Child(fieldpath.Item("services", n), "encapsulation"), "packets of %d bytes do not fit: %s has an "+
				"MTU of %d, and clients behind filters for ICMP are not told; raise the MTU on the way to the servers "+
				"to %d", clientMTU, out, mtu, need)
		}
	}
}
