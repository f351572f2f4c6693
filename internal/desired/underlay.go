// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Underlay carries the packets of srv6-encap in IPv4 and UDP, between hosts of a fabric without
// IPv6. The first 32 bits of all locators are the same, and the last 32 bits of each are the IPv4
// address of its host.
type Underlay struct {
	// Port is the UDP port to which packets are sent, on all hosts. Default 6080. A change needs a
	// restart.
	Port uint16 `yaml:"port" range:"1 to 65535"`
	// Sources are prefixes of IPv4 addresses: packets from other hosts are dropped. A change needs a
	// restart.
	Sources []netip.Prefix `yaml:"sources"`
}

// DefaultUnderlayPort is the port of GUE in the registry of IANA.
const DefaultUnderlayPort = 6080

// MostUnderlaySources is the maximum number of prefixes: MAX_UNDERLAY_SOURCES in
// bpf/net/underlay.h.
const MostUnderlaySources = 16

// UnderlayOverhead is the number of bytes that an underlay adds: an IPv4 and a UDP header.
const UnderlayOverhead = ipv4Header + 8

// overhead returns the number of bytes that the underlay adds to packets of an encapsulation. It
// may be nil.
func (u *Underlay) overhead(e Encapsulation) int {
	if u == nil || !e.IsSRv6() {
		return 0
	}
	return UnderlayOverhead
}

// Overhead is Encapsulation.Overhead for a service of this node.
func (n *BalancerNode) Overhead(e Encapsulation, tunnels []netip.Addr) int {
	return e.Overhead(tunnels) + n.Underlay.overhead(e)
}

// Overhead is Encapsulation.Overhead for a service of this node.
func (n *AgentNode) Overhead(e Encapsulation) int {
	return e.Overhead(n.Addresses) + n.Underlay.overhead(e)
}

// UnderlayAddress returns the IPv4 address in a locator: that of its host.
func UnderlayAddress(locator netip.Addr) netip.Addr {
	bytes := locator.As16()
	return netip.AddrFrom4([4]byte(bytes[4:8]))
}

// fixed returns the settings of the underlay, which may be nil.
func (u *Underlay) fixed() []Setting {
	if u == nil {
		u = &Underlay{}
	}
	return []Setting{setting("node.underlay.port", u.Port), setting("node.underlay.sources", u.sources())}
}

func (u *Underlay) sources() string {
	var all []string
	for _, prefix := range u.Sources {
		all = append(all, prefix.String())
	}
	return strings.Join(all, ", ")
}

// Accepts tells whether a source contains the address.
func (u *Underlay) Accepts(address netip.Addr) bool {
	for _, prefix := range u.Sources {
		if prefix.Contains(address) {
			return true
		}
	}
	return false
}

func (given Given) defaultUnderlay(u *Underlay) {
	if u != nil {
		setDefault(given, "node.underlay.port", &u.Port, DefaultUnderlayPort)
	}
}

// checkUnderlay checks the underlay of a node, which may be nil, and the locator of the node.
func (r *rules) checkUnderlay(u *Underlay, locator netip.Prefix, services []AgentService) {
	const at = "node.underlay.sources"
	switch {
	case u == nil:
		return
	case !locator.IsValid():
		r.failf("node.locator", "required by node.underlay: its last 32 bits are the IPv4 address of this host")
	default:
		r.checkUnderlaid("node.locator", locator, locator)
	}
	if n := len(u.Sources); n == 0 || n > MostUnderlaySources {
		r.failf(at, "must have 1 to %d prefixes: those of all balancers and servers", MostUnderlaySources)
	}
	seen := make(map[netip.Prefix]string)
	for i, prefix := range u.Sources {
		path := fieldpath.Item(at, i)
		switch {
		case !prefix.IsValid():
		case !prefix.Addr().Is4():
			r.failf(path, "must be an IPv4 prefix")
		case prefix != prefix.Masked():
			r.failf(path, "has bits behind its length; write it as %s", prefix.Masked())
		case prefix.Addr().IsUnspecified():
			r.failf(path, "contains hosts outside of the fabric; write the prefixes of balancers and servers")
		default:
			checkUnique(r, seen, prefix, path)
		}
	}
	for i, s := range services {
		if s.Encapsulation == SRv6Insert {
			r.failf(fieldpath.Child(fieldpath.Item("services", i), "encapsulation"), "must be %s with node.underlay, "+
				"or %s or %s", SRv6Encap, GRE, IPIP)
		}
	}
}

// checkUnderlaid checks that a locator has the form that an underlay requires. own is the locator
// of the node.
func (r *rules) checkUnderlaid(path string, locator, own netip.Prefix) {
	address := UnderlayAddress(locator.Addr())
	prefix := netip.PrefixFrom(own.Addr(), 32).Masked()
	switch {
	case locator.Bits() != 64 || locator.Addr().Is4(): // an error already
	case !prefix.Contains(locator.Addr()):
		r.failf(path, "must be in %s, as node.locator is, because of node.underlay: 32 bits that all hosts share, "+
			"and then the host's IPv4 address", prefix)
	case address.As4()[0] == 0, address.IsLoopback(), address.IsMulticast(), address.As4()[0] >= 240:
		r.failf(path, "has the IPv4 address %s in its last 32 bits; must have that of its host, because of "+
			"node.underlay, such as %s for 10.0.0.1", address, exampleLocator(prefix))
	}
}

// exampleLocator returns the locator of host 10.0.0.1.
func exampleLocator(prefix netip.Prefix) string {
	bytes := prefix.Addr().As16()
	copy(bytes[4:], []byte{10, 0, 0, 1})
	return fmt.Sprint(netip.PrefixFrom(netip.AddrFrom16(bytes), 64))
}

// checkUnderlaidServer checks a server of a balancer with an underlay.
func (r *rules) checkUnderlaidServer(at string, server *Server, node *BalancerNode) {
	if node.Underlay == nil {
		return
	}
	if server.Address.Is6() {
		r.failf(fieldpath.Child(at, "address"), "must be IPv4 with node.underlay: the fabric carries no IPv6")
	}
	locator, path := server.Locator, fieldpath.Child(at, "locator")
	if !locator.IsValid() || !node.Locator.IsValid() {
		return
	}
	before := len(r.errs)
	r.checkUnderlaid(path, locator, node.Locator)
	address, sources := UnderlayAddress(locator.Addr()), node.Underlay.Sources
	if len(r.errs) == before && len(sources) > 0 && !node.Underlay.Accepts(address) {
		r.failf(path, "has the IPv4 address %s, which is in no prefix of node.underlay.sources: the balancer would drop "+
			"the server's packets", address)
	}
}
