// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// rules collects the errors of values that break a rule.
type rules struct {
	errs fieldpath.Errors
}

// failf adds an error about the field at a path.
func (r *rules) failf(path, format string, args ...any) { r.errs.Addf(path, format, args...) }

// conflict adds an error about a field whose value conflicts with another field. The text ends with
// the path of the other field.
func (r *rules) conflict(path, other, format string, args ...any) {
	r.failf(path, "%s %s", fmt.Sprintf(format, args...), other)
	r.errs[len(r.errs)-1].Other = other
}

// checkRanges checks all numbers with a range tag, in a struct and in the structs that it contains.
// A field with omitempty may be 0, which means that the value is missing.
func (r *rules) checkRanges(path string, value reflect.Value) {
	switch {
	case value.Kind() == reflect.Pointer && !value.IsNil():
		r.checkRanges(path, value.Elem())
	case value.Kind() == reflect.Slice:
		for i := range value.Len() {
			r.checkRanges(fieldpath.Item(path, i), value.Index(i))
		}
	case value.Kind() == reflect.Struct:
		r.checkFields(path, value)
	}
}

// checkFields does the work of checkRanges for the fields of a struct.
func (r *rules) checkFields(path string, value reflect.Value) {
	for _, f := range rangedFieldsOf(value.Type()) {
		v, at := value.FieldByIndex(f.index), fieldpath.Child(path, f.name)
		if !f.limited {
			r.checkRanges(at, v)
			continue
		}
		v = reflect.Indirect(v)
		isMissing := !v.IsValid() || v.IsZero() && f.optional
		if !isMissing && !f.bounds.Contain(v) {
			r.failf(at, "must be a whole number %s", f.bounds)
		}
	}
}

// rangedField is a field with a range tag, or one that can contain such fields.
type rangedField struct {
	index    []int
	name     string
	limited  bool // the field itself has a range tag
	bounds   fieldpath.Bounds
	optional bool // the value 0 means that it is missing
}

// rangedFields has the results of rangedFieldsOf, by type. A file can have thousands of servers, so
// the fields of a type are found only once.
var rangedFields sync.Map

// rangedFieldsOf returns the fields of a struct that have a range tag or can contain such fields.
func rangedFieldsOf(t reflect.Type) []rangedField {
	if known, ok := rangedFields.Load(t); ok {
		return known.([]rangedField)
	}
	var all []rangedField
	for _, f := range reflect.VisibleFields(t) {
		name, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "" || name == "-" {
			continue
		}
		ranged := rangedField{index: f.Index, name: name, optional: options == "omitempty"}
		var tag string
		if tag, ranged.limited = f.Tag.Lookup("range"); ranged.limited {
			ranged.bounds = fieldpath.ParseBounds(tag)
		}
		if ranged.limited || containsStructs(f.Type) {
			all = append(all, ranged)
		}
	}
	rangedFields.Store(t, all)
	return all
}

// containsStructs tells whether a type is, points to, or is a list of a struct of this package.
func containsStructs(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice:
		return containsStructs(t.Elem())
	}
	return t.Kind() == reflect.Struct && t.PkgPath() == reflect.TypeFor[rules]().PkgPath()
}

// IsSRv6 tells whether the encapsulation is one of segment routing. IsSRv6 and IsTunnel are both
// false for an unknown encapsulation, which is an error already.
func (e Encapsulation) IsSRv6() bool   { return e == SRv6Insert || e == SRv6Encap }
func (e Encapsulation) IsTunnel() bool { return e == GRE || e == IPIP }

const instanceForm = "must be 1 to 63 letters, digits, - or _"

func isInstance(name string) bool { return fieldpath.IsPlain(name) && len(name) <= 63 }

// CheckInstance returns an error if a name is not valid for an instance. A valid name is also safe
// as a file name.
func CheckInstance(name string) error {
	if !isInstance(name) {
		return fmt.Errorf("instance %q: %s", name, instanceForm)
	}
	return nil
}

