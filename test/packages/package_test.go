// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// The network is that of README.md, with a routed link for each host:
//
//	lb, eth0 2001:db8:1::10 --- router and client --- 2001:db8:2::100, eth0, server
const (
	vip = "2001:db8:80::1"

	lbFile = `node: {interface: eth0, locator: "fd00:6c:0:1::/64", signal-key: /etc/segue/signal.key}
metrics: {listen: "127.0.0.1:9188"}
services:
  - &web
    name: web
    vip: "2001:db8:80::1"
    port: 80
    protocol: tcp
    encapsulation: srv6-insert
    health: {tcp: {}}
    servers: &servers [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:2::100"}]
  - name: hunt
    vip: "2001:db8:80::1"
    port: 81
    protocol: tcp
    encapsulation: srv6-insert
    placement: hunt
    health: {tcp: {}}
    servers: *servers
  - name: echo
    vip: "2001:db8:80::1"
    port: 9000
    protocol: udp
    encapsulation: srv6-encap
    health: {tcp: {port: 80}}
    servers: *servers
`
	agentFile = `node:
  interface: eth0
  locator: "fd00:5:0:1::/64"
  balancers: ["fd00:6c::/32"]
  signal-key: /etc/segue/signal.key
services:
  - {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, encapsulation: srv6-insert}
  - {name: hunt, vip: "2001:db8:80::1", port: 81, protocol: tcp, encapsulation: srv6-insert,
     accept: {policy: least}, load: {source: connections}}
  - {name: echo, vip: "2001:db8:80::1", port: 9000, protocol: udp, encapsulation: srv6-encap}
`
	key = "000102030405060708090a0b0c0d0e0f\n"
)

var tcpServices = []string{"[" + vip + "]:80", "[" + vip + "]:81"}

const udpService = "[" + vip + "]:9000"

// site has a balancer and a server, which are machines, and a router with the client.
type site struct {
	router     *testhost.Namespace
	lb, server *machine
}

// TestPackage follows a balancer and a server from the installation of the package, through an
// upgrade under load, to the purge.
func TestPackage(t *testing.T) {
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) { testPackage(t, suite) })
	}
}

func testPackage(t *testing.T, suite string) {
	testhost.NeedNamespaces(t)
	testhost.NeedAgent(t)
	testhost.NeedCgroup2(t)
	testhost.NeedCommand(t, "ethtool", "ethtool")
	root := debianRoot(t, suite)
	s := newSite(t, root)
	before := map[*machine][]string{s.lb: s.lb.files(t), s.server: s.server.files(t)}

	s.install(t, buildEarlier(t))
	s.requireSandbox(t)
	s.requireLittleExposure(t)
	echoServers(t, s.server.net, []string{"[::]:80", "[::]:81"}, udpService)
	load := startLoad(t, s.router, tcpServices, udpService)
	load.more(t)

	s.testReload(t)
	load.more(t)
	s.restart(t)
	load.more(t)
	s.requireNoneToSpare(t)
	load.more(t)
	s.upgrade(t, load)
	load.requireNoLoss(t)

	s.startByRoot(t)
	s.refuseStrangersPins(t)
	s.removeAndReturn(t)
	s.remove(t, before)
}

func newSite(t *testing.T, root string) *site {
	t.Helper()
	s := &site{router: testhost.NewNamespace(t)}
	s.lb = bootMachine(t, "lb", root)
	s.server = bootMachine(t, "server", root)
	s.connect(t, "to-lb", "2001:db8:1::1/64", s.lb.net, "2001:db8:1::10/64")
	s.connect(t, "to-server", "2001:db8:2::1/64", s.server.net, "2001:db8:2::100/64")
	must(t, s.router.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	}))
	for _, route := range [][]string{
		{vip + "/128", "2001:db8:1::10"}, {"fd00:6c:0:1::/64", "2001:db8:1::10"}, {"fd00:5:0:1::/64", "2001:db8:2::100"},
	} {
		ip(t, s.router, "route", "add", route[0], "via", route[1])
	}
	ip(t, s.lb.net, "route", "add", "default", "via", "2001:db8:1::1")
	ip(t, s.lb.net, "route", "add", "fd00:5:0:1::/64", "via", "2001:db8:1::1")
	ip(t, s.server.net, "route", "add", "default", "via", "2001:db8:2::1")
	return s
}

