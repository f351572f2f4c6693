// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"cmp"
	"embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/desired"
)

// processes returns the processes that run on the node, in accordance with its role. The comment of
// Lab.Process lists them. Fabric and client have none.
func (n *Node) processes(o Options) []*Process {
	var list []*Process
	add := func(name string, p Process) {
		p.Name, p.node = name, n
		list = append(list, &p)
	}
	switch {
	case n.Role == RoleServer:
		add(string(n.Application), Process{
			args: n.applicationCommand(o.Laboratory), port: httpPort, daemon: n.Application == Emulated,
			limited: n.cpus() > 0,
		})
		if n.Application == MediaWiki {
			add("mariadb", n.mariaDB())
			add("memcached", n.memcached())
		}
		if ports := n.lab.Topology.ports(desired.UDP); len(ports) > 0 {
			args := []string{o.Laboratory, "lab", "udp-echo", n.Name}
			for _, port := range ports {
				args = append(args, strconv.Itoa(int(port)))
			}
			add("echo", Process{args: args, daemon: true})
		}
		if n.lab.Topology.RunsSegue() {
			args := []string{o.Segue, "agent", "-c", n.configPath("agent.yaml")}
			add("agent", Process{args: args, daemon: true})
		}
	case n.Role == RoleSwitch:
		add("bmv2", n.bmv2())
	case n.Role == RoleEdge && n.lab.Topology.Edge.Router != "":
		router := n.router()
		add(router.Name, router)
	case n.Role == RoleBalancer && n.lab.Topology.hasProxies():
		add(string(n.lab.Topology.Proxy.Program), n.proxy())
	case n.Role == RoleBalancer && n.lab.Topology.RunsSegue():
		args := []string{o.Segue, "lb", "-c", n.configPath("balancer.yaml")}
		add("lb", Process{args: args, daemon: true})
		if n.lab.Topology.Edge.BFD {
			add("bfd", n.bfd())
		}
	}
	return list
}

// applicationCommand returns the command that runs the node's HTTP server in the foreground.
// laboratory is the segue-lab executable.
func (n *Node) applicationCommand(laboratory string) []string {
	switch n.Application {
	case Emulated:
		return n.emulatedCommand(laboratory)
	case Apache, MediaWiki:
		return n.apacheCommand()
	}
	return []string{
		"nginx", "-p", n.lab.path(n.Name), "-c", n.configPath("nginx.conf"), "-e", "stderr",
	}
}

// configPath returns the path of the node's configuration file that is written by a template.
func (n *Node) configPath(template string) string {
	return n.lab.path("conf", n.Name+"-"+template)
}

// Instance returns the instance name of the node's balancer or agent.
func (n *Node) Instance() string { return Instance(n.lab.Name, n.Name) }

// httpPort is a port on which every HTTP server listens, in addition to the ports of the services.
const httpPort = 80

// Addresses at which balancers and agents serve metrics, inside their namespaces.
const (
	balancerMetrics = "127.0.0.1:9188"
	agentMetrics    = "127.0.0.1:9189"
)

// BalancerConfig returns the configuration that Up gives the balancer on the node. It has all
// services, each with all servers.
func (n *Node) BalancerConfig() desired.Balancer {
	c := desired.Balancer{
		Node: desired.BalancerNode{
			Instance:  n.Instance(),
			Name:      n.Name,
			Peers:     n.lab.balancers(),
			Interface: uplink,
			Locator:   n.Locator,
			State:     n.lab.path("state"),
			Limits:    desired.Limits{Hints: desired.DefaultHints},
			Switch:    n.switchConfig(),
		},
		Metrics: desired.Metrics{Listen: balancerMetrics},
		BGP:     n.bgp(),
	}
	c.Node.Underlay = n.lab.Topology.underlay()
	if n.hasOuter() {
		c.Node.Interface, c.Node.Inside = outer, uplink
	}
	if n.lab.Topology.usesAny(desired.GRE, desired.IPIP) {
		c.Node.Addresses = n.addresses()
	}
	if n.lab.Topology.polls() {
		c.Node.SignalKey = n.lab.keyPath()
	}
	for _, s := range n.lab.Topology.Services {
		service := desired.Service{
			Name: s.Name, VIP: s.VIP, Port: s.Port, Protocol: s.Protocol, Encapsulation: s.Encapsulation,
			Placement: s.Placement, Persistence: s.Persistence, Selection: s.Selection,
			Infer: s.Infer, Candidates: s.Candidates, History: s.History,
			Generations: s.Generations, Buckets: s.Buckets, BucketHash: s.BucketHash, Affinity: s.Affinity,
			Health:    s.Health,
			OnFailure: s.OnFailure, OnDrain: s.OnDrain, AllFailed: s.AllFailed, SlowStart: s.SlowStart,
		}
		for _, spec := range n.lab.Topology.specs(RoleServer) {
			service.Servers = append(service.Servers, server(spec, s))
		}
		c.Services = append(c.Services, service)
	}
	return c
}

