// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"bytes"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzNetlink reads any bytes as messages of the kernel. The messages are at least as long as their
// headers, which the readers of sockets check.
func FuzzNetlink(f *testing.F) {
	header := bytes.Repeat([]byte{0}, unix.SizeofRtMsg)
	header[0] = unix.AF_INET6
	attribute := func(kind byte, value ...byte) []byte {
		b := append([]byte{byte(4 + len(value)), 0, kind, 0}, value...)
		return append(b, make([]byte, aligned(len(b))-len(b))...)
	}
	address := netip.MustParseAddr("fd00:5:0:1::").AsSlice()
	newRoute := bytes.Join([][]byte{
		header, attribute(unix.RTA_DST, address...), attribute(unix.RTA_OIF, 2, 0, 0, 0),
		attribute(unix.RTA_GATEWAY, address...), attribute(unix.RTA_VIA, 10, 0, 1),
		attribute(unix.RTA_MULTIPATH, append([]byte{8 + 20, 0, 0, 3, 2, 0, 0, 0}, attribute(unix.RTA_GATEWAY, address...)...)...),
	}, nil)
	f.Add(uint16(unix.RTM_NEWROUTE), newRoute)
	f.Add(uint16(unix.RTM_NEWROUTE), append(header, attribute(unix.RTA_OIF, 2)...)) // shorter than a number
	f.Add(uint16(unix.RTM_NEWRULE), append(header, attribute(unix.FRA_IIFNAME, 'l', 'o', 0)...))
	f.Add(uint16(unix.RTM_NEWNEIGH), append(header, attribute(unix.NDA_LLADDR, 2, 0, 0, 0, 0, 1)...))
	f.Add(uint16(unix.RTM_NEWNEXTHOP), append(header[:sizeofNhmsg:sizeofNhmsg], attribute(unix.NHA_GROUP, address...)...))
	target := netip.MustParseAddr("fd00:5:0:1::1")
	f.Fuzz(func(t *testing.T, kind uint16, message []byte) {
		r := Resolver{targets: newTargets([]netip.Addr{target})}
		r.matters(syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: message})
		if len(message) >= sizeofNhmsg {
			all := objects{}
			all.add(message)
			for id := range all {
				all.resolve(&route{object: id})
			}
		}
		if len(message) < unix.SizeofRtMsg { // as long as struct ndmsg and struct fib_rule_hdr
			return
		}
		parseNeighbour(message)
		rule := parseRule(message)
		rule.matches(target)
		found, ok := parseRoute(message)
		if !ok {
			return
		}
		rule.passesOver(found)
		for _, p := range found.paths {
			if order := p.order(target); order < 0 {
				t.Errorf("order %v of %+v", order, p)
			}
		}
	})
}
