// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"time"
)

// Agent is what `segue agent` has to do.
type Agent struct {
	Node     AgentNode      `yaml:"node"`
	API      API            `yaml:"api,omitempty"`
	Metrics  Metrics        `yaml:"metrics"`
	Poll     Poll           `yaml:"poll,omitempty"`
	Services []AgentService `yaml:"services"`
}

// Poll configures the endpoint at which balancers ask for the loads of services. Without an address
// there is none.
type Poll struct {
	// Listen is a UDP address such as "[2001:db8::7]:7460".
	Listen string `yaml:"listen,omitempty"`
}

// AgentNode describes a server.
type AgentNode struct {
	Instance  string       `yaml:"instance"`  // as BalancerNode.Instance; default "agent"
	Interface string       `yaml:"interface"` // where the balancers' packets arrive and replies leave
	Internal  *bool        `yaml:"internal"`  // as BalancerNode.Internal
	Locator   netip.Prefix `yaml:"locator"`   // required when a service uses an SRv6 encapsulation
	Addresses []netip.Addr `yaml:"addresses"` // this end of gre and ipip tunnels; required for those
	// Underlay is the same as in BalancerNode.
	Underlay *Underlay `yaml:"underlay,omitempty"`
	// XDPMode is how the program of Interface attaches, as BalancerNode.XDPMode.
	XDPMode XDPMode `yaml:"xdp-mode,omitempty"`
	// MTU is the length of the largest packet on the path from the balancers to this server, 1280
	// to 65535 bytes. The default is the MTU of the interface.
	MTU int `yaml:"mtu,omitempty" range:"1280 to 65535"`
	// AssignVIPs makes the agent put the VIPs on the loopback interface, and remove
	// them when it is detached. Default true.
	AssignVIPs *bool `yaml:"assign-vips"`
	// Balancers are prefixes of locators. Only balancers in them may send packets with functions about
	// connections, and packets that the agent passes on. The default is all balancers.
	Balancers []netip.Prefix `yaml:"balancers,omitempty"`
	// State is the absolute path of the directory in which the agent keeps its overrides. Default
	// /var/lib/segue; a change needs a restart. An empty path, which a file cannot have, means that
	// the agent keeps no overrides.
	State string `yaml:"state,omitempty"`
	// SignalKey is the path of the file with the key for tags. It is the same file as on the
	// balancers. Without it signals have no tags.
	SignalKey string `yaml:"signal-key,omitempty"`
}

// AgentService is a service that this server takes part in.
type AgentService struct {
	Name string `yaml:"name"`
	// VIP, VIPs, Port and Ports are those of the balancer's Service. The agent keeps the state of
	// the service, such as its load, under VIP and Port.
	VIP           netip.Addr    `yaml:"vip"`
	VIPs          []netip.Addr  `yaml:"vips,omitempty"`
	Port          Port          `yaml:"port"`
	Ports         []Port        `yaml:"ports,omitempty"`
	Protocol      Protocol      `yaml:"protocol"`
	Encapsulation Encapsulation `yaml:"encapsulation"`
	// Accept and Load are for services that hunt (Hunts).
	Accept Accept `yaml:"accept,omitempty"`
	Load   Source `yaml:"load,omitempty"`
	// NotLocal says what the last candidate does with a packet of a flow that no candidate has. It is
	// for services of TCP that hunt. Default reset.
	NotLocal NotLocal `yaml:"not-local,omitempty"`
	// Drained makes the server refuse all offered connections of the service, as under policy never.
	// It takes precedence over Accept. It is for services that hunt only.
	Drained bool `yaml:"drained,omitempty"`
	// QUIC and FormerQUIC are the forms of the connection IDs that the service's program issues, as
	// in the balancer's Service. QUICID and FormerQUICID are the server ID of this server in these
	// forms, as in the balancer's Server. QUICID and QUIC are both set, or both not. They are for
	// UDP. Without them, the agent does not compare connection IDs.
	QUIC         *QUIC  `yaml:"quic,omitempty"`
	QUICID       string `yaml:"quic-id,omitempty"`
	FormerQUIC   *QUIC  `yaml:"former-quic,omitempty"`
	FormerQUICID string `yaml:"former-quic-id,omitempty"`
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
	AcceptLeast   AcceptPolicy = "least"   // candidates compare their loads

	LoadConnections  LoadSource = "connections"
	LoadAcceptQueue  LoadSource = "accept-queue"
	LoadApache       LoadSource = "apache-scoreboard"
	LoadCgroup       LoadSource = "cgroup"
	LoadSharedMemory LoadSource = "shared-memory"
	LoadSharedMap    LoadSource = "shared-map"

	NotLocalDrop  NotLocal = "drop"
	NotLocalReset NotLocal = "reset" // the server's own stack answers with a reset, up to a rate
)

