// SPDX-License-Identifier: Apache-2.0

package health

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

func TestTargets(t *testing.T) {
	host, jitter := netip.MustParseAddr, time.Second
	services := []desired.Service{
		{
			Name: "web", VIP: host("2001:db8::80"), Port: 80,
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				HTTP:     &desired.HTTPCheck{Path: "/healthz", Port: 8080, Status: "200-399", Body: "ok"},
				Interval: 2 * time.Second, Jitter: &jitter, Timeout: time.Second, Rise: 4, Fall: 5,
			},
			Servers: []desired.Server{
				{Name: "s1", Host: host("fd00::1")},
				{Name: "s2", Host: host("fd00::2")},
			},
		},
		{Name: "unchecked", VIP: host("2001:db8::81"), Servers: []desired.Server{{Name: "s1", Host: host("fd00::1")}}},
		{
			Name: "dns", VIP: host("192.0.2.53"), Port: 53,
			Health: &desired.Health{
				Via:      desired.ViaHost,
				TCP:      &desired.TCPCheck{Port: 53},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1", Host: host("10.0.0.1")}},
		},
		{
			Name: "ntp", VIP: host("192.0.2.123"), Port: 123,
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				UDP:      &desired.UDPCheck{Port: 123, RequestHex: "1b 00", Answer: "GPS"},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1"}},
		},
		{
			Name: "api", VIP: host("192.0.2.44"), Port: 443,
			Health: &desired.Health{
				Via: desired.ViaPackets,
				HTTPS: &desired.HTTPCheck{
					Path: "/", Port: 8443, Host: "api.example", Status: "204", Verify: true,
				},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1"}},
		},
	}
	address := netip.MustParseAddrPort
	web := Target{
		Service: "web", Server: "s1", Address: address("[2001:db8::80]:8080"), OnPath: true,
		Kind: HTTP, Path: "/healthz", Host: "[2001:db8::80]:8080", Status: "200-399", Body: "ok",
		Interval: 2 * time.Second, Jitter: time.Second, Timeout: time.Second, Rise: 4, Fall: 5,
	}
	web2 := web
	web2.Server = "s2"
	want := []Target{
		web, web2,
		{
			Service: "dns", Server: "s1", Address: address("10.0.0.1:53"), Kind: TCP,
			Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
		{
			Service: "ntp", Server: "s1", Address: address("192.0.2.123:123"), OnPath: true, Kind: UDP,
			Request: "\x1b\x00", Answer: "GPS", Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
		{
			Service: "api", Server: "s1", Address: address("192.0.2.44:8443"), OnPath: true, Kind: HTTPS,
			Path: "/", Host: "api.example", Status: "204", Verify: true,
			Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
	}
	if got := Targets(services); !slices.Equal(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}
