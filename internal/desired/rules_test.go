// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// valid returns a balancer with one service. It has all that rules require, and was read from no
// file.
func valid() *Balancer {
	one := uint32(1)
	server := func(name, locator string) Server {
		return Server{Name: name, Locator: netip.MustParsePrefix(locator), Weight: &one}
	}
	return &Balancer{
		Node: BalancerNode{
			Instance: "lb", Interface: "eth0", XDPMode: XDPAuto, Locator: netip.MustParsePrefix("fd00:6c:0:1::/64"),
			Limits: Limits{Flows: 1024, Servers: 4},
		},
		Services: []Service{{
			Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: TCP,
			Placement: PlacementHash, Persistence: PersistenceTable, Encapsulation: SRv6Encap,
			Candidates: 3, Generations: 3, Buckets: 1021,
			Timeouts:  Timeouts{New: 1e10, Established: 1e10, Closing: 1e10, Silent: 1e10},
			OnFailure: OnFailureMoveUDP, OnDrain: OnDrainMoveUDP, AllFailed: AllFailedUse,
			Servers: []Server{server("s1", "fd00:5:0:1::/64"), server("s2", "fd00:5:0:2::/64")},
		}},
	}
}

// TestValidate covers what a source other than a file can get wrong: the file's decoder refuses
// these values already.
func TestValidate(t *testing.T) {
	if errs := valid().Validate(); errs != nil {
		t.Fatal(errs)
	}
	heavy := uint32(1001)
	for name, c := range map[string]struct {
		change func(*Balancer)
		want   string
	}{
		"no port": {
			func(b *Balancer) { b.Services[0].Port = 0 },
			"services[0].port: required",
		},
		"port": {
			func(b *Balancer) { b.Services[0].Port = AllPorts + 1 },
			"services[0].port: must be a port from 1 to 65535, or all",
		},
		"all ports": {
			func(b *Balancer) { b.Services[0].Port = AllPorts },
			"",
		},
		"no protocol": {
			func(b *Balancer) { b.Services[0].Protocol = "" },
			"services[0].protocol: required",
		},
		"no weight": {
			func(b *Balancer) { b.Services[0].Servers[1].Weight = nil },
			"services[0].servers[1].weight: required",
		},
		"weight": {
			func(b *Balancer) { b.Services[0].Servers[1].Weight = &heavy },
			"services[0].servers[1].weight: must be a whole number from 0 to 1000",
		},
		"flows": {
			func(b *Balancer) { b.Node.Limits.Flows = 1 },
			"node.limits.flows: must be a whole number from 1024 to 100000000",
		},
		"no rise": {
			func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} },
			"services[0].health.rise: required",
		},
		"no fall": {
			func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} },
			"services[0].health.fall: required",
		},
		"no check port": {
			func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} },
			"services[0].health.tcp.port: required",
		},
		"default check": {
			func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}, Fall: -1} },
			"services[0].health.fall: must be a whole number from 1 to 1000",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := valid()
			c.change(b)
			if got := b.Validate().Error(); !strings.Contains(got, c.want) || c.want == "" && got != "" {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// TestValidateAgent is TestValidate for an agent.
func TestValidateAgent(t *testing.T) {
	a := Agent{
		Node: AgentNode{
			Instance: "agent", Interface: "eth0", Locator: netip.MustParsePrefix("fd00:5:0:1::/64"),
			XDPMode: "driver", MTU: 1279,
		},
		Services: []AgentService{{
			Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: TCP,
			Encapsulation: SRv6Encap, Accept: Accept{Policy: AcceptDynamic},
			Load: Source{Kind: LoadConnections}, NotLocal: NotLocalReset,
		}},
	}
	want := `node.mtu: must be a whole number from 1280 to 65535
node.xdp-mode: must be one of: auto, native, generic
services[0].accept.window: required by policy dynamic
services[0].accept.window-time: required by policy dynamic
services[0].accept.initial: required by policy dynamic
services[0].accept.epsilon: required by policy dynamic`
	if diff := cmp.Diff(want, a.Validate().Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
