// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

const (
	serverCount = 16
	servicePort = 80
)

var (
	hostMAC         = packet.MAC{2, 0, 0, 0, 0, 2}
	clientMAC       = packet.MAC{2, 0, 0, 0, 0, 1}
	balancerLocator = netip.MustParsePrefix("fd00:6c:0:1::/64")
	balancerAddress = netip.MustParseAddr("fd00:a::1")
	vips            = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("198.51.100.1"), ipv6: netip.MustParseAddr("2001:db8:80::1"),
	}
	// strangers are addresses that are not VIPs.
	strangers = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("198.51.100.2"), ipv6: netip.MustParseAddr("2001:db8:80::2"),
	}
	// clients are the base addresses of clients. The flow's number is added to the last 32 bits.
	clients = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("10.0.0.0"), ipv6: netip.MustParseAddr("2001:db8:c::"),
	}
)

// hop is the next hop of every server. It leads back through the interface on which test runs
// receive, so the verdict is XDP_TX, as on a balancer with one network card.
var hop = nexthop.Hop{
	MAC:  packet.MAC{2, 0, 0, 0, 1, 1},
	Link: nexthop.Link{Index: 1, Name: "lo", Type: "device", MAC: hostMAC, MTU: 9000},
}

func serverLocator(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 6: byte(i >> 8), 7: byte(i)}), 64)
}

func serverAddress(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 9, 14: byte(i >> 8), 15: byte(i)})
}

func hasLocators(kind desired.Encapsulation) bool {
	return kind == desired.SRv6Insert || kind == desired.SRv6Encap
}

// setupKind selects the programs of a setup.
type setupKind int

const (
	setupNone setupKind = iota
	setupFloor
	setupFloorLookup
	setupBalancer
	setupReference
	setupAgent
)

// content is the content of a flow table that is filled to the setup's capacity.
type content int

const (
	noFlows content = iota
	newFlows
	knownFlows // each confirmed by a second packet
)

// setup is programs and their shared tables, in the initial state of a case. Cases with equal
// setups share one. The entries of a flow table do not contain the encapsulation or the protocol,
// so a balancer's service is changed for each case.
type setup struct {
	kind          setupKind
	capacity      uint32 // requested for the flow table, in flows; the table may be larger
	content       content
	family        family                // of the flows in the table, and of an agent's service
	encapsulation desired.Encapsulation // of an agent's service
	accept        bool                  // an agent's service hunts, and an application listens
	threshold     uint32                // of that service, in waiting connections
	persistence   desired.Persistence   // of a balancer's service; "": table
	tableBytes    uint32                // least size of the table of setupFloorLookup
	changed       bool                  // that service has had other servers
	servers       int                   // of a balancer's service; 0: serverCount
}

// hasFlowTable tells whether the setup has a table whose flows age.
func (s *setup) hasFlowTable() bool { return s.persistence == "" }

// rig is a setup that was built.
type rig struct {
	program  *ebpf.Program
	steps    map[string]*ebpf.Program // programs on the same tables that end after a step
	loadStep func(step string) (*ebpf.Program, error)
	balancer *balancer.Rehearsal
	config   *desired.Balancer
	serves   service // the configuration's only service
	next     uint64  // number of the next unused flow
	view     *inspect.View
	// count returns the number of packets counted under a reason. It is nil if there are no
	// counters.
	count func(reason string) (uint64, error)
	// namespace contains the sockets of an agent's host. If it is nil, the process's own namespace
	// is used.
	namespace *netdev.Namespace
	closers   []func() error
}

var instances atomic.Int32

func (s *setup) build() (r *rig, err error) {
	r = &rig{steps: map[string]*ebpf.Program{}}
	switch s.kind {
	case setupFloor, setupFloorLookup:
		err = r.loadFloor(s)
	case setupBalancer, setupReference:
		err = r.loadBalancer(s)
	case setupAgent:
		err = r.loadAgent(s)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *rig) close() (err error) {
	for i := len(r.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, r.closers[i]())
	}
	return err
}

