package bench

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
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
	// strangers are addresses that are no VIPs.
	strangers = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("198.51.100.2"), ipv6: netip.MustParseAddr("2001:db8:80::2"),
	}
	// clients have the flow's number added to their last 32 bits.
	clients = map[family]netip.Addr{
		ipv4: netip.MustParseAddr("10.0.0.0"), ipv6: netip.MustParseAddr("2001:db8:c::"),
	}
)

// hop is how every server is reached: back by the interface that test runs receive on, so that the
// verdict is XDP_TX as on a balancer with one network card.
var hop = nexthop.Hop{
	MAC:  packet.MAC{2, 0, 0, 0, 1, 1},
	Link: nexthop.Link{Index: 1, Name: "lo", Type: "device", MAC: hostMAC, MTU: 9000},
}

func serverLocator(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 7: byte(i)}), 64)
}

func serverAddress(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 9, 15: byte(i)})
}

func hasLocators(kind config.Encapsulation) bool {
	return kind == config.SRv6Insert || kind == config.SRv6Encap
}

// setupKind is which program is measured.
type setupKind int

const (
	setupNone setupKind = iota
	setupFloor
	setupBalancer
	setupReference
	setupSteps
	setupAgent
)

// setup is a program with what it needs, in the state that a case finds it in. Cases with the same share
// it.
type setup struct {
	kind          setupKind
	family        family
	encapsulation config.Encapsulation
	protocol      config.Protocol
	capacity      uint32          // of the flow table, in flows
	filledBy      packet.TCPFlags // what the table is filled by to its capacity; 0: it is empty
	confirmed     bool            // by a second packet of every flow
	lastStep      uint32          // of setupSteps: index in steps
}

// rig is a setup that was made.
type rig struct {
	program   *ebpf.Program
	filler    *ebpf.Program  // enters flows
	instance  string         // of a balancer
	constants map[string]any // of programs on its tables
	view      *balancer.View // of those
	closers   []func() error
}

var instances atomic.Int32

