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
	serverCount = 16 // of a service, unless its case says otherwise
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
	// clients are the addresses of the client of flow 0. In flow n, n is added to the last 32 bits.
	clients = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("10.0.0.0"), ipv6: netip.MustParseAddr("2001:db8:c::"),
	}
)

// hop is the next hop of every server. It leads through the interface on which test runs receive
// packets, so the verdict is XDP_TX, as on a balancer with one network card.
var hop = nexthop.Hop{
	MAC:  packet.MAC{2, 0, 0, 0, 1, 1},
	Link: nexthop.Link{Index: 1, Name: "lo", Type: "device", MAC: hostMAC, MTU: 9000},
}

// serverLocator returns the locator of server i.
func serverLocator(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 6: byte(i >> 8), 7: byte(i)}), 64)
}

// serverAddress returns the address of server i for tunnels without segment routing.
func serverAddress(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 9, 14: byte(i >> 8), 15: byte(i)})
}

// hasLocators tells whether an encapsulation uses segment routing, and so the servers' locators.
func hasLocators(kind desired.Encapsulation) bool {
	return kind == desired.SRv6Insert || kind == desired.SRv6Encap
}

// setupKind selects the programs of a setup.
type setupKind int

const (
	setupNone        setupKind = iota // the host program alone
	setupFloor                        // an encapsulation
	setupFloorLookup                  // an encapsulation, and an access to a table
	setupBalancer
	setupReference // the reference program, with tables of a balancer
	setupAgent
)

// content tells with which flows the flow table of a setup is filled, up to its capacity.
type content int

const (
	noFlows    content = iota // the table stays empty
	newFlows                  // flows of one packet
	knownFlows                // flows that a second packet has confirmed
)

// setup describes programs and their tables, in the state in which a case begins. Cases with equal
// setups share the programs and tables. Entries of a flow table do not depend on encapsulation and
// protocol. So cases that differ in these share a table, and serve changes the balancer's service.
type setup struct {
	kind          setupKind
	capacity      uint32 // of the flow table, in flows; the table may be larger
	content       content
	family        family                // of the flows in the table, and of an agent's service
	encapsulation desired.Encapsulation // of an agent's service
	accept        bool                  // an agent's service hunts, and an application listens
	threshold     uint32                // of an agent's service, in waiting connections
	persistence   desired.Persistence   // of a balancer's service; "": table
	bucketHash    desired.BucketHash    // of persistence stateless; "": multilinear
	tableBytes    uint32                // of setupFloorLookup: the least size of the table
	changed       bool                  // other servers have replaced all servers of the service
	servers       int                   // of a balancer's service; 0: serverCount
}

// hasFlowTable tells whether the setup's balancer finds flows in a flow table, whose flows time
// out.
func (s *setup) hasFlowTable() bool { return s.persistence == "" }

// rig has the programs and tables of a setup that was built.
type rig struct {
	program *ebpf.Program // the program under test
	// steps has the loaded programs that end after a step, by the name of the step. They have the
	// same tables as program. loadStep loads the program for a step.
	steps    map[string]*ebpf.Program
	loadStep func(step string) (*ebpf.Program, error)
	balancer *balancer.Rehearsal // nil without a balancer; then config, service and view are not set
	config   *desired.Balancer   // the balancer's present configuration
	service  service             // the only service in config
	view     *inspect.View       // of the balancer's tables; nil with the reference program
	next     uint64              // number of the next flow that is not used yet
	// count returns the number of packets counted under a reason. It is nil if there are no
	// counters.
	count func(reason string) (uint64, error)
	// namespace contains the sockets of an agent's host. If it is nil, the process's own namespace
	// is used.
	namespace *netdev.Namespace
	closers   []func() error // called by close, the last one first
}

// instances counts the instance names that this process has used.
var instances atomic.Int32

