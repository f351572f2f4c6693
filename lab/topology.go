// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Topology describes a lab. All other properties of the lab, such as the addresses of links, follow
// from its topology by the rules in plan.go.
type Topology struct {
	// Name distinguishes the labs on a machine. It has 1 to 12 lower-case letters and digits.
	Name      string `yaml:"name"`
	Balancers int    `yaml:"balancers"` // 1 to 16
	// Switches is the number of balancers, from lb1 on, that stand behind a software switch, which
	// balances as the data path does (docs/understand/p4.md).
	Switches int `yaml:"switches,omitempty"`
	Servers  int `yaml:"servers"` // 1 to 128
	MTU      MTU `yaml:"mtu"`
	// TwoArmed gives each balancer a separate link to the edge router, on which clients' packets
	// arrive. The segment routing domain then begins at the balancer, and contains the fabric.
	TwoArmed bool `yaml:"two-armed"`
	// IPv4Only leaves IPv6 out of the fabric. The services then have IPv4 VIPs, and srv6-encap uses an
	// underlay.
	IPv4Only bool `yaml:"ipv4-only,omitempty"`
	// Bare leaves out the daemons of balancers and agents. The lab then has the network and the
	// servers' applications, but nothing forwards packets from VIPs to servers.
	Bare bool `yaml:"bare"`
	// Proxy lets the balancers run an HTTP proxy instead of Segue. Then no agents run.
	Proxy  Proxy      `yaml:"proxy,omitempty"`
	Edge   Edge       `yaml:"edge,omitempty"`
	Impair Impairment `yaml:"impair"`
	// Applications are the applications of the servers in turn: s1 runs the first, s2 the second.
	Applications []Application `yaml:"applications"`
	// Emulated describes the servers with the application emulated.
	Emulated EmulatedServers `yaml:"emulated"`
	// Apache describes the servers with the application apache or mediawiki.
	Apache ApacheServers `yaml:"apache"`
	// MediaWiki describes the servers with the application mediawiki.
	MediaWiki MediaWikiServers `yaml:"mediawiki"`
	Services  []Service        `yaml:"services"`
}

// Application is an HTTP server.
type Application string

// The applications that servers can run. All of them serve the lab's files, and accept uploads. The
// application emulated emulates its processors (package application). MediaWiki runs on Apache.
const (
	Nginx     Application = "nginx"
	Apache    Application = "apache"
	Emulated  Application = "emulated"
	MediaWiki Application = "mediawiki"
)

var applications = []Application{Nginx, Apache, Emulated, MediaWiki}

// MTU holds the sizes of the largest packets, in bytes.
type MTU struct {
	// Client is the MTU between client and edge router: from 1280 to the MTU of the fabric.
	Client int `yaml:"client"`
	// Fabric is the MTU among edge router, balancers and servers. It is at most MaxFabricMTU. It
	// is at least 1280 plus the space for the longest list of servers (extraListBytes).
	Fabric int `yaml:"fabric"`
}

// MaxFabricMTU is the largest MTU with which veth runs XDP natively, in bytes. A packet, its
// headroom and the kernel's skb_shared_info must fit a page.
const MaxFabricMTU = 3498