// server returns the item of a server in a balancer's configuration of the service. The balancer
// sends packets to its Locator or to its Address, depending on the encapsulation. Health checks and
// polls connect to its Host, which is not set if the service has no checks and no polls.
func server(spec Spec, s Service) desired.Server {
	server := desired.Server{Name: spec.Name}
	switch {
	case s.Encapsulation == desired.SRv6Insert || s.Encapsulation == desired.SRv6Encap:
		server.Locator = spec.Locator
	case s.VIP.Is4():
		server.Address = spec.IPv4
	default:
		server.Address = spec.IPv6
	}
	switch {
	case s.Health == nil && !s.Placement.Polls(): // nothing connects to the server's host
	case s.VIP.Is4():
		server.Host = spec.IPv4
	default:
		server.Host = spec.IPv6
	}
	return server
}

// AgentConfig returns the configuration that Up gives the agent on the node. It has all services.
func (n *Node) AgentConfig() desired.Agent {
	c := desired.Agent{
		Node: desired.AgentNode{
			Instance:  n.Instance(),
			Interface: uplink,
			Locator:   n.Locator,
			State:     n.lab.path("state"),
		},
		Metrics: desired.Metrics{Listen: agentMetrics},
	}
	c.Node.Underlay = n.lab.Topology.underlay()
	if n.lab.Topology.usesAny(desired.GRE, desired.IPIP) {
		c.Node.Addresses = n.addresses()
	}
	if n.lab.Topology.polls() {
		c.Node.SignalKey = n.lab.keyPath()
		c.Poll.Listen = fmt.Sprintf("[::]:%d", desired.DefaultPollPort)
	}
	for _, s := range n.lab.Topology.Services {
		c.Services = append(c.Services, n.agentService(s))
	}
	if extra := n.lab.Topology.extraListBytes(); extra > 0 {
		c.Node.MTU = n.lab.Topology.MTU.Fabric - extra
	}
	return c
}

// agentService returns the configuration of a service for the node's agent. If the service has an
// exception for this node, the exception's settings replace those of the service. If the path or
// the capacity of a load source is not set, it is that of the node's application.
func (n *Node) agentService(s Service) desired.AgentService {
	service := desired.AgentService{
		Name: s.Name, VIP: s.VIP, Port: s.Port, Protocol: s.Protocol, Encapsulation: s.Encapsulation,
		Accept: s.Accept, Load: s.Load, NotLocal: s.NotLocal,
	}
	for _, e := range s.Exceptions {
		if e.Server != n.Name {
			continue
		}
		service.Accept = cmp.Or(e.Accept, service.Accept)
		service.Load = cmp.Or(e.Load, service.Load)
		service.NotLocal = cmp.Or(e.NotLocal, service.NotLocal)
	}
	switch service.Load.Kind {
	case desired.LoadApache:
		service.Load = n.apacheLoad(service.Load)
	case desired.LoadSharedMemory:
		service.Load.Path = cmp.Or(service.Load.Path, n.LoadFile())
		service.Load.Capacity = cmp.Or(service.Load.Capacity, n.capacity(service.Accept))
	case desired.LoadSharedMap:
		service.Load.Path = cmp.Or(service.Load.Path, n.LoadPin())
		service.Load.Capacity = cmp.Or(service.Load.Capacity, n.capacity(service.Accept))
	}
	return service
}

