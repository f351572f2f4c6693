// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"net/netip"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Snapshot is the state of a balancer at one moment.
type Snapshot struct {
	datapath.Snapshot
	// Inside is the interface of node.inside and its program; nil: node.inside is not configured.
	// Its index is 0 if the interface no longer exists.
	Inside    *datapath.Attachment `json:"inside"`
	FlowTable FlowTable            `json:"flow_table"`
	// Hints are the present hints. They are nil unless a service uses them.
	Hints    *dataplane.HintCounts `json:"hints"`
	Services []*ServiceState       `json:"services"` // by name
	// RemovedVIPs are the VIPs whose last service was removed not long ago, by address.
	RemovedVIPs []RemovedVIP `json:"removed_vips"`
}

// RemovedVIP is a VIP without a service. Packets to it are dropped until it is forgotten.
type RemovedVIP struct {
	VIP     netip.Addr `json:"vip"`
	Age     float64    `json:"age_seconds"` // since the removal
	Packets uint64     `json:"packets"`     // dropped since then
	Bytes   uint64     `json:"bytes"`       // of layer 3
}

// FlowTable describes how full the flow table is.
type FlowTable struct {
	// Capacity is the number of flows for which the table is made: node.limits.flows, rounded up.
	// The table has twice as many entries. With more flows than Capacity, some flows get no entry.
	Capacity uint64 `json:"capacity"`
	// Age is the time since the sweep that counted the flows, in seconds. The balancer sweeps the
	// table every five seconds, as long as its process runs. If Age is nil, no sweep has counted
	// the flows yet, and Flows and HalfOpen are nil as well.
	Age *float64 `json:"age_seconds"`
	// Flows are the numbers of flows of all servers at the last sweep.
	Flows *dataplane.FlowCounts `json:"flows"`
	// HalfOpen is the number of half-open flows of services with placement hunt at the last sweep.
	// Another table contains these flows.
	HalfOpen *uint64 `json:"half_open"`
}

// ServiceState is a service, with its state in the data path.
type ServiceState struct {
	Name string `json:"name"`
	// VIP and Port are the lowest ones of a service with several. VIPs and Ports then have all of
	// them, in ascending order.
	VIP   netip.Addr   `json:"vip"`
	VIPs  []netip.Addr `json:"vips,omitempty"`
	Port  uint16       `json:"port"` // 0: all ports without another service
	Ports []uint16     `json:"ports,omitempty"`
	// Sources are the prefixes of the clients that may reach the service; nil: all may.
	Sources       []netip.Prefix        `json:"sources,omitempty"`
	Protocol      desired.Protocol      `json:"protocol"`
	Placement     desired.Placement     `json:"placement"`
	Selection     desired.Selection     `json:"selection,omitempty"` // only with placement hunt
	Inference     *InferenceState       `json:"inference,omitempty"` // nil: the service does not infer
	Persistence   desired.Persistence   `json:"persistence"`
	Encapsulation desired.Encapsulation `json:"encapsulation"`
	// QUIC and FormerQUIC are the forms of the connection IDs. Only persistence quic has them.
	QUIC       *desired.QUIC `json:"quic,omitempty"`
	FormerQUIC *desired.QUIC `json:"former_quic,omitempty"`
	Buckets    uint32        `json:"buckets"` // 0: it has no candidate table
	// BucketHash is the hash that selects the bucket of a flow. Only persistence stateless has one.
	BucketHash desired.BucketHash `json:"bucket_hash,omitempty"`
	// Affinity is the part of a flow that selects its bucket; nil: the whole flow.
	Affinity   *desired.ClientAffinity `json:"affinity,omitempty"`
	Candidates uint8                   `json:"candidates"`
	// Generation is the number of the present set of servers. Sets is how many sets the candidate
	// table contains: the present one, and former ones, which may have older flows. Balancers with
	// the same Digest have the same candidate tables.
	Generation uint64 `json:"generation"`
	Sets       uint8  `json:"sets"`
	Digest     string `json:"digest"`      // 8 hexadecimal digits
	TakesFlows bool   `json:"takes_flows"` // at least one server gets new flows
	// Refuses tells whether new flows are refused because all servers that are not drained have
	// failed.
	Refuses bool `json:"refuses"`
	// Ignored are the causes of servers that get new flows nevertheless: all servers that are not
	// drained have a cause, or probes find more servers unfit than they may exclude.
	Ignored []Condition    `json:"ignored"`
	Servers []*ServerState `json:"servers"` // by name

	number uint32
	table  uint32
}

