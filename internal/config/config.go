// SPDX-License-Identifier: Apache-2.0

// Package config holds the configuration files of the balancer and the agent:
// their schema, how they are read, and every rule that they must satisfy before
// anything on the machine is touched.
package config

import (
	"net/netip"
	"strconv"
	"time"
)

// Balancer is the configuration file of `segue lb`.
type Balancer struct {
	Node     BalancerNode `yaml:"node"`
	Metrics  Metrics      `yaml:"metrics"`
	Services []Service    `yaml:"services"`

	warnings Errors
}

// BalancerNode describes the host that a balancer runs on.
type BalancerNode struct {
	// Instance names the balancer on its host and its pins under
	// /sys/fs/bpf/segue/<instance>: 1 to 63 letters, digits, - and _ (the BPF
	// file system refuses dots). Default "lb".
	Instance string `yaml:"instance"`
	// Interface receives the packets for the VIPs.
	Interface string `yaml:"interface"`
	// Inside is a second interface, towards the servers, for a balancer that is itself the edge of the
	// segment routing domain: it receives what they signal, and packets for the VIPs as well. A change
	// needs a restart.
	Inside string `yaml:"inside,omitempty"`
	// Internal says that only hosts of the segment routing domain send by Interface to SIDs, or with
	// segments left: routers at the domain's edge see to it, or nobody else is there. Default true
	// without Inside, and always false with it; a change needs a restart.
	Internal *bool `yaml:"internal"`
	// Locator is the balancer's own /64, the sender in every segment list. It is
	// required when a service uses an SRv6 encapsulation.
	Locator netip.Prefix `yaml:"locator"`
	// Addresses are the outer sources of gre and ipip packets: at most one IPv4
	// and one IPv6, each required when a server has an address of that family.
	Addresses []netip.Addr `yaml:"addresses"`
	// Seed selects the buckets of all flows. Balancers that share services must
	// share it; a secret one keeps clients from choosing their server. Default 0; a
	// change needs a restart.
	Seed uint64 `yaml:"seed"`
	// Limits size the tables in the kernel; a change needs a restart.
	Limits Limits `yaml:"limits"`
	// SignalKey is the file of the keys that servers' signals must bear the tag of, absolute;
	// ReadSignalKeys reads it. Without one tags are not looked at.
	SignalKey string `yaml:"signal-key,omitempty"`
}

// Limits are the capacities of the tables in the kernel.
type Limits struct {
	// Flows is how many flows the flow table holds, 1024 to 100 million.
	// Default 1,048,576.
	Flows uint32 `yaml:"flows" range:"1024 to 100000000"`
	// Servers is how many servers all services together may have, 1 to 65535.
	// Default 4096.
	Servers uint32 `yaml:"servers" range:"1 to 65535"`
}

// Metrics is where Prometheus metrics are served; no address, no server.
type Metrics struct {
	// Listen is a TCP address such as "127.0.0.1:9188".
	Listen string `yaml:"listen"`
}

// Placement decides which server gets a new connection.
type Placement string

// Selection decides which servers placement hunt offers a new connection to.
type Selection string

// Persistence decides how later packets find that server.
type Persistence string

// Encapsulation is how packets travel from the balancer to the server.
type Encapsulation string