// capacity returns the capacity of the node's application for an agent's configuration. 0 means the
// capacity that the application reports. An emulated server reports the number of its workers, of
// which some may wait for a core. Policy least needs the number of cores instead: for it, a server
// has free capacity only while a core is free.
func (n *Node) capacity(accept desired.Accept) uint32 {
	policy := cmp.Or(accept.Policy, desired.DefaultAcceptPolicy)
	if n.Application != Emulated || policy != desired.AcceptLeast {
		return 0
	}
	return uint32(n.lab.Topology.Emulated.Of(n.Name).Cores)
}

// underlay returns the underlay of a fabric without IPv6; nil: the fabric has IPv6.
func (t Topology) underlay() *desired.Underlay {
	if !t.IPv4Only {
		return nil
	}
	return &desired.Underlay{Port: desired.DefaultUnderlayPort, Sources: []netip.Prefix{fabricNet4}}
}

// usesAny tells whether a service uses one of the encapsulations.
func (t Topology) usesAny(encapsulations ...desired.Encapsulation) bool {
	return slices.ContainsFunc(t.Services, func(s Service) bool {
		return slices.Contains(encapsulations, s.Encapsulation)
	})
}

//go:embed templates
var templateFiles embed.FS

// templates are the templates of configuration files. They leave out fields that are not set,
// because a configuration file with the zero value of a field often means something else than one
// without the field.
var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"quote": strconv.Quote, "attributes": attributeLines,
}).ParseFS(templateFiles, "templates/*"))

// attributeLines returns the lines of a balancer's configuration file with attributes of BGP routes.
// The argument is a desired.RouteAttributes, or a pointer to one.
func attributeLines(indent string, of any) (text string, err error) {
	a, ok := of.(desired.RouteAttributes)
	if p, isPointer := of.(*desired.RouteAttributes); isPointer {
		a, ok = *p, true
	}
	if !ok {
		return "", fmt.Errorf("attributes of a %T", of)
	}
	for _, field := range []struct {
		name  string
		value *uint32
	}{{"prepend", a.Prepend}, {"med", a.MED}, {"local-pref", a.LocalPref}} {
		if field.value != nil {
			text += fmt.Sprintf("\n%s%s: %d", indent, field.name, *field.value)
		}
	}
	if len(a.Communities) > 0 {
		var quoted []string
		for _, c := range a.Communities {
			quoted = append(quoted, strconv.Quote(string(c)))
		}
		text += fmt.Sprintf("\n%scommunities: [%s]", indent, strings.Join(quoted, ", "))
	}
	return text, nil
}

// WriteBalancerConfig replaces the balancer's configuration file. The balancer reads the file at
// its start, and in Process.Reload.
func (n *Node) WriteBalancerConfig(c desired.Balancer) error {
	return n.writeConfig("balancer.yaml", c)
}

// WriteAgentConfig replaces the agent's configuration file. The agent reads the file at its start,
// and in Process.Reload.
func (n *Node) WriteAgentConfig(c desired.Agent) error {
	return n.writeConfig("agent.yaml", c)
}

// writeConfig writes the configuration file that a template renders for the node.
func (n *Node) writeConfig(template string, data any) error {
	text, err := render(template, data)
	if err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	return atomicfile.Write(n.configPath(template), text, 0o644)
}

// render returns the text of a template for the data.
func render(template string, data any) ([]byte, error) {
	var text bytes.Buffer
	if err := templates.ExecuteTemplate(&text, template, data); err != nil {
		return nil, fmt.Errorf("write %s: %w", template, err)
	}
	return text.Bytes(), nil
}

