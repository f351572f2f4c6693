// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/l2"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

var (
	l2Connections = flag.Int("l2.connections", 100, "how many connections TestL2 keeps open")
	l2All         = flag.Bool("l2.all", false, "have TestL2 also pull a cable, drain, and stop the store")
)

// l2Lease is the shortest lease, so that the test need not wait for long.
const l2Lease = 2 * time.Second

// TestL2: the edge router and the balancers share a link, and the router has no routes to
// balancers: it finds the VIPs by ARP and neighbour discovery. Balancers die, are cut off, are
// drained and return, and the store dies. VIPs move, and no connection breaks.
func TestL2(t *testing.T) {
	t.Parallel()
	s := &site{T: t, etcd: etcdtest.Start(t)}
	top := topology("http6-encap", "http4-encap")
	s.build(top, fmt.Sprintf("l2: {lease: %s, hold-down: 0s}\n", l2Lease), s.etcd)
	putOnLink(t, s.lab)
	s.awaitLeaders("lb1", "lb2")
	live := open(t, s.lab, *l2Connections, s.lab.Topology.Services...)
	suffer := func(what string, cause func(), leaders ...string) {
		t.Helper()
		began := time.Now()
		cause()
		s.awaitLeaders(leaders...)
		moved := time.Since(began)
		live.rounds(t, 1)
		live.requireUnbroken(t)
		t.Logf("| %s | VIPs moved after %.1f s | new connection after %.1f s |", what, moved.Seconds(),
			s.connect(began).Seconds())
	}
	lb1 := s.lab.Process("lb1", "lb")
	suffer("kill -9", func() { must(t, lb1.Kill()) }, "lb2")
	suffer("its return", func() { must(t, lb1.Start(t.Context())) }, "lb1", "lb2")
	suffer("power off", func() {
		s.toStore((*etcdtest.Proxy).Cut, "lb1")
		command(t, s.lab, "fabric", "ip", "link", "set", "lb1", "down")
	}, "lb2")
	suffer("its return", func() {
		command(t, s.lab, "fabric", "ip", "link", "set", "lb1", "up")
		s.toStore((*etcdtest.Proxy).Heal, "lb1")
	}, "lb1", "lb2")
	if !*l2All {
		return
	}
	suffer("a cable is pulled", func() {
		command(t, s.lab, "fabric", "ip", "link", "set", "lb2", "down")
	}, "lb1")
	suffer("its return", func() {
		command(t, s.lab, "fabric", "ip", "link", "set", "lb2", "up")
	}, "lb1", "lb2")
	suffer("drain", func() { s.run("lb1", "drain", "--self", "--wait=false") }, "lb2")
	suffer("undrain", func() { s.run("lb1", "undrain", "--self") }, "lb1", "lb2")
	suffer("the store dies", func() {
		s.etcd.Kill()
		s.awaitStatus("lb1", "OTHER BALANCERS UNKNOWN")
	}, "lb1", "lb2")
	suffer("its return", s.etcd.Run, "lb1", "lb2")
}

// putOnLink makes the edge router look for the VIPs on its link, where servers do not answer for
// them.
func putOnLink(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleServer) { // they have the VIPs as addresses, too
		command(t, l, name, "sysctl", "net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.all.arp_announce=2")
	}
	for _, service := range l.Topology.Services {
		command(t, l, "edge", "ip", "route", "replace", service.VIP.String(), "dev", "eth0")
	}
}

