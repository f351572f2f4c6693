// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/lab"
)

// probed are services with probed agents: both placements, families and encapsulations.
var probed = []string{"http6-insert", "http4-encap", "hunt6-insert", "hunt4-encap"}

// conditions returns the conditions of a server in all services of a balancer, as status shows
// them.
func conditions(t *testing.T, n *lab.Node, server string) map[string]inspect.Condition {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var s inspect.Snapshot
	must(t, json.Unmarshal([]byte(out), &s))
	all := map[string]inspect.Condition{}
	for _, service := range s.Services {
		for _, state := range service.Servers {
			if state.Name == server {
				all[service.Name] = state.Condition
			}
		}
	}
	return all
}

// awaitCondition waits until all balancers show the condition for a server in some services.
func awaitCondition(t *testing.T, l *lab.Lab, server string, want inspect.Condition, services ...string) {
	t.Helper()
	eventually(t, func() error { return checkCondition(t, l, server, want, services...) })
}

// checkCondition returns an error unless all balancers show the condition for a server in some
// services.
func checkCondition(t *testing.T, l *lab.Lab, server string, want inspect.Condition, services ...string) error {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		got := conditions(t, l.Node(name), server)
		for _, service := range services {
			if got[service] != want {
				return fmt.Errorf("%s: %s is %s in %s, want %s", name, server, got[service], service, want)
			}
		}
	}
	return nil
}

// TestDetachedAgent detaches the agent of a running server. The host, the application and the path
// to the server work, but no connection would be served.
func TestDetachedAgent(t *testing.T) {
	t.Parallel()
	l := up(t, topology(probed...))
	c := newClient(l)
	awaitCondition(t, l, "s3", inspect.ServerUnchecked, probed...)
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))

	must(t, l.Process("s3", "agent").Stop())
	// The data path of s3 works without the process.
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))
	command(t, l, "s3", segue, "agent", "detach", l.Node("s3").Instance())
	awaitCondition(t, l, "s3", inspect.ServerSilent, probed...)
	must(t, c.spread(t.Context(), "s1", "s2"))
	for _, name := range nodes(l, lab.RoleBalancer) {
		eventually(t, func() error { // changes are collected before they are logged
			if log := readLog(t, l.Process(name, "lb")); !strings.Contains(log, "agents do not answer probes") {
				return fmt.Errorf("%s does not log that agents are silent: %s", name, log)
			}
			return nil
		})
	}

	must(t, l.Process("s3", "agent").Start(t.Context()))
	awaitCondition(t, l, "s3", inspect.ServerUnchecked, probed...)
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))
}

// TestKilledApplication kills the application of a server, while clients connect. The services have
// no health checks: only the agents know that the server refuses connections. Its connections from
// before are not the balancers' business.
func TestKilledApplication(t *testing.T) {
	t.Parallel()
	l := up(t, topology(probed...))
	c := newClient(l)
	awaitCondition(t, l, "s3", inspect.ServerUnchecked, probed...)
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))
	for range 2 {
		must(t, l.Process("s3", "nginx").Kill())
		stop := attempts(t, l)
		awaitCondition(t, l, "s3", inspect.ServerRefusing, probed...)
		stop()
		must(t, c.spread(t.Context(), "s1", "s2"))
		must(t, l.Process("s3", "nginx").Start(t.Context()))
		awaitCondition(t, l, "s3", inspect.ServerUnchecked, probed...)
		must(t, c.spread(t.Context(), "s1", "s2", "s3"))
	}
}

// TestServerWithoutWayToBalancers removes a server's routes to the balancers. The server answers
// probes and accepts connections. But its SYN-ACKs, which travel through the balancers, are lost.
// The other servers are busier. So all connections go to this server until the balancers notice. Its
// half-open connections count as a load. So they must end soon.
func TestServerWithoutWayToBalancers(t *testing.T) {
	t.Parallel()
	top := topology("hunt6-insert", "hunt4-encap")
	for i := range top.Services {
		// s1 and s2 can become unheard, too, while s3 gets all connections and does not answer.
		top.Services[i].SlowStart = new(time.Duration)
	}
	l := up(t, top)
	c := newClient(l)
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))
	busy := make([]*connection, 60*len(l.Topology.Services))
	each(t, busy, func(i int) (err error) {
		busy[i], err = dial(t.Context(), l, l.Topology.Services[i%len(l.Topology.Services)])
		return err
	})
	command(t, l, "s3", "sysctl", "-qw", "net.ipv4.tcp_synack_retries=0")
	for _, name := range nodes(l, lab.RoleBalancer) {
		command(t, l, "s3", "ip", "-6", "route", "add", "unreachable", l.Node(name).Locator.String(), "metric", "1")
	}
	for _, connection := range busy {
		if connection.server == "s3" {
			must(t, connection.conn.Close())
		}
	}
	for round := 1; ; round++ {
		stop := attempts(t, l)
		awaitCondition(t, l, "s3", inspect.ServerUnheard, "hunt6-insert", "hunt4-encap")
		stop()
		if err := c.spread(t.Context(), "s1", "s2"); err == nil {
			break
		} else if round == 3 ||
			checkCondition(t, l, "s3", inspect.ServerUnheard, "hunt6-insert", "hunt4-encap") == nil {
			t.Fatal(err)
		} // otherwise s3 has got another chance meanwhile
	}
	for _, connection := range busy {
		_ = connection.conn.Close() // those of s3 are closed already
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		command(t, l, "s3", "ip", "-6", "route", "del", "unreachable", l.Node(name).Locator.String(), "metric", "1")
	}
	awaitCondition(t, l, "s3", inspect.ServerUnchecked, "hunt6-insert", "hunt4-encap")
	must(t, c.spread(t.Context(), "s1", "s2", "s3"))
}

// attempts opens connections to every service, until the returned function is called or the test
// ends. Some of them may not be established soon.
func attempts(t *testing.T, l *lab.Lab) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var dials sync.WaitGroup
	for _, s := range l.Topology.Services {
		for range 20 {
			dials.Go(func() {
				for ctx.Err() == nil {
					soon, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
					if conn, err := l.Node("client").Dial(soon, "tcp", s.Address().String()); err == nil {
						_ = conn.Close()
					}
					<-soon.Done() // limits the rate
					cancel()
				}
			})
		}
	}
	stop = sync.OnceFunc(func() {
		cancel()
		dials.Wait()
	})
	t.Cleanup(stop)
	return stop
}