func (r *rig) loadFloor(s *setup) error {
	spec, err := loadFloor()
	if err != nil {
		return err
	}
	for name, value := range map[string]any{
		"to_mac": macWord(hop.MAC), "from_mac": macWord(hostMAC),
		"server": envelope(desired.SRv6Insert, srv6.Deliver).Segments[0].As16(), "balancer": balancerLocator.Addr().As16(),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("floor: set %s: %w", name, err)
		}
	}
	words := uint32(1) << bits.Len32(max(2, s.tableBytes/8)-1)
	spec.Maps["table"].MaxEntries = words
	shift := 64 - uint32(bits.TrailingZeros32(words))
	if err := spec.Variables["table_shift"].Set(shift); err != nil {
		return fmt.Errorf("floor: set table_shift: %w", err)
	}
	objects := &floorObjects{}
	if err := spec.LoadAndAssign(objects, nil); err != nil {
		return fmt.Errorf("load the floor: %w", err)
	}
	r.program, r.closers = objects.XdpFloor, append(r.closers, objects.Close)
	if s.kind == setupFloorLookup {
		r.program = objects.XdpFloorLookup
	}
	return nil
}

// macWord returns a MAC address in the form of the data path, in memory order.
func macWord(mac packet.MAC) (word [8]byte) {
	copy(word[:], mac[:])
	return word
}

func newInstance() string { return fmt.Sprintf("bench-%d-%d", os.Getpid(), instances.Add(1)) }

