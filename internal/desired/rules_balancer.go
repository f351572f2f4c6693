// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/tables"
)

// MaxServices is the maximum number of services of a balancer: MAX_SERVICES of
// bpf/balancer/tables/services.h.
const MaxServices = 16384

// MaxGenerations is the maximum number of server sets in a candidate table: MAX_GENERATIONS of
// bpf/balancer/types.h.
const MaxGenerations = 4

// MaxColumnGenerations is the maximum number of server sets for persistence stateless or hint. The
// candidate table holds the last different servers of each place, and not whole sets.
const MaxColumnGenerations = 64

// MaxColumns is the maximum of buckets times candidates for persistence stateless or hint:
// COLUMN_TABLE_SIZE of bpf/balancer/tables/columns.h.
const MaxColumns = 1 << 19

// MaxVisited is the most servers that a packet of an unknown flow visits: MAX_SEGMENTS of
// bpf/net/srv6.h.
const MaxVisited = 10

// Validate returns an error for every rule that the balancer breaks. All defaults must be set.
func (b *Balancer) Validate() fieldpath.Errors {
	return b.ValidateChanged(func(int) bool { return true })
}

// ValidateChanged is Validate for a balancer that obeyed all rules before, and of which only some
// services have changed. It checks single services only if they have changed, and all rules between
// services.
func (b *Balancer) ValidateChanged(changed func(service int) bool) fieldpath.Errors {
	var r rules
	withoutServices := *b
	withoutServices.Services = nil
	r.checkRanges("", reflect.ValueOf(withoutServices))
	for i := range b.Services {
		if changed(i) {
			r.checkRanges(fieldpath.Item("services", i), reflect.ValueOf(b.Services[i]))
		}
	}
	r.checkBalancer(b, changed)
	return r.errs
}