// ServerState is a server of a service, with its state in the data path. Counters begin when the
// server is configured.
type ServerState struct {
	Name      string    `json:"name"`
	Slot      uint32    `json:"slot"`
	Address   string    `json:"address"` // the locator, or the far end of the tunnel
	Condition Condition `json:"condition"`
	Checked   bool      `json:"checked"` // a health check of it has had a result
	Probed    bool      `json:"probed"`  // its agent is probed
	// Causes are the reasons why the server is unfit for new flows, the most severe first. The
	// server gets new flows nevertheless if its service ignores the causes. A server that is
	// drained and has no cause gets no new flows either.
	Causes []Condition `json:"causes"`
	// Reasons tell why the server has some of the causes. They are from the process, and up to two
	// seconds old.
	Reasons map[Condition]string `json:"reasons,omitempty"`
	// TakesFlows tells whether the server gets new flows, or is offered them. A server with a cause
	// gets them if its service ignores the cause.
	TakesFlows bool `json:"takes_flows"`
	// Share is the part of the buckets whose new flows the server gets, or is offered first, from 0
	// to 1. It is 0 if the service infers, because buckets do not determine who gets a flow.
	Share   float64  `json:"share"`
	NextHop *NextHop `json:"next_hop"` // nil: none, packets are dropped
	// Flows are the numbers of flows at the last sweep. They are nil if the server is newer than
	// that sweep.
	Flows   *dataplane.FlowCounts `json:"flows"`
	Packets uint64                `json:"packets"`
	Bytes   uint64                `json:"bytes"`  // of layer 3, as received
	Placed  uint64                `json:"placed"` // new flows placed on the server
	// Hunt is nil if the service does not hunt.
	Hunt *HuntCounts `json:"hunt"`
	// Inferred is nil if the service does not infer.
	Inferred *InferredServer `json:"inferred,omitempty"`
	// Rate and PlacedRate (flows per second) are nil until RatesSince has set them. PlacedShare is
	// the share of the service's flows that were placed on this server in the same time. It is nil
	// if no flow was placed.
	Rate        *datapath.Rate `json:"rate,omitempty"`
	PlacedRate  *float64       `json:"placed_per_second,omitempty"`
	PlacedShare *float64       `json:"placed_share,omitempty"`
}

// HuntCounts are the counters of a server that gets offers. They begin when the server is
// configured.
type HuntCounts struct {
	// HalfOpen is the number of half-open flows whose SYN the server has answered, at the last
	// sweep. It is nil if the server is newer than that sweep.
	HalfOpen *uint64 `json:"half_open"`
	Offered  uint64  `json:"offered"` // SYNs that were offered to the server first
	Created  uint64  `json:"created"` // create-stickiness signals from the server
	Removed  uint64  `json:"removed"` // remove-stickiness signals from the server
	Resets   uint64  `json:"resets"`  // resets to the server, of connections that another server had
	// Reports are the loads that the server has reported. They are nil if the service does not
	// order candidates by them.
	Reports *ReportState `json:"reports"`
}

// ReportState is the last load report of a server, and what became of all reports.
type ReportState struct {
	// Load is the number of connections per unit of capacity, with one connection more. It is nil
	// if the server has reported nothing, or does not know its load.
	Load *float64 `json:"load"`
	// Age is the time since the last report, in seconds. It is nil if there is none.
	Age *float64 `json:"age_seconds"`
	// Counts are the numbers of reports by result: taken, unknown_load (taken, but the server does
	// not know its load), old (not newer than the last one), unsynchronised (not from the
	// server's present time), relayed (another server took the flow, and told this one's load).
	Counts map[string]uint64 `json:"counts,omitempty"`
}

// NextHop is where the balancer sends the packets to a server.
type NextHop struct {
	MAC     string `json:"mac"`
	Ifindex int    `json:"ifindex"`
	// Interface is the name of the interface. It is empty if the interface belongs to another
	// network namespace than that of the reader.
	Interface string `json:"interface"`
	MTU       int    `json:"mtu"` // bytes of layer 3
}

// RatesSince sets the rates since an earlier snapshot of the same instance, and the shares of
// servers in the placed flows. A server that the earlier snapshot does not have counts from 0.
func (s *Snapshot) RatesSince(earlier *Snapshot) {
	interval := s.Snapshot.RatesSince(&earlier.Snapshot)
	before := map[serverLabel]*ServerState{}
	for _, service := range earlier.Services {
		for _, server := range service.Servers {
			before[serverLabel{service.Name, server.Name, server.Slot}] = server
		}
	}
	for _, service := range s.Services {
		for _, now := range service.Servers {
			old := before[serverLabel{service.Name, now.Name, now.Slot}]
			if old == nil {
				old = &ServerState{}
			}
			packets := datapath.Growth(now.Packets, old.Packets)
			now.Rate = datapath.NewRate(packets, datapath.Growth(now.Bytes, old.Bytes), interval)
			placed := datapath.PerSecond(datapath.Growth(now.Placed, old.Placed), interval)
			now.PlacedRate = &placed
		}
		service.setPlacedShares()
	}
}

// setPlacedShares sets the shares of the servers in the flows that were placed.
func (s *ServiceState) setPlacedShares() {
	all := 0.0
	for _, server := range s.Servers {
		all += *server.PlacedRate
	}
	for _, server := range s.Servers {
		server.PlacedShare = nil
		if all > 0 {
			server.PlacedShare = new(*server.PlacedRate / all)
		}
	}
}
