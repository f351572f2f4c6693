// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab"
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
	l := shared(t, topology(probed...))
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

// awaitProbes waits until a server's agent has answered a probe of every service. A balancer probes
// every service once before it probes one again.
func awaitProbes(t *testing.T, l *lab.Lab, server string) {
	t.Helper()
	want := uint64(len(nodes(l, lab.RoleBalancer)) * len(l.Topology.Services))
	eventually(t, func() error {
		if answered := packetCounts(t, l.Node(server))["answer_probe"]; answered < want {
			return fmt.Errorf("%s has answered %d probes, want %d", server, answered, want)
		}
		return nil
	})
}

// TestKilledApplication kills the application of a server, while clients connect. The services have
// no health checks: only the agents know that the server refuses connections, if a probe has found
// its application before. Its connections from before are not the balancers' business.
func TestKilledApplication(t *testing.T) {
	t.Parallel()
	l := shared(t, topology(probed...))
	c := newClient(l)
	awaitProbes(t, l, "s3")
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
//
// Before that, a client sends SYNs that no server answers, and all servers stay. After that, the
// server has no route to the others: it answers, but what it passes on is lost.
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
	sendBrokenSYNs(t, l, 6*time.Second, l.Topology.Services...)
	for _, server := range nodes(l, lab.RoleServer) {
		must(t, checkCondition(t, l, server, inspect.ServerUnchecked, "hunt6-insert", "hunt4-encap"))
	}
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

	for _, peer := range []string{"s1", "s2"} {
		command(t, l, "s3", "ip", "-6", "route", "add", "unreachable", l.Node(peer).Locator.String(), "metric", "1")
	}
	stop := attempts(t, l)
	awaitCondition(t, l, "s3", inspect.ServerUnheard, "hunt6-insert", "hunt4-encap")
	stop()
	must(t, c.spread(t.Context(), "s1", "s2"))
	for _, peer := range []string{"s1", "s2"} {
		command(t, l, "s3", "ip", "-6", "route", "del", "unreachable", l.Node(peer).Locator.String(), "metric", "1")
	}
	awaitCondition(t, l, "s3", inspect.ServerUnchecked, "hunt6-insert", "hunt4-encap")
}

// sendBrokenSYNs sends SYNs with a wrong checksum to some services for some time: 1000 a second to
// each, from one client. Balancers offer them, and the stacks of servers drop them.
func sendBrokenSYNs(t *testing.T, l *lab.Lab, lasts time.Duration, services ...lab.Service) {
	t.Helper()
	var sockets []net.Conn
	for _, s := range services {
		network := "ip6:tcp"
		if s.VIP.Is4() {
			network = "ip4:tcp"
		}
		must(t, l.Node("client").Do(func() error {
			conn, err := net.Dial(network, s.VIP.String())
			sockets = append(sockets, conn)
			return err
		}))
	}
	syn := make([]byte, 20) // the checksum is 0, and the kernel leaves it so
	syn[12], syn[13] = 5<<4, 0x02
	const batch = 10
	pace := time.NewTicker(batch * time.Second / 1000)
	defer pace.Stop()
	number := uint16(0)
	for end := time.Now().Add(lasts); time.Now().Before(end); <-pace.C {
		for range batch {
			number++
			for i, conn := range sockets {
				binary.BigEndian.PutUint16(syn, 1024+number%60000)
				binary.BigEndian.PutUint16(syn[2:], services[i].Port.Number())
				_, err := conn.Write(syn)
				must(t, err)
			}
		}
	}
	for _, conn := range sockets {
		must(t, conn.Close())
	}
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
