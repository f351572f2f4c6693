// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// strict is the value of rp_filter that makes the kernel accept a packet only on the interface that
// leads back to its source (RFC 3704 section 2.2).
const strict = 1

// checkReverse4 returns an error if rp_filter would make the kernel drop answers of an IPv4 VIP
// that arrive on the interface (fib_validate_source in the kernel). Answers on other interfaces do
// not matter: the sockets of checks are bound to the interface. checkReverse4 returns nil if the
// kernel would accept the answers, and also if that cannot be found out.
func checkReverse4(by PathInterface, vip netip.Addr) error {
	setting, filter := reversePathFilter(by.Name)
	if filter == 0 || isInVRF(by.Index) {
		return nil
	}
	routes, err := netlink.RouteGetWithOptions(vip.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		cure := "add a route to the VIP"
		if filter == strict {
			cure += fmt.Sprintf(", and set the sysctl net.ipv4.conf.%s.rp_filter to 2", by.Name)
		}
		return fmt.Errorf("the kernel drops the answers of servers on %s, because %s is %d and the host "+
			"has no route to the VIP %s: %s", by.Name, setting, filter, vip, cure)
	case err != nil || len(routes) == 0 || filter != strict || leadsThrough(&routes[0], by.Index):
		return nil
	}
	return fmt.Errorf("the kernel drops the answers of servers on %[1]s, because %[2]s is 1 and the "+
		"route to the VIP %[3]s leads through %[4]s: set the sysctl net.ipv4.conf.%[1]s.rp_filter to 2",
		by.Name, setting, vip, nameOf(&routes[0]))
}

// reversePathFilter returns the sysctl that decides about an interface, and its value. It is the
// sysctl of the interface or that of all interfaces, whichever has the higher value.
func reversePathFilter(name string) (setting string, value int) {
	all, own := sysctl4("all", "rp_filter"), sysctl4(name, "rp_filter")
	if all > own {
		return "net.ipv4.conf.all.rp_filter", all
	}
	return "net.ipv4.conf." + name + ".rp_filter", own
}

// leadsThrough tells whether one of a route's next hops is on the interface.
func leadsThrough(route *netlink.Route, index int) bool {
	for _, hop := range route.MultiPath {
		if hop.LinkIndex == index {
			return true
		}
	}
	return route.LinkIndex == index
}

// nameOf returns the name of the interface of a route's first next hop.
func nameOf(route *netlink.Route) string {
	index := route.LinkIndex
	if index == 0 && len(route.MultiPath) > 0 {
		index = route.MultiPath[0].LinkIndex
	}
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Sprintf("#%d", index)
	}
	return link.Attrs().Name
}

// isInVRF tells whether the interface belongs to another one, which may be a VRF. For a VRF, the
// kernel looks for the route in another table. isInVRF also returns true if there is no such
// interface.
func isInVRF(index int) bool {
	link, err := netlink.LinkByIndex(index)
	return err != nil || link.Attrs().MasterIndex != 0
}

// sysctl4 returns a setting of IPv4 for an interface, or for "all". It returns 0 if the setting
// cannot be read.
func sysctl4(scope, name string) int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + scope + "/" + name)
	if err != nil {
		return 0
	}
	value, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return value
}
