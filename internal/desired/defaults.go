// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/netip"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/tables"
)

const (
	// DefaultFlows is the default capacity of the flow table.
	DefaultFlows = 1 << 20
	// DefaultHints is the default capacity of the hint table.
	DefaultHints = 1 << 20
)

// DefaultDropRemovedVIPs is how long packets to a removed VIP are dropped by default. By then,
// routers have forgotten the route, even if a timer such as that of BGP's graceful restart delays
// this.
const DefaultDropRemovedVIPs = 10 * time.Minute

const (
	// DefaultGenerations is the default number of sets of servers from which a candidate table
	// follows.
	DefaultGenerations = 3
	// DefaultColumnGenerations is the default for a persistence that finds flows by columns.
	DefaultColumnGenerations = 32
	// DefaultHistory is the default number of servers that each place of a candidate table remembers.
	// With three, SHELL loses less than 1% of connections in its realistic case (section VI of the
	// paper).
	DefaultHistory = 3
)

// DefaultAcceptPolicy is the default accept policy. It needs no parameter.
const DefaultAcceptPolicy = AcceptLeast

// DefaultCandidates returns the default number of candidates of a service that hunts. Each further
// candidate makes it likelier that one is idle, and adds 16 bytes to packets that visit all
// candidates.
func (s Selection) DefaultCandidates() int { return s.Method().Candidates }

// Given tells whether a source gives a value for the field at a path. Zero can be a value.
type Given func(path string) bool

// setDefault sets a field to a value, unless the source gives one.
func setDefault[T any](given Given, path string, into *T, value T) {
	if !given(path) {
		*into = value
	}
}

// defaultState is the default directory for state that outlasts a process.
const defaultState = "/var/lib/segue"

// SetDefaults sets the fields that the source does not give, except those of services.
func (b *Balancer) SetDefaults(given Given) {
	setDefault(given, "node.instance", &b.Node.Instance, "lb")
	setDefault(given, "node.name", &b.Node.Name, hostName())
	internal := b.Node.Inside == ""
	setDefault(given, "node.internal", &b.Node.Internal, &internal)
	setDefault(given, "node.xdp-mode", &b.Node.XDPMode, XDPAuto)
	setDefault(given, "node.reject", &b.Node.Reject, true)
	setDefault(given, "node.drop-removed-vips", &b.Node.DropRemovedVIPs, DefaultDropRemovedVIPs)
	setDefault(given, "node.limits.flows", &b.Node.Limits.Flows, DefaultFlows)
	setDefault(given, "node.limits.hints", &b.Node.Limits.Hints, DefaultHints)
	setDefault(given, "node.state", &b.Node.State, defaultState)
	setDefault(given, "node.limits.servers", &b.Node.Limits.Servers, 4096)
	if b.Node.Switch != nil {
		setDefault(given, "node.switch.election-id", &b.Node.Switch.ElectionID, 1)
	}
	given.defaultUnderlay(b.Node.Underlay)
	given.defaultBGP(b.BGP)
	given.defaultL2(b.L2)
	given.defaultStore(b.Store)
}

// SetServiceDefaults sets the fields of a service, and of its servers, that the source does not
// give. Call SetDefaults before it: some defaults follow from the node.
func (b *Balancer) SetServiceDefaults(i int, given Given) {
	s, path := &b.Services[i], fieldpath.Item("services", i)
	given.defaultService(s, path)
	probes := s.Encapsulation.IsSRv6() && b.Node.TakesSignals()
	setDefault(given, fieldpath.Child(path, "probe"), &s.Probe, &probes)
	given.defaultSlowStart(s, path)
}

// defaultSlowStart sets the slow start of a service that does not infer. During a slow start,
// several balancers may choose different servers for the same flow. So there is a slow start only
// if servers can pass on packets of flows that they do not have.
func (given Given) defaultSlowStart(s *Service, path string) {
	if s.Placement.Infers() {
		return
	}
	slow := time.Duration(0)
	if s.Protocol == TCP && (s.ServersDecide() || s.Probes() || s.FindsByColumn()) {
		slow = DefaultSlowStart
	}
	setDefault(given, fieldpath.Child(path, "slow-start"), &s.SlowStart, &slow)
}

