// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestReloadableFrom(t *testing.T) {
	const detached = "`segue lb detach` (which forgets all flows), and a start"
	balancer := func(from, to string) *desired.Balancer { return mustParse(t, validBalancer, from, to, ParseBalancer) }
	agent := func(from, to string) *desired.Agent { return mustParse(t, validAgent, from, to, ParseAgent) }
	oldBalancer, oldAgent := balancer("", ""), agent("", "")
	tests := []struct {
		name string
		err  error
		want string
	}{
		{"same", balancer("", "").ReloadableFrom(oldBalancer), ""},
		{"weight", balancer("weight: 1000", "weight: 10").ReloadableFrom(oldBalancer), ""},
		{"name", balancer("name: dns", "name: ns").ReloadableFrom(oldBalancer), ""},
		{"instance", balancer("edge-1", "edge-2").ReloadableFrom(oldBalancer),
			`node.instance "edge-2": a change from "edge-1" needs a restart`},
		{"signal key", balancer("seed: 0x10", "seed: 0x10\n  signal-key: /key").ReloadableFrom(oldBalancer), ""},
		{"outside", balancer("seed: 0x10", "seed: 0x10\n  internal: false").ReloadableFrom(oldBalancer),
			`node.internal "false": a change from "true" needs a restart`},
		{"inside", balancer("seed: 0x10", "seed: 0x10\n  inside: eth1").ReloadableFrom(oldBalancer),
			`node.inside "eth1": a change from "" needs a restart
node.internal "false": a change from "true" needs a restart`},
		{"several", balancer("eth0", "eth1").ReloadableFrom(&desired.Balancer{}),
			`node.instance "edge-1": a change from "" needs a restart
node.interface "eth1": a change from "" needs a restart
node.xdp-mode "auto": a change from "" needs a restart
node.seed: a change needs a restart
node.state "/var/lib/segue": a change from "" needs a restart
node.limits.flows "1024": a change from "0" needs a stop, ` + detached + `
node.limits.hints "1048576": a change from "0" needs a stop, ` + detached + `
node.limits.servers "5": a change from "0" needs a stop, ` + detached + `
metrics.listen "127.0.0.1:9188": a change from "" needs a restart`},
		{"agent same", agent("", "").ReloadableFrom(oldAgent), ""},
		{"agent MTU", agent("mtu: 1500", "mtu: 9000").ReloadableFrom(oldAgent), ""},
		{"agent balancers", agent("mtu: 1500", `balancers: ["fd00:6c::/32"]`).ReloadableFrom(oldAgent), ""},
		{"agent signal key", agent("mtu: 1500", "signal-key: /key").ReloadableFrom(oldAgent), ""},
		{"agent several", agent("eth0", "eth1").ReloadableFrom(&desired.Agent{}),
			`node.instance "server": a change from "" needs a restart
node.interface "eth1": a change from "" needs a restart
node.xdp-mode "auto": a change from "" needs a restart
node.state "/var/lib/segue": a change from "" needs a restart
metrics.listen ":9189": a change from "" needs a restart`},
	}
	for _, test := range tests {
		got := ""
		if test.err != nil {
			got = test.err.Error()
		}
		if got != test.want {
			t.Errorf("%s: got:\n%s\nwant:\n%s", test.name, got, test.want)
		}
	}
}

// mustParse reads a file in which from is replaced by to.
func mustParse[T any](t *testing.T, file, from, to string, parse func([]byte) (*T, fieldpath.Errors, error)) *T {
	t.Helper()
	config, _, err := parse([]byte(strings.Replace(file, from, to, 1)))
	testhost.Must(t, err)
	return config
}