// checkHost checks the fields that the section node has in both files.
func (r *rules) checkHost(
	instance, iface string, mode XDPMode, locator netip.Prefix, addresses []netip.Addr,
) {
	if !isInstance(instance) {
		r.failf("node.instance", "%s", instanceForm)
	}
	if iface == "" {
		r.failf("node.interface", "required")
	} else {
		r.checkInterface("node.interface", iface)
	}
	checkKnown(r, "node.xdp-mode", mode, XDPAuto, XDPNative, XDPGeneric)
	r.checkLocator("node.locator", locator)
	seen := make(map[netip.Addr]string)
	for i, address := range addresses {
		r.checkAddress(fieldpath.Item("node.addresses", i), address)
		checkUnique(r, seen, address, fieldpath.Item("node.addresses", i))
	}
}

// SignalKeyField is the path of the field that names the file of keys.
const SignalKeyField = "node.signal-key"

// checkSignalKey checks the path of a key file without reading the file.
func (r *rules) checkSignalKey(file string) {
	if file != "" && !filepath.IsAbs(file) {
		r.failf(SignalKeyField, "must be absolute")
	}
}

// checkState checks the path of the state directory.
func (r *rules) checkState(directory string) {
	if directory != "" && !filepath.IsAbs(directory) {
		r.failf("node.state", "must be absolute")
	}
}

// checkInterface checks the form of an interface's name.
func (r *rules) checkInterface(path, name string) {
	if !isInterfaceName(name) {
		r.failf(path, "must be an interface name: 1 to 15 bytes without /, : and spaces")
	}
}

// isInterfaceName tells whether a name has only printable characters, and passes the kernel's
// dev_valid_name.
func isInterfaceName(name string) bool {
	return name != "" && len(name) < 16 && name != "." && name != ".." &&
		!strings.ContainsFunc(name, func(r rune) bool {
			return r == '/' || r == ':' || !unicode.IsPrint(r) || unicode.IsSpace(r)
		})
}