// Accept is an accept policy with its parameters. Parameters of other policies are not set.
type Accept struct {
	Policy AcceptPolicy `yaml:"policy"` // default least
	// Threshold is for static (c in 6LB): the server accepts while the load, in units of its source,
	// is less. Required for static.
	Threshold *uint32 `yaml:"threshold,omitempty"`
	// Window is the number of offers after which dynamic adapts its threshold, 1 to 1,000,000.
	// Default 50.
	Window uint32 `yaml:"window,omitempty" range:"1 to 1000000"`
	// WindowTime is the shortest time of a window, up to 1h. So a flood of SYNs does not adapt the
	// threshold faster than the load changes. 0 means none, as in 6LB. Default 2s.
	WindowTime *time.Duration `yaml:"window-time,omitempty"`
	// Epsilon is how far the accepted share of a window may be from one half before dynamic changes
	// its threshold: 0 to less than 0.5, with six decimal places. Default 0.1.
	Epsilon *float64 `yaml:"epsilon,omitempty"`
	// Initial is the first threshold of dynamic. Default 1.
	Initial *uint32 `yaml:"initial,omitempty"`
}

// Source is the load source of a service.
type Source struct {
	// Kind is connections by default. UDP has no default: a source with a path (LoadSource.HasPath)
	// is required, unless the policy needs no load.
	Kind LoadSource `yaml:"source"`
	// Path is the absolute path of the scoreboard, the control group or the shared memory, or of the
	// pin of the map. Required for these sources, and not allowed for others.
	Path string `yaml:"path,omitempty"`
	// Workers is the number of connections that the application serves at a time. For
	// apache-scoreboard it is MaxRequestWorkers. For connections it is the upper bound of the
	// dynamic threshold. Not allowed for other sources. Default 0: not set. Capacity takes
	// precedence.
	Workers uint32 `yaml:"workers,omitempty" range:"1 to 4294967295"`
	// Capacity is the number of connections that the server serves at a time without one slowing
	// another, such as its number of processors, in units of the source. It is 1 to 1,048,575, which
	// is the largest number that a segment has room for. Default 0: that of the source, if it has
	// one.
	Capacity uint32 `yaml:"capacity,omitempty" range:"1 to 1048575"`
	// Interval is the time from one read to the next, 1ms to 10s. Default 20ms for
	// apache-scoreboard, 500ms for cgroup, and 10ms for shared-memory. Not allowed for other
	// sources.
	Interval time.Duration `yaml:"interval,omitempty"`
}

// HasPath tells whether the source is a file, or a pinned map, that the agent opens.
func (l LoadSource) HasPath() bool { return l.IsPolled() || l == LoadSharedMap }

// IsPolled tells whether the agent reads the source at an interval. The data path reads the others
// when a connection is offered.
func (l LoadSource) IsPolled() bool {
	return l == LoadApache || l == LoadCgroup || l == LoadSharedMemory
}

// IsInternal tells whether the interface is internal, which is the default.
func (n AgentNode) IsInternal() bool { return n.Internal == nil || *n.Internal }

// AssignsVIPs tells whether the agent puts the VIPs on the loopback interface.
func (n AgentNode) AssignsVIPs() bool { return n.AssignVIPs == nil || *n.AssignVIPs }

// AllVIPs returns the VIPs of the service.
func (s *AgentService) AllVIPs() []netip.Addr { return listOr(s.VIPs, s.VIP) }

// AllPorts returns the ports of the service at each of its VIPs.
func (s *AgentService) AllPorts() []Port { return listOr(s.Ports, s.Port) }

// Hunts tells whether balancers may offer the service's connections to this server: those of TCP in
// an SRv6 encapsulation, and those of QUIC there, if the service has an accept policy or a load
// source.
func (s AgentService) Hunts() bool {
	isQUIC := s.Protocol == UDP && (s.Accept.Policy != "" || s.Load.Kind != "")
	return s.Encapsulation.IsSRv6() && (s.Protocol == TCP || isQUIC)
}

// UsesLoad tells whether the policy decides by the load of the server.
func (p AcceptPolicy) UsesLoad() bool { return p != AcceptAlways && p != AcceptNever }
