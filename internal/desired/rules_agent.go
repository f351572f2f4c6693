// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Validate returns an error for every rule that the agent breaks. All defaults must be set.
func (a *Agent) Validate() fieldpath.Errors {
	var r rules
	r.checkRanges("", reflect.ValueOf(*a))
	r.checkAgent(a)
	return r.errs
}

// checkAgent checks all rules of an agent except ranges.
func (r *rules) checkAgent(a *Agent) {
	r.checkHost(a.Node.Instance, a.Node.Interface, a.Node.XDPMode, a.Node.Locator, a.Node.Addresses)
	r.checkBalancers(a.Node.Balancers, a.Services)
	r.checkSignalKey(a.Node.SignalKey)
	r.checkState(a.Node.State)
	r.checkAPI(&a.API)
	r.checkListen("metrics.listen", a.Metrics.Listen)
	r.checkListen("poll.listen", a.Poll.Listen)
	if a.Poll.Listen != "" && a.Node.SignalKey == "" {
		r.failf(SignalKeyField, "required by poll.listen: only balancers with the key get answers")
	}
	r.checkPresent(len(a.Services))
	r.checkServices(a.Services)
	r.checkLocatorNeeded(a.Services, a.Node.Locator)
	r.checkUnderlay(a.Node.Underlay, a.Node.Locator, a.Services)
	for i, s := range a.Services {
		if s.Encapsulation.IsTunnel() && len(a.Node.Addresses) == 0 {
			r.failf("node.addresses", "required by %s, whose encapsulation is %s", fieldpath.Item("services", i), s.Encapsulation)
			break
		}
	}
	srv6 := slices.IndexFunc(a.Services, func(s AgentService) bool { return s.Encapsulation.IsSRv6() })
	if !a.Node.IsInternal() && srv6 >= 0 {
		r.failf("node.internal", "must be true for %s, whose encapsulation is %s: the balancers' packets arrive on node.interface",
			fieldpath.Item("services", srv6), a.Services[srv6].Encapsulation)
	}
	vips := newVIPs(a.Services)
	if a.Node.Underlay != nil && a.Node.Locator.IsValid() {
		vips.checkNotVIP(r, "node.locator", UnderlayAddress(a.Node.Locator.Addr()))
	}
	for i, address := range a.Node.Addresses {
		vips.checkNotVIP(r, fieldpath.Item("node.addresses", i), address)
	}
	for i, s := range a.Services {
		for j, vip := range s.AllVIPs() {
			if a.Node.Locator.Contains(vip) {
				r.failf(vipPath(fieldpath.Item("services", i), s.VIPs, j), "is in the locator of the agent")
			}
		}
	}
	for i, s := range a.Services {
		r.checkHunting(fieldpath.Item("services", i), s)
		r.checkAgentQUIC(fieldpath.Item("services", i), &s)
	}
}

// MostBalancers is the maximum number of prefixes of balancers in an agent's file.
const MostBalancers = 1024

// checkBalancers checks the prefixes in node.balancers.
func (r *rules) checkBalancers(prefixes []netip.Prefix, services []AgentService) {
	if len(services) > 0 && !slices.ContainsFunc(services, AgentService.mayHunt) {
		r.refuse("node.balancers", len(prefixes) > 0, "only for services that hunt: %s", thatHunt)
	}
	if len(prefixes) > MostBalancers {
		r.failf("node.balancers", "must have at most %d prefixes", MostBalancers)
	}
	seen := make(map[netip.Prefix]string)
	for i, prefix := range prefixes {
		path := fieldpath.Item("node.balancers", i)
		switch address := prefix.Addr(); {
		case !prefix.IsValid():
			continue
		case address.Is4() || prefix.Bits() > 64:
			r.failf(path, "must be an IPv6 prefix of at most 64 bits")
		case prefix != prefix.Masked():
			r.failf(path, "has bits set after the first %d; write it as %s", prefix.Bits(), prefix.Masked())
		case address.IsUnspecified() || address.IsMulticast() || address.IsLinkLocalUnicast():
			r.failf(path, "must be a unicast prefix that other hosts can reach")
		}
		checkUnique(r, seen, prefix, path)
	}
}

// thatHunt says which services of an agent hunt.
const thatHunt = "TCP in srv6-insert or srv6-encap, and UDP there with accept.policy or load.source"

// mayHunt tells whether a service hunts, or may hunt after the error in its protocol or
// encapsulation is corrected.
func (s AgentService) mayHunt() bool {
	isKnown := (s.Protocol == TCP || s.Protocol == UDP) && (s.Encapsulation.IsSRv6() || s.Encapsulation.IsTunnel())
	return s.Hunts() || !isKnown
}

