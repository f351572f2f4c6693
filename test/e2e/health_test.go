// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestUnhealthyServersAreAvoided stops a server's nginx and starts it again. Then it stops the
// nginx of all servers.
func TestUnhealthyServersAreAvoided(t *testing.T) {
	t.Parallel()
	checked := topology(mixed...)
	for i := range checked.Services {
		checked.Services[i].Health = &desired.Health{
			HTTP:     &desired.HTTPCheck{Path: "/healthz"},
			Interval: 500 * time.Millisecond, Rise: 2, Fall: 2,
		}
	}
	l := up(t, checked)
	live := open(t, l, 100, l.Topology.Services...)
	c := newClient(l)
	must(t, l.Process("s1", "nginx").Stop())
	eventually(t, func() error { return c.spread(t.Context(), "s2", "s3") })
	must(t, c.spread(t.Context(), "s2", "s3"))
	live.rounds(t, 1)
	live.requireUnbroken(t, "s1")

	must(t, l.Process("s1", "nginx").Start(t.Context()))
	awaitServers(t, l)
	must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
	live.rounds(t, 1)
	live.requireUnbroken(t, "s1")
	requireNoDrops(t, l)
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, "nginx").Stop())
	}
	n := l.Node("lb1")
	eventually(t, func() error { return allFail(t, n, readLog(t, l.Process("lb1", "lb"))) })
}

// allFail requires that all servers are shown as failing, that all services still place flows, and
// that the log says so. Agents may also have said that their applications are refusing.
func allFail(t *testing.T, n *lab.Node, log string) error {
	t.Helper()
	status := balancerStatus(t, n)
	for _, service := range status.Services {
		if service.Buckets == 0 || !slices.Contains(service.Ignored, inspect.ServerFailing) {
			return fmt.Errorf("service %s ignores %v", service.Name, service.Ignored)
		}
		for _, server := range service.Servers {
			if server.Condition != inspect.ServerFailing {
				return fmt.Errorf("%s of %s is %s", server.Name, service.Name, server.Condition)
			}
		}
	}
	for _, text := range []string{ // the line is about one server or about several
		`level=WARN msg="servers? fails? (its|their) health checks"`,
		`level=INFO msg="servers? pass(es)? (its|their) health checks"`,
		`level=ERROR msg="ALL reachable servers of .* the checks are ignored"`,
	} {
		if !regexp.MustCompile(text).MatchString(log) {
			return fmt.Errorf("no %s in the log:\n%s", text, log)
		}
	}
	return nil
}