func (r *rig) loadBalancer(s *setup) (err error) {
	r.serves = usual(s.family, desired.TCP)
	r.serves.servers = s.servers
	if r.serves.persistence = s.persistence; s.persistence != "" {
		r.serves.placement = desired.PlacementHunt
	}
	r.config = balancerConfig(s, r.serves)
	if r.balancer, err = balancer.NewRehearsal(r.config, desired.Secrets{}, slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	r.closers = append(r.closers, r.balancer.Close)
	if r.program, err = r.balancer.Fill(hop); err != nil {
		return err
	}
	if s.kind == setupReference {
		return r.loadReference(s.capacity)
	}
	if s.changed {
		after := r.serves
		after.changed = true
		if err := r.apply(after); err != nil {
			return err
		}
		r.balancer.Reach(hop)
	}
	r.loadStep = r.loadBalancerStep
	if r.view, err = inspect.OpenView(r.config.Node.Instance); err != nil {
		return err
	}
	r.count, r.closers = r.view.Count, append(r.closers, r.view.Close)
	return nil
}

func balancerConfig(s *setup, serves service) *desired.Balancer {
	limits := desired.Limits{Flows: s.capacity, Servers: 2 * uint32(serves.serverCount())}
	switch {
	case s.kind == setupReference:
		limits.Flows = 1 // the reference has a flow table of its own
	case s.persistence.Method().NeedsHints:
		limits.Flows, limits.Hints = 1, s.capacity
	}
	return &desired.Balancer{
		Node: desired.BalancerNode{
			Instance: newInstance(), Interface: hop.Link.Name, Locator: balancerLocator,
			Limits: limits,
		},
		Services: []desired.Service{serviceConfig(serves)},
	}
}

// serviceConfig returns a service that has the same servers for all encapsulations, so that flows
// keep their servers. The far end of a tunnel, too, is the first address of a locator.
func serviceConfig(s service) desired.Service {
	c := desired.Service{
		Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: s.protocol,
		Placement: desired.PlacementHash, Persistence: desired.PersistenceTable, Encapsulation: s.encapsulation,
		Candidates: 3, Generations: 1, Buckets: tables.DefaultBuckets,
		Timeouts: desired.Timeouts{New: time.Hour, Established: time.Hour, Closing: time.Hour},
	}
	if persistence := s.persistence.Method(); persistence.Name != "" {
		c.Persistence = s.persistence
		if persistence.ByColumn {
			c.Generations, c.History = persistence.Generations, desired.DefaultHistory
		}
		if persistence.HasIDs {
			c.QUIC = quicForm()
		}
	}
	if placement := s.placement.Method(); placement.Name != "" {
		c.Placement, c.Candidates = s.placement, placement.Candidates
		if placement.ServersDecide {
			c.Selection, c.Candidates = cmp.Or(s.selection, placement.Selections[0]), 2
			if s.selection.OrdersByReports() {
				c.Candidates = s.selection.DefaultCandidates()
			}
		}
		c.Infer = inferConfig(placement)
	}
	addServers(&c, 1, s.serverCount())
	if s.placement.Polls() { // of those that are drawn, a third does not take the flow
		for i := range c.Servers {
			c.Servers[i].Weight = new(uint32(1 + 2*(i%2)))
		}
	}
	if s.changed {
		for i := range c.Servers {
			c.Servers[i].Weight = new(uint32(0))
		}
		addServers(&c, s.serverCount()+1, s.serverCount())
	}
	return c
}

// inferConfig returns the defaults of a placement that infers, with rare polls; nil: it does not
// infer.
func inferConfig(placement desired.PlacementMethod) *desired.Infer {
	if !placement.Infers() {
		return nil
	}
	infer := &desired.Infer{Among: placement.Amongs[0]}
	if len(placement.Estimators) > 0 {
		infer.Estimator, infer.Interval = placement.Estimators[0], desired.DefaultInferInterval
	}
	if placement.Polls {
		infer.Poll = 10 * time.Second
	}
	return infer
}

func addServers(c *desired.Service, first, count int) {
	for i := first; i < first+count; i++ {
		server := desired.Server{
			Name: fmt.Sprintf("s%d", i), Locator: serverLocator(i), Weight: new(uint32(1)),
		}
		if c.QUIC != nil {
			server.QUICID = fmt.Sprintf("c460%02x", i)
		}
		c.Servers = append(c.Servers, server)
	}
}

// serve replaces a balancer's only service by another, which keeps the flows.
func (r *rig) serve(h *host, s service) error {
	if r.balancer == nil || r.serves == s {
		return nil
	}
	if err := r.apply(s); err != nil {
		return err
	}
	if s.selection.OrdersByReports() {
		return r.report(h, s)
	}
	return nil
}

func (r *rig) apply(s service) error {
	next := *r.config
	next.Services = []desired.Service{serviceConfig(s)}
	isBalancers := r.program == r.balancer.Program()
	if err := r.balancer.Apply(&next); err != nil {
		return err
	}
	if isBalancers && r.program != r.balancer.Program() {
		r.program = r.balancer.Program()
		clear(r.steps) // they may lack what the service needs
	}
	r.config, r.serves = &next, s
	return nil
}

// report has each server of the service accept a flow and report its load. The loads differ, so
// candidates do not stay in the order of the table.
func (r *rig) report(h *host, s service) error {
	serial, err := clock()
	if err != nil {
		return err
	}
	for i := 1; i <= serverCount; i++ {
		load := accept.Code(accept.Load{Busy: uint32(i * 5 % serverCount), Capacity: 2})
		t := signalFrom(s, i, srv6.Report{Serial: serial, Load: load, IsFirst: true}.Argument())
		t.first = r.next
		if err := h.prepare(r.program, &t); err != nil {
			return err
		}
		if _, err := r.run(h, 1); err != nil {
			return fmt.Errorf("report the load of server %d: %w", i, err)
		}
		r.next++
	}
	return nil
}

// clock returns this host's clock as the serial of a report.
func clock() (uint32, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint32(now.Nano() / int64(srv6.ReportTick)), nil
}

// loadReference replaces the program by the reference program, which shares all tables except for
// the flow table.
func (r *rig) loadReference(capacity uint32) error {
	spec, err := loadReference()
	if err != nil {
		return err
	}
	spec.Maps["reference_flows"].MaxEntries = capacity
	r.program, err = r.load(spec, "xdp_reference")
	return err
}

// load loads another program with the balancer's tables.
func (r *rig) load(spec *ebpf.CollectionSpec, program string) (*ebpf.Program, error) {
	dataplane.NameDirectory(spec)
	for name, value := range r.balancer.Constants() {
		if variable := spec.Variables[name]; variable != nil {
			if err := variable.Set(value); err != nil {
				return nil, fmt.Errorf("%s: set %s: %w", program, name, err)
			}
		}
	}
	shared, err := pinnedMaps(r.config.Node.Instance, spec)
	if err != nil {
		return nil, err
	}
	return r.loadShared(spec, program, shared, map[string]any{
		"host_mac": macWord(hostMAC), "host_hairpin": uint32(hop.Link.Index),
	})
}

// pinnedMaps opens the pinned maps of an instance that a specification has.
func pinnedMaps(instance string, spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	dir := datapath.Dir(instance)
	pins, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	maps := map[string]*ebpf.Map{}
	for _, pin := range pins {
		if spec.Maps[pin.Name()] == nil {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pin.Name()), nil)
		if err != nil {
			closeMaps(maps)
			return nil, err
		}
		maps[pin.Name()] = m
	}
	return maps, nil
}

func closeMaps(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		_ = m.Close()
	}
}

// loadShared loads another program with maps that it shares, and sets its variables. It closes the
// maps.
func (r *rig) loadShared(
	spec *ebpf.CollectionSpec, program string, shared map[string]*ebpf.Map, variables map[string]any,
) (*ebpf.Program, error) {
	defer closeMaps(shared)
	for name, m := range shared {
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", program, err)
	}
	r.closers = append(r.closers, func() error { collection.Close(); return nil })
	for name, value := range variables {
		if err := collection.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("%s: set %s: %w", program, name, err)
		}
	}
	return collection.Programs[program], nil
}