// checkHunting checks the fields about offered connections.
func (r *rules) checkHunting(path string, s AgentService) {
	if !s.mayHunt() {
		const other = "only for services that hunt: " + thatHunt
		r.refuse(fieldpath.Child(path, "accept"), s.Accept != Accept{}, other)
		r.refuse(fieldpath.Child(path, "load"), s.Load != Source{}, other)
		r.refuse(fieldpath.Child(path, "not-local"), s.NotLocal != "" && s.Protocol == TCP, other)
		r.refuse(fieldpath.Child(path, "drained"), s.Drained, other+"; balancers do "+
			"not ask the servers of other services; drain the server at the balancers")
	}
	r.refuse(fieldpath.Child(path, "not-local"), s.NotLocal != "" && s.Protocol == UDP, "only for TCP: UDP has no resets")
	if !s.Hunts() {
		return
	}
	r.checkAccept(fieldpath.Child(path, "accept"), s.Accept)
	if s.Protocol == UDP {
		r.checkQUICLoad(fieldpath.Child(path, "load"), s)
		return
	}
	r.checkLoad(fieldpath.Child(path, "load"), s.Load)
	checkKnown(r, fieldpath.Child(path, "not-local"), s.NotLocal, NotLocalDrop, NotLocalReset)
}

// checkQUICLoad checks the load source of a service of UDP that hunts.
func (r *rules) checkQUICLoad(path string, s AgentService) {
	switch at := fieldpath.Child(path, "source"); s.Load.Kind {
	case "":
		if s.Accept.Policy.UsesLoad() {
			r.failf(at, "required by UDP with policy %s: the agent does not count connections of UDP", s.Accept.Policy)
		}
		r.refuse(path, s.Load != Source{}, "not used without source")
	case LoadConnections, LoadAcceptQueue:
		r.failf(at, "must be %s, %s, %s or %s for UDP: the agent sees connections of TCP only",
			LoadSharedMap, LoadSharedMemory, LoadCgroup, LoadApache)
	default:
		r.checkLoad(path, s.Load)
	}
}

// refuse reports a field that is present although it has no meaning.
func (r *rules) refuse(path string, present bool, format string, args ...any) {
	if present {
		r.failf(path, format, args...)
	}
}

func (r *rules) checkAccept(path string, a Accept) {
	checkKnown(r, fieldpath.Child(path, "policy"), a.Policy, AcceptAlways, AcceptNever, AcceptStatic, AcceptDynamic, AcceptLeast)
	if at := fieldpath.Child(path, "threshold"); a.Policy != AcceptStatic {
		r.refuse(at, a.Threshold != nil, "only for policy static; the policy is %s", a.Policy)
	} else if a.Threshold == nil {
		r.failf(at, "required by policy static")
	}
	if a.Policy != AcceptDynamic {
		const other = "only for policy dynamic; the policy is %s"
		r.refuse(fieldpath.Child(path, "window"), a.Window != 0, other, a.Policy)
		r.refuse(fieldpath.Child(path, "window-time"), a.WindowTime != nil, other, a.Policy)
		r.refuse(fieldpath.Child(path, "epsilon"), a.Epsilon != nil, other, a.Policy)
		r.refuse(fieldpath.Child(path, "initial"), a.Initial != nil, other, a.Policy)
		return
	}
	const needed = "required by policy dynamic"
	if a.Window == 0 {
		r.failf(fieldpath.Child(path, "window"), needed)
	}
	if at := fieldpath.Child(path, "window-time"); a.WindowTime == nil {
		r.failf(at, needed)
	} else {
		checkRange(r, at, *a.WindowTime, 0, time.Hour)
	}
	if a.Initial == nil {
		r.failf(fieldpath.Child(path, "initial"), needed)
	}
	if at := fieldpath.Child(path, "epsilon"); a.Epsilon == nil {
		r.failf(at, needed)
	} else if *a.Epsilon < 0 || *a.Epsilon >= 0.5 {
		r.failf(at, "must be at least 0 and less than 0.5")
	}
}

// checkLoad checks a load source and its parameters.
func (r *rules) checkLoad(path string, l Source) {
	checkKnown(r, fieldpath.Child(path, "source"), l.Kind,
		LoadConnections, LoadAcceptQueue, LoadApache, LoadCgroup, LoadSharedMemory, LoadSharedMap)
	if !slices.Contains([]LoadSource{LoadConnections, LoadApache}, l.Kind) {
		r.refuse(fieldpath.Child(path, "workers"), l.Workers != 0,
			"only for connections and apache-scoreboard; capacity is for all sources")
	}
	if !l.Kind.IsPolled() {
		r.refuse(fieldpath.Child(path, "interval"), l.Interval != 0, "not used by source %s: it is read when a connection is offered", l.Kind)
	}
	if !l.Kind.HasPath() {
		r.refuse(fieldpath.Child(path, "path"), l.Path != "", "not used by source %s", l.Kind)
		return
	}
	if l.Path == "" {
		r.failf(fieldpath.Child(path, "path"), "required by source %s", l.Kind)
	} else if !filepath.IsAbs(l.Path) {
		r.failf(fieldpath.Child(path, "path"), "must be absolute")
	}
	if l.Kind.IsPolled() {
		checkRange(r, fieldpath.Child(path, "interval"), l.Interval, time.Millisecond, 10*time.Second)
	}
}
