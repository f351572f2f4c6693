// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

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
		for _, v := range vipsOf(&desired.BGP{}, services) {
			if v.hasPeer {
				t.Error("there is no peer")
			}
			switch got = "not served"; {
			case v.isServed:
				got = "served"
			case v.isUnchecked:
				got = "unchecked"
			}
		}
		if got != test.want {
			t.Errorf("%v with %v: %s, want %s", test.announce, test.abilities, got, test.want)
		}
	}
}

// TestDamping: a route that comes and goes waits longer each time, up to a limit.
func TestDamping(t *testing.T) {
	t.Parallel()
	const holdDown = 10 * time.Second
	var d damping
	now := time.Unix(1e9, 0)
	if due := d.due(now, holdDown); due != now {
		t.Errorf("the first announcement waits for %v", due.Sub(now))
	}
	var waits []time.Duration
	for range 8 {
		d.announced = now
		now = now.Add(time.Second)
		d.withdrawn(now, holdDown)
		now = now.Add(time.Minute)
		due := d.due(now, holdDown)
		waits = append(waits, due.Sub(now)/time.Second)
		if again := d.due(now.Add(time.Second), holdDown); again != due {
			t.Errorf("due %v, and a second later %v", due, again)
		}
		now = due
	}
	if got := fmt.Sprint(waits); got != "[10ns 20ns 40ns 80ns 160ns 320ns 320ns 320ns]" {
		t.Errorf("waits %s", got)
	}
	d.announced = now
	now = now.Add(stableFactor*holdDown + time.Second)
	d.withdrawn(now, holdDown)
	if due := d.due(now, holdDown); due != now.Add(holdDown) {
		t.Errorf("a route that was stable waits for %v", due.Sub(now))
	}
}
