// SPDX-License-Identifier: Apache-2.0

// Package desired describes what an operator wants a balancer or an agent to do: plain types, the
// rules that they obey, and their differences. A configuration file is one source of a desired
// state (package config). The yaml tags are the names of the fields in every source, in errors and
// in lists of changes.
package desired

import (
	"net/netip"
	"time"
)

// Balancer is what `segue lb` has to do.
type Balancer struct {
	Node    BalancerNode `yaml:"node"`
	API     API          `yaml:"api"`
	Metrics Metrics      `yaml:"metrics"`
	// BGP describes how the VIPs are announced to routers; nil: they are not announced.
	BGP *BGP `yaml:"bgp,omitempty"`
	// L2 describes how the VIPs are announced on the link of Node.Interface; nil: they are not.
	L2 *L2 `yaml:"l2,omitempty"`
	// Store is where the services come from; nil: they come from the file. A change needs a restart.
	Store    *Store    `yaml:"store,omitempty"`
	Services []Service `yaml:"services"`
}

// BalancerNode describes the host that a balancer runs on.
type BalancerNode struct {
	// Instance names the balancer on its host and its pins under
	// /sys/fs/bpf/segue/<instance>: 1 to 63 letters, digits, - and _ (the BPF
	// file system refuses dots). Default "lb".
	Instance string `yaml:"instance"`
	// Name is the name by which the other balancers of the services know this one. The default is
	// the name of the host.
	Name string `yaml:"name"`
	// Peers are the names of all balancers of the services. Name may be among them. Only placement
	// infer uses the names, to avoid servers that others prefer. Correctness does not depend on
	// them.
	Peers []string `yaml:"peers"`
	// Interface receives the packets for the VIPs.
	Interface string `yaml:"interface"`
	// Inside is a second interface, towards the servers, for a balancer that is itself the edge of
	// the segment routing domain. It receives signals, and also packets for the VIPs. A change
	// needs a restart.
	Inside string `yaml:"inside,omitempty"`
	// Internal tells whether Interface is inside the segment routing domain. Then no packet from a
	// host outside the domain may arrive there for a SID, or with segments left: routers at the edge
	// must drop such packets. The default is true without Inside. With Inside it is always false. A
	// change needs a restart.
	Internal *bool `yaml:"internal"`
	// XDPMode is how the programs of Interface and Inside attach. Default auto; a change needs a
	// restart.
	XDPMode XDPMode `yaml:"xdp-mode,omitempty"`
	// Locator is the balancer's own /64. The source address of its SRv6 packets is in it. It is
	// required if a service uses an SRv6 encapsulation.
	Locator netip.Prefix `yaml:"locator"`
	// Addresses are the outer sources of gre and ipip packets: at most one IPv4
	// and one IPv6, each required if a server has an address of that family.
	Addresses []netip.Addr `yaml:"addresses"`
	// TunnelSources is an IPv4 prefix that contains the IPv4 address of Addresses. Each flow's outer
	// source is one of its addresses, so that the packets to a server do not all arrive in one
	// receive queue. Without it, the outer source is always the one in Addresses.
	TunnelSources netip.Prefix `yaml:"tunnel-sources,omitempty"`
	// Underlay carries the packets of srv6-encap in IPv4; nil: they are IPv6 packets on the fabric.
	Underlay *Underlay `yaml:"underlay,omitempty"`
	// Reject tells whether the balancer answers packets that no server gets by a reset or an ICMP
	// error. No server gets a packet if the VIP has no service for the port, or if the service has no
	// server for new flows. Default true.
	Reject bool `yaml:"reject"`
	// DropRemovedVIPs is how long packets to a VIP are dropped after its last service was removed,
	// 0 to 24h: routers may still send them, and a host that forwards would send them back. Default
	// 10m.
	DropRemovedVIPs time.Duration `yaml:"drop-removed-vips"`
	// Seed keys the hash that selects the buckets of flows. Balancers that share services must have
	// the same seed. If the seed is secret, clients cannot choose their server. Default 0; a change
	// needs a restart.
	Seed uint64 `yaml:"seed"`
	// Limits size the tables in the kernel; a change needs a restart.
	Limits Limits `yaml:"limits"`
	// State is the absolute path of the directory in which the balancer keeps the generations of
	// its services (package serversets). Default /var/lib/segue; a change needs a restart. An empty
	// path, which a file cannot have, means that the balancer keeps them in memory.
	State string `yaml:"state,omitempty"`
	// SignalKey is the absolute path of the file with the keys for tags of signals. A start and a
	// reload read it. Without it the balancer does not check tags.
	SignalKey string `yaml:"signal-key,omitempty"`
	// Switch is a switch in front of Interface that balances services itself; nil: there is none. A
	// change needs a restart.
	Switch *Switch `yaml:"switch,omitempty"`
}