// connect connects the router and a host. The router's end has the settings that XDP on veth needs
// (docs/research/lab.md).
func (s *site) connect(t *testing.T, name, address string, host *testhost.Namespace, hostAddress string) {
	t.Helper()
	testhost.Connect(t, s.router, name, []netip.Prefix{netip.MustParsePrefix(address)},
		host, "eth0", []netip.Prefix{netip.MustParsePrefix(hostAddress)})
	ip(t, s.router, "link", "set", name, "mtu", "1600")
	ip(t, host, "link", "set", "eth0", "mtu", "1600")
	must(t, s.router.Do(func() error {
		out, err := exec.CommandContext(t.Context(), "ethtool", "-K", name, "gro", "on", "tx", "off").CombinedOutput()
		if err != nil {
			return fmt.Errorf("ethtool %s: %w\n%s", name, err, out)
		}
		return nil
	}))
}

// install installs the package, writes configurations, and starts the units.
func (s *site) install(t *testing.T, file string) {
	t.Helper()
	// The processes whose files exist start with the installation.
	must(t, os.Mkdir(filepath.Join(s.server.root, "etc/segue"), 0o750))
	s.server.write(t, "etc/segue/agent.yaml", strings.Replace(agentFile, "  signal-key: /etc/segue/signal.key\n", "", 1), 0o644)
	for _, m := range []*machine{s.lb, s.server} {
		m.dpkg(t, file)
		for _, role := range []string{"lb", "agent"} {
			_, err := m.run("systemctl", "is-active", "segue-"+role)
			if isActive := err == nil; isActive != (m == s.server && role == "agent") {
				t.Errorf("%s: after the installation, segue-%s is active: %t", m.name, role, isActive)
			}
		}
		m.write(t, "etc/segue/signal.key", key, 0o400)
		m.must(t, "chown", "segue", "/etc/segue/signal.key")
	}
	s.lb.write(t, "etc/segue/lb.yaml", lbFile, 0o644)
	s.server.write(t, "etc/segue/agent.yaml", agentFile, 0o644)
	s.server.must(t, "systemctl", "restart", "segue-agent")
	s.lb.must(t, "systemctl", "start", "segue-lb")
	if out := s.lb.must(t, "systemctl", "is-enabled", "segue-lb"); out != "enabled\n" {
		t.Errorf("segue-lb is %s", out)
	}
}

// dpkg installs a package.
func (m *machine) dpkg(t *testing.T, file string) {
	t.Helper()
	run(t, "cp", file, filepath.Join(m.root, "var/tmp/package.deb"))
	out := m.must(t, "dpkg", "--install", "/var/tmp/package.deb")
	if strings.Contains(out, "segue:") {
		t.Errorf("%s: the installation reports a problem:\n%s", m.name, out)
	}
}

// units returns the machines with their units.
func (s *site) units() map[*machine]string {
	return map[*machine]string{s.lb: "segue-lb", s.server: "segue-agent"}
}

// pid returns the process of a unit, as this machine numbers it.
func (m *machine) pid(t *testing.T, unit string) string {
	t.Helper()
	return strings.TrimSpace(m.must(t, "systemctl", "show", "--property=MainPID", "--value", unit))
}

// requireSandbox checks that the processes have the user and the capabilities of their units, and
// no others.
func (s *site) requireSandbox(t *testing.T) {
	t.Helper()
	for m, unit := range s.units() {
		status := m.must(t, "cat", "/proc/"+m.pid(t, unit)+"/status")
		want := capabilityMask(t, unitCapabilities(t, unit))
		for _, set := range []string{"CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if got := statusField(status, set); got != want {
				t.Errorf("%s: %s is %s, want %s", unit, set, got, want)
			}
		}
		user := strings.Fields(m.must(t, "getent", "passwd", "segue"))
		id := strings.Split(user[0], ":")[2]
		if uids := strings.Fields(statusField(status, "Uid")); !slices.Equal(uids, []string{id, id, id, id}) || id == "0" {
			t.Errorf("%s: user IDs %v, want %s", unit, uids, id)
		}
		if statusField(status, "NoNewPrivs") != "1" || statusField(status, "Seccomp") != "2" {
			t.Errorf("%s: not restricted:\n%s", unit, status)
		}
	}
}