func (given Given) defaultBGP(b *BGP) {
	if b == nil {
		return
	}
	setDefault(given, "bgp.restart-time", &b.RestartTime, 2*time.Minute)
	setDefault(given, "bgp.hold-down", &b.HoldDown, 10*time.Second)
	setDefault(given, "bgp.drain-delay", &b.DrainDelay, 5*time.Second)
	for i := range b.Peers {
		p, path := &b.Peers[i], fieldpath.Item("bgp.peers", i)
		setDefault(given, fieldpath.Child(path, "port"), &p.Port, 179)
		setDefault(given, fieldpath.Child(path, "hold-time"), &p.HoldTime, 9*time.Second)
		switch families := fieldpath.Child(path, "families"); {
		case p.Interface != "":
			setDefault(given, families, &p.Families, []Family{IPv4, IPv6})
		case p.Address.IsValid():
			setDefault(given, families, &p.Families, []Family{FamilyOf(p.Address)})
		}
	}
}

// defaultService sets the defaults of a service that follow from the service alone. Later defaults
// follow from earlier ones.
func (given Given) defaultService(s *Service, path string) {
	given.defaultFirst(&s.VIP, s.VIPs, &s.Port, s.Ports, path)
	setDefault(given, fieldpath.Child(path, "placement"), &s.Placement, PlacementMethods[0].Name)
	setDefault(given, fieldpath.Child(path, "persistence"), &s.Persistence, PersistenceMethods[0].Name)
	placement, persistence := s.Placement.Method().orDefault(), s.Persistence.Method().orDefault()
	setDefault(given, fieldpath.Child(path, "encapsulation"), &s.Encapsulation, SRv6Encap)
	setDefault(given, fieldpath.Child(path, "on-failure"), &s.OnFailure, OnFailureMoveUDP)
	setDefault(given, fieldpath.Child(path, "on-drain"), &s.OnDrain, persistence.OnDrain)
	setDefault(given, fieldpath.Child(path, "all-failed"), &s.AllFailed, AllFailedUse)
	candidates := placement.Candidates
	if len(placement.Selections) > 0 {
		setDefault(given, fieldpath.Child(path, "selection"), &s.Selection, placement.Selections[0])
		candidates = s.Selection.DefaultCandidates()
	}
	setDefault(given, fieldpath.Child(path, "candidates"), &s.Candidates, candidates)
	setDefault(given, fieldpath.Child(path, "generations"), &s.Generations, persistence.Generations)
	if s.FindsByColumn() {
		setDefault(given, fieldpath.Child(path, "history"), &s.History, min(DefaultHistory, s.Generations))
	}
	given.defaultQUIC(s, path)
	given.defaultInfer(s, path)
	if persistence.HasCookies {
		setDefault(given, fieldpath.Child(path, "bucket-hash"), &s.BucketHash, BucketHashMultilinear)
	}
	buckets := tables.DefaultBuckets
	isTooLarge := s.FindsByColumn() && buckets*s.Candidates > MaxColumns
	if isTooLarge || s.BucketHash == BucketHashCRC32 {
		buckets = 1 << 16 // MaxColumns has room for eight candidates of so many buckets
	}
	setDefault(given, fieldpath.Child(path, "buckets"), &s.Buckets, buckets)
	given.defaultAffinity(s.Affinity, fieldpath.Child(path, "affinity"))
	given.defaultTimeouts(&s.Timeouts, fieldpath.Child(path, "timeouts"), s)
	if s.Health != nil {
		given.defaultHealth(s.Health, fieldpath.Child(path, "health"), s.Port)
	}
	for i := range s.Servers {
		given.defaultServer(&s.Servers[i], fieldpath.Item(fieldpath.Child(path, "servers"), i))
	}
}

