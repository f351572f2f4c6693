// SPDX-License-Identifier: Apache-2.0

package l2

import "time"

// LinkState is the state of all VIPs on the link.
type LinkState struct {
	Interface string `json:"interface"`
	MAC       string `json:"mac,omitempty" doc:"with which the balancer answers"`
	IsUp      bool   `json:"is_up" doc:"the link can be used"`
	// Drained is when the balancer was drained; nil: it is not.
	Drained *time.Time `json:"drained_since,omitempty" doc:"missing: the balancer is not drained"`
	// Lease is in seconds.
	Lease float64 `json:"lease_seconds" doc:"after which others answer for a balancer that has died"`
	// Problem is why the balancer does not know which balancers there are now.
	Problem string `json:"problem,omitempty" doc:"why it is unknown which balancers there are now"`
	// Balancers are those that the store knows, with this one.
	Balancers []LinkBalancer `json:"balancers" nullable:"false"`
	VIPs      []LinkVIP      `json:"vips" nullable:"false"`
	Answers   uint64         `json:"answers" doc:"to ARP requests and neighbour solicitations"`
	Claims    uint64         `json:"claims" doc:"of strangers to a VIP of this balancer"`
}

// LinkBalancer is a balancer of the link.
type LinkBalancer struct {
	Name string `json:"name"`
	MAC  string `json:"mac"`
	Able int    `json:"able" doc:"for how many VIPs it can answer"`
	VIPs int    `json:"vips" doc:"for how many VIPs it is the leader"`
}

// LinkVIP is the state of a VIP.
type LinkVIP struct {
	Address string    `json:"address"`
	Answers bool      `json:"answers" doc:"whether this balancer answers for it"`
	Since   time.Time `json:"since" doc:"since when it answers, or not"`
	// Leader is the balancer that answers for the VIP. Empty: there is none.
	Leader string `json:"leader,omitempty" doc:"the balancer that answers for it; missing: none"`
	// Reason is why this balancer cannot answer for the VIP. It is empty if it can.
	Reason   Reason   `json:"reason,omitempty" enum:"not_served,unchecked,held_down,drained,link_down" doc:"why this balancer cannot answer for it"`
	Services []string `json:"services" nullable:"false"`
}

// Reason is why a balancer cannot answer for a VIP.
type Reason string

// The reasons.
const (
	NotServed Reason = "not_served" // no service of the VIP can serve
	Unchecked Reason = "unchecked"  // no server has passed a health check, and some have no result yet
	HeldDown  Reason = "held_down"  // a service can serve again, but not for long enough
	Drained   Reason = "drained"    // the balancer is drained
	LinkDown  Reason = "link_down"  // the interface cannot be used
)

// text says in plain words why the balancer no longer answers for a VIP for which it has answered.
// The Reason is empty if another balancer is the leader.
func (r Reason) text() string {
	switch r {
	case NotServed:
		return "none of its services can serve"
	case Drained:
		return "the balancer is drained"
	case LinkDown:
		return "the interface is down"
	}
	return "another balancer answers for it, or it is no longer configured"
}
