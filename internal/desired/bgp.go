// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// BGP describes how the balancer announces its VIPs to routers. A balancer without it announces
// nothing.
type BGP struct {
	// ASN is the balancer's autonomous system, 1 to 4294967295. A change needs a restart.
	ASN uint32 `yaml:"asn" range:"1 to 4294967295"`
	// RouterID identifies the balancer to its peers: an IPv4 address, which need not be reachable.
	// A change needs a restart.
	RouterID netip.Addr `yaml:"router-id"`
	// Listen is the TCP port on which the balancer accepts sessions of its peers; 0: it only opens
	// sessions itself. A change needs a restart.
	Listen uint16 `yaml:"listen,omitempty" range:"1 to 65535"`
	// RestartTime is how long peers keep the routes while no process of the balancer runs (RFC 4724):
	// 1 s to 4095 s. Default 120 s. A change needs a restart.
	RestartTime time.Duration `yaml:"restart-time"`
	// HoldDown is how long a VIP must be served again before its route returns after a withdrawal: 0
	// to one hour. It doubles with each further withdrawal that follows soon. Default 10 s.
	HoldDown time.Duration `yaml:"hold-down"`
	// DrainDelay is how long `segue drain --self` waits at least, after it has withdrawn all routes,
	// for routers to use other ones: 0 to ten minutes. Default 5 s.
	DrainDelay time.Duration `yaml:"drain-delay"`
	// NextHops are the next hops of the routes, at most one IPv4 and one IPv6 address. The default
	// is the balancer's own address in the session.
	NextHops []netip.Addr `yaml:"next-hops,omitempty"`
	// RouteAttributes are those of all routes. A service or an aggregate may have others.
	RouteAttributes `yaml:",inline"`
	// Aggregates are announced beside the VIPs that they contain, or in place of them.
	Aggregates []Aggregate `yaml:"aggregates,omitempty"`
	// Drain has the attributes that routes get while the balancer is drained; nil: a drain withdraws
	// the routes.
	Drain *RouteAttributes `yaml:"drain,omitempty"`
	Peers []BGPPeer        `yaml:"peers"`
}

// RouteAttributes are attributes of a route by which routers choose one of several routes, or
// decide what to do with it. A nil field is not given.
type RouteAttributes struct {
	// Prepend is how often the balancer's autonomous system is in the path of the route in addition
	// to the one time that each external session needs.
	Prepend *uint32 `yaml:"prepend,omitempty" range:"0 to 16"`
	// MED is the MULTI_EXIT_DISC. Routers of one autonomous system prefer the lowest. A missing one
	// counts as 0.
	MED *uint32 `yaml:"med,omitempty" range:"0 to 4294967295"`
	// LocalPref is the LOCAL_PREF of internal sessions. Routers prefer the highest. A missing one
	// counts as DefaultLocalPref.
	LocalPref   *uint32     `yaml:"local-pref,omitempty" range:"0 to 4294967295"`
	Communities []Community `yaml:"communities,omitempty"`
}

// DefaultLocalPref is the LOCAL_PREF of routes for which none is configured.
const DefaultLocalPref = 100

// Aggregate is a prefix that is announced while any VIP inside is served.
type Aggregate struct {
	Prefix netip.Prefix `yaml:"prefix"`
	// SummaryOnly: the VIPs inside have no routes of their own.
	SummaryOnly     bool `yaml:"summary-only,omitempty"`
	RouteAttributes `yaml:",inline"`
}

// AggregateOf returns the aggregate that contains an address, or nil. Aggregates do not overlap.
func (b *BGP) AggregateOf(address netip.Addr) *Aggregate {
	for i := range b.Aggregates {
		if b.Aggregates[i].Prefix.Contains(address) {
			return &b.Aggregates[i]
		}
	}
	return nil
}

// BGPPeer is a router to which the balancer has a session.
type BGPPeer struct {
	// Address is the router's address. It identifies the peer, unless there is an Interface.
	Address netip.Addr `yaml:"address,omitempty"`
	// Interface is the link to an unnumbered peer, to which the session uses link-local addresses.
	// Without Address, the peer is the router that sends router advertisements there. Otherwise
	// Address is the router's link-local address.
	Interface string `yaml:"interface,omitempty"`
	// ASN is the router's autonomous system. If it is the balancer's own, the session is internal.
	ASN uint32 `yaml:"asn" range:"1 to 4294967295"`
	// Port is the router's TCP port. Default 179.
	Port uint16 `yaml:"port" range:"1 to 65535"`
	// PasswordFile is the absolute path of the file with the key for TCP's MD5 signatures (RFC
	// 2385). Without it segments are not signed.
	PasswordFile string `yaml:"password-file,omitempty"`
	// HoldTime is the time after which either side gives up a session without messages: 3 s to 65535
	// s, in whole seconds. The shorter one of both sides counts. Default 9 s.
	HoldTime time.Duration `yaml:"hold-time"`
	// Multihop is the largest number of hops to a router that is not on a link of this host, 2 to
	// 255. It is for external sessions; 0: the router is on a link.
	Multihop int `yaml:"multihop,omitempty" range:"2 to 255"`
	// TTLSecurity tells whether the balancer only takes packets that no router has forwarded (RFC
	// 5082). The router must have the same setting.
	TTLSecurity bool `yaml:"ttl-security,omitempty"`
	// Families are the families of the VIPs to announce. The default is that of the address.
	Families []Family `yaml:"families"`
}

