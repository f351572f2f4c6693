// SPDX-License-Identifier: Apache-2.0

// Package config reads and checks the configuration files of the balancer and the agent: their
// schema, defaults, rules and warnings. It changes nothing on the machine.
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
	// Inside is a second interface, towards the servers, for a balancer that is itself the edge of
	// the segment routing domain. It receives signals, and also packets for the VIPs. A change
	// needs a restart.
	Inside string `yaml:"inside,omitempty"`
	// Internal tells whether only hosts of the segment routing domain can send packets to SIDs, or
	// with segments left, to Interface: the edge routers drop such packets of others, or there are
	// no other hosts. Default true without Inside; always false with it. A change needs a restart.
	Internal *bool `yaml:"internal"`
	// Locator is the balancer's own /64, the sender in every segment list. It is
	// required if a service uses an SRv6 encapsulation.
	Locator netip.Prefix `yaml:"locator"`
	// Addresses are the outer sources of gre and ipip packets: at most one IPv4
	// and one IPv6, each required if a server has an address of that family.
	Addresses []netip.Addr `yaml:"addresses"`
	// Seed selects the buckets of all flows. Balancers that share services must
	// share it; a secret one keeps clients from choosing their server. Default 0; a
	// change needs a restart.
	Seed uint64 `yaml:"seed"`
	// Limits size the tables in the kernel; a change needs a restart.
	Limits Limits `yaml:"limits"`
	// State is the absolute path of the directory in which the balancer keeps the generations of its
	// services (package generation). Default /var/lib/segue; a change needs a restart. A balancer
	// that was not read from a file may have none, and then keeps them in memory.
	State string `yaml:"state,omitempty"`
	// SignalKey is the absolute path of the file with the keys for tags of signals. ReadSignalKeys
	// reads it. Without it the balancer does not check tags.
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

// Metrics configures the server for Prometheus metrics. Without an address there is none.
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
	PlacementHunt Placement = "hunt" // the candidates decide in turn

	SelectConsistent Selection = "consistent" // the candidates of the flow's bucket
	SelectRandom     Selection = "random"     // the candidates of a random bucket

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

// AllPorts is the Port of a service for all ports of its VIP without a service of their own. It is
// "all" in the file.
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
	// Candidates is how many servers a bucket lists, 1 to 8, or fewer if there are not so many
	// servers. Default 2 for placement hunt, 3 for placement hash.
	Candidates int `yaml:"candidates"`
	// Generations is how many sets of servers the candidate table holds, 1 to 4: the present one
	// and those before. Default 3.
	Generations int `yaml:"generations"`
	// Buckets is the size of the consistent-hash table: a prime or a power of
	// two, more than the servers. Default 65537.
	Buckets  int      `yaml:"buckets"`
	Timeouts Timeouts `yaml:"timeouts"`
	// Health excludes servers that fail their checks from placement; nil: no checks.
	Health *Health `yaml:"health"`
	// Probe tells whether the balancer probes the servers' agents. Default true if servers have
	// locators and the balancer takes packets from them (TakesSignals); otherwise it must not be
	// true.
	Probe   *bool    `yaml:"probe"`
	Servers []Server `yaml:"servers"`
}

// Takes tells whether the server gets new flows as far as its configuration says: it has a weight
// and is not drained.
func (s *Server) Takes() bool { return !s.Drained && *s.Weight > 0 }

// Probes tells whether the servers' agents are probed. Without a value they are not.
func (s *Service) Probes() bool { return s.Probe != nil && *s.Probe }

// Timeouts are the times for which the flow table keeps a flow after its last packet, from 5 s to
// four hours. The granularity is 4 to 7 s.
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
	// Fall failures in a row exclude a server, and Rise successes in a row end that: 1 to 1000
	// each.
	Rise int `yaml:"rise,omitempty" range:"1 to 1000"` // default 2
	Fall int `yaml:"fall,omitempty" range:"1 to 1000"` // default 3
}

// HTTPCheck succeeds if the answer has a status from 200 to 399.
type HTTPCheck struct {
	Path string `yaml:"path,omitempty"` // default "/"
	// Port is the service's port by default, and required if that is all.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
}

// TCPCheck succeeds when a connection opens.
type TCPCheck struct {
	// Port is the service's port by default, and required if that is all.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
}

