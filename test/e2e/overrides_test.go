// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/inspect"
)

// TestOverrides drains a server by an override. The server stays drained when the balancer starts
// again, until the override is removed. A file with an error changes nothing. A start goes without an
// override with an error, and says so.
func TestOverrides(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	n := l.Node("lb1")
	cfg := n.BalancerConfig()
	path := cfg.OverridesFile()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	write := func(text string) { t.Helper(); must(t, os.WriteFile(path, []byte(text), 0o644)) }
	require := func(condition inspect.Condition, overrides string) {
		t.Helper()
		eventually(t, func() error {
			s := balancerStatus(t, n)
			if got := fmt.Sprint(s.Configuration.Overrides); got != overrides {
				return fmt.Errorf("overrides %s, want %s", got, overrides)
			}
			if got := s.Services[0].Servers[0]; got.Name != "s1" || got.Condition != condition {
				return fmt.Errorf("server %s is %s, want %s", got.Name, got.Condition, condition)
			}
			return nil
		})
	}
	require(inspect.ServerUnchecked, "[]")
	write("overrides:\n- {service: http6-encap, server: s1, set: {drained: true}}\n")
	reload(t, l, "lb1")
	require(inspect.ServerDrained, "[http6-encap/s1 (drained)]")

	balancer := l.Process("lb1", "lb")
	must(t, balancer.Stop())
	must(t, balancer.Start(t.Context()))
	require(inspect.ServerDrained, "[http6-encap/s1 (drained)]")

	write("overrides:\n- {service: http6-encap, server: s1}\n")
	must(t, balancer.Reload(t.Context()))
	requireRefused(t, n, filepath.Join("/run/segue/lab", l.Name, "conf", "lb1-balancer.yaml"), path+":2: overrides[0]: must have add, set or remove")
	require(inspect.ServerDrained, "[http6-encap/s1 (drained)]")

	must(t, balancer.Stop())
	write("overrides:\n- {service: http6-encap, server: s1, set: {drained: true}}\n" +
		"- {service: http6-encap, server: s2, set: {address: \"2001:db8::1\"}}\n")
	died := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".1") // of a process that died during a change
	must(t, os.WriteFile(died, nil, 0o644))
	must(t, balancer.Start(t.Context()))
	require(inspect.ServerDrained, "[http6-encap/s1 (drained)]")
	if _, err := os.Stat(died); !os.IsNotExist(err) {
		t.Errorf("%s stays: %v", died, err)
	}
	if out := command(t, l, "lb1", segue, "status"); !strings.Contains(out, "\nOVERRIDES ARE LEFT OUT") ||
		!strings.Contains(out, "\n  http6-encap/s2 (address 2001:db8::1): "+path+":3: http6-encap/s2.address") {
		t.Errorf("status does not show the override that was left out:\n%s", out)
	}
	reload(t, l, "lb1") // leaves it out, too

	must(t, os.Remove(path))
	reload(t, l, "lb1")
	require(inspect.ServerUnchecked, "[]")
}