// Service is a service as the client sees it. All servers belong to it.
type Service struct {
	Name          string                `yaml:"name"`
	VIP           netip.Addr            `yaml:"vip"`
	Port          desired.Port          `yaml:"port"`
	Protocol      desired.Protocol      `yaml:"protocol"`
	Encapsulation desired.Encapsulation `yaml:"encapsulation"`
	// The fields from Placement to Affinity are the same as in a balancer's configuration, with its
	// defaults.
	Placement   desired.Placement   `yaml:"placement,omitempty"`
	Persistence desired.Persistence `yaml:"persistence,omitempty"`
	Selection   desired.Selection   `yaml:"selection,omitempty"`
	Infer       *desired.Infer      `yaml:"infer,omitempty"`
	Candidates  int                 `yaml:"candidates,omitempty"`
	Generations int                 `yaml:"generations,omitempty"`
	History     int                 `yaml:"history,omitempty"`
	Buckets     int                 `yaml:"buckets,omitempty"`
	BucketHash  desired.BucketHash  `yaml:"bucket-hash,omitempty"`
	Affinity    *desired.Affinity   `yaml:"affinity,omitempty"`
	// Health is the same as in a balancer's configuration, with its defaults. With via: host,
	// checks connect to the servers' addresses on the fabric, in the VIP's family.
	Health *desired.Health `yaml:"health,omitempty"`
	// OnFailure, OnDrain, AllFailed and SlowStart are the same as in a balancer's configuration,
	// with its defaults.
	OnFailure desired.OnFailure `yaml:"on-failure,omitempty"`
	OnDrain   desired.OnDrain   `yaml:"on-drain,omitempty"`
	AllFailed desired.AllFailed `yaml:"all-failed,omitempty"`
	SlowStart *time.Duration    `yaml:"slow-start,omitempty"`
	// Accept, Load and NotLocal are the same as in an agent's configuration, with its defaults.
	// Load has further defaults: the source apache-scoreboard has the path and the number of
	// workers of the lab's Apache, and the sources shared-memory and shared-map have the path of the
	// server's application. With shared-map, Apache and nginx use Segue's modules.
	Accept   desired.Accept   `yaml:"accept,omitempty"`
	Load     desired.Source   `yaml:"load,omitempty"`
	NotLocal desired.NotLocal `yaml:"not-local,omitempty"`
	// Exceptions change settings of the service on single servers.
	Exceptions []Exception `yaml:"exceptions,omitempty"`
}

// Exception replaces settings of a service on one server. Fields that are not set keep the
// service's settings.
type Exception struct {
	Server   string           `yaml:"server"`
	Accept   desired.Accept   `yaml:"accept,omitempty"`
	Load     desired.Source   `yaml:"load,omitempty"`
	NotLocal desired.NotLocal `yaml:"not-local,omitempty"`
}

// Address returns the address and port that clients connect to.
func (s Service) Address() netip.AddrPort { return netip.AddrPortFrom(s.VIP, s.Port.Number()) }

//go:embed default.yaml
var defaultTopology []byte

// DefaultTopology returns the built-in topology, without a check: a test shows that it is valid.
func DefaultTopology() Topology {
	var t Topology
	unchecked := func() fieldpath.Errors { return nil }
	if err := config.Decode(defaultTopology, &t, unchecked); err != nil {
		panic(fmt.Sprintf("lab: the built-in topology: %v", err))
	}
	return t
}

// ParseTopology reads a topology in YAML. Missing fields get the values of the built-in topology. A
// list replaces the built-in list as a whole. File names in the topology must be absolute. The
// error is of type fieldpath.Errors.
func ParseTopology(text []byte) (Topology, error) { return ParseTopologyIn(text, "") }

// ParseTopologyIn does the same as ParseTopology. File names in the topology are relative to dir,
// unless dir is empty.
func ParseTopologyIn(text []byte, dir string) (Topology, error) {
	t := DefaultTopology()
	err := t.parse(text, dir)
	return t, err
}

// parse sets the fields that a text in YAML has, and checks the whole topology. Fields that the
// text does not have keep their values. File names in the text are relative to dir, unless dir is
// empty.
func (t *Topology) parse(text []byte, dir string) error {
	return config.Decode(text, t, func() fieldpath.Errors {
		t.Emulated.resolve(dir)
		return t.problems()
	})
}

// LoadTopology reads the topology in a file.
func LoadTopology(path string) (Topology, error) {
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return Topology{}, err
	}
	return config.Load(path, func(text []byte) (Topology, error) { return ParseTopologyIn(text, dir) })
}

// labName matches the names of labs. A lab's name is part of the names of its namespaces and
// instances. It has no hyphen: in these names, a hyphen follows the lab's name.
var labName = regexp.MustCompile(`^[a-z0-9]{1,12}$`)

