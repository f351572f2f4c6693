// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// announcingFile is a balancer whose VIP is announced. The router does not answer.
const announcingFile = silentFile + `bgp:
  asn: 64600
  router-id: 192.0.2.11
  drain-delay: 0s
  peers: [{address: "2001:db8:1::1", asn: 64512}]
`

// silentFile is a balancer without BGP.
const silentFile = `node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
  - name: web
    vip: "2001:db8:80::1"
    port: 80
    protocol: tcp
    encapsulation: srv6-insert
    probe: false
    servers: [{name: s1, locator: "fd00:5:0:1::/64"}]
`

// TestDrainAtShutdown: segue-drain.service drains the balancer when the host shuts down, and at no other
// time. The balancer is not drained after the next boot, unless somebody had drained it.
func TestDrainAtShutdown(t *testing.T) {
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) { testDrainAtShutdown(t, suite) })
	}
}

func testDrainAtShutdown(t *testing.T, suite string) {
	testhost.NeedNamespaces(t)
	testhost.NeedCommand(t, "ethtool", "ethtool")
	s := &site{router: testhost.NewNamespace(t)}
	m := bootMachine(t, "lb", debianRoot(t, suite))
	s.connect(t, "to-lb", "2001:db8:1::1/64", m.net, "2001:db8:1::10/64")
	ip(t, m.net, "route", "add", "fd00:5:0:1::/64", "via", "2001:db8:1::1")
	m.dpkg(t, buildPackage(t, later))
	m.write(t, "etc/segue/lb.yaml", announcingFile, 0o644)
	m.must(t, "systemctl", "start", "segue-lb")
	m.must(t, "systemctl", "enable", "--now", "segue-drain")

	m.must(t, "systemctl", "restart", "segue-lb")
	m.dpkg(t, buildPackage(t, later))
	m.must(t, "systemctl", "restart", "segue-drain")
	m.requireSelf(t, canDrain)
	m.requireDrains(t, 0)

	m.powerOff(t)
	m.boot(t)
	m.requireDrains(t, 1)
	m.requireSelf(t, canDrain)

	m.must(t, "segue", "drain", "--self", "--instance", "lb")
	m.powerOff(t)
	m.boot(t)
	m.requireSelf(t, "the balancer is drained already")
	m.must(t, "systemctl", "disable", "--now", "segue-drain")
	m.must(t, "segue", "undrain", "--self", "--instance", "lb")
	m.requireDrains(t, 2)
	m.powerOff(t)
	m.boot(t)
	m.requireSelf(t, canDrain)
	m.requireDrains(t, 2)

	// Without BGP there is nothing to drain.
	m.write(t, "etc/segue/lb.yaml", silentFile, 0o644)
	m.must(t, "systemctl", "restart", "segue-lb")
	m.must(t, "systemctl", "enable", "--now", "segue-drain")
	m.powerOff(t)
	m.boot(t)
	m.requireDrains(t, 2)
	journal := m.must(t, "journalctl", "--quiet", "--merge", "--unit=segue-drain")
	if !strings.Contains(journal, "the balancer does not announce its VIPs") ||
		strings.Contains(journal, "Failed with result") {
		t.Errorf("the drain fails, or does not say why it does nothing:\n%s", journal)
	}
}

// canDrain is what a dry run of a drain says if the balancer announces its route.
const canDrain = "dry run: the balancer is drained: 1 route withdrawn"

// requireSelf waits until a drain of the balancer would do what is wanted.
func (m *machine) requireSelf(t *testing.T, want string) {
	t.Helper()
	eventually(t, func() error {
		out, err := m.run("segue", "drain", "--self", "--dry-run", "--instance", "lb")
		if err != nil || strings.TrimSpace(out) != want {
			return fmt.Errorf("a drain says %q (%v), want %q", out, err, want)
		}
		return nil
	})
}

// requireDrains waits until the journal tells of so many drains, in all boots.
func (m *machine) requireDrains(t *testing.T, want int) {
	t.Helper()
	eventually(t, func() error {
		journal := m.must(t, "journalctl", "--quiet", "--merge", "--output=cat", "--unit=segue-lb")
		if got := strings.Count(journal, `msg="route withdrawn: the balancer is drained"`); got != want {
			return fmt.Errorf("%d drains, want %d:\n%s", got, want, journal)
		}
		return nil
	})
}
