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
			Instance: "lb", Interface: "eth0", Locator: netip.MustParsePrefix("fd00:6c:0:1::/64"),
			Limits: Limits{Flows: 1024, Servers: 4},
		},
		Services: []Service{{
			Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: TCP,
			Placement: PlacementHash, Persistence: PersistenceTable, Encapsulation: SRv6Encap,
			Candidates: 3, Generations: 3, Buckets: 1021,
			Timeouts: Timeouts{New: 1e10, Established: 1e10, Closing: 1e10},
			Servers:  []Server{server("s1", "fd00:5:0:1::/64"), server("s2", "fd00:5:0:2::/64")},
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
		"no port":       {func(b *Balancer) { b.Services[0].Port = 0 }, "services[0].port: required"},
		"port":          {func(b *Balancer) { b.Services[0].Port = AllPorts + 1 }, "services[0].port: must be a port from 1 to 65535, or all"},
		"all ports":     {func(b *Balancer) { b.Services[0].Port = AllPorts }, ""},
		"no protocol":   {func(b *Balancer) { b.Services[0].Protocol = "" }, "services[0].protocol: required"},
		"no weight":     {func(b *Balancer) { b.Services[0].Servers[1].Weight = nil }, "services[0].servers[1].weight: required"},
		"weight":        {func(b *Balancer) { b.Services[0].Servers[1].Weight = &heavy }, "services[0].servers[1].weight: must be a whole number from 0 to 1000"},
		"flows":         {func(b *Balancer) { b.Node.Limits.Flows = 1 }, "node.limits.flows: must be a whole number from 1024 to 100000000"},
		"no rise":       {func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} }, "services[0].health.rise: required"},
		"no fall":       {func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} }, "services[0].health.fall: required"},
		"no check port": {func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}} }, "services[0].health.tcp.port: required"},
		"default check": {func(b *Balancer) { b.Services[0].Health = &Health{TCP: &TCPCheck{}, Rise: 0, Fall: -1} }, "services[0].health.fall: must be a whole number from 1 to 1000"},
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
		Node: AgentNode{Instance: "agent", Interface: "eth0", Locator: netip.MustParsePrefix("fd00:5:0:1::/64"), MTU: 1279},
		Services: []AgentService{{
			Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: TCP, Encapsulation: SRv6Encap,
			Accept: Accept{Policy: AcceptDynamic}, Load: Source{Kind: LoadConnections}, NotLocal: NotLocalReset,
		}},
	}
	want := `node.mtu: must be a whole number from 1280 to 65535
services[0].accept.window: required by policy dynamic
services[0].accept.initial: required by policy dynamic
services[0].accept.epsilon: required by policy dynamic`
	if diff := cmp.Diff(want, a.Validate().Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestValidateOverrides(t *testing.T) {
	yes, heavy := true, uint32(1001)
	overrides := Overrides{[]Override{
		{Service: "web", Server: "s1", Drained: &yes},
		{Service: "web", Server: "s1", Drained: &yes},
		{Service: "web", Server: "s2"},
		{Server: "s3", Weight: &heavy},
	}}
	want := `overrides[1]: server s1 of service web is already in overrides[0]
overrides[2]: must have drained or weight
overrides[3].service: required
overrides[3].weight: must be a whole number from 0 to 1000`
	if diff := cmp.Diff(want, overrides.Validate().Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestOverride replaces settings of single servers, and leaves the others.
func TestOverride(t *testing.T) {
	yes, no, seven := true, false, uint32(7)
	b := valid()
	b.Services[0].Servers[1].Drained = true
	overrides := []Override{
		{Service: "web", Server: "s1", Drained: &yes, Weight: &seven},
		{Service: "web", Server: "s2", Drained: &no},
		{Service: "web", Server: "s9", Drained: &yes},
		{Service: "dns", Server: "s1", Drained: &yes},
	}
	want := `overrides[2]: service web has no server s9: the override has no effect
overrides[3]: service dns has no server s1: the override has no effect`
	if diff := cmp.Diff(want, b.Override(overrides).Error()); diff != "" {
		t.Errorf("warnings, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(overrides[:2], b.Overrides); diff != "" {
		t.Errorf("overrides in force, -want +got:\n%s", diff)
	}
	s1, s2 := b.Services[0].Servers[0], b.Services[0].Servers[1]
	if !s1.Drained || *s1.Weight != 7 || s2.Drained || *s2.Weight != 1 {
		t.Errorf("got %+v and %+v", s1, s2)
	}
	changes := b.ChangesFrom(valid()).Attributes()
	if diff := cmp.Diff([]any{"servers_changed", "web/s1 (weight 1 to 7, drained false to true)"}, changes); diff != "" {
		t.Errorf("changes, -want +got:\n%s", diff)
	}
}

// TestOverrideOfAllServers warns if a service gets no new connections because of overrides.
func TestOverrideOfAllServers(t *testing.T) {
	b := valid()
	overrides := []Override{
		{Service: "web", Server: "s1", Drained: new(true)},
		{Service: "web", Server: "s2", Weight: new(uint32(0))},
	}
	if warnings := b.Override(overrides[:1]); warnings != nil {
		t.Errorf("one server is left: %v", warnings)
	}
	want := "overrides: all servers are now drained or have weight 0: service web gets no new connections"
	if diff := cmp.Diff(want, valid().Override(overrides).Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
