// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"flag"
	"fmt"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

var (
	switchRequests    = flag.Int("switch.requests", 24, "how many requests TestSwitch sends")
	switchConnections = flag.Int("switch.connections", 60,
		"how many connections TestConnectionsMoveBetweenSwitchAndBalancer keeps open")
	switchChanges = flag.Int("switch.changes", 6,
		"how often TestConnectionsMoveBetweenSwitchAndBalancer changes servers and balancers")
)

// behindSwitch returns a lab whose first balancer stands behind a switch. Its services hunt with the
// policy least, in each encapsulation that a switch has.
func behindSwitch(t *testing.T) *lab.Lab {
	t.Helper()
	testhost.NeedSwitch(t)
	services := huntingServices(4)
	for i := range services {
		s := &services[i]
		s.Persistence, s.BucketHash, s.Buckets = desired.PersistenceStateless, desired.BucketHashCRC32, 1024
	}
	topology := topology()
	topology.Switches, topology.Servers, topology.Services = 1, 5, services
	l := up(t, topology)
	must(t, l.SetNextHops("lb1"))
	awaitSwitch(t, l)
	return l
}

// awaitSwitch waits until the switch forwards all packets of a request to each service. Before, they
// pass to the host, because the switch does not have all entries yet.
func awaitSwitch(t *testing.T, l *lab.Lab) {
	t.Helper()
	c := newClient(l)
	eventually(t, func() error {
		before := forwardedByHost(t, l)
		for _, s := range l.Topology.Services {
			if _, err := c.visit(t.Context(), s, 1); err != nil {
				return err
			}
		}
		if n := forwardedByHost(t, l) - before; n > 0 {
			return fmt.Errorf("%d packets passed to the host behind the switch", n)
		}
		return nil
	})
}

// forwardedByHost returns how many packets the balancer behind the switch has forwarded itself.
func forwardedByHost(t *testing.T, l *lab.Lab) uint64 {
	t.Helper()
	return packetCounts(t, l.Node("lb1")).with("forward_").sum()
}

// switchEntries returns the number of entries that the balancer has written.
func switchEntries(t *testing.T, l *lab.Lab) string {
	t.Helper()
	return switchMetric(t, l, "entries")
}

// withoutCookie returns how many packets the switch has passed to its host because they had no cookie,
// such as resets without TCP options.
func withoutCookie(t *testing.T, l *lab.Lab) uint64 {
	t.Helper()
	n, err := strconv.ParseFloat(switchMetric(t, l, `packets_total{reason="pass_no_cookie"}`), 64)
	must(t, err)
	return uint64(n)
}

// switchMetric returns the value of one of the metrics segue_lb_switch_*.
func switchMetric(t *testing.T, l *lab.Lab, name string) string {
	t.Helper()
	metrics := command(t, l, "lb1", "curl", "-sS", "--fail", "http://127.0.0.1:9188/metrics")
	match := regexp.MustCompile(`(?m)^segue_lb_switch_` + regexp.QuoteMeta(name) + ` (.*)$`).FindStringSubmatch(metrics)
	if match == nil {
		t.Fatalf("there is no metric segue_lb_switch_%s in:\n%s", name, metrics)
	}
	return match[1]
}

// TestSwitch sends requests through a switch alone. Every byte is correct, and the balancer behind
// the switch forwards only packets without a cookie.
func TestSwitch(t *testing.T) {
	t.Parallel()
	l := behindSwitch(t)
	before, without := forwardedByHost(t, l), withoutCookie(t, l)
	c := newClient(l)
	services := l.Topology.Services
	var group errgroup.Group
	for i, s := range services {
		group.Go(func() error {
			for n := i; n < *switchRequests; n += len(services) {
				if err := c.transfer(t, s, n/len(services)); err != nil {
					return fmt.Errorf("request %d: %w", n, err)
				}
			}
			return nil
		})
	}
	must(t, group.Wait())
	must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
	// The switch counts a packet first.
	n := forwardedByHost(t, l) - before
	if without = withoutCookie(t, l) - without; n > without {
		t.Errorf("the host behind the switch forwarded %d packets, and only %d had no cookie", n, without)
	}
	// The answer to a probe may wait in the switch for so long that the next probe has begun.
	requireNoDropsBut(t, l, "drop_sender")
	in, out, err := l.SwitchFrames()
	must(t, err)
	t.Logf("%d requests: the switch sent %d frames, %d of them without a cookie to its host, and %d frames found a full queue",
		*switchRequests, out, without, in-out)
}

// transfer makes the nth request to a service: downloads and uploads in turn. The first eight of 400
// requests use each size of files twice, and the others the two smallest sizes.
func (c *client) transfer(t *testing.T, s lab.Service, n int) error {
	do, size := c.download, lab.Sizes[n/2%len(lab.Sizes)]
	if n%2 == 1 {
		do = c.upload
	}
	if n%400 >= 2*len(lab.Sizes) {
		size = lab.Sizes[n/2%2]
	}
	return do(t.Context(), s, size)
}

// TestConnectionsMoveBetweenSwitchAndBalancer keeps connections open while the edge router sends
// their packets through a switch, or an XDP balancer, or both. Meanwhile, servers come, are drained
// and leave. No connection is lost, because each column keeps its server in the history. Then the
// switch is killed, and starts without entries.
func TestConnectionsMoveBetweenSwitchAndBalancer(t *testing.T) {
	t.Parallel()
	l := behindSwitch(t)
	steps := []func(*desired.Balancer){
		func(cfg *desired.Balancer) {},
		func(cfg *desired.Balancer) { drain(cfg, "s1") },
		func(cfg *desired.Balancer) { drain(cfg, "s5") },
		func(cfg *desired.Balancer) { keepServers(cfg, "s1", "s2", "s3", "s4") },
	}
	last := len(steps) - 1
	hops := [][]string{{"lb2"}, {"lb1"}, {"lb2", "lb1"}, {"lb1", "lb2"}} // the order matters for ECMP
	before := switchEntries(t, l)
	reconfigure(t, l, steps[last])
	awaitServers(t, l)
	eventually(t, func() error {
		if switchEntries(t, l) == before {
			return errors.New("the switch still has the entries of s5")
		}
		return nil
	})
	must(t, l.SetNextHops(hops[last]...))
	rest := time.Duration(*switchConnections) * 4 * time.Millisecond // 250 requests a second: bmv2 is slow
	live := openResting(t, l, *switchConnections, rest, l.Topology.Services...)
	for change := range *switchChanges {
		reconfigure(t, l, steps[change%len(steps)])
		must(t, l.SetNextHops(hops[change%len(hops)]...))
		live.rounds(t, 1)
	}
	must(t, l.SetNextHops("lb1"))
	live.rounds(t, 1)
	passed := forwardedByHost(t, l)
	_, err := l.Restart(t.Context(), "sw1", nil, true)
	must(t, err)
	live.rounds(t, 1)
	live.requireUnbroken(t)
	_, out, err := l.SwitchFrames()
	must(t, err)
	t.Logf("%d connections survived %d changes; the switch sent %d frames, and the host behind it forwarded %d packets",
		len(live.connections), *switchChanges, out, passed)
}
