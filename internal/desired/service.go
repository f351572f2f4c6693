// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Placement decides which server gets a new connection.
type Placement string

// Selection decides to which servers placement hunt offers a new connection.
type Selection string

// Persistence decides how later packets of a connection find its server.
type Persistence string

// BucketHash is the hash that selects the bucket of a flow.
type BucketHash string

// Encapsulation is how packets travel from the balancer to the server.
type Encapsulation string

// The values that a service may name.
const (
	PlacementHash       Placement = "hash"        // the first candidate of the flow's bucket
	PlacementHunt       Placement = "hunt"        // the candidates decide in turn
	PlacementRoundRobin Placement = "round-robin" // all servers in turn, by their weights
	PlacementInfer      Placement = "infer"       // the server with the lowest score
	// The server with the fewest flows.
	PlacementLeastQueue Placement = "least-queue"
	// The server with the fewest flows per unit of its configured weight: the shortest expected
	// delay.
	PlacementSED Placement = "sed"
	// The other placements poll the servers' loads.
	PlacementAWCMP         Placement = "awcmp"                // a random server, by weights
	PlacementWeightedTurns Placement = "weighted-round-robin" // the next server in turn, by weights
	PlacementGSQ2          Placement = "gsq2"                 // the better one of two random servers

	SelectConsistent Selection = "consistent" // the candidates of the flow's bucket
	SelectRandom     Selection = "random"     // the candidates of a random bucket
	// The three candidates of the flow's bucket that have reported the lowest loads.
	SelectReports Selection = "reports"
	// As reports, but the last of the three is a server of any bucket that has reported free capacity.
	SelectSpare Selection = "spare"

	PersistenceTable     Persistence = "table"     // a flow table has the server
	PersistenceStateless Persistence = "stateless" // cookies in the packets name the server
	PersistenceHint      Persistence = "hint"      // a small table guesses, and the server checks
	PersistenceQUIC      Persistence = "quic"      // the connection IDs of QUIC name the server

	BucketHashMultilinear BucketHash = "multilinear" // it has keys, so no client can choose its bucket
	BucketHashCRC32       BucketHash = "crc-32"      // that of switches: clients can choose their buckets

	SRv6Insert Encapsulation = "srv6-insert"
	SRv6Encap  Encapsulation = "srv6-encap"
	GRE        Encapsulation = "gre"
	IPIP       Encapsulation = "ipip"
)

// Protocol is a transport protocol.
type Protocol string