const nameForm = "must be 1 to 12 lower-case letters and digits"

// ValidateName returns an error unless a lab can have the name.
func ValidateName(name string) error {
	if !labName.MatchString(name) {
		return fmt.Errorf("name %q: %s", name, nameForm)
	}
	return nil
}

// Validate returns all problems of the topology as an error of type fieldpath.Errors, each with the
// path and the value of its field.
func (t Topology) Validate() error {
	if problems := t.problems(); len(problems) > 0 {
		return problems
	}
	return nil
}

// problems lists all problems of the topology. If it finds none, and the lab runs Segue, it returns
// the errors that the daemons would report about their configurations (daemonErrors).
func (t Topology) problems() fieldpath.Errors {
	var errs fieldpath.Errors
	fail := func(path string, value any, format string, args ...any) {
		errs = append(errs, &fieldpath.Error{
			Path: path, Value: fmt.Sprint(value), Problem: fmt.Sprintf(format, args...),
		})
	}
	inRange := func(path string, value, low, high int) {
		if value < low || value > high {
			fail(path, value, "must be %d to %d", low, high)
		}
	}
	if !labName.MatchString(t.Name) {
		fail("name", t.Name, nameForm)
	}
	inRange("balancers", t.Balancers, 1, maxBalancers)
	t.switchProblems(fail)
	t.proxyProblems(fail)
	switch router := t.Edge.Router; {
	case router == "":
		if t.Edge.BFD {
			fail("edge.bfd", true, "needs edge.router")
		}
	case !slices.Contains(routers, router):
		fail("edge.router", router, "must be one of %v", routers)
	case t.Bare:
		fail("edge.router", router, "cannot be used with bare: there are no balancers that announce VIPs")
	}
	if t.IPv4Only {
		t.ipv4Problems(fail)
	}
	inRange("servers", t.Servers, 1, maxServers)
	before := len(errs)
	inRange("mtu.client", t.MTU.Client, 1280, MaxFabricMTU)
	inRange("mtu.fabric", t.MTU.Fabric, 1280+t.extraListBytes(), MaxFabricMTU)
	bothInRange := len(errs) == before
	if bothInRange && t.MTU.Fabric < t.MTU.Client {
		fail("mtu", "", "the fabric's MTU, %d, is smaller than the client's MTU, %d: "+
			"the edge router could not forward the client's largest packets",
			t.MTU.Fabric, t.MTU.Client)
	}
	errs = append(errs, t.Impair.problems(t)...)
	for i, application := range t.Applications {
		if !slices.Contains(applications, application) {
			fail(fmt.Sprintf("applications[%d]", i), application, "must be one of %v", applications)
		}
	}
	if len(t.Applications) == 0 {
		fail("applications", "", "at least one is required")
	}
	t.emulatedProblems(fail)
	t.Apache.problems(fail)
	for i, x := range t.Apache.Exceptions {
		if !t.hasServer(x.Server) {
			fail(fmt.Sprintf("apache.exceptions[%d].server", i), x.Server, "is not a server of the lab")
		}
	}
	t.MediaWiki.problems(fail)
	t.serviceProblems(fail)
	if len(errs) == 0 && t.RunsSegue() {
		errs = t.daemonErrors()
	}
	return errs
}

// ipv4Problems calls fail for every part of the topology that needs IPv6 on the fabric.
func (t Topology) ipv4Problems(fail func(path string, value any, format string, args ...any)) {
	if t.TwoArmed {
		fail("two-armed", true, "cannot be used with ipv4-only")
	}
	if t.Edge.Router != "" {
		fail("edge.router", t.Edge.Router, "cannot be used with ipv4-only: it has a session over IPv6")
	}
	for i, s := range t.Services {
		if s.VIP.Is6() {
			fail(fmt.Sprintf("services[%d].vip", i), s.VIP, "must be IPv4 with ipv4-only")
		}
	}
}