// defaultFirst makes the first of several VIPs, and of several ports, the VIP and the port of a
// service.
func (given Given) defaultFirst(vip *netip.Addr, vips []netip.Addr, port *Port, ports []Port, path string) {
	if len(vips) > 0 {
		setDefault(given, fieldpath.Child(path, "vip"), vip, vips[0])
	}
	if len(ports) > 0 {
		setDefault(given, fieldpath.Child(path, "port"), port, ports[0])
	}
}

// defaultQUIC sets the forms of connection IDs and the server IDs of the former form.
func (given Given) defaultQUIC(s *Service, path string) {
	isQUIC := s.Persistence.Method().HasIDs
	if isQUIC {
		setDefault(given, fieldpath.Child(path, "quic"), &s.QUIC, &QUIC{})
	}
	given.defaultQUICForms(s.QUIC, s.FormerQUIC, path)
	if !isQUIC || !s.QUIC.keepsServerIDs(s.FormerQUIC) {
		return
	}
	for i := range s.Servers {
		server, at := &s.Servers[i], fieldpath.Item(fieldpath.Child(path, "servers"), i)
		setDefault(given, fieldpath.Child(at, "former-quic-id"), &server.FormerQUICID, server.QUICID)
	}
}

// defaultQUICForms sets the defaults of the present and the former form of a service.
func (given Given) defaultQUICForms(present, former *QUIC, path string) {
	given.defaultQUICForm(present, fieldpath.Child(path, "quic"))
	given.defaultQUICForm(former, fieldpath.Child(path, "former-quic"))
}

// defaultQUICForm sets the defaults of a form of connection IDs, if there is one.
func (given Given) defaultQUICForm(q *QUIC, path string) {
	if q == nil {
		return
	}
	setDefault(given, fieldpath.Child(path, "form"), &q.Form, QUICLB21)
	setDefault(given, fieldpath.Child(path, "server-id-length"), &q.ServerIDLength, 8)
	nonce := min(8, mostNonce(q.ServerIDLength))
	setDefault(given, fieldpath.Child(path, "nonce-length"), &q.NonceLength, nonce)
}

func (given Given) defaultTimeouts(t *Timeouts, path string, s *Service) {
	newFlow, established := time.Minute, time.Hour
	if s.Protocol == UDP {
		newFlow, established = 30*time.Second, 2*time.Minute
	}
	setDefault(given, fieldpath.Child(path, "new"), &t.New, newFlow)
	setDefault(given, fieldpath.Child(path, "established"), &t.Established, established)
	setDefault(given, fieldpath.Child(path, "closing"), &t.Closing, s.Placement.Method().closing())
	setDefault(given, fieldpath.Child(path, "silent"), &t.Silent, DefaultSilent)
}

// defaultHealth sets the defaults of a health check. port is that of the service. If the service is
// for all ports, the port of the check has no default, and stays 0.
func (given Given) defaultHealth(h *Health, path string, port Port) {
	setDefault(given, fieldpath.Child(path, "via"), &h.Via, ViaPackets)
	setDefault(given, fieldpath.Child(path, "interval"), &h.Interval, time.Second)
	jitter := h.Interval / 10
	setDefault(given, fieldpath.Child(path, "jitter"), &h.Jitter, &jitter)
	setDefault(given, fieldpath.Child(path, "timeout"), &h.Timeout, h.Interval)
	setDefault(given, fieldpath.Child(path, "rise"), &h.Rise, 2)
	setDefault(given, fieldpath.Child(path, "fall"), &h.Fall, 3)
	given.defaultHTTP(h.HTTP, fieldpath.Child(path, "http"), port)
	given.defaultHTTP(h.HTTPS, fieldpath.Child(path, "https"), port)
	if h.TCP != nil {
		setDefault(given, fieldpath.Child(path, "tcp.port"), &h.TCP.Port, port.Number())
	}
	if h.UDP != nil {
		setDefault(given, fieldpath.Child(path, "udp.port"), &h.UDP.Port, port.Number())
	}
}