// XDPMode is how XDP programs attach to an interface.
type XDPMode string

// The modes of XDP that a node may name.
const (
	XDPAuto    XDPMode = "auto"    // native if the driver accepts the program, otherwise generic
	XDPNative  XDPMode = "native"  // in the driver
	XDPGeneric XDPMode = "generic" // on socket buffers, whatever the driver can do
)

// Switch is a switch that runs the program in folder p4 (package p4switch).
type Switch struct {
	// Address is where the switch serves P4Runtime: host:port, or unix:path.
	Address string `yaml:"address"`
	// TLSFiles protect the connection. Without CAFile, it is not encrypted.
	TLSFiles `yaml:",inline"`
	// Device is the number of the switch among those that the address serves. Default 0.
	Device uint64 `yaml:"device,omitempty"`
	// ElectionID decides which of several controllers may write: the one with the highest, until it
	// has gone. It is at least 1, the default.
	ElectionID uint64 `yaml:"election-id"`
	// NetworkPort is the port of the switch towards clients and servers. HostPort is the one towards
	// the balancer's interface.
	NetworkPort int `yaml:"network-port" range:"1 to 511"`
	HostPort    int `yaml:"host-port" range:"1 to 511"`
}

// UsesTLS tells whether the connection with the switch is encrypted.
func (s *Switch) UsesTLS() bool { return s.CAFile != "" }

// Limits are the capacities of the tables in the kernel.
type Limits struct {
	// Flows is how many flows the flow table holds, 1024 to 100 million.
	// Default 1,048,576.
	Flows uint32 `yaml:"flows" range:"1024 to 100000000"`
	// Hints is how many flows may have hints at once, 1024 to one billion (persistence hint, and
	// clients without timestamps under stateless). A flow takes 4 bytes. 0: there are no hints.
	// Default 1,048,576.
	Hints uint32 `yaml:"hints" range:"0 to 1000000000"`
	// Servers is how many servers all services together may have, 1 to 65535.
	// Default 4096.
	Servers uint32 `yaml:"servers" range:"1 to 65535"`
}

// API configures the socket by which operators change a running balancer or agent.
type API struct {
	// Group is the name of the group that may use the socket, beside root. A change needs a
	// restart.
	Group string `yaml:"group,omitempty"`
}

// Metrics configures the server for Prometheus metrics. Without an address there is none.
type Metrics struct {
	// Listen is a TCP address such as "127.0.0.1:9188".
	Listen string `yaml:"listen"`
}

// Service returns a service, or nil.
func (b *Balancer) Service(name string) *Service {
	for i := range b.Services {
		if b.Services[i].Name == name {
			return &b.Services[i]
		}
	}
	return nil
}

// Server returns a server of a service, or nil.
func (b *Balancer) Server(service, name string) *Server {
	s := b.Service(service)
	if s == nil {
		return nil
	}
	for i := range s.Servers {
		if s.Servers[i].Name == name {
			return &s.Servers[i]
		}
	}
	return nil
}

// IsInternal tells whether Interface is inside the segment routing domain. By default it is, unless
// Inside is set.
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