// groupName matches the names of groups that Debian's commands accept, and names with capital
// letters.
var groupName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,31}$`)

func (r *rules) checkAPI(a *API) {
	if a.Group != "" && !groupName.MatchString(a.Group) {
		r.failf("api.group", "must be the name of a group: letters, digits, -, _ and dots")
	}
}

// checkBalancer checks all rules of a balancer except ranges.
func (r *rules) checkBalancer(b *Balancer, changed func(service int) bool) {
	r.checkHost(b.Node.Instance, b.Node.Interface, b.Node.XDPMode, b.Node.Locator, b.Node.Addresses)
	r.checkTunnelSources(b)
	r.checkPeers(&b.Node)
	r.checkSignalKey(b.Node.SignalKey)
	r.checkPollKey(b)
	r.checkSwitch(&b.Node)
	r.checkState(b.Node.State)
	checkRange(r, "node.drop-removed-vips", b.Node.DropRemovedVIPs, 0, 24*time.Hour)
	r.checkAPI(&b.API)
	r.checkListen("metrics.listen", b.Metrics.Listen)
	r.checkStore(b)

	if n := len(b.Services); n > MaxServices {
		r.failf("services", "must have at most %d items, has %d", MaxServices, n)
	}

	common := make([]AgentService, len(b.Services))
	for i, s := range b.Services {
		common[i] = AgentService{Name: s.Name, VIP: s.VIP, VIPs: s.VIPs, Port: s.Port, Ports: s.Ports,
			Protocol: s.Protocol, Encapsulation: s.Encapsulation}
	}
	if b.Store == nil {
		r.checkPresent(len(b.Services))
	}
	r.checkServices(common)
	r.checkLocatorNeeded(common, b.Node.Locator)
	r.checkUnderlay(b.Node.Underlay, b.Node.Locator, common)
	total, sources := 0, 0
	for i := range b.Services {
		total += len(b.Services[i].Servers)
		sources += len(b.Services[i].Sources)
		if !changed(i) {
			continue
		}
		r.checkService(fieldpath.Item("services", i), &b.Services[i])
		r.checkProbe(fieldpath.Child(fieldpath.Item("services", i), "probe"), &b.Services[i], &b.Node)
		r.checkServers(fieldpath.Item("services", i), &b.Services[i], &b.Node)
	}
	if limit := b.Node.Limits.Servers; total > int(limit) {
		r.failf("node.limits.servers", "all services together have %d servers, and the limit is %d", total, limit)
	}
	if sources > MostSources {
		r.failf("services", "have %d sources, must have at most %d", sources, MostSources)
	}
	r.checkHints(b)
	r.checkTunnelsNeeded(b)
	r.checkInside(b)
	r.checkVIPs(b, newVIPs(common))
	r.checkBGP(b, newVIPs(common))
	r.checkL2(b)
}

// checkInside checks node.internal and node.inside.
func (r *rules) checkInside(b *Balancer) {
	signalled := slices.IndexFunc(b.Services, func(s Service) bool { return b.signalledBy(&s) != "" })
	switch {
	case b.Node.Inside == "":
		if !b.Node.IsInternal() && signalled >= 0 {
			r.failf("node.internal", "must be true for %s, whose %s: its signals arrive on node.interface, "+
				"unless node.inside is set", fieldpath.Item("services", signalled), b.signalledBy(&b.Services[signalled]))
		}
		return
	case b.Node.Inside == b.Node.Interface:
		r.failf("node.inside", "must differ from node.interface")
	default:
		r.checkInterface("node.inside", b.Node.Inside)
	}
	if b.Node.IsInternal() {
		r.failf("node.internal", "must be false or absent if node.inside is set: the domain is then reached by node.inside")
	}
}

// signalledBy tells why servers send signals about the flows of a service, such as "placement is
// hunt". It is empty if they send none.
func (b *Balancer) signalledBy(s *Service) string {
	switch persistence := s.Persistence.Method(); {
	case s.IsAnswered():
		return fmt.Sprintf("placement is %s", s.Placement)
	case persistence.NeedsHints:
		return fmt.Sprintf("persistence is %s", s.Persistence)
	case persistence.ByColumn && b.Node.Limits.Hints > 0:
		return fmt.Sprintf("persistence is %s with node.limits.hints above 0", s.Persistence)
	}
	return ""
}

func (r *rules) checkHints(b *Balancer) {
	const at, least = "node.limits.hints", 1024
	hinted := slices.IndexFunc(b.Services, func(s Service) bool { return s.Persistence.Method().NeedsHints })
	switch hints := b.Node.Limits.Hints; {
	case hints == 0 && hinted >= 0:
		r.failf(at, "must not be 0 for %s, whose persistence is %s", fieldpath.Item("services", hinted), b.Services[hinted].Persistence)
	case hints > 0 && hints < least:
		r.failf(at, "must be 0 or at least %d", least)
	}
}

// checkTunnelSources checks the source addresses of tunnels. There may be one of each family, and a
// prefix that contains the IPv4 address.
func (r *rules) checkTunnelSources(b *Balancer) {
	first := make(map[string]string)
	for i, address := range b.Node.Addresses {
		at := fieldpath.Item("node.addresses", i)
		if other, ok := first[family(address)]; ok {
			r.failf(at, "is a second %s address; the first is %s", family(address), other)
		} else if address.IsValid() {
			first[family(address)] = at
		}
	}
	const at = "node.tunnel-sources"
	prefix := b.Node.TunnelSources
	switch {
	case !prefix.IsValid():
		return
	case !prefix.Addr().Is4():
		r.failf(at, "is %s; must be an IPv4 prefix: outer IPv6 headers have a flow label instead", prefix)
	case prefix != prefix.Masked():
		r.failf(at, "has bits behind its length; write it as %s", prefix.Masked())
	case !slices.ContainsFunc(b.Node.Addresses, prefix.Contains):
		r.failf(at, "must contain the IPv4 address of node.addresses")
	}
	for i, s := range b.Services {
		for j, server := range s.Servers {
			if prefix.Contains(server.Address) {
				path := fieldpath.Item(fieldpath.Child(fieldpath.Item("services", i), "servers"), j)
				r.failf(at, "must not contain %s, which is %s.address", server.Address, path)
				return
			}
		}
	}
}

// checkService checks the fields of a service that only balancers have, except its servers.
func (r *rules) checkService(path string, s *Service) {
	checkKnown(r, fieldpath.Child(path, "placement"), s.Placement, placements...)
	checkKnown(r, fieldpath.Child(path, "persistence"), s.Persistence, persistences...)
	at := fieldpath.Child(path, "candidates")
	checkRange(r, at, s.Candidates, 1, tables.MaxCandidates)
	r.checkSources(fieldpath.Child(path, "sources"), s.Sources)
	r.checkHunt(path, s)
	r.checkInfer(path, s)
	r.checkPersistence(path, s)
	r.checkQUIC(path, s)
	at = fieldpath.Child(path, "buckets")
	if err := tables.ValidBuckets(s.Buckets); err != nil {
		r.failf(at, "%v", err)
	} else if s.Buckets <= len(s.Servers) {
		r.failf(at, "%d must exceed the number of servers, %d", s.Buckets, len(s.Servers))
	}
	r.checkBucketHash(fieldpath.Child(path, "bucket-hash"), s)
	r.checkAffinity(fieldpath.Child(path, "affinity"), s)
	at = fieldpath.Child(path, "timeouts")
	checkRange(r, fieldpath.Child(at, "new"), s.Timeouts.New, 5*time.Second, 4*time.Hour)
	checkRange(r, fieldpath.Child(at, "established"), s.Timeouts.Established, 5*time.Second, 4*time.Hour)
	checkRange(r, fieldpath.Child(at, "closing"), s.Timeouts.Closing, 5*time.Second, 4*time.Hour)
	checkRange(r, fieldpath.Child(at, "silent"), s.Timeouts.Silent, 5*time.Second, 4*time.Hour)
	checkKnown(r, fieldpath.Child(path, "on-failure"), s.OnFailure, OnFailureKeep, OnFailureMoveUDP, OnFailureReset)
	checkKnown(r, fieldpath.Child(path, "on-drain"), s.OnDrain, OnDrainKeep, OnDrainMoveUDP)
	if s.OnDrain == OnDrainMoveUDP && s.Persistence.Method().HasIDs {
		r.failf(fieldpath.Child(path, "on-drain"), "must be %s for persistence %s: connection IDs name the server",
			OnDrainKeep, s.Persistence)
	}
	checkKnown(r, fieldpath.Child(path, "all-failed"), s.AllFailed, AllFailedUse, AllFailedRefuse)
	switch at := fieldpath.Child(path, "slow-start"); {
	case s.SlowStart == nil:
	case s.Placement.Infers():
		r.failf(at, "not used by placement %s: it has infer.slow-start", s.Placement)
	default:
		checkRange(r, at, *s.SlowStart, 0, time.Hour)
	}
	if s.Health != nil {
		r.checkHealth(fieldpath.Child(path, "health"), s)
	}
}

// MostSources is the maximum number of source prefixes of all services together: half of
// MAX_SOURCE_PREFIXES of bpf/balancer/tables/sources.h, because old and new ones are there while they
// are replaced.
const MostSources = 32768

// checkSources checks the source prefixes of a service.
func (r *rules) checkSources(path string, prefixes []netip.Prefix) {
	seen := make(map[netip.Prefix]string)
	for i, prefix := range prefixes {
		at := fieldpath.Item(path, i)
		switch {
		case !prefix.IsValid():
		case prefix.Addr().Is4In6():
			r.failf(at, "is IPv4-mapped; write it as an IPv4 prefix")
		case prefix != prefix.Masked():
			r.failf(at, "has bits set after the first %d; write it as %s", prefix.Bits(), prefix.Masked())
		}
		checkUnique(r, seen, prefix, at)
	}
}

// checkHunt checks the requirements and the fields of placements under which servers decide.
func (r *rules) checkHunt(path string, s *Service) {
	at := fieldpath.Child(path, "selection")
	placement := s.Placement.Method()
	if !placement.ServersDecide {
		if s.Selection != "" && slices.Contains(placements, s.Placement) {
			r.failf(at, "not used by placement %s", s.Placement)
		}
		return
	}
	checkKnown(r, at, s.Selection, placement.Selections...)
	if at := fieldpath.Child(path, "protocol"); s.Protocol == UDP && !s.Persistence.Method().HasIDs {
		r.failf(at, "must be %s for placement %s, except with persistence %s: without a handshake or connection IDs, "+
			"the balancer cannot learn which server accepts a flow", TCP, s.Placement, PersistenceQUIC)
	}
	if at := fieldpath.Child(path, "encapsulation"); s.Encapsulation.IsTunnel() {
		r.failf(at, "must be %s or %s for placement %s: %s has no segment list",
			SRv6Insert, SRv6Encap, s.Placement, s.Encapsulation)
	}
}

// checkPersistence checks the requirements and the fields of the persistence.
func (r *rules) checkPersistence(path string, s *Service) {
	at, history := fieldpath.Child(path, "generations"), fieldpath.Child(path, "history")
	persistence := s.Persistence.Method().orDefault()
	if why := persistence.whyNot(s.Selection); why != "" {
		r.failf(fieldpath.Child(path, "selection"), "must not be %s for persistence %s: %s",
			s.Selection, s.Persistence, why)
	}
	if !persistence.ByColumn {
		checkRange(r, at, s.Generations, 1, persistence.MaxGenerations)
		if s.History != 0 {
			r.failf(history, "not used by persistence %s", s.Persistence)
		}
		return
	}
	checkRange(r, at, s.Generations, 1, persistence.MaxGenerations)
	checkRange(r, history, s.History, 1, MaxGenerations)
	if s.Protocol == UDP {
		r.failf(fieldpath.Child(path, "protocol"), "must be %s for persistence %s: a server cannot tell whether it has a flow of UDP",
			TCP, s.Persistence)
	}
	if s.Encapsulation.IsTunnel() {
		r.failf(fieldpath.Child(path, "encapsulation"), "must be %s or %s for persistence %s: %s cannot ask a server whether it has a flow",
			SRv6Insert, SRv6Encap, s.Persistence, s.Encapsulation)
	}
	if s.Placement.Method().TakesTurns() {
		r.failf(fieldpath.Child(path, "placement"), "must be %s or %s for persistence %s: the server of a flow in turn is in no column of its bucket",
			PlacementHash, PlacementHunt, s.Persistence)
	}
	if s.Buckets*s.Candidates > MaxColumns {
		r.failf(fieldpath.Child(path, "buckets"), "%d buckets of %d candidates: persistence %s can have at most %d together",
			s.Buckets, s.Candidates, s.Persistence, MaxColumns)
	}
}

// checkSwitch checks the settings of the switch in front of the node's interface.
func (r *rules) checkSwitch(node *BalancerNode) {
	to, at := node.Switch, "node.switch"
	if to == nil {
		return
	}
	switch {
	case to.Address == "":
		r.failf(fieldpath.Child(at, "address"), "required")
	case !isTarget(to.Address):
		r.failf(fieldpath.Child(at, "address"), "must be host:port or unix:path")
	}
	r.checkTLSFiles(at, &to.TLSFiles, "")
	if to.CertFile != "" && to.CAFile == "" {
		r.failf(fieldpath.Child(at, "ca-file"), "required by cert-file")
	}
	if to.ElectionID == 0 {
		r.failf(fieldpath.Child(at, "election-id"), "must be at least 1")
	}
	if to.NetworkPort == to.HostPort && to.HostPort != 0 {
		r.failf(fieldpath.Child(at, "host-port"), "must not be the network-port, %d", to.NetworkPort)
	}
	if node.Underlay != nil {
		r.failf("node.underlay", "must not be set with node.switch: the switch sends IPv6 packets to servers")
	}
	if node.Inside != "" {
		r.failf("node.inside", "must not be set with node.switch, whose packets to servers leave by the network-port")
	}
}

// isTarget tells whether a switch can have the address.
func isTarget(address string) bool {
	if path, isSocket := strings.CutPrefix(address, "unix:"); isSocket {
		return path != ""
	}
	host, port, err := net.SplitHostPort(address)
	number, notANumber := strconv.ParseUint(port, 10, 16)
	return err == nil && notANumber == nil && host != "" && number > 0
}

// checkBucketHash checks the hash that selects buckets. A CRC has no key. With a flow table, clients
// could fill the bucket of another flow, so only a persistence without one may use it.
func (r *rules) checkBucketHash(path string, s *Service) {
	if !s.Persistence.Method().HasCookies {
		r.refuse(path, s.BucketHash != "", "not used by persistence %s", s.Persistence)
		return
	}
	checkKnown(r, path, s.BucketHash, BucketHashMultilinear, BucketHashCRC32)
	if s.BucketHash == BucketHashCRC32 && s.Buckets&(s.Buckets-1) != 0 {
		r.failf(path, "%s requires a power of two of buckets, because switches cannot multiply; the service has %d",
			BucketHashCRC32, s.Buckets)
	}
}

// checkProbe checks the requirements of probes.
func (r *rules) checkProbe(path string, s *Service, node *BalancerNode) {
	switch {
	case !s.Probes():
	case s.Encapsulation.IsTunnel():
		r.failf(path, "must be false for encapsulation %s: probes need a locator", s.Encapsulation)
	case !node.TakesSignals():
		r.failf(path, "must be false if node.internal is false and node.inside is not set: "+
			"no interface takes the answers of agents")
	}
}

// checkServers checks the servers of a service, apart from conflicts with other services.
func (r *rules) checkServers(path string, s *Service, node *BalancerNode) {
	names := make(map[string]string)
	locators := make(map[netip.Prefix]string)
	addresses := make(map[netip.Addr]string)
	for i, server := range s.Servers {
		at := fieldpath.Item(fieldpath.Child(path, "servers"), i)
		r.checkName(fieldpath.Child(at, "name"), server.Name)
		if server.Weight == nil {
			r.failf(fieldpath.Child(at, "weight"), "required")
		}
		checkUnique(r, names, server.Name, fieldpath.Child(at, "name"))

		r.checkPresence(fieldpath.Child(at, "locator"), server.Locator.IsValid(), s.Encapsulation.IsSRv6(), s.Encapsulation)
		r.checkLocator(fieldpath.Child(at, "locator"), server.Locator)
		checkUnique(r, locators, server.Locator, fieldpath.Child(at, "locator"))
		if server.Locator.IsValid() && server.Locator == node.Locator {
			r.failf(fieldpath.Child(at, "locator"), "is the balancer's own")
		}
		r.checkUnderlaidServer(at, &server, node)

		r.checkPresence(fieldpath.Child(at, "address"), server.Address.IsValid(), s.Encapsulation.IsTunnel(), s.Encapsulation)
		r.checkAddress(fieldpath.Child(at, "address"), server.Address)
		checkUnique(r, addresses, server.Address, fieldpath.Child(at, "address"))

		if server.hasOwnHost() {
			r.checkServerHost(fieldpath.Child(at, "host"), server.Host)
		} else if s.Health != nil && s.Health.Via == ViaHost && s.Encapsulation.IsSRv6() {
			r.failf(fieldpath.Child(at, "host"), "required by health checks via %s of a service whose encapsulation is %s", ViaHost, s.Encapsulation)
		} else if s.Placement.Polls() && s.Encapsulation.IsSRv6() {
			r.failf(fieldpath.Child(at, "host"), "required by placement %s: the agent is polled at this address", s.Placement)
		}
	}
}

// checkPresence checks that a field is present if and only if an encapsulation needs it.
func (r *rules) checkPresence(path string, present, needed bool, e Encapsulation) {
	switch {
	case !e.IsSRv6() && !e.IsTunnel(): // it is unknown, which is an error already
	case needed && !present:
		r.failf(path, "required by encapsulation %s", e)
	case !needed && present:
		r.failf(path, "not used by encapsulation %s", e)
	}
}

// checkServerHost checks the address for health checks and polls, which only this host must reach.
func (r *rules) checkServerHost(path string, host netip.Addr) {
	switch {
	case host.Is4In6():
		r.failf(path, "is IPv4-mapped; write it as %s", host.Unmap())
	case host.IsUnspecified() || host.IsMulticast():
		r.failf(path, "is %s; must be a unicast address", kind(host))
	}
}

// checkTunnelsNeeded reports each family for which tunnels need a source address that is missing.
// It names only the first server that needs it.
func (r *rules) checkTunnelsNeeded(b *Balancer) {
	have := make(map[string]bool)
	for _, address := range b.Node.Addresses {
		have[family(address)] = true
	}
	for i, s := range b.Services {
		for j, server := range s.Servers {
			if !s.Encapsulation.IsTunnel() || !server.Address.IsValid() || have[family(server.Address)] {
				continue
			}
			have[family(server.Address)] = true
			r.failf("node.addresses", "needs an %s address, because %s.address is one", family(server.Address),
				fieldpath.Item(fieldpath.Child(fieldpath.Item("services", i), "servers"), j))
		}
	}
}

// checkVIPs reports VIPs that are in a locator, or that are also addresses of the balancer or of
// servers.
func (r *rules) checkVIPs(b *Balancer, all vips) {
	locators := locatorsOf(b, all)
	own := make(map[netip.Addr]bool)
	if b.Node.Underlay != nil && b.Node.Locator.IsValid() {
		all.checkNotVIP(r, "node.locator", UnderlayAddress(b.Node.Locator.Addr()))
	}
	for i, address := range b.Node.Addresses {
		own[address] = true
		all.checkNotVIP(r, fieldpath.Item("node.addresses", i), address)
	}
	for i, s := range b.Services {
		path := fieldpath.Item("services", i)
		for j, vip := range s.AllVIPs() {
			if prefix, err := vip.Prefix(64); err == nil && locators[prefix] != "" {
				r.failf(s.VIPPath(i, j), "is in the locator of %s", locators[prefix])
			}
		}
		for j := range s.Servers {
			server := &s.Servers[j]
			if all[server.Address] == "" && all[server.Host] == "" && !own[server.Address] {
				continue // no error; this saves the time to make the path
			}
			at := fieldpath.Item(fieldpath.Child(path, "servers"), j)
			all.checkNotVIP(r, fieldpath.Child(at, "address"), server.Address)
			if server.hasOwnHost() {
				all.checkNotVIP(r, fieldpath.Child(at, "host"), server.Host)
			}
			if own[server.Address] {
				r.failf(fieldpath.Child(at, "address"), "is the balancer's own")
			}
		}
	}
}

// vipPath returns the path of a VIP of the service at a path. i is its index in AllVIPs, and vips is
// the list of the service, which may be empty.
func vipPath(path string, vips []netip.Addr, i int) string {
	if len(vips) == 0 {
		return fieldpath.Child(path, "vip")
	}
	return fieldpath.Item(fieldpath.Child(path, "vips"), i)
}

// locatorsOf returns the owner of each /64 with a VIP: the server or the balancer whose locator it
// is, or an empty text if it is not a locator.
func locatorsOf(b *Balancer, all vips) map[netip.Prefix]string {
	locators := make(map[netip.Prefix]string)
	for vip := range all {
		if prefix, err := vip.Prefix(64); err == nil { // an IPv4 address has no /64
			locators[prefix] = ""
		}
	}
	for i := range b.Services {
		for j := range b.Services[i].Servers {
			locator := b.Services[i].Servers[j].Locator
			if owner, ok := locators[locator]; ok && owner == "" {
				locators[locator] = fieldpath.Item(fieldpath.Child(fieldpath.Item("services", i), "servers"), j)
			}
		}
	}
	if b.Node.Locator.IsValid() {
		locators[b.Node.Locator] = "the balancer"
	}
	return locators
}