func (s *setup) build() (r *rig, err error) {
	r = &rig{}
	switch s.kind {
	case setupFloor:
		err = r.loadFloor()
	case setupBalancer, setupReference, setupSteps:
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

func (r *rig) loadFloor() error {
	spec, err := loadFloor()
	if err != nil {
		return err
	}
	for name, value := range map[string]any{
		"to_mac": macWord(hop.MAC), "from_mac": macWord(hostMAC),
		"server": envelope(config.SRv6Insert).Segments[0].As16(), "balancer": balancerLocator.Addr().As16(),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("floor: set %s: %w", name, err)
		}
	}
	objects := &floorObjects{}
	if err := spec.LoadAndAssign(objects, nil); err != nil {
		return fmt.Errorf("load the floor: %w", err)
	}
	r.program, r.closers = objects.XdpFloor, append(r.closers, objects.Close)
	return nil
}

// macWord is a MAC address as the data path has it, in memory order.
func macWord(mac packet.MAC) (word [8]byte) {
	copy(word[:], mac[:])
	return word
}

func newInstance() string { return fmt.Sprintf("bench-%d-%d", os.Getpid(), instances.Add(1)) }

func (r *rig) loadBalancer(s *setup) error {
	cfg := s.balancerConfig()
	b, err := balancer.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	r.instance, r.constants, r.closers = cfg.Node.Instance, b.Constants(), append(r.closers, b.Close)
	if r.program, err = b.Rehearse(hop); err != nil {
		return err
	}
	r.filler = r.program
	switch s.kind {
	case setupReference:
		return r.loadReference(s.capacity)
	case setupSteps:
		return r.loadSteps(s.lastStep)
	}
	if r.view, err = balancer.OpenView(r.instance); err != nil {
		return err
	}
	r.closers = append(r.closers, r.view.Close)
	return nil
}

func (s *setup) balancerConfig() *config.Balancer {
	service := config.Service{
		Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: s.protocol,
		Placement: config.PlacementHash, Persistence: config.PersistenceTable, Encapsulation: s.encapsulation,
		Candidates: 1, Buckets: tables.DefaultBuckets,
		Timeouts: config.Timeouts{New: time.Hour, Established: time.Hour, Closing: time.Hour},
	}
	weight := uint32(1)
	for i := 1; i <= serverCount; i++ {
		server := config.Server{Name: fmt.Sprintf("s%d", i), Weight: &weight}
		if hasLocators(s.encapsulation) {
			server.Locator = serverLocator(i)
		} else {
			server.Address = serverAddress(i)
		}
		service.Servers = append(service.Servers, server)
	}
	capacity := s.capacity
	if s.kind == setupReference {
		capacity = 1 // it has a table of its own
	}
	return &config.Balancer{
		Node: config.BalancerNode{
			Instance: newInstance(), Interface: hop.Link.Name, Locator: balancerLocator,
			Addresses: []netip.Addr{balancerAddress},
			Limits:    config.Limits{Flows: capacity, Servers: serverCount},
		},
		Services: []config.Service{service},
	}
}

// loadReference replaces the program by the reference, which shares all tables but that of flows.
func (r *rig) loadReference(capacity uint32) error {
	spec, err := loadReference()
	if err != nil {
		return err
	}
	spec.Maps["reference_flows"].MaxEntries = capacity
	err = r.replace(spec, "xdp_reference")
	r.filler = r.program
	return err
}

// loadSteps replaces the program by one that ends after a step.
func (r *rig) loadSteps(last uint32) error {
	spec, err := loadSteps()
	if err != nil {
		return err
	}
	if err := spec.Variables["last_step"].Set(last); err != nil {
		return err
	}
	return r.replace(spec, "xdp_steps")
}

// replace loads another program on the balancer's tables.
func (r *rig) replace(spec *ebpf.CollectionSpec, program string) error {
	dir := datapath.Dir(r.instance)
	pins, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	shared := map[string]*ebpf.Map{}
	defer func() {
		for _, m := range shared {
			_ = m.Close()
		}
	}()
	for _, pin := range pins {
		mapSpec := spec.Maps[pin.Name()]
		if mapSpec == nil {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pin.Name()), nil)
		if err != nil {
			return err
		}
		shared[pin.Name()], mapSpec.MaxEntries = m, m.MaxEntries()
	}
	for name, value := range r.constants {
		if variable := spec.Variables[name]; variable != nil {
			if err := variable.Set(value); err != nil {
				return fmt.Errorf("%s: set %s: %w", program, name, err)
			}
		}
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return fmt.Errorf("load %s: %w", program, err)
	}
	r.program = collection.Programs[program]
	r.closers = append(r.closers, func() error { collection.Close(); return nil })
	return collection.Variables["host_mac"].Set(macWord(hostMAC))
}

func (r *rig) loadAgent(s *setup) error {
	cfg := &config.Agent{
		Node: config.AgentNode{
			Instance: newInstance(), Interface: hop.Link.Name, MTU: hop.Link.MTU,
			Locator: serverLocator(1), Addresses: []netip.Addr{serverAddress(1)},
		},
		Services: []config.AgentService{{
			Name: "bench", VIP: vips[s.family], Port: servicePort, Protocol: config.TCP, Encapsulation: s.encapsulation,
		}},
	}
	a, err := agent.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	// An agent leaves its data path, also one that was never put in place.
	r.closers = append(r.closers, func() error { return datapath.RemoveDir(cfg.Node.Instance) }, a.Close)
	r.program, err = a.Rehearse(hostMAC)
	return err
}

// fill brings the flow table into the state that the cases find it in.
func (r *rig) fill(h *host, s *setup) error {
	if s.filledBy == 0 {
		return nil
	}
	passes := []packet.TCPFlags{s.filledBy}
	if s.confirmed {
		passes = append(passes, packet.ACK)
	}
	for _, flags := range passes {
		t := trafficTo(s.family, vips[s.family], s.protocol, flags)
		t.order = sequential
		if err := h.prepare(r.filler, &t); err != nil {
			return err
		}
		if _, err := h.run(s.capacity); err != nil {
			return fmt.Errorf("fill the flow table: %w", err)
		}
	}
	return nil
}

// known is how many packets of known flows a balancer has forwarded.
func (r *rig) known() (uint64, error) {
	return r.view.Count("forward_known")
}