// Name identifies the peer: its address, its interface, or address%interface.
func (p *BGPPeer) Name() string {
	switch {
	case p.Interface == "":
		return p.Address.String()
	case p.Address.IsValid():
		return p.Address.WithZone(p.Interface).String()
	}
	return p.Interface
}

// hasIPv6 tells whether the packets of the session are IPv6.
func (p *BGPPeer) hasIPv6() bool { return p.Interface != "" || p.Address.Is6() }

// NextHopsAreIPv6 tells whether the routes of a family have IPv6 next hops in the session with the
// peer. If the family is IPv4, the peer must support that (RFC 8950).
func (b *BGP) NextHopsAreIPv6(p *BGPPeer, family Family) bool {
	return family == IPv6 || p.hasIPv6() && !b.NextHop(IPv4).IsValid()
}

// Family is a family of addresses.
type Family string

// The families.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// FamilyOf returns the family of an address.
func FamilyOf(address netip.Addr) Family {
	if address.Is4() {
		return IPv4
	}
	return IPv6
}

// NextHop returns the configured next hop of a family, or the zero address for the default.
func (b *BGP) NextHop(family Family) netip.Addr {
	for _, hop := range b.NextHops {
		if FamilyOf(hop) == family {
			return hop
		}
	}
	return netip.Addr{}
}

// Announces tells whether any peer takes routes of a family.
func (b *BGP) Announces(family Family) bool {
	return slices.ContainsFunc(b.Peers, func(p BGPPeer) bool { return slices.Contains(p.Families, family) })
}

// Announcement says when a service is a reason to announce its VIP.
type Announcement string

// The values of ServiceBGP.Announce.
const (
	// AnnounceReady announces the VIP while at least one server gets new connections and no check,
	// probe or neighbour says that this server does not work.
	AnnounceReady Announcement = "ready"
	// AnnounceUsable announces the VIP while at least one server gets new connections, even if all
	// servers fail their checks and the balancer ignores that.
	AnnounceUsable Announcement = "usable"
	// AnnounceNever: the service is no reason to announce the VIP.
	AnnounceNever Announcement = "never"
)

var announcements = []Announcement{AnnounceReady, AnnounceUsable, AnnounceNever}

// ServiceBGP has the settings of a service's announcement.
type ServiceBGP struct {
	// Announce is ready by default.
	Announce Announcement `yaml:"announce,omitempty"`
	// RouteAttributes are those of the VIP's route. Each takes the place of the one of all routes,
	// except for communities, which are added.
	RouteAttributes `yaml:",inline"`
}

// Announcement returns when the service is a reason to announce its VIP.
func (s *Service) Announcement() Announcement {
	if s.BGP == nil {
		return AnnounceReady
	}
	return cmp.Or(s.BGP.Announce, AnnounceReady)
}

// Community marks a route for routers. In text it is ASN:VALUE with 16 bits each (RFC 1997),
// ASN:VALUE:VALUE with 32 bits each (RFC 8092), or a well-known name.
type Community string

// wellKnown are the communities with names (RFC 1997, RFC 3765, RFC 7999, RFC 8326).
var wellKnown = map[Community]uint32{
	"graceful-shutdown":   0xffff0000,
	"blackhole":           0xffff029a,
	"no-export":           0xffffff01,
	"no-advertise":        0xffffff02,
	"no-export-subconfed": 0xffffff03,
	"no-peer":             0xffffff04,
}

// Standard returns the value of a community of RFC 1997.
func (c Community) Standard() (value uint32, ok bool) {
	if value, ok := wellKnown[c]; ok {
		return value, true
	}
	parts, ok := c.parts(2, math.MaxUint16)
	if !ok {
		return 0, false
	}
	return parts[0]<<16 | parts[1], true
}

// Large returns the parts of a large community (RFC 8092).
func (c Community) Large() (parts [3]uint32, ok bool) {
	all, ok := c.parts(3, math.MaxUint32)
	if ok {
		parts = [3]uint32(all)
	}
	return parts, ok
}

// parts returns the numbers between colons. There must be count numbers, each up to most.
func (c Community) parts(count int, most uint64) (parts []uint32, ok bool) {
	for text := range strings.SplitSeq(string(c), ":") {
		number, err := strconv.ParseUint(text, 10, 32)
		if err != nil || number > most || text != fmt.Sprint(number) {
			return nil, false
		}
		parts = append(parts, uint32(number))
	}
	return parts, len(parts) == count
}
