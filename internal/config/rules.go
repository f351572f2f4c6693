// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// isSRv6 and isTunnel are both false for an unknown encapsulation, which is an error already.
func (e Encapsulation) isSRv6() bool   { return e == SRv6Insert || e == SRv6Encap }
func (e Encapsulation) isTunnel() bool { return e == GRE || e == IPIP }

const instanceForm = "must be 1 to 63 letters, digits, - or _"

func isInstance(name string) bool { return isPlain(name) && len(name) <= 63 }

// CheckInstance returns an error if a name is not valid for an instance. A valid name is also safe
// as a file name.
func CheckInstance(name string) error {
	if !isInstance(name) {
		return fmt.Errorf("instance %q: %s", name, instanceForm)
	}
	return nil
}

// checkHost checks the fields about the host that balancers and agents share.
func (d *document) checkHost(instance, iface string, locator netip.Prefix, addresses []netip.Addr) {
	if !isInstance(instance) {
		d.failf("node.instance", "%s", instanceForm)
	}
	if !d.has("node.interface") {
		d.failf("node.interface", "required")
	} else {
		d.checkInterface("node.interface", iface)
	}
	d.checkLocator("node.locator", locator)
	seen := make(map[netip.Addr]string)
	for i, address := range addresses {
		d.checkAddress(item("node.addresses", i), address)
		checkUnique(d, seen, address, item("node.addresses", i))
	}
}

// checkSignalKey checks the path of a key file without reading the file.
func (d *document) checkSignalKey(file string) {
	if file != "" && !filepath.IsAbs(file) {
		d.failf(signalKeyPath, "must be absolute")
	}
}

func (d *document) checkInterface(path, name string) {
	if !isInterfaceName(name) {
		d.failf(path, "must be an interface name: 1 to 15 bytes without /, : and spaces")
	}
}

// isInterfaceName is the kernel's dev_valid_name.
func isInterfaceName(name string) bool {
	return name != "" && len(name) < 16 && name != "." && name != ".." &&
		!strings.ContainsFunc(name, func(r rune) bool {
			return r == '/' || r == ':' || !unicode.IsPrint(r) || unicode.IsSpace(r)
		})
}

func family(address netip.Addr) string {
	if address.Unmap().Is4() {
		return "IPv4"
	}
	return "IPv6"
}

func (d *document) checkListen(listen string) {
	if listen == "" {
		return
	}
	host, port, err := net.SplitHostPort(listen)
	number, portErr := strconv.ParseUint(port, 10, 16)
	_, addrErr := netip.ParseAddr(host)
	if err != nil || portErr != nil || number == 0 || host != "" && addrErr != nil && !isHostName(host) {
		d.failf("metrics.listen", "must be an address and a port from 1 to 65535, "+
			"such as 127.0.0.1:9188 or [::1]:9188")
	}
}

func isHostName(host string) bool {
	for label := range strings.SplitSeq(host, ".") {
		if !isPlain(label) || len(label) > 63 {
			return false
		}
	}
	return len(host) <= 253
}

// checkServices checks the fields of services that balancers and agents share.
func (d *document) checkServices(services []AgentService) {
	// An empty list is more likely a truncated file than a wish to stop all traffic.
	if len(services) == 0 {
		d.failf("services", "at least one is required")
	}
	names := make(map[string]string)
	type key struct {
		vip      netip.Addr
		port     Port
		protocol Protocol
	}
	keys := make(map[key]string)
	for i, s := range services {
		path := item("services", i)
		d.checkName(child(path, "name"), s.Name)
		checkUnique(d, names, s.Name, child(path, "name"))
		d.checkVIP(child(path, "vip"), s)
		for _, name := range []string{"port", "protocol"} {
			if !d.has(child(path, name)) {
				d.failf(child(path, name), "required")
			}
		}
		if d.has(child(path, "protocol")) {
			checkKnown(d, child(path, "protocol"), s.Protocol, TCP, UDP)
		}
		checkKnown(d, child(path, "encapsulation"), s.Encapsulation, SRv6Insert, SRv6Encap, GRE, IPIP)

		if !d.decoded(child(path, "vip"), child(path, "port"), child(path, "protocol")) {
			continue
		}
		k := key{s.VIP, s.Port, s.Protocol}
		if other, ok := keys[k]; ok {
			d.failf(path, "%s port %s of %s is already used by %s", s.Protocol, s.Port, s.VIP, other)
		} else {
			keys[k] = path
		}
	}
}

