// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/desired"
)

// Proxy is an HTTP proxy that all balancers run in place of Segue. A proxy accepts the connections
// of clients itself, and opens connections of its own to the servers.
type Proxy struct {
	Program ProxyProgram `yaml:"program"`
	// Algorithm is the program's own name of the method by which it chooses servers.
	Algorithm string `yaml:"algorithm"`
	// Maxconn is the largest number of connections that a proxy has to a server (maxconn of
	// HAProxy). Further requests wait in the proxy. 0 stands for an equal share of the server's
	// workers, or no limit if these are not limited.
	Maxconn int `yaml:"maxconn,omitempty" range:"0 to 65536"`
}

// ProxyProgram is the program of a proxy.
type ProxyProgram string

// The programs, which are also the names of their executables and of Debian's packages.
const (
	ProxyHAProxy ProxyProgram = "haproxy"
	ProxyNginx   ProxyProgram = "nginx"
)

// ProxyRandom2 is HAProxy's algorithm that compares two random servers.
const ProxyRandom2 = "random(2)"

// proxyAlgorithms has the algorithms of each program that choose by the load of servers.
var proxyAlgorithms = map[ProxyProgram][]string{
	ProxyHAProxy: {"leastconn", ProxyRandom2},
	ProxyNginx:   {"least_conn"},
}

// RunsSegue tells whether the lab runs Segue's balancers and agents.
func (t Topology) RunsSegue() bool { return !t.Bare && !t.hasProxies() }

// hasProxies tells whether balancers run a proxy.
func (t Topology) hasProxies() bool { return t.Proxy != Proxy{} }

// proxyProblems calls fail for every problem of the section proxy.
func (t Topology) proxyProblems(fail func(path string, value any, format string, args ...any)) {
	p := t.Proxy
	if !t.hasProxies() {
		return
	}
	algorithms, known := proxyAlgorithms[p.Program]
	switch {
	case !known:
		fail("proxy.program", p.Program, "must be haproxy or nginx")
	case !slices.Contains(algorithms, p.Algorithm):
		fail("proxy.algorithm", p.Algorithm, "must be one of %v", algorithms)
	}
	if p.Maxconn > 0 && p.Program == ProxyNginx {
		fail("proxy.maxconn", p.Maxconn,
			"is not for nginx, which refuses requests beyond a limit, and has no queue for them")
	}
	switch {
	case t.Bare:
		fail("proxy.program", p.Program, "cannot be used with bare: the balancers run nothing")
	case t.Switches > 0:
		fail("proxy.program", p.Program, "cannot be used with switches, which Segue programs")
	case t.Edge.Router != "":
		fail("proxy.program", p.Program, "cannot be used with edge.router: a proxy does not announce VIPs")
	}
}

// proxyProblems calls fail if the service has settings that a proxy does not have.
func (s Service) proxyProblems(fail func(field string, value any, format string, args ...any)) {
	if s.Protocol != desired.TCP {
		fail("protocol", s.Protocol, "must be tcp, because proxies are for HTTP")
	}
	plain := Service{Name: s.Name, VIP: s.VIP, Port: s.Port, Protocol: s.Protocol}
	fields, own := reflect.ValueOf(plain), reflect.ValueOf(s)
	for i := range own.NumField() {
		value := own.Field(i).Interface()
		if !reflect.DeepEqual(value, fields.Field(i).Interface()) {
			name, _, _ := strings.Cut(own.Type().Field(i).Tag.Get("yaml"), ",")
			fail(name, value, "is a setting of Segue, which proxies do not have")
		}
	}
}

// proxy returns the process of a balancer that is a proxy. Both programs have a thread or a process
// for each core, as packets of Segue are handled on all cores.
func (n *Node) proxy() Process {
	p := n.lab.Topology.Proxy
	args := []string{"haproxy", "-db", "-f", n.configPath(p.config())}
	if p.Program == ProxyNginx {
		args = []string{
			"nginx", "-p", n.lab.path(n.Name), "-c", n.configPath(p.config()), "-e", "stderr",
		}
	}
	return Process{args: args, port: httpPort}
}

// config returns the template of the proxy's configuration.
func (p Proxy) config() string {
	if p.Program == ProxyNginx {
		return "nginx-proxy.conf"
	}
	return "haproxy.cfg"
}

// proxyFiles has the values that the configurations of proxies use.
type proxyFiles struct {
	Dir       string // the proxy's own directory
	Algorithm string
	Ports     []uint16
	Servers   []proxyServer
}

// proxyServer is a server of a proxy.
type proxyServer struct {
	Spec
	Maxconn int // 0: not limited
}

// proxyFiles returns the values for the node's proxy.
func (n *Node) proxyFiles() proxyFiles {
	t := &n.lab.Topology
	files := proxyFiles{n.lab.path(n.Name), t.Proxy.Algorithm, n.httpPorts(), nil}
	for _, spec := range t.specs(RoleServer) {
		maxconn := cmp.Or(t.Proxy.Maxconn, t.workersFor(spec))
		files.Servers = append(files.Servers, proxyServer{spec, maxconn})
	}
	return files
}

// writeProxy writes the configuration of the node's proxy, and makes its directory.
func (n *Node) writeProxy() error {
	return errors.Join(os.MkdirAll(n.lab.path(n.Name, "temp"), 0o755),
		n.writeConfig(n.lab.Topology.Proxy.config(), n.proxyFiles()))
}

// workersFor returns the number of workers of a server for each balancer, at least 1, or 0 if the
// number of workers is not limited. So the connections of all proxies find a worker each.
func (t Topology) workersFor(server Spec) int {
	workers := 0
	switch {
	case server.Application == Emulated:
		workers = t.Emulated.Of(server.Name).Workers
	case server.Application.runsApache():
		workers = t.Apache.Workers
	}
	if workers == 0 {
		return 0
	}
	return max(workers/t.Balancers, 1)
}