// The values that a service may name.
const (
	PlacementHash Placement = "hash" // the first candidate of the flow's bucket
	PlacementHunt Placement = "hunt" // the candidates decide, one after the other

	SelectConsistent Selection = "consistent" // the candidates of the flow's bucket
	SelectRandom     Selection = "random"     // those of any bucket

	PersistenceTable Persistence = "table"

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

// AllPorts is the Port of a service that takes every port of its VIP which no
// other service names; "all" in the file.
const AllPorts Port = 0

// Port is a transport port, 1 to 65535, or AllPorts.
type Port uint16

// String returns the port as configuration files write it.
func (p Port) String() string {
	if p == AllPorts {
		return "all"
	}
	return strconv.Itoa(int(p))
}

// MarshalYAML lets the yaml package write what this one reads.
func (p Port) MarshalYAML() (any, error) {
	if p == AllPorts {
		return "all", nil
	}
	return uint16(p), nil
}

// Service is a VIP, port and protocol with the servers behind it.
type Service struct {
	Name          string        `yaml:"name"`
	VIP           netip.Addr    `yaml:"vip"`
	Port          Port          `yaml:"port"`
	Protocol      Protocol      `yaml:"protocol"`
	Placement     Placement     `yaml:"placement"`     // default hash
	Persistence   Persistence   `yaml:"persistence"`   // default table
	Encapsulation Encapsulation `yaml:"encapsulation"` // default srv6-encap
	// Selection is for placement hunt only, where the default is consistent.
	Selection Selection `yaml:"selection,omitempty"`
	// Candidates is how many servers a bucket lists, 1 to 8. Default 2 for placement
	// hunt; always 1 for placement hash.
	Candidates int `yaml:"candidates"`
	// Buckets is the size of the consistent-hash table: a prime or a power of
	// two, more than the servers. Default 65537.
	Buckets  int      `yaml:"buckets"`
	Timeouts Timeouts `yaml:"timeouts"`
	// Health takes servers that fail it out of placement; nil checks nothing.
	Health *Health `yaml:"health"`
	// Probe says whether the balancer probes the servers' agents. Default true where servers have
	// locators and the balancer takes packets from them (TakesSignals); else it must not be true.
	Probe   *bool    `yaml:"probe"`
	Servers []Server `yaml:"servers"`
}

// Probes tells whether the servers' agents are probed. A service that does not say is not.
func (s *Service) Probes() bool { return s.Probe != nil && *s.Probe }

// Timeouts are how long the flow table keeps a flow after its last packet. The
// granularity is 4 to 7 s, the shortest 5 s, the longest four hours.
type Timeouts struct {
	New         time.Duration `yaml:"new"`         // seen once; default 60s, 30s for UDP
	Established time.Duration `yaml:"established"` // default 1h, 2m for UDP
	Closing     time.Duration `yaml:"closing"`     // after FIN or RST; default 60s, 10s for placement hunt
}

// Health is an active check of every server of a service. Exactly one of HTTP
// and TCP is set.
type Health struct {
	HTTP     *HTTPCheck    `yaml:"http,omitempty"`
	TCP      *TCPCheck     `yaml:"tcp,omitempty"`
	Interval time.Duration `yaml:"interval,omitempty"` // at least 100ms; default 1s
	Timeout  time.Duration `yaml:"timeout,omitempty"`  // 1ms to the interval; default the interval
	// Rise is how many successes bring a server back, and Fall how many failures take it out:
	// 1 to 1000 each.
	Rise int `yaml:"rise,omitempty" range:"1 to 1000"` // default 2
	Fall int `yaml:"fall,omitempty" range:"1 to 1000"` // default 3
}

// HTTPCheck succeeds on a status from 200 to 399.
type HTTPCheck struct {
	Path string `yaml:"path,omitempty"` // default "/"
	// Port is the service's by default, and required when that is all.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
}

// TCPCheck succeeds when a connection opens.
type TCPCheck struct {
	// Port is the service's by default, and required when that is all.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
}

// Server is one application instance's host.
type Server struct {
	Name string `yaml:"name"`
	// Locator is the server's /64; its SIDs are in it. SRv6 encapsulations only.
	Locator netip.Prefix `yaml:"locator"`
	// Address is the tunnel's far end. gre and ipip only.
	Address netip.Addr `yaml:"address"`
	// Host is where health checks connect to. Default the address; a server of an
	// SRv6 encapsulation has none, so it is required when the service has health
	// checks.
	Host netip.Addr `yaml:"host"`
	// Weight is the server's share of new flows relative to the others', 0 to
	// 1000. Default 1. A server of weight 0 keeps its flows and gets no new ones.
	Weight *uint32 `yaml:"weight" range:"0 to 1000"`
}

// Agent is the configuration file of `segue agent`.
type Agent struct {
	Node     AgentNode      `yaml:"node"`
	Metrics  Metrics        `yaml:"metrics"`
	Services []AgentService `yaml:"services"`

	warnings Errors
}

// AgentNode describes a server.
type AgentNode struct {
	Instance  string       `yaml:"instance"`  // as the balancer's; default "agent"
	Interface string       `yaml:"interface"` // where the balancers' packets arrive and replies leave
	Internal  *bool        `yaml:"internal"`  // as the balancer's
	Locator   netip.Prefix `yaml:"locator"`   // required when a service uses an SRv6 encapsulation
	Addresses []netip.Addr `yaml:"addresses"` // this end of gre and ipip tunnels; required for those
	// MTU is the largest packet that travels from the balancers to here, 1280 to
	// 65535 bytes. Default the interface's.
	MTU int `yaml:"mtu,omitempty" range:"1280 to 65535"`
	// AssignVIPs makes the agent put the VIPs on the loopback interface, and take
	// them away when it is detached. Default true.
	AssignVIPs *bool `yaml:"assign-vips"`
	// Balancers are prefixes of the locators of those that may ask about connections. Default: all.
	Balancers []netip.Prefix `yaml:"balancers,omitempty"`
	// SignalKey is the file of the key whose tag signals bear, as the balancers'. Without one they bear none.
	SignalKey string `yaml:"signal-key,omitempty"`
}

// AgentService is a service that this server takes part in.
type AgentService struct {
	Name          string        `yaml:"name"`
	VIP           netip.Addr    `yaml:"vip"`
	Port          Port          `yaml:"port"`
	Protocol      Protocol      `yaml:"protocol"`
	Encapsulation Encapsulation `yaml:"encapsulation"`
	// Accept, Load and NotLocal are of services that hunt: TCP in an SRv6 encapsulation.
	Accept Accept `yaml:"accept,omitempty"`
	Load   Source `yaml:"load,omitempty"`
	// NotLocal is what becomes of a packet whose flow no candidate has. Default reset.
	NotLocal NotLocal `yaml:"not-local,omitempty"`
}

// AcceptPolicy decides whether a server takes a connection that it is offered.
type AcceptPolicy string

// LoadSource says how busy a server is.
type LoadSource string

// NotLocal is what a server does with a packet of a flow that nobody has.
type NotLocal string

// The values that an agent's service may name.
const (
	AcceptAlways  AcceptPolicy = "always"
	AcceptNever   AcceptPolicy = "never"
	AcceptStatic  AcceptPolicy = "static"  // 6LB algorithm 1
	AcceptDynamic AcceptPolicy = "dynamic" // 6LB algorithm 2

	LoadConnections  LoadSource = "connections"
	LoadAcceptQueue  LoadSource = "accept-queue"
	LoadApache       LoadSource = "apache-scoreboard"
	LoadCgroup       LoadSource = "cgroup"
	LoadSharedMemory LoadSource = "shared-memory"

	NotLocalDrop  NotLocal = "drop"
	NotLocalReset NotLocal = "reset" // the server's own stack answers it, up to a rate
)

// Accept is an accept policy with its parameters; those of other policies are not set.
type Accept struct {
	Policy AcceptPolicy `yaml:"policy"` // default dynamic
	// Threshold is c of static: a connection is taken while fewer are busy, in units of the load
	// source. Required for static.
	Threshold *uint32 `yaml:"threshold,omitempty"`
	// Window is how many connections dynamic is offered before it adapts, 1 to 1,000,000. Default 50.
	Window uint32 `yaml:"window,omitempty" range:"1 to 1000000"`
	// Epsilon is how far from one half the accepted share of a window may be, 0 to less than 0.5, to
	// six decimal places. Default 0.1.
	Epsilon *float64 `yaml:"epsilon,omitempty"`
	// Initial is the threshold that dynamic begins with. Default 1.
	Initial *uint32 `yaml:"initial,omitempty"`
}

// Source is where a service's load is read.
type Source struct {
	Kind LoadSource `yaml:"source"` // default connections
	// Path is the scoreboard's, the control group's or the shared memory's, absolute. Required for
	// those, and for no other.
	Path string `yaml:"path,omitempty"`
	// Workers is how many connections the application serves at a time: MaxRequestWorkers for
	// apache-scoreboard, the upper bound of the dynamic threshold for connections; not for others.
	// Default 0, which for connections is no bound.
	Workers uint32 `yaml:"workers,omitempty" range:"1 to 4294967295"`
}

// IsInternal tells whether Interface is. A node that does not say is inside, unless it has another interface
// that is.
func (n BalancerNode) IsInternal() bool {
	if n.Internal == nil {
		return n.Inside == ""
	}
	return *n.Internal
}

// Interfaces are those that receive packets, Interface first.
func (n BalancerNode) Interfaces() []string {
	if n.Inside == "" {
		return []string{n.Interface}
	}
	return []string{n.Interface, n.Inside}
}

// TakesSignals tells whether the balancer takes packets from servers to its SIDs: by an interface
// that is inside.
func (n BalancerNode) TakesSignals() bool { return n.IsInternal() || n.Inside != "" }

// IsInternal tells whether the interface is. A node that does not say is inside.
func (n AgentNode) IsInternal() bool { return n.Internal == nil || *n.Internal }

// AssignsVIPs tells whether the agent puts the VIPs on the loopback interface.
func (n AgentNode) AssignsVIPs() bool { return n.AssignVIPs == nil || *n.AssignVIPs }

// Hunts tells whether balancers may offer the service's connections to this server.
func (s AgentService) Hunts() bool { return s.Protocol == TCP && s.Encapsulation.isSRv6() }