// decoded tells whether the file has all the fields, and all could be decoded.
func (d *document) decoded(paths ...string) bool {
	return !slices.ContainsFunc(paths, func(path string) bool { return !d.has(path) || d.bad(path) })
}

func (d *document) checkName(path, name string) {
	switch {
	case !d.has(path):
		d.failf(path, "required")
	case len(name) < 1 || len(name) > 63:
		d.failf(path, "must have 1 to 63 bytes, has %d", len(name))
	case strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }):
		d.failf(path, "must have only printable characters, and no spaces")
	}
}

func (d *document) checkVIP(path string, s AgentService) {
	if !d.has(path) {
		d.failf(path, "required")
		return
	}
	d.checkAddress(path, s.VIP)
	if s.Encapsulation == SRv6Insert && s.VIP.Is4() {
		d.failf(path, "must be IPv6 for encapsulation %s; IPv4 needs %s", SRv6Insert, SRv6Encap)
	}
}

// checkAddress checks an address that other hosts must be able to reach.
func (d *document) checkAddress(path string, address netip.Addr) {
	switch {
	case !address.IsValid():
	case address.Is4In6():
		d.failf(path, "is IPv4-mapped; write it as %s", address.Unmap())
	case address.IsUnspecified(), address.IsLoopback(), address.IsMulticast(),
		address.Is6() && address.IsLinkLocalUnicast(), address == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		d.failf(path, "is %s; must be a unicast address that other hosts can reach", kind(address))
	case address.Zone() != "":
		d.failf(path, "must not have a zone")
	}
}

// kind names the kind of an address that is not a host's unicast address.
func kind(address netip.Addr) string {
	switch {
	case address.IsUnspecified():
		return "unspecified"
	case address.IsLoopback():
		return "loopback"
	case address.IsMulticast():
		return "multicast"
	case address.IsLinkLocalUnicast():
		return "link-local"
	}
	return "broadcast"
}

// checkLocator checks the prefix of a host's SIDs. The last 64 bits of a SID are its function and
// argument (RFC 8986, section 3.1).
func (d *document) checkLocator(path string, locator netip.Prefix) {
	address := locator.Addr()
	switch {
	case !locator.IsValid():
	case address.Is4() || locator.Bits() != 64:
		d.failf(path, "must be an IPv6 /64")
	case locator != locator.Masked():
		d.failf(path, "has bits set after the first 64; write it as %s", locator.Masked())
	case address.IsUnspecified() || address.IsMulticast() || address.IsLinkLocalUnicast():
		d.failf(path, "must be a unicast prefix that other hosts can reach")
	}
}

// checkLocatorNeeded reports a missing locator once, naming the first service that needs it.
func (d *document) checkLocatorNeeded(services []AgentService, locator netip.Prefix) {
	for i, s := range services {
		if s.Encapsulation.isSRv6() && !locator.IsValid() {
			d.failf("node.locator", "required by %s, whose encapsulation is %s", item("services", i), s.Encapsulation)
			return
		}
	}
}

// vips are the first services of VIPs, by their path.
type vips map[netip.Addr]string

func newVIPs(services []AgentService) vips {
	v := make(vips)
	for i, s := range services {
		if _, ok := v[s.VIP]; !ok && s.VIP.IsValid() {
			v[s.VIP] = item("services", i)
		}
	}
	return v
}

// checkNot reports an address of a host that is a VIP.
func (v vips) checkNot(d *document, path string, address netip.Addr) {
	if service, ok := v[address]; ok {
		d.failf(path, "is the VIP of %s", service)
	}
}

// checkUnique reports the second of two equal values. seen holds the paths of earlier values. It
// ignores zero values, which stand for missing ones.
func checkUnique[T comparable](d *document, seen map[T]string, value T, path string) {
	var zero T
	if value == zero {
		return
	}
	if other, ok := seen[value]; ok {
		d.failf(path, "is already used by %s", other)
		return
	}
	seen[value] = path
}

// checkKnown reports a value that is not one of the known ones.
func checkKnown[T ~string](d *document, path string, value T, known ...T) {
	if slices.Contains(known, value) {
		return
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	d.failf(path, "must be one of: %s", strings.Join(names, ", "))
}

// checkRange reports a value outside of low to high, both included.
func checkRange[T int | time.Duration](d *document, path string, value, low, high T) {
	if value < low || value > high {
		d.failf(path, "must be from %v to %v", low, high)
	}
}