// family returns the name of an address's IP version for messages.
func family(address netip.Addr) string {
	if address.Unmap().Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// checkListen checks an address with a port at which a process listens. The address may be missing.
func (r *rules) checkListen(path, listen string) {
	if listen == "" {
		return
	}
	host, port, err := net.SplitHostPort(listen)
	number, portErr := strconv.ParseUint(port, 10, 16)
	_, addrErr := netip.ParseAddr(host)
	isHost := host == "" || addrErr == nil || isHostName(host)
	if err != nil || portErr != nil || number == 0 || !isHost {
		r.failf(path, "must be an address and a port from 1 to 65535, "+
			"such as 127.0.0.1:9188 or [::1]:9188")
	}
}

// isHostName tells whether a text has the form of a host name.
func isHostName(host string) bool {
	for label := range strings.SplitSeq(host, ".") {
		if !fieldpath.IsPlain(label) || len(label) > 63 {
			return false
		}
	}
	return len(host) <= 253
}

// checkPresent checks that there are services. An empty list is more likely a truncated file than a
// wish to stop all traffic.
func (r *rules) checkPresent(services int) {
	if services == 0 {
		r.failf("services", "at least one is required")
	}
}

// checkServices checks the fields that services of balancers and of agents have in common.
func (r *rules) checkServices(services []AgentService) {
	names := make(map[string]string)
	type key struct {
		vip      netip.Addr
		port     Port
		protocol Protocol
	}
	keys := make(map[key]string)
	for i, s := range services {
		path := fieldpath.Item("services", i)
		r.checkName(fieldpath.Child(path, "name"), s.Name)
		checkUnique(r, names, s.Name, fieldpath.Child(path, "name"))
		r.checkVIPsOf(path, &s)
		r.checkPortsOf(path, &s)
		if at := fieldpath.Child(path, "protocol"); s.Protocol == "" {
			r.failf(at, "required")
		} else {
			checkKnown(r, at, s.Protocol, TCP, UDP)
		}
		checkKnown(r, fieldpath.Child(path, "encapsulation"), s.Encapsulation, SRv6Insert, SRv6Encap, GRE, IPIP)

		if s.Protocol == "" {
			continue
		}
		for _, vip := range s.AllVIPs() {
			for _, port := range s.AllPorts() {
				k := key{vip, port, s.Protocol}
				switch other, ok := keys[k]; {
				case !vip.IsValid() || port == 0 || other == path: // an error already
				case ok:
					r.conflict(path, other, "%s port %s of %s is already used by", s.Protocol, port, vip)
				default:
					keys[k] = path
				}
			}
		}
	}
	r.checkEntries(services)
}

const (
	// MostVIPs is the maximum number of VIPs of a service.
	MostVIPs = 1024
	// MostPorts is the maximum number of ports of a service with a list of ports.
	MostPorts = 1024
	// MostEntries is the maximum number of VIPs, and of pairs of a VIP and a port, of all services
	// together. So that many entries always find room in the tables of the data path.
	MostEntries = 2 * MaxServices
)

// checkEntries checks that the tables of the data path have room for all VIPs and ports.
func (r *rules) checkEntries(services []AgentService) {
	entries, vips := 0, map[netip.Addr]bool{}
	for i := range services {
		s := &services[i]
		entries += len(s.AllVIPs()) * len(s.AllPorts())
		for _, vip := range s.AllVIPs() {
			vips[vip] = true
		}
	}
	if entries += len(vips); entries > MostEntries {
		r.failf("services", "have %d VIPs and pairs of a VIP and a port, must have at most %d", entries, MostEntries)
	}
}

// checkVIPsOf checks the VIPs of a service.
func (r *rules) checkVIPsOf(path string, s *AgentService) {
	if len(s.VIPs) == 0 {
		r.checkVIP(fieldpath.Child(path, "vip"), s.VIP, s.Encapsulation)
		return
	}
	at, seen := fieldpath.Child(path, "vips"), map[netip.Addr]string{}
	for i, vip := range s.VIPs {
		r.checkVIP(fieldpath.Item(at, i), vip, s.Encapsulation)
		checkUnique(r, seen, vip, fieldpath.Item(at, i))
	}
	switch {
	case len(s.VIPs) > MostVIPs:
		r.failf(at, "must have at most %d items, has %d", MostVIPs, len(s.VIPs))
	case s.VIP != s.VIPs[0]:
		r.failf(fieldpath.Child(path, "vip"), "must be absent, or the first of vips, %s", s.VIPs[0])
	}
}

// checkPortsOf checks the ports of a service.
func (r *rules) checkPortsOf(path string, s *AgentService) {
	if len(s.Ports) == 0 {
		r.checkPort(fieldpath.Child(path, "port"), s.Port)
		return
	}
	at, seen := fieldpath.Child(path, "ports"), map[Port]string{}
	for i, port := range s.Ports {
		if port == 0 || port >= AllPorts {
			r.failf(fieldpath.Item(at, i), "must be a port from 1 to 65535; for all ports, write port: all")
		}
		checkUnique(r, seen, port, fieldpath.Item(at, i))
	}
	switch {
	case len(s.Ports) > MostPorts:
		r.failf(at, "must have at most %d items, has %d", MostPorts, len(s.Ports))
	case s.Port != s.Ports[0]:
		r.failf(fieldpath.Child(path, "port"), "must be absent, or the first of ports, %s", s.Ports[0])
	}
}

func (r *rules) checkPort(path string, port Port) {
	switch {
	case port == 0:
		r.failf(path, "required")
	case port > AllPorts:
		r.failf(path, "must be a port from 1 to 65535, or all")
	}
}

// maxName is the length of the longest name, in bytes.
const maxName = 63

// checkName checks the name of a service, a server or a node.
func (r *rules) checkName(path, name string) {
	switch {
	case name == "":
		r.failf(path, "required")
	case len(name) > maxName:
		r.failf(path, "must have 1 to %d bytes, has %d", maxName, len(name))
	case strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }):
		r.failf(path, "must have only printable characters, and no spaces")
	case strings.Contains(name, "/"):
		r.failf(path, "must not have a slash: commands name a server as SERVICE/SERVER")
	}
}