// serviceProblems calls fail for every problem of the section services.
func (t Topology) serviceProblems(fail func(path string, value any, format string, args ...any)) {
	for i, s := range t.Services {
		path := fmt.Sprintf("services[%d]", i)
		failIn := func(field string, value any, format string, args ...any) {
			fail(path+"."+field, value, format, args...)
		}
		s.validate(failIn)
		if t.hasProxies() {
			s.proxyProblems(failIn)
		} else {
			s.segueProblems(failIn)
		}
		for j, e := range s.Exceptions {
			if !t.hasServer(e.Server) {
				fail(fmt.Sprintf("%s.exceptions[%d].server", path, j), e.Server,
					"is not a server of the lab")
			}
		}
		for j, other := range t.Services[:i] {
			if s.Name == other.Name && s.Name != "" {
				fail(path+".name", s.Name, "is already used by services[%d]", j)
			}
			hasAddress := s.VIP.IsValid() && s.Port != desired.AllPorts
			if hasAddress && s.Address() == other.Address() && s.Protocol == other.Protocol {
				fail(path, "", "services[%d] also has %s %s", j, s.Protocol, s.Address())
			}
		}
	}
}

// daemonErrors returns the errors that the daemons would report about their configurations. Of the
// balancers, it checks only lb1, because all have the same services. It checks the agents of all
// servers with exceptions, and one other agent, because all other agents have the same services. A
// service has the same index in a configuration as in the topology, so the path of an error is also
// its path in the topology.
func (t Topology) daemonErrors() (errs fieldpath.Errors) {
	l, err := newLab(t, Options{})
	if err != nil {
		return fieldpath.Errors{{Problem: err.Error()}}
	}
	checkedPlain := false // an agent of a server without exceptions was checked
	for _, n := range l.Nodes {
		hasException := t.hasException(n.Name)
		switch {
		case n.Name == "lb1":
			err = checkConfig("balancer.yaml", n.BalancerConfig(), config.ParseBalancer)
		case n.Role == RoleServer && (hasException || !checkedPlain):
			err = checkConfig("agent.yaml", n.AgentConfig(), config.ParseAgent)
			checkedPlain = checkedPlain || !hasException
		default:
			continue
		}
		var problems fieldpath.Errors
		if !errors.As(err, &problems) && err != nil { // an error that concerns no field
			problems = fieldpath.Errors{{Problem: err.Error()}}
		}
		for _, p := range problems {
			p.Line = 0 // the line in the generated configuration, which the user does not see
			p.Problem = fmt.Sprintf("%s (%s)", p.Problem, n.Name)
		}
		errs = append(errs, problems...)
	}
	return errs
}

// checkConfig renders the configuration c by a template, and parses the resulting text. It returns
// the error of the template or of the parser, or nil if the configuration is valid.
func checkConfig[Config, Read any](
	template string, c Config, parse func([]byte) (Read, fieldpath.Errors, error),
) error {
	text, err := render(template, c)
	if err == nil {
		_, _, err = parse(text)
	}
	return err
}

// hasServer tells whether the lab has a server with this name. Servers are named s1, s2 and so on.
func (t Topology) hasServer(name string) bool {
	number, err := strconv.Atoi(strings.TrimPrefix(name, "s"))
	isInRange := number >= 1 && number <= t.Servers
	return err == nil && isInRange && name == fmt.Sprintf("s%d", number) // not s01
}

// hasException tells whether a service has an exception for the server.
func (t Topology) hasException(server string) bool {
	return slices.ContainsFunc(t.Services, func(s Service) bool {
		return slices.ContainsFunc(s.Exceptions, func(e Exception) bool { return e.Server == server })
	})
}

