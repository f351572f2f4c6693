// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// modulesAgent is the configuration of an agent with two services, of Apache and of nginx.
const modulesAgent = `
node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services:
  - {name: apache, vip: "2001:db8:80::1", port: 80, protocol: tcp,
     load: {source: shared-map, path: /sys/fs/bpf/segue/@loads/apache2}}
  - {name: nginx, vip: "2001:db8:80::1", port: 8080, protocol: tcp,
     load: {source: shared-map, path: /sys/fs/bpf/segue/@loads/nginx}}
`

// buildModules builds the packages of both modules, and returns their paths.
func buildModules(t *testing.T) (apache, nginx string) {
	t.Helper()
	testhost.NeedCommand(t, "apxs", "apache2-dev")
	testhost.NeedCommand(t, "dh_nginx", "nginx-dev")
	for _, script := range []string{"modules/build.sh", "packaging/modules.sh"} {
		cmd := exec.Command(script)
		cmd.Dir = project
		cmd.Env = append(os.Environ(), "VERSION="+later, "SOURCE_DATE_EPOCH=1700000000")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	path := func(name string) string {
		return filepath.Join(project, "bin", fmt.Sprintf("%s_%s_%s.deb", name, later, runtime.GOARCH))
	}
	return path("libapache2-mod-segue-load"), path("libnginx-mod-segue-load")
}

// release returns the name of this machine's release of Debian. It skips the test on other
// distributions: nginx loads only modules that were built for its version.
func release(t *testing.T) string {
	text, err := os.ReadFile("/etc/os-release")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if name, found := strings.CutPrefix(line, "VERSION_CODENAME="); found && aptMirror() != "" {
			return strings.TrimSpace(name)
		}
	}
	t.Skip("needs Debian")
	return ""
}

// TestModulePackages installs the packages of the modules on a host with Debian's Apache and nginx.
// Their load reaches the agent, which is not root, from the installation on, also after a restart of
// the host. Both servers work without the modules when the packages are removed.
func TestModulePackages(t *testing.T) {
	testhost.NeedNamespaces(t)
	testhost.NeedAgent(t)
	testhost.NeedCgroup2(t)
	apache, nginx := buildModules(t)
	suite := release(t)
	m := bootMachine(t, "server", debianRootWith(t, suite, suite+"-servers", "apache2", "nginx"))
	router := testhost.NewNamespace(t)
	testhost.Connect(t, router, "to-server", []netip.Prefix{netip.MustParsePrefix("2001:db8:2::1/64")},
		m.net, "eth0", []netip.Prefix{netip.MustParsePrefix("2001:db8:2::100/64")})
	m.write(t, "etc/nginx/sites-available/default", "server { listen 8080; root /var/www/html; }\n", 0o644)
	m.must(t, "systemctl", "restart", "apache2", "nginx")
	must(t, os.MkdirAll(filepath.Join(m.root, "etc/segue"), 0o750))
	m.write(t, "etc/segue/agent.yaml", modulesAgent, 0o644)
	m.dpkg(t, buildPackage(t, later))
	m.dpkg(t, apache)
	m.dpkg(t, nginx)
	m.write(t, "etc/nginx/conf.d/segue.conf", "segue_load /sys/fs/bpf/segue/@loads/nginx 5;\n", 0o644)
	m.must(t, "systemctl", "restart", "nginx")
	m.expectLoads(t, "0 of 150", "0 of 5")
	must(t, m.net.Do(func() error {
		conn, err := net.Dial("tcp", "127.0.0.1:80")
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err = conn.Write([]byte("GET / HTTP/1.1\r\n")); err != nil { // occupies a worker
			return err
		}
		m.expectLoads(t, "1 of 150", "0 of 5")
		return nil
	}))
	m.expectLoads(t, "0 of 150", "0 of 5")

	m.powerOff(t)
	m.boot(t)
	m.expectLoads(t, "0 of 150", "0 of 5")

	m.must(t, "dpkg", "--remove", "libapache2-mod-segue-load")
	m.expectLoads(t, "STALE", "0 of 5")
	must(t, os.Remove(filepath.Join(m.root, "etc/nginx/conf.d/segue.conf")))
	m.must(t, "dpkg", "--remove", "libnginx-mod-segue-load")
	for _, unit := range []string{"apache2", "nginx"} {
		m.must(t, "systemctl", "restart", unit)
		m.requireState(t, unit, "enabled", true)
	}
	m.expectLoads(t, "STALE", "STALE")
	m.must(t, "dpkg", "--purge", "libapache2-mod-segue-load", "libnginx-mod-segue-load", "segue")
	if out, _ := m.run("ls", "/sys/fs/bpf/segue"); !strings.Contains(out, "No such file") {
		t.Errorf("pins remain: %s", out)
	}
}

// expectLoads waits until the status of the agent shows the loads of both services.
func (m *machine) expectLoads(t *testing.T, apache, nginx string) {
	t.Helper()
	testhost.Eventually(t, func() error {
		out, err := m.run("segue", "status")
		for service, load := range map[string]string{"apache": apache, "nginx": nginx} {
			row := ""
			for line := range strings.Lines(out) {
				if strings.HasPrefix(strings.TrimSpace(line), service+" ") {
					row = line
				}
			}
			if !strings.Contains(row, load) {
				return fmt.Errorf("%s: no load %q in the status (%v):\n%s", service, load, err, out)
			}
		}
		return nil
	})
}
