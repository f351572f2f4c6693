// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestEventsThatMatter makes changes to a kernel. Some of them could change the path to a server.
func TestEventsThatMatter(t *testing.T) {
	forBothVersions(t, unprepared, func(t *testing.T, n *network, v version) {
		left := v.left.String()
		words := strings.NewReplacer("UNUSED", strings.Replace(left, "2", "77", 1), "LEFT", left,
			"FAR", map[string]string{"ipv6": "2001:db8::/32", "ipv4": "198.51.100.0/24"}[v.family],
			"AGGREGATE", v.aggregate)
		n.ip(v, fmt.Sprintf("route add %s via %s", v.locator, left),
			words.Replace("neigh replace LEFT lladdr 02:00:00:00:00:01 dev left"))
		r := New(nil, n.resolver.log)
		r.retarget([]netip.Addr{v.server})
		var events <-chan syscall.NetlinkMessage
		n.do(func() (err error) {
			if events, err = subscribe(t.Context()); err == nil {
				_, err = r.resolve()
			}
			return err
		})
		for _, c := range []struct {
			command string
			matters bool
		}{
			{"neigh add UNUSED lladdr 02:00:00:00:00:09 dev left", false},
			{"neigh del UNUSED dev left", false},
			{"neigh replace LEFT lladdr 02:00:00:00:00:09 dev left", true},
			{"neigh del LEFT dev left", true},
			{"route add FAR via LEFT", false},
			{"route del FAR", false},
			{"route add AGGREGATE via LEFT", true},
			{"route del AGGREGATE", true},
			{"route add default via LEFT", true},
			{"rule add to FAR lookup 77", true},
			{"nexthop add id 9 via LEFT dev left", true},
		} {
			n.ip(v, words.Replace(c.command))
			if got := n.matter(r, events); got != c.matters {
				t.Errorf("%q matters: %v", c.command, got)
			}
		}
	})
}

// matter tells whether any of the events so far matters. Events of interfaces always matter, and
// may come at any time while links are new.
func (n *network) matter(r *Resolver, events <-chan syscall.NetlinkMessage) (any bool) {
	n.t.Helper()
	n.mtu++
	ip(n.t, n.balancer, "", fmt.Sprintf("link set lo mtu %d", 60000+n.mtu)) // the last event
	for event := range events {
		switch event.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if !r.matters(event) {
				n.t.Errorf("message %d about an interface does not matter", event.Header.Type)
			}
			if event.Header.Type == unix.RTM_NEWLINK && number(event.Data[4:]) == 1 {
				return any
			}
		default:
			any = any || r.matters(event)
		}
	}
	n.t.Fatal("the subscription has ended")
	return false
}

// TestKnownDiffers compares entries of a neighbour that is in use.
func TestKnownDiffers(t *testing.T) {
	mac, other := [6]byte{2, 0, 0, 0, 0, 1}, [6]byte{2, 0, 0, 0, 0, 2}
	answers, silent := known{mac: mac}, known{mac: mac, silent: true}
	for name, c := range map[string]struct {
		known known
		entry entry
		want  bool
	}{
		"still there":             {answers, entry{mac: mac, usable: true, managed: true}, false},
		"still there, permanent":  {answers, entry{mac: mac, usable: true, fixed: true}, false},
		"not kept":                {answers, entry{mac: mac, usable: true}, true},
		"another address":         {answers, entry{mac: other, usable: true, managed: true}, true},
		"looked for":              {answers, entry{managed: true}, false},
		"failed":                  {answers, entry{failed: true, managed: true}, true},
		"gone":                    {answers, entry{}, true},
		"silent, failed again":    {silent, entry{failed: true, managed: true}, false},
		"silent, looked for":      {silent, entry{managed: true}, false},
		"silent, back":            {silent, entry{mac: mac, usable: true, managed: true}, true},
		"first address":           {known{}, entry{mac: mac, usable: true, managed: true}, true},
		"no address, looked for":  {known{}, entry{managed: true}, false},
		"no address, and failed":  {known{}, entry{failed: true, managed: true}, true},
		"silent, another address": {silent, entry{mac: other, usable: true, managed: true}, true},
	} {
		if got := c.known.differs(c.entry); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