// validate calls fail for every problem of the service's name and address that does not depend on
// other services.
func (s Service) validate(fail func(field string, value any, format string, args ...any)) {
	if s.Name == "" {
		fail("name", "", "required")
	}
	switch {
	case !s.VIP.IsValid():
		fail("vip", "", "required")
	case s.VIP.Is4In6() || s.VIP.Zone() != "" || !s.VIP.IsGlobalUnicast():
		fail("vip", s.VIP, "must be a unicast address")
	case reserved(s.VIP):
		fail("vip", s.VIP, "is in a prefix of the lab's links or locators")
	}
	if s.Port == 0 || s.Port == desired.AllPorts {
		fail("port", "", "must be a port from 1 to 65535, because the applications listen on it")
	}
}

// segueProblems calls fail for every further problem of a service that Segue balances.
func (s Service) segueProblems(fail func(field string, value any, format string, args ...any)) {
	if s.Protocol != desired.TCP && s.Protocol != desired.UDP {
		fail("protocol", s.Protocol, "must be tcp or udp")
	}
	known := []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap, desired.GRE, desired.IPIP}
	if !slices.Contains(known, s.Encapsulation) {
		fail("encapsulation", s.Encapsulation, "must be one of %v", known)
	}
	if s.Infer != nil && s.Infer.PollPort != 0 && s.Infer.PollPort != desired.DefaultPollPort {
		fail("infer.poll-port", s.Infer.PollPort, "must be %d, where the lab's agents listen",
			desired.DefaultPollPort)
	}
	if s.Encapsulation == desired.SRv6Insert && s.VIP.Is4() {
		fail("encapsulation", s.Encapsulation, "cannot carry the IPv4 VIP %s", s.VIP)
	}
}

// polls tells whether balancers poll agents, because a service has a placement that polls.
func (t Topology) polls() bool {
	return slices.ContainsFunc(t.Services, func(s Service) bool { return s.Placement.Polls() })
}

// hunts tells whether the service has placement hunt: its servers decide which of them takes a new
// flow.
func (s Service) hunts() bool { return s.Placement.Method().ServersDecide }

// extraListBytes returns the largest result of Service.extraListBytes for the topology's services.
func (t Topology) extraListBytes() (most int) {
	for _, s := range t.Services {
		most = max(most, s.extraListBytes(t.Servers))
	}
	return most
}

// extraListBytes returns how many bytes the longest list of servers adds to a packet of the
// service, compared to a packet for a single server. servers is the number of servers of the lab.
// Agents do not know the number of candidates, so the lab subtracts these bytes from their MTU.
func (s Service) extraListBytes(servers int) int {
	byColumn := s.Persistence.Method().ByColumn
	if !s.hunts() && !byColumn {
		return 0 // each packet is for a single server
	}
	// A packet of an unknown flow visits all servers that may have the flow: the candidates of all
	// generations, or the history of all columns (docs/understand/tables.md).
	candidates := cmp.Or(s.Candidates, s.Selection.DefaultCandidates())
	perCandidate := cmp.Or(s.Generations, desired.DefaultGenerations)
	if byColumn {
		perCandidate = cmp.Or(s.History, desired.DefaultHistory)
	}
	visited := min(candidates*perCandidate, servers, desired.MaxVisited)
	const segment, fixedHeader = 16, 8 // bytes of a segment routing header
	extra := (visited - 1) * segment
	if visited > 1 && s.Encapsulation != desired.SRv6Insert {
		// A packet for a single server has no segment routing header. A longer list has all servers
		// but the first, whose SID is the destination address. An offer lists the first, too, but is
		// a SYN, and so a short packet.
		extra += fixedHeader
	}
	return extra
}

// ports returns the distinct ports of the services of a protocol, in ascending order.
func (t Topology) ports(protocol desired.Protocol) []uint16 {
	var ports []uint16
	for _, s := range t.Services {
		if s.Protocol == protocol {
			ports = append(ports, s.Port.Number())
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// vips returns the distinct VIPs in the order of the services.
func (t Topology) vips() []netip.Addr {
	var vips []netip.Addr
	for _, s := range t.Services {
		if !slices.Contains(vips, s.VIP) {
			vips = append(vips, s.VIP)
		}
	}
	return vips
}