// writeFiles writes all files that the lab's processes read, except for the wikis (prepareWikis).
func (l *Lab) writeFiles() error {
	if err := errors.Join(l.writeContent(), l.writeKey()); err != nil {
		return err
	}
	for _, n := range l.Nodes {
		var err error
		switch {
		case n.Role == RoleEdge:
			err = n.writeRouter()
		case n.Role == RoleBalancer && l.Topology.hasProxies():
			err = n.writeProxy()
		case n.Role == RoleBalancer:
			err = errors.Join(n.WriteBalancerConfig(n.BalancerConfig()), n.writeBFD())
		case n.Role == RoleServer:
			err = errors.Join(n.WriteAgentConfig(n.AgentConfig()), n.writeApplicationConfig())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// keyPath returns the file with the key that balancers and agents share. Agents answer only polls
// of balancers that have the key.
func (l *Lab) keyPath() string { return l.path("signal-key") }

// writeKey writes a random key to keyPath, if balancers poll agents.
func (l *Lab) writeKey() error {
	if !l.Topology.polls() {
		return nil
	}
	key := fmt.Appendf(nil, "%016x%016x\n", rand.Uint64(), rand.Uint64())
	return os.WriteFile(l.keyPath(), key, 0o600)
}

// writeApplicationConfig writes the files of the node's HTTP server, and makes its directories.
func (n *Node) writeApplicationConfig() error {
	upload := n.lab.path(n.Name, "upload")
	for _, dir := range []string{n.lab.path(n.Name, "temp"), upload} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	switch n.Application {
	case Emulated:
		return nil // its command line has everything
	case Apache:
		return n.writeApacheConfig()
	case MediaWiki:
		return errors.Join(n.writeApacheConfig(), n.writeMediaWikiConfig())
	}
	return n.writeConfig("nginx.conf", n.nginxFiles())
}

// nginxFiles has the values that the template nginx.conf uses.
type nginxFiles struct {
	serverFiles
	loadModule
}

func (n *Node) nginxFiles() nginxFiles {
	return nginxFiles{
		n.serverFiles(), n.loadModule("ngx_http_segue_load_module.so", "/usr/lib/nginx/modules"),
	}
}

// serverFiles has the values that the configurations of all HTTP servers use.
type serverFiles struct {
	Node    string
	Dir     string // the server's own directory
	Content string // the directory with the lab's files
	Ports   []uint16
}

// serverFiles returns the values for the node's HTTP server.
func (n *Node) serverFiles() serverFiles {
	return serverFiles{n.Name, n.lab.path(n.Name), n.lab.path("content"), n.httpPorts()}
}

// httpPorts returns the ports on which the node's HTTP server listens, in ascending order.
func (n *Node) httpPorts() []uint16 {
	ports := append(n.lab.Topology.ports(desired.TCP), httpPort)
	slices.Sort(ports)
	return slices.Compact(ports)
}

// Size is an amount of data, in bytes.
type Size int

// Sizes are the sizes of the files on every server. The name of a file is its size, such as 100kB.
var Sizes = []Size{1e3, 100e3, 1e6, 10e6}

// String returns the size in decimal units, such as 100kB.
func (s Size) String() string {
	switch {
	case s >= 1e6 && s%1e6 == 0:
		return strconv.Itoa(int(s/1e6)) + "MB"
	case s >= 1e3 && s%1e3 == 0:
		return strconv.Itoa(int(s/1e3)) + "kB"
	}
	return strconv.Itoa(int(s)) + "B"
}

// Content returns the first bytes of a fixed sequence of random bytes.
func Content(size Size) []byte {
	content := make([]byte, size)
	rand.NewChaCha8([32]byte{}).Read(content) // never fails
	return content
}

// writeContent writes a file of each size, which all servers serve.
func (l *Lab) writeContent() error {
	if err := os.Mkdir(l.path("content"), 0o755); err != nil {
		return err
	}
	for _, size := range Sizes {
		if err := os.WriteFile(l.path("content", size.String()), Content(size), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// UploadPath returns the file in which the node's HTTP server stores a PUT to /upload/NAME.
func (n *Node) UploadPath(name string) string {
	return n.lab.path(n.Name, "upload", filepath.Base(name))
}