// build loads the programs and makes the tables, which are not filled yet.
func (s *setup) build() (r *rig, err error) {
	r = &rig{steps: map[string]*ebpf.Program{}}
	switch s.kind {
	case setupFloor, setupFloorLookup:
		err = r.makeFloor(s)
	case setupBalancer, setupReference:
		err = r.makeBalancer(s)
	case setupAgent:
		err = r.makeAgent(s)
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

// makeFloor loads a program that encapsulates packets. With setupFloorLookup it also reads a random
// word of a table of at least s.tableBytes.
func (r *rig) makeFloor(s *setup) error {
	spec, err := loadFloor()
	if err != nil {
		return err
	}
	for name, value := range map[string]any{
		"to_mac": macWord(hop.MAC), "from_mac": macWord(hostMAC),
		"server":   envelope(desired.SRv6Insert, srv6.Deliver).Segments[0].As16(),
		"balancer": balancerLocator.Addr().As16(),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("floor: set %s: %w", name, err)
		}
	}
	// The table has words of 8 bytes. Their number is rounded up to a power of two. The program
	// shifts a random number of 64 bits to the right, so that its highest bits are the index of a
	// word.
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

// macWord returns a MAC address in the data path's form: 8 bytes, of which the last two are zero.
func macWord(mac packet.MAC) (word [8]byte) {
	copy(word[:], mac[:])
	return word
}

// newInstance returns an instance name that is unique on this machine.
func newInstance() string { return fmt.Sprintf("bench-%d-%d", os.Getpid(), instances.Add(1)) }

// makeBalancer makes a balancer, without a daemon, and takes its program. With setupReference, the
// reference program takes the place of the balancer's program.
func (r *rig) makeBalancer(s *setup) (err error) {
	r.service = usual(s.family, desired.TCP)
	r.service.servers = s.servers
	// A persistence other than table is measured with placement hunt, until serve changes the
	// service.
	r.service.persistence, r.service.bucketHash = s.persistence, s.bucketHash
	if s.persistence != "" {
		r.service.placement = desired.PlacementHunt
	}
	r.config = balancerConfig(s, r.service)
	quiet := slog.New(slog.DiscardHandler)
	if r.balancer, err = balancer.NewRehearsal(r.config, desired.Secrets{}, quiet); err != nil {
		return err
	}
	r.closers = append(r.closers, r.balancer.Close)
	if r.program, err = r.balancer.Fill(hop); err != nil {
		return err
	}
	if s.kind == setupReference {
		return r.useReference(s.capacity)
	}
	if s.changed { // replace the servers of the service by others
		after := r.service
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

// balancerConfig returns the configuration of a setup's balancer with one service.
func balancerConfig(s *setup, svc service) *desired.Balancer {
	limits := desired.Limits{Flows: s.capacity, Servers: 2 * uint32(svc.serverCount())}
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
		Services: []desired.Service{serviceConfig(svc)},
	}
}

// serviceConfig returns the configuration of a service. Servers have locators even if the
// encapsulation needs none: a tunnel without segment routing leads to the first address of the
// locator. So flows keep their servers when the encapsulation changes.
func serviceConfig(s service) desired.Service {
	c := desired.Service{
		Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: s.protocol,
		Placement: desired.PlacementHash, Persistence: desired.PersistenceTable,
		Encapsulation: s.encapsulation,
		Candidates:    3, Generations: 1, Buckets: tables.DefaultBuckets,
		Timeouts: desired.Timeouts{New: time.Hour, Established: time.Hour, Closing: time.Hour},
	}
	if persistence := s.persistence.Method(); persistence.Name != "" { // s names one
		c.Persistence = s.persistence
		if persistence.ByColumn {
			c.Generations, c.History = persistence.Generations, desired.DefaultHistory
		}
		if persistence.HasIDs {
			c.QUIC = quicForm()
		}
		if s.bucketHash == desired.BucketHashCRC32 {
			c.BucketHash, c.Buckets = s.bucketHash, 1<<16
		}
	}
	if placement := s.placement.Method(); placement.Name != "" { // s names one
		c.Placement, c.Candidates = s.placement, placement.Candidates
		if placement.ServersDecide {
			c.Selection, c.Candidates = cmp.Or(s.selection, placement.Selections[0]), 2
			if s.selection.OrdersByReports() {
				c.Candidates = s.selection.DefaultCandidates()
			}
		}
		c.Infer = inferConfig(placement, s.estimator)
	}
	addServers(&c, 1, s.serverCount())
	if s.placement.Polls() {
		// Half of the servers are lighter, and take a third of the flows that are proposed to them.
		// So a third of all proposals fail.
		const light, heavy = 1, 3
		for i := range c.Servers {
			c.Servers[i].Weight = new(uint32(light))
			if i%2 == 1 {
				c.Servers[i].Weight = new(uint32(heavy))
			}
		}
	}
	if s.changed { // drain all servers, and add as many others
		for i := range c.Servers {
			c.Servers[i].Weight = new(uint32(0))
		}
		addServers(&c, s.serverCount()+1, s.serverCount())
	}
	return c
}

// inferConfig returns the section infer of a service with a placement, and with an estimator unless
// it is empty. It has the placement's defaults, except that polls are rare. It returns nil if the
// placement has no such section.
func inferConfig(placement desired.PlacementMethod, estimator desired.Estimator) *desired.Infer {
	if !placement.Infers() {
		return nil
	}
	infer := &desired.Infer{Among: placement.Amongs[0]}
	if len(placement.Estimators) > 0 {
		infer.Estimator = cmp.Or(estimator, placement.Estimators[0])
		infer.Interval = desired.DefaultInferInterval
	}
	if placement.Polls {
		infer.Poll = 10 * time.Second
	}
	return infer
}

// addServers adds count servers to a service, from server number first on.
func addServers(c *desired.Service, first, count int) {
	for i := first; i < first+count; i++ {
		server := desired.Server{
			Name: fmt.Sprintf("s%d", i), Locator: serverLocator(i), Weight: new(uint32(1)),
		}
		if c.QUIC != nil {
			server.QUICID = fmt.Sprintf("c460%02x", i) // quicCase has the ID of server 1
		}
		c.Servers = append(c.Servers, server)
	}
}

// serve makes s the only service of the balancer. The flows in the flow table stay. If the balancer
// orders the servers of s by load reports, serve also sends it a report of each server. It does
// nothing if the rig has no balancer, or if the balancer has this service already.
func (r *rig) serve(h *host, s service) error {
	if r.balancer == nil || r.service == s {
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

// apply applies a configuration with the service. The balancer may load another program for it.
func (r *rig) apply(s service) error {
	next := *r.config
	next.Services = []desired.Service{serviceConfig(s)}
	isReference := r.program != r.balancer.Program()
	if err := r.balancer.Apply(&next); err != nil {
		return err
	}
	// The reference program stays: it takes the place of each program of the balancer.
	if !isReference && r.program != r.balancer.Program() {
		r.program = r.balancer.Program()
		clear(r.steps) // upTo loads them again: the loaded ones may lack what the service needs
	}
	r.config, r.service = &next, s
	return nil
}

// report sends the balancer a signal of each server, by which the server accepts a flow and reports
// its load. The loads differ, so that the balancer has to sort the candidates.
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

// clock returns the present time in ticks, which a load report has as its serial.
func clock() (uint32, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint32(now.Nano() / int64(srv6.ReportTick)), nil
}

// useReference replaces the balancer's program by the reference program. It uses the balancer's
// tables, except for the flow table.
func (r *rig) useReference(capacity uint32) error {
	spec, err := loadReference()
	if err != nil {
		return err
	}
	spec.Maps["reference_flows"].MaxEntries = capacity
	r.program, err = r.load(spec, "xdp_reference")
	return err
}

// load loads a program of a specification, with the constants and tables of the balancer's program.
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

// pinnedMaps opens those pinned maps of an instance that a specification also has, by name.
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

// loadShared loads a program of a specification and sets its variables. The program uses the maps
// in shared, which loadShared closes.
func (r *rig) loadShared(
	spec *ebpf.CollectionSpec, program string, shared map[string]*ebpf.Map, variables map[string]any,
) (*ebpf.Program, error) {
	defer closeMaps(shared)
	for name, m := range shared { // a map can only replace one of the same size
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	collection, err := ebpf.NewCollectionWithOptions(spec,
		ebpf.CollectionOptions{MapReplacements: shared})
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

// makeAgent makes the agent of server 1, without a daemon, and takes its program. If s.accept is
// set, the service hunts: the agent accepts a connection while fewer connections than s.threshold
// wait in the accept queue of an application, which makeAgent also starts.
func (r *rig) makeAgent(s *setup) error {
	cfg := &desired.Agent{
		Node: desired.AgentNode{
			Instance: newInstance(), Interface: hop.Link.Name, MTU: hop.Link.MTU,
			Locator: serverLocator(1), Addresses: []netip.Addr{serverAddress(1)},
		},
		Services: []desired.AgentService{{
			Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: desired.TCP,
			Encapsulation: s.encapsulation,
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

// listen makes a network namespace for the agent's host, in which an application listens at all
// addresses.
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

// fill enters flows into the flow table, or into the hint table, from flow 0 on, as many as the
// setup's capacity. It enters none if the setup's content is noFlows. The cases with known flows
// use the flows that were entered first. These are certainly in the flow table: a second packet
// confirms each of them before the next one is entered, and later flows do not replace confirmed
// ones.
func (r *rig) fill(ctx context.Context, h *host, s *setup) error {
	switch {
	case s.content == noFlows:
		return nil
	case s.persistence.Method().NeedsHints:
		return r.fillHints(ctx, h, s)
	}
	t := s.entering()
	for r.next < uint64(s.capacity) {
		if err := ctx.Err(); err != nil {
			return err
		}
		flows := min(fillChunk, uint64(s.capacity)-r.next)
		t.first = r.next
		if err := h.prepare(r.program, &t); err != nil {
			return err
		}
		if _, err := r.run(h, uint32(flows*t.order.packetsPerFlow())); err != nil {
			return fmt.Errorf("fill the flow table: %w", err)
		}
		r.next += flows
	}
	return nil
}

// entering returns the packets that enter flows into the setup's flow table.
func (s *setup) entering() traffic {
	t := trafficTo(s.family, vips[s.family], desired.TCP, packet.ACK)
	t.order = inTurn
	switch {
	case s.kind == setupAgent: // offers that the server must accept
		syn := trafficTo(s.family, vips[s.family], desired.TCP, packet.SYN)
		t = wrapped(passed(syn), s.encapsulation, srv6.ConnectForce)
		t.order = inTurn
	case s.content == knownFlows: // the second packet confirms the flow
		t.order = inPairs
	}
	return t
}

// fillHints enters flows into the hint table. For each flow, all servers signal that they have
// accepted the flow, and then the client answers. The signal of one server would be enough, but
// only if the flow's row of the candidate table contains that server: the balancer ignores signals
// of other servers.
func (r *rig) fillHints(ctx context.Context, h *host, s *setup) error {
	ack := trafficTo(s.family, vips[s.family], desired.TCP, packet.ACK)
	ack.order = inTurn
	for r.next < uint64(s.capacity) {
		flows := min(fillChunk, uint64(s.capacity)-r.next)
		var all []traffic
		for i := 1; i <= serverCount; i++ {
			all = append(all, signalFrom(r.service, i, 0))
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