func (r *rules) checkVIP(path string, vip netip.Addr, encapsulation Encapsulation) {
	if !vip.IsValid() {
		r.failf(path, "required")
		return
	}
	r.checkAddress(path, vip)
	if encapsulation == SRv6Insert && vip.Is4() {
		r.failf(path, "must be IPv6 for encapsulation %s; IPv4 needs %s", SRv6Insert, SRv6Encap)
	}
}

// checkAddress checks an address that other hosts must be able to reach.
func (r *rules) checkAddress(path string, address netip.Addr) {
	switch {
	case !address.IsValid():
	case address.Is4In6():
		r.failf(path, "is IPv4-mapped; write it as %s", address.Unmap())
	case address.IsUnspecified(), address.IsLoopback(), address.IsMulticast(),
		address.Is6() && address.IsLinkLocalUnicast(), address == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		r.failf(path, "is %s; must be a unicast address that other hosts can reach", kind(address))
	case address.Zone() != "":
		r.failf(path, "must not have a zone")
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
func (r *rules) checkLocator(path string, locator netip.Prefix) {
	address := locator.Addr()
	switch {
	case !locator.IsValid():
	case address.Is4() || locator.Bits() != 64:
		r.failf(path, "must be an IPv6 /64")
	case locator != locator.Masked():
		r.failf(path, "has bits set after the first 64; write it as %s", locator.Masked())
	case address.IsUnspecified() || address.IsMulticast() || address.IsLinkLocalUnicast():
		r.failf(path, "must be a unicast prefix that other hosts can reach")
	}
}

// checkLocatorNeeded reports a missing locator of the node. It names only the first service that
// needs it.
func (r *rules) checkLocatorNeeded(services []AgentService, locator netip.Prefix) {
	for i, s := range services {
		if s.Encapsulation.IsSRv6() && !locator.IsValid() {
			r.failf("node.locator", "required by %s, whose encapsulation is %s", fieldpath.Item("services", i), s.Encapsulation)
			return
		}
	}
}

// vips has the path of the first service of each VIP.
type vips map[netip.Addr]string

// newVIPs returns the VIPs of services.
func newVIPs(services []AgentService) vips {
	v := make(vips)
	for i := range services {
		for _, vip := range services[i].AllVIPs() {
			if _, ok := v[vip]; !ok && vip.IsValid() {
				v[vip] = fieldpath.Item("services", i)
			}
		}
	}
	return v
}

// checkNotVIP reports an address of a host if it is also a VIP.
func (v vips) checkNotVIP(r *rules, path string, address netip.Addr) {
	if service, ok := v[address]; ok {
		r.failf(path, "is the VIP of %s", service)
	}
}

// checkUnique reports a value that occurred before, and returns false. seen has the paths of
// earlier values. checkUnique ignores zero values, because they mean that the value is missing.
func checkUnique[T comparable](r *rules, seen map[T]string, value T, path string) (ok bool) {
	var zero T
	if value == zero {
		return true
	}
	if other, ok := seen[value]; ok {
		r.conflict(path, other, "is already used by")
		return false
	}
	seen[value] = path
	return true
}

// checkKnown reports a value that is not one of the known ones.
func checkKnown[T ~string](r *rules, path string, value T, known ...T) {
	if slices.Contains(known, value) {
		return
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	r.failf(path, "must be one of: %s", strings.Join(names, ", "))
}

// checkRange reports a value outside of low to high, both included.
func checkRange[T int | time.Duration](r *rules, path string, value, low, high T) {
	if value < low || value > high {
		r.failf(path, "must be from %v to %v", low, high)
	}
}