// defaultHTTP sets the defaults of an HTTP or HTTPS check, if there is one.
func (given Given) defaultHTTP(h *HTTPCheck, path string, port Port) {
	if h == nil {
		return
	}
	setDefault(given, fieldpath.Child(path, "path"), &h.Path, "/")
	setDefault(given, fieldpath.Child(path, "port"), &h.Port, port.Number())
	setDefault(given, fieldpath.Child(path, "status"), &h.Status, DefaultStatus)
}

func (given Given) defaultServer(s *Server, path string) {
	one := uint32(1)
	setDefault(given, fieldpath.Child(path, "weight"), &s.Weight, &one)
	setDefault(given, fieldpath.Child(path, "host"), &s.Host, s.Address)
}

// SetDefaults sets the fields that the source does not give.
func (a *Agent) SetDefaults(given Given) {
	setDefault(given, "node.instance", &a.Node.Instance, "agent")
	yes := true
	setDefault(given, "node.internal", &a.Node.Internal, &yes)
	setDefault(given, "node.xdp-mode", &a.Node.XDPMode, XDPAuto)
	setDefault(given, "node.assign-vips", &a.Node.AssignVIPs, &yes)
	given.defaultUnderlay(a.Node.Underlay)
	setDefault(given, "node.state", &a.Node.State, defaultState)
	for i := range a.Services {
		given.defaultAgentService(&a.Services[i], fieldpath.Item("services", i))
	}
}

// loadIntervals are the default intervals between two reads of a load source. They are short enough
// to follow the load. The CPU time of a control group is a mean over the interval: a shorter one
// would give noise.
var loadIntervals = map[LoadSource]time.Duration{
	LoadApache:       20 * time.Millisecond,
	LoadCgroup:       500 * time.Millisecond,
	LoadSharedMemory: 10 * time.Millisecond,
}

func (given Given) defaultAgentService(s *AgentService, path string) {
	given.defaultFirst(&s.VIP, s.VIPs, &s.Port, s.Ports, path)
	setDefault(given, fieldpath.Child(path, "encapsulation"), &s.Encapsulation, SRv6Encap)
	given.defaultAgentQUIC(s, path)
	if !s.Hunts() {
		return
	}
	setDefault(given, fieldpath.Child(path, "accept.policy"), &s.Accept.Policy, DefaultAcceptPolicy)
	if s.Accept.Policy == AcceptDynamic {
		setDefault(given, fieldpath.Child(path, "accept.window"), &s.Accept.Window, 50)
		windowTime, epsilon, initial := 2*time.Second, 0.1, uint32(1)
		setDefault(given, fieldpath.Child(path, "accept.window-time"), &s.Accept.WindowTime, &windowTime)
		setDefault(given, fieldpath.Child(path, "accept.epsilon"), &s.Accept.Epsilon, &epsilon)
		setDefault(given, fieldpath.Child(path, "accept.initial"), &s.Accept.Initial, &initial)
	}
	if s.Protocol == TCP {
		setDefault(given, fieldpath.Child(path, "load.source"), &s.Load.Kind, LoadConnections)
		setDefault(given, fieldpath.Child(path, "not-local"), &s.NotLocal, NotLocalReset)
	}
	if s.Load.Kind.IsPolled() {
		setDefault(given, fieldpath.Child(path, "load.interval"), &s.Load.Interval, loadIntervals[s.Load.Kind])
	}
}

// defaultAgentQUIC sets the defaults of the forms of connection IDs, and of the server ID in the
// former form.
func (given Given) defaultAgentQUIC(s *AgentService, path string) {
	if s.QUICID != "" {
		setDefault(given, fieldpath.Child(path, "quic"), &s.QUIC, &QUIC{})
	}
	given.defaultQUICForms(s.QUIC, s.FormerQUIC, path)
	if s.QUIC != nil && s.QUIC.keepsServerIDs(s.FormerQUIC) {
		setDefault(given, fieldpath.Child(path, "former-quic-id"), &s.FormerQUICID, s.QUICID)
	}
}