// requireNoneToSpare takes each capability from the units in turn: a start without it must fail, and
// the data path must work on.
func (s *site) requireNoneToSpare(t *testing.T) {
	t.Helper()
	for m, unit := range s.units() {
		all := unitCapabilities(t, unit)
		dir := filepath.Join("etc/systemd/system", unit+".service.d")
		must(t, os.MkdirAll(filepath.Join(m.root, dir), 0o755))
		for i, name := range all {
			if name == "CAP_NET_RAW" {
				continue // only needed where the driver has no native XDP
			}
			others := strings.Join(slices.Concat(all[:i], all[i+1:]), " ")
			m.write(t, filepath.Join(dir, "less.conf"), fmt.Sprintf("[Service]\n"+
				"AmbientCapabilities=\nAmbientCapabilities=%[1]s\n"+
				"CapabilityBoundingSet=\nCapabilityBoundingSet=%[1]s\nRestart=no\n", others), 0o644)
			m.must(t, "systemctl", "daemon-reload")
			if _, err := m.run("systemctl", "restart", unit); err == nil {
				t.Errorf("%s starts without %s", unit, name)
			}
		}
		must(t, os.RemoveAll(filepath.Join(m.root, dir)))
		m.must(t, "systemctl", "daemon-reload")
		m.must(t, "systemctl", "restart", unit)
	}
}

// mostExposure is the highest exposure that `systemd-analyze security` may find, in tenths: 0 is none
// and 100 the highest.
var mostExposure = map[string]string{"segue-lb": "21", "segue-agent": "19", "segue-pins": "19", "segue-drain": "13"}

// requireLittleExposure lets systemd judge the units.
func (s *site) requireLittleExposure(t *testing.T) {
	t.Helper()
	for unit, most := range mostExposure {
		if out, err := s.lb.run("systemd-analyze", "--no-pager", "security", "--threshold="+most, unit); err != nil {
			t.Errorf("%s: %v", unit, err)
		} else {
			t.Log(lastLines([]byte(out), 1))
		}
		s.lb.must(t, "systemd-analyze", "--man=no", "verify", "/usr/lib/systemd/system/"+unit+".service")
	}
}

func statusField(status, name string) string {
	match := regexp.MustCompile(`(?m)^` + name + `:\s*(.*)$`).FindStringSubmatch(status)
	if match == nil {
		return ""
	}
	return match[1]
}

