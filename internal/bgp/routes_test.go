// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
)

// TestVIPs: a VIP is served as long as one of its services is.
func TestVIPs(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		announce  []desired.Announcement
		abilities []balancer.Ability
		want      string
	}{
		{[]desired.Announcement{""}, []balancer.Ability{balancer.Ready}, "served"},
		{[]desired.Announcement{""}, []balancer.Ability{balancer.Usable}, "not served"},
		{[]desired.Announcement{"usable"}, []balancer.Ability{balancer.Usable}, "served"},
		{[]desired.Announcement{"usable"}, []balancer.Ability{balancer.Unable}, "not served"},
		{[]desired.Announcement{"usable"}, []balancer.Ability{balancer.Unchecked}, "unchecked"},
		{[]desired.Announcement{"", ""}, []balancer.Ability{balancer.Unchecked, balancer.Usable}, "unchecked"},
		{[]desired.Announcement{"", "never"}, []balancer.Ability{balancer.Unable, balancer.Unchecked}, "not served"},
		{[]desired.Announcement{"never"}, []balancer.Ability{balancer.Ready}, "none"},
		{[]desired.Announcement{"", ""}, []balancer.Ability{balancer.Unable, balancer.Ready}, "served"},
		{[]desired.Announcement{"", ""}, []balancer.Ability{balancer.Ready, balancer.Unable}, "served"},
		{[]desired.Announcement{"", "never"}, []balancer.Ability{balancer.Unable, balancer.Ready}, "not served"},
	} {
		var services []balancer.ServiceState
		for i, a := range test.announce {
			s := &desired.Service{VIP: netip.MustParsePrefix(vip6).Addr(), BGP: &desired.ServiceBGP{Announce: a}}
			services = append(services, balancer.ServiceState{Service: s, Ability: test.abilities[i]})
		}
		got := "none"
		for _, v := range destinationsOf(&desired.BGP{}, services, nil) {
			if v.hasPeer {
				t.Error("there is no peer")
			}
			switch got = "not served"; {
			case v.service.IsServed:
				got = "served"
			case v.service.IsUnchecked:
				got = "unchecked"
			}
		}
		if got != test.want {
			t.Errorf("%v with %v: %s, want %s", test.announce, test.abilities, got, test.want)
		}
	}
}

// TestAggregates: an aggregate is served as long as a VIP inside is. It does not have the attributes
// of services.
func TestAggregates(t *testing.T) {
	t.Parallel()
	b := &desired.BGP{
		RouteAttributes: desired.RouteAttributes{MED: new(uint32(5)), Communities: []desired.Community{"1:1"}},
		Aggregates: []desired.Aggregate{
			{Prefix: netip.MustParsePrefix("203.0.113.0/24"), RouteAttributes: desired.RouteAttributes{Prepend: new(uint32(1))}},
			{Prefix: netip.MustParsePrefix("2001:db8:80::/48"), SummaryOnly: true},
		},
	}
	drain := &desired.RouteAttributes{Prepend: new(uint32(2)), Communities: []desired.Community{"graceful-shutdown"}}
	service := func(name, vip string, ability balancer.Ability, own *desired.ServiceBGP) balancer.ServiceState {
		return balancer.ServiceState{
			Service: &desired.Service{Name: name, VIP: netip.MustParseAddr(vip), BGP: own}, Ability: ability,
		}
	}
	own := &desired.ServiceBGP{RouteAttributes: desired.RouteAttributes{
		MED: new(uint32(9)), LocalPref: new(uint32(50)), Communities: []desired.Community{"1:2", "1:1"},
	}}
	never := &desired.ServiceBGP{Announce: desired.AnnounceNever}
	several := service("several", "203.0.113.1", balancer.Ready, nil)
	several.Service.VIPs = []netip.Addr{several.Service.VIP, netip.MustParseAddr("203.0.113.2")}
	a, bb := service("a", "203.0.113.1", balancer.Unable, own), service("b", "203.0.113.2", balancer.Ready, nil)
	for _, test := range []struct {
		services []balancer.ServiceState
		drain    *desired.RouteAttributes
		want     string
	}{
		{[]balancer.ServiceState{a, bb}, nil, "203.0.113.0/24 served 1 {5 true} {0 false} [1:1] [a b]; " +
			"203.0.113.1/32 not served 0 {9 true} {50 true} [1:1 1:2] [a]; 203.0.113.2/32 served 0 {5 true} {0 false} [1:1] [b]"},
		{[]balancer.ServiceState{a}, drain, "203.0.113.0/24 not served 3 {5 true} {0 false} [1:1 graceful-shutdown] [a]; " +
			"203.0.113.1/32 not served 2 {9 true} {50 true} [1:1 1:2 graceful-shutdown] [a]"},
		{[]balancer.ServiceState{service("six", "2001:db8:80::1", balancer.Unchecked, nil)}, nil,
			"2001:db8:80::/48 unchecked 0 {5 true} {0 false} [1:1] [six]"},
		{[]balancer.ServiceState{service("six", "2001:db8:80::1", balancer.Ready, never)}, nil, ""},
		{[]balancer.ServiceState{service("out", "198.51.100.1", balancer.Ready, nil)}, nil,
			"198.51.100.1/32 served 0 {5 true} {0 false} [1:1] [out]"},
		{[]balancer.ServiceState{several}, nil, "203.0.113.0/24 served 1 {5 true} {0 false} [1:1] [several]; " +
			"203.0.113.1/32 served 0 {5 true} {0 false} [1:1] [several]; 203.0.113.2/32 served 0 {5 true} {0 false} [1:1] [several]"},
	} {
		all := destinationsOf(b, test.services, test.drain)
		var texts []string
		for _, prefix := range slices.SortedFunc(maps.Keys(all), netip.Prefix.Compare) {
			d := all[prefix]
			state := "not served"
			switch {
			case d.service.IsServed:
				state = "served"
			case d.service.IsUnchecked:
				state = "unchecked"
			}
			texts = append(texts, fmt.Sprint(prefix, " ", state, " ", d.prepend, " ", d.med, " ", d.localPref, " ",
				d.communities, " ", d.services))
		}
		if got := strings.Join(texts, "; "); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
	}
}
