// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// checkedTopology is a lab with one balancer and all services of the default topology, which have
// every encapsulation, IP version and protocol. All have health checks.
func checkedTopology() lab.Topology {
	all := lab.DefaultTopology().Services
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	t := topology(names...)
	t.Balancers = 1
	for i := range t.Services {
		s := &t.Services[i]
		s.Health = &desired.Health{Interval: 300 * time.Millisecond, Rise: 2, Fall: 2}
		if s.Protocol == desired.UDP {
			s.Health.UDP = &desired.UDPCheck{Request: "are you there?", Answer: "there"}
		} else {
			s.Health.HTTP = &desired.HTTPCheck{Path: "/healthz", Status: "200", Body: "ok"}
		}
		if s.Placement == desired.PlacementHunt { // the server accepts no connection by choice
			s.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32)}
		}
	}
	return t
}

// TestChecksTakeThePathOfPackets detaches the agent of a server whose application works. Then all
// services, whatever their encapsulation, find that the server fails. It also makes the VIPs local
// to the balancer, as some routing daemons require. Checks must still reach the servers.
func TestChecksTakeThePathOfPackets(t *testing.T) {
	t.Parallel()
	l := up(t, checkedTopology())
	lb := l.Node("lb1")
	requireChecked(t, l)

	requireNoticed(t, l)
	command(t, l, "lb1", "sysctl", "-w", "net.ipv4.conf.all.accept_local=1")
	must(t, ownVIPs(lb, l.Topology.Services))
	requireChecked(t, l)
	must(t, conditionsAre(t, lb, "s3", inspect.ServerUp))

	// The kernel forgets the routes of an interface that goes down.
	command(t, l, "lb1", "ip", "-6", "route", "flush", "table", "all", "via", "fe80::5e6c:6865:616c:7468")
	command(t, l, "lb1", "ip", "route", "flush", "table", "all", "via", "192.0.0.8")
	requireChecked(t, l)

	must(t, l.Process("lb1", "lb").Stop())
	for _, family := range []string{"-4", "-6"} {
		if rules := command(t, l, "lb1", "ip", family, "rule", "show", "priority", "94"); rules != "" {
			t.Errorf("after the end of the process: %s", rules)
		}
	}
}

// TestReversePathOfTwoArmedBalancers sets rp_filter on the interface towards the servers. The way to
// VIPs leads through the other interface. So the kernel drops the answers to checks of IPv4 VIPs.
// This is no fault of the servers, and log and status say what to do.
func TestReversePathOfTwoArmedBalancers(t *testing.T) {
	t.Parallel()
	topology := checkedTopology()
	topology.TwoArmed = true
	l := up(t, topology)
	lb := l.Node("lb1")
	requireChecked(t, l)
	command(t, l, "lb1", "ip", "route", "replace", "default", "dev", "eth1")
	command(t, l, "lb1", "sysctl", "-w", "net.ipv4.conf.eth0.rp_filter=1")
	const cure = "net.ipv4.conf.eth0.rp_filter to 2"
	eventually(t, func() error {
		status := command(t, l, "lb1", segue, "status", "--instance", lb.Instance(), "--interval", "0s")
		if !strings.Contains(status, "CANNOT CHECK SERVERS") || !strings.Contains(status, cure) {
			return fmt.Errorf("status does not name the sysctl:\n%s", status)
		}
		return nil
	})
	if log := readLog(t, l.Process("lb1", "lb")); !strings.Contains(log, cure) {
		t.Errorf("the log does not name the sysctl: %s", log)
	}
	must(t, conditionsAre(t, lb, "s3", inspect.ServerUp))
	command(t, l, "lb1", "sysctl", "-w", "net.ipv4.conf.eth0.rp_filter=2")
	requireChecked(t, l)
	requireNoticed(t, l)
}

// requireNoticed requires that the checks notice a server without an agent, and when the agent is
// back.
func requireNoticed(t *testing.T, l *lab.Lab) {
	t.Helper()
	lb := l.Node("lb1")
	must(t, l.Process("s3", "agent").Stop())
	command(t, l, "s3", segue, "agent", "detach", l.Node("s3").Instance())
	eventually(t, func() error { return conditionsAre(t, lb, "s3", inspect.ServerFailing) })
	must(t, conditionsAre(t, lb, "s1", inspect.ServerUp))
	must(t, l.Process("s3", "agent").Start(t.Context()))
	eventually(t, func() error { return conditionsAre(t, lb, "s3", inspect.ServerUp) })
}

// requireChecked requires that checks of all encapsulations reach a server, which no client uses.
func requireChecked(t *testing.T, l *lab.Lab) {
	t.Helper()
	before := packetCounts(t, l.Node("s3"))
	eventually(t, func() error {
		now := packetCounts(t, l.Node("s3")).since(t, before)
		for _, reason := range []string{
			"deliver_srv6_insert", "deliver_srv6_encap", "deliver_gre", "deliver_ipip",
		} {
			if now[reason] < 15 {
				return fmt.Errorf("%d packets of checks in %s", now[reason], reason)
			}
		}
		return conditionsAre(t, l.Node("lb1"), "s3", inspect.ServerUp)
	})
}

// conditionsAre returns an error unless a server has the condition in all services.
func conditionsAre(t *testing.T, n *lab.Node, name string, condition inspect.Condition) error {
	t.Helper()
	for _, service := range balancerStatus(t, n).Services {
		i := slices.IndexFunc(service.Servers, func(s *inspect.ServerState) bool { return s.Name == name })
		if now := service.Servers[i]; now.Condition != condition &&
			!(condition == inspect.ServerFailing && slices.Contains(now.Causes, condition)) {
			return fmt.Errorf("%s of %s is %s %v, want %s", name, service.Name, now.Condition, now.Causes, condition)
		}
	}
	return nil
}

// ownVIPs gives a node the VIPs of the services.
func ownVIPs(n *lab.Node, services []lab.Service) error {
	return n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, s := range services {
			bits := s.VIP.BitLen()
			address := &netlink.Addr{
				IPNet: &net.IPNet{IP: s.VIP.AsSlice(), Mask: net.CIDRMask(bits, bits)}, Flags: unix.IFA_F_NODAD,
			}
			if err := netlink.AddrReplace(lo, address); err != nil {
				return err
			}
		}
		return nil
	})
}
