// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
)

// Flows lose their server if the server or its service goes, or gets another address. They leave the
// history when no kept generation has their server.
func TestLosses(t *testing.T) {
	service := func(name string, weights ...uint32) desired.Service {
		s := desired.Service{
			Name: name, VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: desired.TCP,
			Placement: desired.PlacementHash, Buckets: 101, Candidates: 3, Generations: 3,
		}
		for i, w := range weights {
			s.Servers = append(s.Servers, desired.Server{Name: fmt.Sprint("s", i+1), Weight: &w})
		}
		return s
	}
	weighted := func(weights ...uint32) []desired.Service {
		return []desired.Service{service("web", weights...)}
	}
	g := serversets.Generations{}
	require := func(before, after []desired.Service, want ...desired.Loss) {
		t.Helper()
		if got := lossesOf(before, diffOf(before, after), g); !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	removed, forgotten := desired.LossRemoved, desired.LossForgotten
	states := [][]desired.Service{weighted(1, 1, 1), weighted(1, 1, 0), weighted(2, 1, 0), weighted(3, 1, 0)}
	g = g.Next(states[0])
	require(states[0], states[0])
	require(states[0], states[0][:0], desired.Loss{Service: "web", Server: "s1", Cause: removed},
		desired.Loss{Service: "web", Server: "s2", Cause: removed}, desired.Loss{Service: "web", Server: "s3", Cause: removed})
	require(states[0], weighted(1, 1), desired.Loss{Service: "web", Server: "s3", Cause: removed})
	require(states[0], states[1]) // the generation before has s3
	g = g.Next(states[1])
	require(states[1], states[2])
	g = g.Next(states[2])
	require(states[2], states[3], desired.Loss{Service: "web", Server: "s3", Cause: forgotten})
	other := weighted(2, 1, 0)
	other[0].Buckets = 103 // no former set fits
	require(states[2], other, desired.Loss{Service: "web", Server: "s3", Cause: forgotten})
	g = g.Next(states[3])
	moved := func(change func(*desired.Service)) {
		t.Helper()
		after := weighted(3, 1)
		change(&after[0])
		require(weighted(3, 1), after, desired.Loss{Service: "web", Server: "s1", Cause: desired.LossMoved},
			desired.Loss{Service: "web", Server: "s2", Cause: desired.LossMoved})
	}
	moved(func(s *desired.Service) { s.VIP = netip.MustParseAddr("2001:db8:80::2") })
	moved(func(s *desired.Service) { s.Port = 81 })
	moved(func(s *desired.Service) { s.Protocol = desired.UDP })
	moved(func(s *desired.Service) {
		s.Servers[0].Locator = netip.MustParsePrefix("fd00:5:0:9::/64")
		s.Servers[1].Address = netip.MustParseAddr("2001:db8:1::9")
	})
	other = weighted(3, 1)
	other[0].Placement, other[0].Timeouts.New = desired.PlacementHunt, 1
	require(weighted(3, 1), other)
	require(states[3], weighted(4, 1, 0)) // s3 had left before
	require(states[3], append(weighted(3, 1, 0), service("new", 1)))
}

// A service of all ports gets no packets of the ports that other services have. Flows of these lose
// their server when the service gets fewer ports, and no others do.
func TestLossesOfPorts(t *testing.T) {
	const all = desired.AllPorts
	weight := uint32(1)
	service := func(name string, port desired.Port) desired.Service {
		return desired.Service{
			Name: name, VIP: netip.MustParseAddr("2001:db8:80::1"), Port: port, Protocol: desired.TCP,
			Placement: desired.PlacementHash, Buckets: 101, Candidates: 3, Generations: 3,
			Servers: []desired.Server{{Name: "s", Weight: &weight}},
		}
	}
	services := func(web, other desired.Port) (list []desired.Service) {
		list = append(list, service("web", web))
		if other != 0 {
			list = append(list, service("other", other))
		}
		return list
	}
	const moved, narrowed, removed = desired.LossMoved, desired.LossNarrowed, desired.LossRemoved
	for _, test := range []struct {
		web, other, webAfter, otherAfter desired.Port // 0: there is no such service
		lossOfWeb, lossOfOther           desired.LossCause
	}{
		{web: 80, webAfter: all},
		{web: all, webAfter: 80, lossOfWeb: narrowed},
		{web: all, webAfter: all, otherAfter: 80, lossOfWeb: narrowed},
		{web: all, other: 80, webAfter: all, otherAfter: 80},
		{web: all, other: 80, webAfter: all, lossOfOther: removed},
		{web: all, other: 80, webAfter: all, otherAfter: 81, lossOfWeb: narrowed, lossOfOther: moved},
		{web: all, other: 80, webAfter: 81, otherAfter: 80, lossOfWeb: narrowed},
		{web: all, other: 80, webAfter: 80, otherAfter: all, lossOfWeb: moved, lossOfOther: moved},
		{web: all, other: 80, webAfter: 81, otherAfter: all, lossOfWeb: narrowed},
		{web: 80, webAfter: 80, otherAfter: all},
	} {
		before, after := services(test.web, test.other), services(test.webAfter, test.otherAfter)
		got := map[string]desired.LossCause{}
		for _, loss := range lossesOf(before, diffOf(before, after), serversets.Generations{}.Next(before)) {
			got[loss.Service] = loss.Cause
		}
		if got["web"] != test.lossOfWeb || got["other"] != test.lossOfOther {
			t.Errorf("%+v: got %q", test, got)
		}
	}
	before := services(all, 0)
	for _, other := range []func(*desired.Service){
		func(s *desired.Service) { s.VIP = netip.MustParseAddr("2001:db8:80::2") },
		func(s *desired.Service) { s.Protocol = desired.UDP },
	} {
		after := services(all, 80)
		other(&after[1])
		if got := lossesOf(before, diffOf(before, after), serversets.Generations{}.Next(before)); len(got) > 0 {
			t.Errorf("%+v: got %v", after[1], got)
		}
	}
}

// A service with several VIPs and ports loses flows if it loses a VIP or a port.
func TestLossesOfSeveralVIPs(t *testing.T) {
	t.Parallel()
	addresses := func(numbers ...byte) (vips []netip.Addr) {
		for _, n := range numbers {
			vips = append(vips, netip.AddrFrom4([4]byte{198, 51, 100, n}))
		}
		return vips
	}
	service := func(vips []netip.Addr, ports ...desired.Port) []desired.Service {
		weight := uint32(1)
		return []desired.Service{{
			Name: "web", VIP: vips[0], VIPs: vips, Port: ports[0], Ports: ports, Protocol: desired.TCP,
			Placement: desired.PlacementHash, Buckets: 101, Candidates: 3, Generations: 3,
			Servers: []desired.Server{{Name: "s", Weight: &weight}},
		}}
	}
	before := service(addresses(1, 2), 80, 443)
	for _, test := range []struct {
		after []desired.Service
		want  desired.LossCause
	}{
		{service(addresses(2, 1, 3), 443, 80, 81), ""},
		{service(addresses(2), 80, 443), desired.LossNarrowed},
		{service(addresses(1, 2), 80), desired.LossNarrowed},
		{service(addresses(3), 80, 443), desired.LossMoved},
		{service(addresses(1, 2), desired.AllPorts), ""},
	} {
		losses := lossesOf(before, diffOf(before, test.after), serversets.Generations{}.Next(before))
		got := desired.LossCause("")
		for _, loss := range losses {
			got = loss.Cause
		}
		if got != test.want {
			t.Errorf("%v, ports %v: %q, want %q", test.after[0].VIPs, test.after[0].Ports, got, test.want)
		}
	}
}
