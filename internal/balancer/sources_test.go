// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// Source prefixes come, change and go in reloads and in starts. A client that may no longer reach the
// service loses its connections. The flows of all others keep their entries.
func TestSourcesChange(t *testing.T) {
	t.Parallel()
	for how, change := range map[string]func(*fixture, *desired.Balancer){
		"reload": (*fixture).mustApply,
		"restart": func(f *fixture, cfg *desired.Balancer) {
			cfg.Node = f.cfg.Node
			f.restartAs(cfg)
		},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			changeSources(t, change)
		})
	}
}

// changeSources does the work of TestSourcesChange.
func changeSources(t *testing.T, change func(*fixture, *desired.Balancer)) {
	sourced := func(prefixes ...string) *desired.Balancer {
		return balancerOf(from(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1)), prefixes...))
	}
	f := open(t, sourced())
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.run(frameOf(web))
	known, drop := f.forwarded(ack, web, "web", "s1", "forward_known"), refused(ack, "drop_source", 60)
	for _, step := range []struct {
		sources []string
		want    outcome
	}{
		{nil, known},
		{[]string{"2001:db8:c::/64", "2001:db8:d::/64"}, known},
		{[]string{"2001:db8:d::/64"}, drop},
		{[]string{"::/0"}, known},
		{[]string{"0.0.0.0/0"}, drop},
		{[]string{"2001:db8:c::2/128"}, known},
		{nil, known},
	} {
		change(f, sourced(step.sources...))
		f.check(step.want, f.run(ack))
		var want []netip.Prefix
		for _, prefix := range step.sources {
			want = append(want, netip.MustParsePrefix(prefix))
		}
		if got := mustSnapshot(t, f.view()).Services[0].Sources; !slices.Equal(got, want) {
			t.Errorf("sources %v, want %v", got, want)
		}
	}
}

// Prefixes of IPv6 admit no IPv4 clients, although IPv4 addresses are IPv4-mapped ones in the tables.
// Prefixes of IPv4 admit no IPv6 packet with an IPv4-mapped source.
func TestSourcesKeepFamiliesApart(t *testing.T) {
	t.Parallel()
	server := srv6Server("s1", 1, 1)
	f := open(t, balancerOf(
		from(serviceOf("web4", vip4, 80, desired.TCP, desired.SRv6Encap, server), "::/0"),
		from(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, server), "0.0.0.0/0"),
	))
	mapped := frameOf(web)
	copy(mapped[ethernetLength+8:], netip.MustParseAddr("::ffff:10.1.2.3").AsSlice())
	for length, frame := range map[int][]byte{40: frameOf(web4), 60: mapped} {
		f.check(refused(frame, "drop_source", uint64(length)), f.run(frame))
	}
}