// unitCapabilities returns the capabilities that a unit gives its process.
func unitCapabilities(t *testing.T, unit string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(project, "packaging/systemd", unit+".service"))
	must(t, err)
	match := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`).FindStringSubmatch(string(text))
	if match == nil {
		t.Fatalf("%s has no CapabilityBoundingSet", unit)
	}
	return strings.Fields(match[1])
}

var capabilities = map[string]int{
	"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN,
	"CAP_PERFMON": unix.CAP_PERFMON, "CAP_BPF": unix.CAP_BPF,
}

func capabilityMask(t *testing.T, names []string) string {
	t.Helper()
	mask := uint64(0)
	for _, name := range names {
		bit, known := capabilities[name]
		if !known {
			t.Fatalf("unexpected capability %s", name)
		}
		mask |= 1 << bit
	}
	return fmt.Sprintf("%016x", mask)
}

// testReload reloads a valid file, an invalid one, and one whose change needs a restart.
func (s *site) testReload(t *testing.T) {
	t.Helper()
	journal := func() string {
		return s.lb.must(t, "journalctl", "--quiet", "--output=cat", "--unit=segue-lb")
	}
	// reload returns the error of a reload whose reason, or whose success, appears in the journal.
	reload := func(content, log string) error {
		t.Helper()
		s.lb.write(t, "etc/segue/lb.yaml", content, 0o644)
		before := strings.Count(journal(), log)
		_, err := s.lb.run("systemctl", "reload", "segue-lb")
		eventually(t, func() error { // systemd writes the journal some time later
			if now := journal(); strings.Count(now, log) == before {
				return fmt.Errorf("no %q in the journal after the reload (%w):\n%s", log, err, now)
			}
			return nil
		})
		return err
	}
	for _, bad := range []struct{ from, to, why string }{
		{"port: 9000", "port: 0", "services[2].port"},
		{"interface: eth0", "interface: eth0, seed: 7", `node.seed: a change needs a restart`},
	} {
		if err := reload(strings.Replace(lbFile, bad.from, bad.to, 1), bad.why); err == nil {
			t.Errorf("a reload of %q succeeds", bad.to)
		}
	}
	must(t, reload(strings.Replace(lbFile, "health: {tcp: {port: 80}}", "health: {tcp: {port: 81}}", 1), "msg=reloaded"))
	must(t, reload(lbFile, "msg=reloaded"))
}

// restart restarts the units, also many times in a short time. A killed process is started again.
func (s *site) restart(t *testing.T) {
	t.Helper()
	for range 7 {
		s.server.must(t, "systemctl", "restart", "segue-agent")
	}
	for m, unit := range s.units() {
		m.must(t, "systemctl", "restart", unit)
		before := m.pid(t, unit)
		m.must(t, "systemctl", "kill", "--kill-who=main", "--signal=KILL", unit)
		eventually(t, func() error {
			out, err := m.run("systemctl", "is-active", unit)
			if now := m.pid(t, unit); err != nil || now == before || now == "0" {
				return fmt.Errorf("%s after a kill: %s, process %s: %w", unit, out, now, err)
			}
			return nil
		})
	}
}

// upgrade installs the next version under load. An invalid file keeps the earlier process running.
func (s *site) upgrade(t *testing.T, load *load) {
	t.Helper()
	for m, unit := range s.units() {
		before := m.pid(t, unit)
		m.dpkg(t, buildPackage(t, later))
		if out := m.must(t, "segue", "--version"); out != "segue version "+later+"\n" {
			t.Errorf("%s after the upgrade: %s", m.name, out)
		}
		after := m.pid(t, unit)
		if after == before || after == "0" {
			t.Errorf("%s: process %s before the upgrade, %s after", unit, before, after)
		}
		runs := m.must(t, "stat", "--dereference", "--format=%i", "/proc/"+after+"/exe")
		if installed := m.must(t, "stat", "--format=%i", "/usr/bin/segue"); runs != installed {
			t.Errorf("%s does not run the installed file", unit)
		}
		load.more(t)
	}
	for path, want := range map[string]string{"etc/segue/lb.yaml": lbFile, "etc/segue/signal.key": key} {
		got, err := os.ReadFile(filepath.Join(s.lb.root, path))
		must(t, err)
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("the upgrade has changed %s, -want +got:\n%s", path, diff)
		}
	}
	s.requireSandbox(t)
	s.refusedUpgrade(t)
	load.more(t)
}

// refusedUpgrade installs a version for which the file is not valid.
func (s *site) refusedUpgrade(t *testing.T) {
	t.Helper()
	before := s.lb.pid(t, "segue-lb")
	s.lb.write(t, "etc/segue/lb.yaml", "invalid", 0o644)
	out := s.lb.must(t, "dpkg", "--install", "/var/tmp/package.deb")
	if !strings.Contains(out, "segue-lb.service keeps running the earlier version") {
		t.Errorf("an upgrade with an invalid file says:\n%s", out)
	}
	if after := s.lb.pid(t, "segue-lb"); after != before {
		t.Errorf("process %s before an upgrade with an invalid file, %s after", before, after)
	}
	s.lb.write(t, "etc/segue/lb.yaml", lbFile, 0o644)
}

// startByRoot starts processes by hand, as root, after their units have run.
func (s *site) startByRoot(t *testing.T) {
	t.Helper()
	for m, unit := range s.units() {
		role := strings.TrimPrefix(unit, "segue-")
		m.must(t, "systemctl", "stop", unit)
		byHand := []string{"/usr/bin/segue", role, "-c", "/etc/segue/" + role + ".yaml"}
		out, err := m.run(byHand...)
		for _, cure := range []string{"belongs to the user segue", "systemctl start " + unit, "chown -R root: /sys/fs/bpf/segue"} {
			if err == nil || !strings.Contains(out, cure) {
				t.Errorf("%s started by root after its unit (%v) does not say %q:\n%s", role, err, cure, out)
			}
		}
		m.must(t, "chown", "-R", "root:", "/sys/fs/bpf/segue")
		m.must(t, "install", "-m", "0400", "/etc/segue/signal.key", "/etc/segue/root.key")
		m.must(t, "sed", "-i", "s,/signal.key,/root.key,", "/etc/segue/"+role+".yaml")
		// systemd tells when the process is ready.
		m.must(t, append([]string{"systemd-run", "--quiet", "--unit=by-hand", "--service-type=notify", "--"}, byHand...)...)
		m.must(t, "systemctl", "stop", "by-hand")
		m.must(t, "sed", "-i", "s,/root.key,/signal.key,", "/etc/segue/"+role+".yaml")
		m.must(t, "rm", "/etc/segue/root.key")
		m.must(t, "systemctl", "start", unit)
	}
	s.requireSandbox(t)
}

// refuseStrangersPins starts the units while the directory of the pins, with all that is in it, belongs
// to another user. The start fails, and the directory stays as it is.
func (s *site) refuseStrangersPins(t *testing.T) {
	t.Helper()
	const dir = "/sys/fs/bpf/segue"
	for m, unit := range s.units() {
		role := strings.TrimPrefix(unit, "segue-")
		m.must(t, "systemctl", "stop", unit)
		m.must(t, "segue", role, "detach", role)
		m.must(t, "mkdir", "-p", dir+"/"+role)
		m.must(t, "chown", "-R", "nobody", dir)
		if _, err := m.run("systemctl", "start", unit); err == nil {
			t.Errorf("%s starts with pins of another user", unit)
		}
		m.must(t, "systemctl", "stop", unit) // systemd would try again
		if out := m.must(t, "stat", "--format=%U", dir, dir+"/"+role); out != "nobody\nnobody\n" {
			t.Errorf("%s: after a start, %s belongs to %s", m.name, dir, out)
		}
		m.must(t, "rm", "-r", dir)
		m.must(t, "systemctl", "start", unit)
	}
}

// removeAndReturn removes the package and installs it again: the processes run as before. A unit
// that the administrator has disabled does not start.
func (s *site) removeAndReturn(t *testing.T) {
	t.Helper()
	s.lb.requireState(t, "segue-drain", "disabled", false)
	s.lb.must(t, "systemctl", "enable", "--now", "segue-drain")
	for m, unit := range s.units() {
		for _, enabled := range []bool{true, false} {
			if !enabled {
				m.must(t, "systemctl", "disable", unit)
			}
			m.must(t, "dpkg", "--remove", "segue")
			m.dpkg(t, buildPackage(t, later))
			state, _ := m.run("systemctl", "is-enabled", unit)
			_, err := m.run("systemctl", "is-active", unit)
			if isActive := err == nil; isActive != enabled || (state == "enabled\n") != enabled {
				t.Errorf("%s after a removal and an installation: %s, active: %t; it was enabled: %t", unit, state, isActive, enabled)
			}
		}
		m.must(t, "systemctl", "enable", "--now", unit)
	}
	s.lb.requireState(t, "segue-drain", "enabled", true)
	s.server.requireState(t, "segue-drain", "disabled", false)
}

// requireState requires that a unit is enabled or disabled, and active or not.
func (m *machine) requireState(t *testing.T, unit, enabled string, active bool) {
	t.Helper()
	state, _ := m.run("systemctl", "is-enabled", unit)
	if _, err := m.run("systemctl", "is-active", unit); (err == nil) != active || !strings.Contains(state, enabled+"\n") {
		t.Errorf("%s: %s is %q, active: %t; want %s, %t", m.name, unit, state, err == nil, enabled, active)
	}
}

// remove removes and purges the package. Only the files of before remain.
func (s *site) remove(t *testing.T, before map[*machine][]string) {
	t.Helper()
	for m, unit := range s.units() {
		m.must(t, "dpkg", "--remove", "segue")
		if out, err := m.run("systemctl", "is-active", unit); err == nil {
			t.Errorf("%s is %s after the removal", unit, out)
		}
		if out, _ := m.run("ls", "/sys/fs/bpf/segue"); !strings.Contains(out, "No such file") {
			t.Errorf("%s: pins remain: %s", m.name, out)
		}
		requireBare(t, m)
		m.must(t, "test", "-e", "/etc/segue/signal.key")
		m.must(t, "dpkg", "--purge", "segue")
		for _, path := range []string{"/run/segue", "/var/lib/segue", "/etc/segue"} {
			if _, err := m.run("test", "!", "-e", path); err != nil {
				t.Errorf("%s: %s remains", m.name, path)
			}
		}
		if out, err := m.run("getent", "passwd", "segue"); err == nil {
			t.Errorf("%s: the user remains: %s", m.name, out)
		}
		if diff := cmp.Diff(before[m], m.files(t)); diff != "" {
			t.Errorf("%s: files before the installation and after the purge, -before +after:\n%s", m.name, diff)
		}
	}
}

// requireBare requires that nothing of Segue is on the interfaces of the machine.
func requireBare(t *testing.T, m *machine) {
	t.Helper()
	must(t, m.net.Do(func() error {
		for _, args := range [][]string{
			{"ip", "-details", "link", "show", "eth0"}, {"ip", "addr", "show", "lo"}, {"ip", "neigh", "show"},
			{"tc", "filter", "show", "dev", "eth0", "egress"}, {"tc", "filter", "show", "dev", "eth0", "ingress"},
		} {
			out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%v: %w\n%s", args, err, out)
			}
			for _, trace := range []string{"xdp", vip, "managed", "bpf"} {
				if strings.Contains(string(out), trace) {
					t.Errorf("%s: %s shows %s:\n%s", m.name, strings.Join(args, " "), trace, out)
				}
			}
		}
		return nil
	}))
}