// The protocols that services balance.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Number returns the number of the protocol in IP headers.
func (p Protocol) Number() uint8 {
	if p == UDP {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}

// Port is a transport port, 1 to 65535, or AllPorts. Zero is not valid: it stands for a missing
// port.
type Port uint32

// AllPorts is the Port of a service for all ports of its VIP for which no other service exists. It
// is "all" in text. Number turns it into 0, which is its number in the data path.
const AllPorts Port = 1 << 16

// PortOf returns the port with a number of the data path: 0 means AllPorts.
func PortOf(number uint16) Port {
	if number == 0 {
		return AllPorts
	}
	return Port(number)
}

// Number returns the number of the port, or 0 for AllPorts.
func (p Port) Number() uint16 { return uint16(p) }

// String returns the port as text.
func (p Port) String() string {
	if p == AllPorts {
		return "all"
	}
	return strconv.FormatUint(uint64(p), 10)
}

// MarshalYAML returns the port as a configuration file has it.
func (p Port) MarshalYAML() (any, error) {
	if p == AllPorts {
		return "all", nil
	}
	return p.Number(), nil
}

// OnFailure is what becomes of the flows of a server that fails. A server fails if it has no next
// hop, if its next hop does not answer, if it fails its health checks, or if probes find it unfit.
type OnFailure string

// OnDrain is what becomes of the flows of a server that the operator drains, by `drained` or by
// weight 0. Connections of TCP always stay.
type OnDrain string

// AllFailed is what becomes of new flows if all servers have failed.
type AllFailed string

// The values of OnFailure, OnDrain and AllFailed.
const (
	OnFailureKeep    OnFailure = "keep"     // all flows stay with the server
	OnFailureMoveUDP OnFailure = "move-udp" // flows of UDP move to other servers
	// As move-udp, and connections of TCP are reset when their clients send the next packet.
	OnFailureReset OnFailure = "reset"

	OnDrainKeep    OnDrain = "keep"     // all flows stay with the server
	OnDrainMoveUDP OnDrain = "move-udp" // flows of UDP move to other servers

	AllFailedUse    AllFailed = "use"    // all servers get new flows, as if none had failed
	AllFailedRefuse AllFailed = "refuse" // new flows are refused: rejected, or dropped (BalancerNode.Reject)
)

// Service is a VIP, port and protocol with the servers behind it. It may have several VIPs and ports.
type Service struct {
	Name string `yaml:"name"`
	// VIP is the only VIP, or the first of VIPs.
	VIP netip.Addr `yaml:"vip"`
	// VIPs are all VIPs of a service that has several; nil: only VIP.
	VIPs []netip.Addr `yaml:"vips,omitempty"`
	// Port is the only port, or the first of Ports.
	Port Port `yaml:"port"`
	// Ports are all ports of a service that has several, at each of its VIPs; nil: only Port.
	Ports []Port `yaml:"ports,omitempty"`
	// Sources are the prefixes of the clients that may reach the service; nil: all may.
	Sources       []netip.Prefix `yaml:"sources,omitempty"`
	Protocol      Protocol       `yaml:"protocol"`
	Placement     Placement      `yaml:"placement"`     // default hash
	Persistence   Persistence    `yaml:"persistence"`   // default table
	Encapsulation Encapsulation  `yaml:"encapsulation"` // default srv6-encap
	// Selection is for placement hunt only, where the default is consistent.
	Selection Selection `yaml:"selection,omitempty"`
	// Infer is for placements that infer only (Placement.Infers).
	Infer *Infer `yaml:"infer,omitempty"`
	// Candidates is how many servers a row has: 1 to 8, or fewer if there are fewer servers. Default
	// 4 for placement hunt, or 8 with selection reports or spare; 3 for hash; 8 for all other
	// placements.
	Candidates int `yaml:"candidates"`
	// Generations is the number of sets of servers from which the candidate table is computed: the
	// present set and former ones. It is 1 to 4, by default 3. For persistence stateless and hint it
	// is 1 to 64, by default 32.
	Generations int `yaml:"generations"`
	// History is how many different servers each place of a row remembers, 1 to 4, the present one
	// included. Default 3, and at most Generations. It is for persistence stateless and hint. Under
	// persistence table, a place remembers the servers of all generations.
	History int `yaml:"history,omitempty"`
	// QUIC is the form of the connection IDs. It is for persistence quic only.
	QUIC *QUIC `yaml:"quic,omitempty"`
	// FormerQUIC is another form whose IDs also name the servers, while servers change from one
	// form to the other; nil: none. Its rotation differs from that of QUIC.
	FormerQUIC *QUIC `yaml:"former-quic,omitempty"`
	// Buckets is the size of the consistent-hash table: a prime or a power of two, larger than the
	// number of servers. Default 65537, or 65536 for eight candidates under persistence stateless or
	// hint, whose tables have no room for more, and 65536 for BucketHash crc-32. Under placement
	// round-robin the table has a row for each turn of a cycle, and Buckets is the largest number of
	// rows.
	Buckets int `yaml:"buckets"`
	// BucketHash is for persistence stateless only. Default multilinear. For crc-32, Buckets is a
	// power of two.
	BucketHash BucketHash `yaml:"bucket-hash,omitempty"`
	// Affinity makes the connections of a client have the same row; nil: each connection has its own.
	Affinity *Affinity `yaml:"affinity,omitempty"`
	Timeouts Timeouts  `yaml:"timeouts"`
	// Health excludes servers that fail their checks from placement; nil: no checks.
	Health *Health `yaml:"health"`
	// OnFailure is what becomes of the flows of a server that fails. Default move-udp.
	OnFailure OnFailure `yaml:"on-failure"`
	// OnDrain is what becomes of the flows of a drained server. Default move-udp, or keep for
	// persistence quic.
	OnDrain OnDrain `yaml:"on-drain"`
	// AllFailed is what becomes of new flows if all servers that are not drained have failed.
	// Default use.
	AllFailed AllFailed `yaml:"all-failed"`
	// SlowStart is the time in which a server that was unfit comes to its full share of new flows,
	// 0 to 1h. Default 10s if servers can pass on packets of flows that they do not have, or else 0.
	// Placements that infer do not use it (Infer.SlowStart).
	SlowStart *time.Duration `yaml:"slow-start,omitempty"`
	// Probe tells whether the balancer probes the servers' agents. Default true if servers have
	// locators and the balancer takes packets from them (TakesSignals); otherwise it must not be
	// true.
	Probe *bool `yaml:"probe"`
	// BGP has the settings of the VIP's announcement; nil: the defaults.
	BGP     *ServiceBGP `yaml:"bgp,omitempty"`
	Servers []Server    `yaml:"servers"`
	// Revision is set by a source that takes over services from an earlier state. Two services with
	// the same Revision are equal, so their fields need not be compared. nil: not known.
	Revision *Revision `yaml:"-"`
}

// AllVIPs returns the VIPs of the service.
func (s *Service) AllVIPs() []netip.Addr { return listOr(s.VIPs, s.VIP) }

// AllPorts returns the ports of the service at each of its VIPs.
func (s *Service) AllPorts() []Port { return listOr(s.Ports, s.Port) }

// VIPPath returns the path of one of AllVIPs in a balancer's file, by the indexes of the service and
// of the VIP.
func (s *Service) VIPPath(service, vip int) string {
	return vipPath(fieldpath.Item("services", service), s.VIPs, vip)
}

// listOr returns the list, or if it is empty a list with the single item.
func listOr[T any](list []T, single T) []T {
	if len(list) == 0 {
		return []T{single}
	}
	return list
}

// Revision identifies one reading of a service: services with a pointer to the same revision are
// equal. It has a byte, so that pointers to two revisions differ.
type Revision struct{ _ byte }

// Same tells whether two services are equal. If they have the same revision, Same does not compare
// their fields.
func (s *Service) Same(other *Service) bool {
	return s.Revision != nil && s.Revision == other.Revision || reflect.DeepEqual(s, other)
}

// Takes tells whether the server may get new flows: it is not drained, and its weight is not 0.
func (s *Server) Takes() bool { return !s.Drained && *s.Weight > 0 }

// OrdersByReports tells whether the balancer orders the candidates by the loads that they report.
func (s *Service) OrdersByReports() bool {
	return s.ServersDecide() && s.Selection.OrdersByReports()
}

// OrdersByReports tells whether the candidates are ordered by the loads that they report.
func (s Selection) OrdersByReports() bool { return s.Method().OrdersByReports }

// ServersDecide tells whether the service's servers decide which of them gets a new flow.
func (s *Service) ServersDecide() bool { return s.Placement.Method().ServersDecide }

// IsAnswered tells whether the servers that decide tell the balancer by signals which of them has
// accepted a flow. Servers of QUIC do not, because its packets name the server.
func (s *Service) IsAnswered() bool { return s.ServersDecide() && !s.Persistence.Method().HasIDs }

// Takes tells whether at least one server may get new flows.
func (s *Service) Takes() bool {
	return slices.ContainsFunc(s.Servers, func(server Server) bool { return server.Takes() })
}

// WhyNotOnSwitch returns why the switch in front of the balancer (BalancerNode.Switch) does not
// balance services, by their names. It leaves out the services that the switch balances. services are
// all of the balancer. now has further reasons, by name, which the settings do not tell. A service of
// all ports passes to the host if the host balances another port of its VIP and protocol: the switch
// would take the packets of that port, too.
func WhyNotOnSwitch(services []*Service, now map[string]string) map[string]string {
	type address struct {
		netip.Addr
		Protocol
	}
	why, ofHost := map[string]string{}, map[address]string{} // ofHost has the name of one service
	for _, s := range services {
		reason := cmp.Or(s.whyNotOnSwitch(), now[s.Name])
		if reason == "" {
			continue
		}
		why[s.Name] = reason
		for _, vip := range s.AllVIPs() {
			if at := (address{vip, s.Protocol}); s.Port != AllPorts && ofHost[at] == "" {
				ofHost[at] = s.Name
			}
		}
	}
	for _, s := range services {
		one := ofHost[address{s.VIP, s.Protocol}]
		if s.Port == AllPorts && why[s.Name] == "" && one != "" {
			why[s.Name] = fmt.Sprintf("this host balances service %s of the same VIP", one)
		}
	}
	return why
}

// whyNotOnSwitch returns the setting for which a switch cannot balance the service, such as
// "persistence table". It is empty if the switch can: a switch keeps nothing about flows, cannot
// multiply, and does not know the loads of servers.
func (s *Service) whyNotOnSwitch() string {
	isStateless := s.Persistence == PersistenceStateless
	switch {
	case len(s.VIPs) > 1 || len(s.Ports) > 1:
		return "several VIPs or ports"
	case len(s.Sources) > 0:
		return "sources"
	case !isStateless && s.Persistence != PersistenceQUIC:
		return "persistence " + string(s.Persistence)
	case isStateless && s.ClientAffinity().IsWanted():
		return "affinity by " + string(s.Affinity.By)
	case isStateless && s.BucketHash != BucketHashCRC32:
		return "bucket-hash " + string(s.BucketHash)
	case isStateless && s.Placement.Infers():
		return "placement " + string(s.Placement)
	case s.Encapsulation.IsTunnel():
		return "encapsulation " + string(s.Encapsulation)
	}
	return ""
}

// Probes tells whether the balancer probes the agents of the servers. A nil Probe means false.
func (s *Service) Probes() bool { return s.Probe != nil && *s.Probe }

// Timeouts are the times for which the flow table keeps a flow after its last packet, from 5 s to
// four hours. The granularity is 4 to 7 s.
type Timeouts struct {
	New         time.Duration `yaml:"new"`         // after the first packet; default 60s, 30s for UDP
	Established time.Duration `yaml:"established"` // after later packets; default 1h, 2m for UDP
	// Closing is for placement hunt only: the time after the server has signalled the end of the flow.
	// Default 10s. Other placements ignore it.
	Closing time.Duration `yaml:"closing"`
	// Silent is the time after which an established flow no longer counts as a load of its server.
	// It counts again with its next packet. Default 10s.
	Silent time.Duration `yaml:"silent"`
}

// Server is a host that runs the application of a service.
type Server struct {
	Name string `yaml:"name"`
	// Locator is the server's /64, which contains its SIDs. It is for SRv6 encapsulations only.
	Locator netip.Prefix `yaml:"locator"`
	// Address is the server's end of the tunnel. It is for gre and ipip only.
	Address netip.Addr `yaml:"address"`
	// Host is the address to which health checks via host connect, and at which the agent is
	// polled. The default is Address. A server of an SRv6 encapsulation has no Address, so Host is
	// required there if the service has such checks or polls.
	Host netip.Addr `yaml:"host"`
	// QUICID is the server ID in the connection IDs of the server, in hexadecimal. It is for
	// persistence quic only.
	QUICID string `yaml:"quic-id,omitempty"`
	// FormerQUICID is the server ID in connection IDs of the form FormerQUIC. The default is QUICID,
	// if server IDs have the same length in both forms.
	FormerQUICID string `yaml:"former-quic-id,omitempty"`
	// Weight is the server's share of new flows relative to the others', 0 to 1000. Default 1. Some
	// placements take it for a speed, or a capacity, or ignore it (docs/reference/configuration.md).
	// A server of weight 0 is drained, and is not in the candidate table.
	Weight *uint32 `yaml:"weight" range:"0 to 1000"`
	// Drained tells whether the server gets no new flows. Service.OnDrain says which flows it keeps.
	// A drained server stays in the candidate table, so a drain does not begin a new generation.
	Drained bool `yaml:"drained,omitempty"`
}

// hasOwnHost tells whether Host is another address than Address.
func (s *Server) hasOwnHost() bool { return s.Host.IsValid() && s.Host != s.Address }

// FindsByColumn tells whether packets find the server of a flow by its column, that is by its place
// in the row of the flow's bucket.
func (s *Service) FindsByColumn() bool { return s.Persistence.Method().ByColumn }