// Server is a host that runs the application of a service.
type Server struct {
	Name string `yaml:"name"`
	// Locator is the server's /64; its SIDs are in it. SRv6 encapsulations only.
	Locator netip.Prefix `yaml:"locator"`
	// Address is the tunnel's far end. gre and ipip only.
	Address netip.Addr `yaml:"address"`
	// Host is the address to which health checks connect. The default is Address. A
	// server of an SRv6 encapsulation has no Address, so Host is required there if
	// the service has health checks.
	Host netip.Addr `yaml:"host"`
	// Weight is the server's share of new flows relative to the others', 0 to
	// 1000. Default 1. A server of weight 0 is drained, and is not in the candidate table.
	Weight *uint32 `yaml:"weight" range:"0 to 1000"`
	// Drained tells whether the server keeps its flows and gets no new ones. It stays in the
	// candidate table, so to drain it does not begin a new generation.
	Drained bool `yaml:"drained,omitempty"`
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
	// AssignVIPs makes the agent put the VIPs on the loopback interface, and remove
	// them when it is detached. Default true.
	AssignVIPs *bool `yaml:"assign-vips"`
	// Balancers are prefixes of the locators of the balancers that may send functions about
	// connections. Default: all.
	Balancers []netip.Prefix `yaml:"balancers,omitempty"`
	// SignalKey is the file with the key for tags, as the balancers'. Without it signals have no
	// tags.
	SignalKey string `yaml:"signal-key,omitempty"`
}

// AgentService is a service that this server takes part in.
type AgentService struct {
	Name          string        `yaml:"name"`
	VIP           netip.Addr    `yaml:"vip"`
	Port          Port          `yaml:"port"`
	Protocol      Protocol      `yaml:"protocol"`
	Encapsulation Encapsulation `yaml:"encapsulation"`
	// Accept, Load and NotLocal are for services that hunt: TCP in an SRv6 encapsulation.
	Accept Accept `yaml:"accept,omitempty"`
	Load   Source `yaml:"load,omitempty"`
	// NotLocal says what the last candidate does with a packet of a flow that no candidate has.
	// Default reset.
	NotLocal NotLocal `yaml:"not-local,omitempty"`
}

// AcceptPolicy decides whether a server accepts an offered connection.
type AcceptPolicy string

// LoadSource names the source of a server's load.
type LoadSource string

// NotLocal is the verdict of a server on a packet of a flow that no server has.
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
	NotLocalReset NotLocal = "reset" // the server's own stack answers with a reset, up to a rate
)

// Accept is an accept policy with its parameters. Parameters of other policies are not set.
type Accept struct {
	Policy AcceptPolicy `yaml:"policy"` // default dynamic
	// Threshold is c of static: the server accepts while the load is less, in units of the load
	// source. Required for static.
	Threshold *uint32 `yaml:"threshold,omitempty"`
	// Window is the number of offers after which dynamic adapts its threshold, 1 to 1,000,000.
	// Default 50.
	Window uint32 `yaml:"window,omitempty" range:"1 to 1000000"`
	// Epsilon is the allowed distance of the accepted share of a window from one half, 0 to less
	// than 0.5, with six decimal places. Default 0.1.
	Epsilon *float64 `yaml:"epsilon,omitempty"`
	// Initial is the first threshold of dynamic. Default 1.
	Initial *uint32 `yaml:"initial,omitempty"`
}

// Source is the load source of a service.
type Source struct {
	Kind LoadSource `yaml:"source"` // default connections
	// Path is the absolute path of the scoreboard, the control group or the shared memory. Required
	// for these sources, and not allowed for others.
	Path string `yaml:"path,omitempty"`
	// Workers is the number of connections that the application serves at a time. For
	// apache-scoreboard it is MaxRequestWorkers. For connections it is the upper bound of the
	// dynamic threshold. Not allowed for other sources. Default 0, which for connections means no
	// bound.
	Workers uint32 `yaml:"workers,omitempty" range:"1 to 4294967295"`
}

// IsInternal tells whether Interface is internal. By default it is, unless Inside is set.
func (n BalancerNode) IsInternal() bool {
	if n.Internal == nil {
		return n.Inside == ""
	}
	return *n.Internal
}

// Interfaces returns the interfaces that receive packets, Interface first.
func (n BalancerNode) Interfaces() []string {
	if n.Inside == "" {
		return []string{n.Interface}
	}
	return []string{n.Interface, n.Inside}
}

// TakesSignals tells whether the balancer has an interface on which it takes packets from servers
// to its SIDs.
func (n BalancerNode) TakesSignals() bool { return n.IsInternal() || n.Inside != "" }

// IsInternal tells whether the interface is internal, which is the default.
func (n AgentNode) IsInternal() bool { return n.Internal == nil || *n.Internal }

// AssignsVIPs tells whether the agent puts the VIPs on the loopback interface.
func (n AgentNode) AssignsVIPs() bool { return n.AssignVIPs == nil || *n.AssignVIPs }

// Hunts tells whether balancers may offer the service's connections to this server.
func (s AgentService) Hunts() bool { return s.Protocol == TCP && s.Encapsulation.isSRv6() }