func (r *rig) loadAgent(s *setup) error {
	cfg := &desired.Agent{
		Node: desired.AgentNode{
			Instance: newInstance(), Interface: hop.Link.Name, MTU: hop.Link.MTU,
			Locator: serverLocator(1), Addresses: []netip.Addr{serverAddress(1)},
		},
		Services: []desired.AgentService{{
			Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: desired.TCP, Encapsulation: s.encapsulation,
		}},
	}
	if s.accept {
		cfg.Services[0].Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: &s.threshold}
		cfg.Services[0].Load.Kind = desired.LoadAcceptQueue
		if err := r.listen(); err != nil {
			return err
		}
	}
	a, err := agent.NewRehearsal(cfg, hostMAC, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	r.closers = append(r.closers, a.Close)
	r.count = func(reason string) (uint64, error) { return agent.Count(cfg.Node.Instance, reason) }
	r.program = a.Program()
	r.loadStep = func(step string) (*ebpf.Program, error) {
		return r.loadAgentStep(step, a.Constants())
	}
	return nil
}

// listen makes a separate host, on which an application accepts connections to any address.
func (r *rig) listen() (err error) {
	if r.namespace, err = netdev.NewNamespace(); err != nil {
		return err
	}
	r.closers = append(r.closers, r.namespace.Close)
	return r.namespace.Do(func() error {
		listener, err := net.Listen("tcp", fmt.Sprintf(":%d", servicePort))
		if err == nil {
			r.closers = append(r.closers, listener.Close)
		}
		return err
	})
}

// run sends packets through the prepared host program, in the namespace of the rig's sockets.
func (r *rig) run(h *host, packets uint32) (c cost, err error) {
	if r.namespace == nil {
		return h.run(packets)
	}
	err = r.namespace.Do(func() (err error) {
		c, err = h.run(packets)
		return err
	})
	return c, err
}

// fillChunk is the number of flows that are entered between two checks of the context.
const fillChunk = 1 << 20

// fill enters flows into the flow table until it is in the initial state of the cases. The first
// flows always find room: they are confirmed before others are entered.
func (r *rig) fill(ctx context.Context, h *host, s *setup) error {
	switch {
	case s.content == noFlows:
		return nil
	case s.persistence.Method().NeedsHints:
		return r.fillHints(ctx, h, s)
	}
	t := trafficTo(s.family, vips[s.family], desired.TCP, packet.ACK)
	t.order = inTurn
	packets := uint32(1) // per flow
	switch {
	case s.kind == setupAgent:
		syn := trafficTo(s.family, vips[s.family], desired.TCP, packet.SYN)
		t = wrapped(passed(syn), s.encapsulation, srv6.ConnectForce)
		t.order = inTurn
	case s.content == knownFlows:
		t.order, packets = inPairs, 2
	}
	for r.next < uint64(s.capacity) {
		if err := ctx.Err(); err != nil {
			return err
		}
		flows := min(fillChunk, uint64(s.capacity)-r.next)
		t.first = r.next
		if err := h.prepare(r.program, &t); err != nil {
			return err
		}
		if _, err := r.run(h, uint32(flows)*packets); err != nil {
			return fmt.Errorf("fill the flow table: %w", err)
		}
		r.next += flows
	}
	return nil
}

// fillHints has a server of each flow's row accept the flow, and the client answer. Of all servers
// that say that they have accepted, the balancer believes the first one of the row.
func (r *rig) fillHints(ctx context.Context, h *host, s *setup) error {
	ack := trafficTo(s.family, vips[s.family], desired.TCP, packet.ACK)
	ack.order = inTurn
	for r.next < uint64(s.capacity) {
		flows := min(fillChunk, uint64(s.capacity)-r.next)
		var all []traffic
		for i := 1; i <= serverCount; i++ {
			all = append(all, signalFrom(r.serves, i, 0))
		}
		for _, t := range append(all, ack) {
			if err := ctx.Err(); err != nil {
				return err
			}
			t.first = r.next
			if err := h.prepare(r.program, &t); err != nil {
				return err
			}
			if _, err := r.run(h, uint32(flows)); err != nil {
				return fmt.Errorf("fill the hint table: %w", err)
			}
		}
		r.next += flows
	}
	return nil
}