// TestKeepalived: with the configuration of docs/operate/l2.md, keepalived gives the VIP to one of
// two balancers, and to the other one when the first is cut off. No connection breaks.
func TestKeepalived(t *testing.T) {
	t.Parallel()
	testhost.NeedCommand(t, "keepalived", "keepalived")
	page, err := os.ReadFile("../../docs/operate/l2.md")
	must(t, err)
	l := up(t, topology("http4-encap"))
	vip := l.Topology.Services[0].VIP
	putOnLink(t, l)
	text := guideOf(t, l, string(page))("## keepalived beside Segue")
	for name, priority := range map[string]string{"lb1": "priority 100", "lb2": "priority 90"} {
		status := fmt.Sprintf(`"%s status --instance %s"`, segue, l.Node(name).Instance())
		own := strings.NewReplacer("203.0.113.10", vip.String(), "priority 100", priority,
			`"/usr/bin/segue status"`, status).Replace(text)
		startKeepalived(t, l.Node(name), own)
	}
	hasVIP := func(name string) {
		t.Helper()
		eventually(t, func() error {
			out, err := l.Node(name).Run(t.Context(), "ip", "-4", "address", "show", "dev", "eth0")
			if err == nil && !strings.Contains(out, vip.String()+"/32") {
				err = fmt.Errorf("%s does not have the vip: %s", name, out)
			}
			return err
		})
	}
	hasVIP("lb1")
	live := open(t, l, *l2Connections, l.Topology.Services...)
	restart(t, l.Process("lb1", "lb")) // the VIP is an address of its host now
	live.rounds(t, 1)
	command(t, l, "fabric", "ip", "link", "set", "lb1", "down")
	hasVIP("lb2")
	live.rounds(t, 1)
	live.requireUnbroken(t)
}

// startKeepalived runs keepalived on a node until the end of the test.
func startKeepalived(t *testing.T, n *lab.Node, config string) {
	t.Helper()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.WriteFile(path("conf"), []byte(config), 0o644))
	log, err := os.Create(path("log"))
	must(t, err)
	cmd := exec.Command("keepalived", "-n", "-l", "-f", path("conf"), "-p", path("pid"), "-r", path("vrrp.pid"))
	cmd.Stdout, cmd.Stderr = log, log
	must(t, n.Start(cmd))
	t.Cleanup(func() {
		must(t, cmd.Process.Signal(unix.SIGTERM))
		_ = cmd.Wait()
		_ = log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(path("log"))
			t.Logf("keepalived of %s:\n%s", n.Name, text)
		}
	})
}

// connect makes a new connection to each service. It returns the time since a moment.
func (s *site) connect(since time.Time) time.Duration {
	s.Helper()
	for _, service := range s.lab.Topology.Services {
		eventually(s.T, func() error {
			_, _, err := newClient(s.lab).get(s.Context(), service, "/1kB")
			return err
		})
	}
	return time.Since(since)
}

// awaitLeaders waits until the VIPs are answered by these balancers, each by one of them, and until
// the edge router sends packets there.
func (s *site) awaitLeaders(want ...string) {
	s.Helper()
	eventually(s.T, func() error {
		answers, macs := map[netip.Addr]string{}, map[string]string{}
		for _, name := range want {
			state, err := s.l2Status(name)
			if err != nil {
				return err
			}
			macs[name] = state.MAC
			answered := 0
			for _, v := range state.VIPs {
				if !v.Answers {
					continue
				}
				vip := netip.MustParseAddr(v.Address)
				if other := answers[vip]; other != "" {
					return fmt.Errorf("%s and %s answer for %s", other, name, vip)
				}
				answers[vip] = name
				answered++
			}
			if answered == 0 {
				return fmt.Errorf("%s answers for no VIP: %+v", name, state)
			}
		}
		for _, service := range s.lab.Topology.Services {
			leader := answers[service.VIP]
			if err := s.reaches(service.VIP, macs[leader]); err != nil {
				return err
			}
		}
		return nil
	})
}

// l2Status returns the state of a balancer's link.
func (s *site) l2Status(balancer string) (*l2.LinkState, error) {
	n := s.lab.Node(balancer)
	out, err := n.Run(s.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	if err != nil {
		return nil, err
	}
	var status struct {
		L2 *l2.LinkState `json:"l2"`
	}
	err = json.Unmarshal([]byte(out), &status)
	if err == nil && status.L2 == nil {
		err = fmt.Errorf("%s: no process answers", balancer)
	}
	return status.L2, err
}

// reaches returns an error unless the edge router sends the packets for a VIP to a MAC address. If
// the router has no entry, it asks when the next packet comes.
func (s *site) reaches(vip netip.Addr, mac string) error {
	if mac == "" {
		return fmt.Errorf("nobody answers for %s", vip)
	}
	entry, err := s.lab.Node("edge").Run(s.Context(), "ip", "neigh", "show", "to", vip.String(), "dev", "eth0")
	if err != nil {
		return err
	}
	if strings.Contains(entry, "lladdr") && !strings.Contains(entry, mac) {
		return fmt.Errorf("the edge router has %s, want %s", entry, mac)
	}
	return nil
}
