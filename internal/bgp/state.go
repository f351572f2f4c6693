// SPDX-License-Identifier: Apache-2.0

package bgp

import "time"

// State is the state of all sessions and routes.
type State struct {
	ASN      uint32 `json:"asn" doc:"the autonomous system of the balancer"`
	RouterID string `json:"router_id"`
	// Drained is when the balancer was drained; nil: it is not.
	Drained *time.Time `json:"drained_since,omitempty" doc:"missing: the balancer is not drained"`
	// DrainDelay is in seconds.
	DrainDelay float64 `json:"drain_delay_seconds" doc:"for routers to use other routes after a drain"`
	// DrainShifts tells that a drain makes routes less preferred instead of withdrawing them.
	DrainShifts bool    `json:"drain_shifts" doc:"a drain makes routes less preferred instead of withdrawing them"`
	Peers       []Peer  `json:"peers" nullable:"false"`
	Routes      []Route `json:"routes" nullable:"false"`
}

// Peer is the state of a session.
type Peer struct {
	Address string `json:"address" doc:"of the peer, or the interface to an unnumbered peer"`
	// Neighbor is the link-local address of an unnumbered peer. It is missing until the peer was
	// heard.
	Neighbor string    `json:"neighbor,omitempty" doc:"link-local address of an unnumbered peer that was heard"`
	ASN      uint32    `json:"asn"`
	State    string    `json:"state" enum:"established,down"`
	Since    time.Time `json:"since" doc:"of the state"`
	// Reason is why the last session has ended.
	Reason       string `json:"reason,omitempty" doc:"why the last session has ended"`
	Sessions     uint64 `json:"sessions" doc:"how often a session was established"`
	LocalAddress string `json:"local_address,omitempty"`
	// HoldTime is in seconds, as both sides have agreed.
	HoldTime    float64 `json:"hold_time_seconds,omitempty" doc:"as both sides have agreed"`
	KeepsRoutes bool    `json:"keeps_routes" doc:"the peer keeps the routes while the balancer restarts"`
	Prefixes    uint64  `json:"prefixes" doc:"that the peer was sent"`
}

// IsEstablished tells whether the session is established.
func (p *Peer) IsEstablished() bool { return p.State == established }

// The states of a session.
const (
	established = "established"
	down        = "down"
)

// Route is the state of the route of a VIP or an aggregate.
type Route struct {
	Prefix    string    `json:"prefix"`
	Announced bool      `json:"announced"`
	Since     time.Time `json:"since" doc:"since when it is announced, or not"`
	// Peers is the number of peers that take routes of the family. Established is the number of
	// those that have a session in which they accept such routes.
	Peers       int      `json:"peers" doc:"how many peers take routes of the family"`
	Established int      `json:"established_peers" doc:"how many of these have an established session"`
	Reason      Reason   `json:"reason,omitempty" enum:"not_served,unchecked,no_peer,held_down,drained" doc:"why it is not announced"`
	Services    []string `json:"services" nullable:"false" doc:"services of the VIP, or inside the aggregate"`
	Prepend     uint32   `json:"prepend" doc:"how often the balancer's AS is in the path in addition"`
	MED         *uint32  `json:"med,omitempty"`
	LocalPref   *uint32  `json:"local_pref,omitempty"`
	// Communities are the BGP communities of the route.
	Communities []string `json:"communities" nullable:"false"`
}

// IsAnnouncedToNobody tells whether the route is announced, but no peer that takes it has a
// session.
func (r *Route) IsAnnouncedToNobody() bool { return r.Announced && r.Established == 0 }

// Reason is why a route is not announced.
type Reason string

// The reasons.
const (
	NotServed Reason = "not_served" // no service of the VIP, or inside the aggregate, can serve
	Unchecked Reason = "unchecked"  // no server has passed a health check, and some have no result yet
	NoPeer    Reason = "no_peer"    // no peer is configured to take routes of the family
	HeldDown  Reason = "held_down"  // a service can serve again, but not for long enough
	Drained   Reason = "drained"    // the balancer is drained
)

// text says in plain words why a route was withdrawn. The Reason is empty if the route is no
// longer configured. It is never Unchecked or HeldDown, which only delay an announcement.
func (r Reason) text() string {
	switch r {
	case NotServed:
		return "none of its services can serve"
	case NoPeer:
		return "no peer takes routes of its family"
	case Drained:
		return "the balancer is drained"
	}
	return "it is no longer configured"
}
