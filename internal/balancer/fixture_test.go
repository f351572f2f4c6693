package balancer

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testnet"
)

// What an XDP program answers with (enum xdp_action of the kernel).
const (
	verdictDrop     = 1
	verdictPass     = 2
	verdictTX       = 3
	verdictRedirect = 4
)

// ownMAC is the balancer's, to which package packet addresses its frames.
var ownMAC = packet.MAC{2, 0, 0, 0, 0, 2}

// links are the interfaces by which the servers of a fixture are reached, with their MTU. The one
// named bridge is one; the others are veths.
var links = map[string]int{"out": 9000, "narrow": 1500, "bridge": 1500}

// fixture is a balancer whose data path is in the kernel but on no interface, with next hops of the
// test's own making.
type fixture struct {
	*Balancer
	t        testing.TB
	clock    *flowClock // of this and all further processes
	ns       *testnet.Namespace
	identity balancerIdentity
	// via names the interface of servers that are not behind "out"; "" is none: no next hop.
	via     map[string]string
	ifindex map[string]int
	macs    map[string]packet.MAC // of the links
}

var instances atomic.Int32

// open loads a balancer with the configuration, in an instance of the test's own.
func open(t testing.TB, cfg *config.Balancer) *fixture {
	t.Helper()
	clock, err := newFlowClock()
	if err != nil {
		t.Fatal(err)
	}
	clock.shift = standstill
	return openAt(t, cfg, clock)
}

// standstill is a length of ticks, in powers of two of jiffies, with which the flow clock is 0 for ever: what
// becomes of a packet does not depend on when it comes.
const standstill = 63

// openAt is open with a flow clock of its own.
func openAt(t testing.TB, cfg *config.Balancer, clock *flowClock) *fixture {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loading BPF programs needs root")
	}
	cfg.Node.Instance = fmt.Sprintf("test-%d-%d", os.Getpid(), instances.Add(1))
	t.Cleanup(func() {
		if err := Detach(cfg.Node.Instance); err != nil {
			t.Error(err)
		}
	})
	f := &fixture{t: t, clock: clock, ns: testnet.New(t), via: map[string]string{}}
	f.connect()
	f.start(cfg)
	f.route()
	f.attached = true // to no interface, but what is not routed from now on is lost
	t.Cleanup(func() { f.stop() })
	return f
}

// start makes a process of the instance: the first, or the one after a stop. Servers that are new
// have no next hops before route.
func (f *fixture) start(cfg *config.Balancer) {
	f.t.Helper()
	var err error
	if f.Balancer, err = newBalancer(cfg, f.clock, slog.New(slog.DiscardHandler)); err != nil {
		f.t.Fatal(err)
	}
	f.must(f.kernel.objects.Identity.Lookup(uint32(0), &f.identity))
	f.must(f.kernel.setHost(nexthop.Link{Type: "veth", MAC: ownMAC}))
}

// stop ends the process; what is pinned stays.
func (f *fixture) stop() {
	f.t.Helper()
	if f.Balancer != nil {
		f.must(f.Close())
	}
	f.Balancer = nil
}

func (f *fixture) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// connect makes the links. Nothing is ever sent on them.
func (f *fixture) connect() {
	f.t.Helper()
	f.ifindex = map[string]int{}
	f.macs = map[string]packet.MAC{}
	far := testnet.New(f.t)
	bridge := netlink.NewLinkAttrs()
	bridge.Name = "bridge"
	f.must(f.ns.Do(func() error { return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: bridge}) }))
	for name, mtu := range links {
		if name != "bridge" {
			testnet.Connect(f.t, f.ns, name, nil, far, name, nil)
		}
		f.must(f.ns.Do(func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			f.ifindex[name] = link.Attrs().Index
			f.macs[name] = packet.MAC(link.Attrs().HardwareAddr)
			return netlink.LinkSetMTU(link, mtu)
		}))
	}
}

// route gives every server its next hop.
func (f *fixture) route() {
	f.t.Helper()
	f.hops = map[netip.Addr]nexthop.Hop{}
	for _, m := range f.services.members() {
		if link := f.linkOf(m.Name); link != "" {
			f.hops[target(m)] = nexthop.Hop{MAC: hopMAC(target(m)), Link: f.link(link)}
		}
	}
	f.applyHops()
	f.rebuild()
}

// link is one of the links, as the resolver would describe it.
func (f *fixture) link(name string) nexthop.Link {
	kind := "veth"
	if name == "bridge" {
		kind = "bridge"
	}
	return nexthop.Link{Index: f.ifindex[name], Name: name, Type: kind, MAC: f.macs[name], MTU: links[name]}
}

func (f *fixture) linkOf(server string) string {
	if link, ok := f.via[server]; ok {
		return link
	}
	return "out"
}

// hopMAC is a next hop's address that tells which server it leads to.
func hopMAC(target netip.Addr) packet.MAC {
	b := target.As16()
	return packet.MAC{2, 1, b[6], b[7], b[14], b[15]}
}

// apply reloads the configuration as the control loop would.
func (f *fixture) apply(cfg *config.Balancer) error {
	f.t.Helper()
	cfg.Node.Instance = f.cfg.Node.Instance
	if err := f.ns.Do(func() error { return f.Apply(cfg) }); err != nil {
		return err
	}
	f.route()
	return nil
}

func (f *fixture) mustApply(cfg *config.Balancer) {
	f.t.Helper()
	f.must(f.apply(cfg))
}

// tally is the difference that a test made to a counter.
type tally struct{ Packets, Bytes, Flows uint64 }

// outcome is what became of a frame, and everything that was counted meanwhile.
type outcome struct {
	Verdict uint32
	Frame   []byte
	Reasons map[string]tally // by the reason's name
	Servers map[string]tally // by "service/server"
}

// xdpContext is struct xdp_md, for a test run that has one.
type xdpContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// run puts a frame through the data path, received on the loopback interface.
func (f *fixture) run(frame []byte) outcome {
	f.t.Helper()
	return f.runIn(frame, nil)
}

// runIn puts a frame through the data path with a context, which may say that the frame begins with
// metadata of the driver.
func (f *fixture) runIn(frame []byte, context *xdpContext) outcome {
	f.t.Helper()
	before := f.counters()
	verdict, out := f.exec(frame, context)
	after := f.counters()
	return outcome{
		Verdict: verdict,
		Frame:   out,
		Reasons: difference(before.reasons, after.reasons),
		Servers: difference(before.servers, after.servers),
	}
}

// exec is runIn without a look at the counters.
func (f *fixture) exec(frame []byte, context *xdpContext) (verdict uint32, out []byte) {
	f.t.Helper()
	f.refill()
	options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)}
	metadata := 0
	if context != nil {
		context.DataEnd = uint32(len(frame))
		metadata = int(context.Data)
		options.Context = context
	}
	verdict, err := f.kernel.objects.XdpLb.Run(&options)
	if err != nil {
		f.t.Fatalf("run a frame of %d bytes: %v", len(frame), err)
	}
	return verdict, options.DataOut[metadata:]
}

// refill lets every core answer again.
func (f *fixture) refill() { f.setAnswered(0) }

// setAnswered sets the time up to which every core has used its right to answer.
func (f *fixture) setAnswered(ns uint64) {
	f.t.Helper()
	cpus, err := ebpf.PossibleCPU()
	f.must(err)
	for kind := range f.kernel.objects.Answers.MaxEntries() {
		f.must(f.kernel.objects.Answers.Put(kind, slices.Repeat([]uint64{ns}, cpus)))
	}
}

// forgetFragments empties the table of first fragments.
func (f *fixture) forgetFragments() {
	f.t.Helper()
	var keys []balancerFragmentKey
	var key balancerFragmentKey
	var flow balancerFragmentFlow
	entries := f.kernel.objects.Fragments.Iterate()
	for entries.Next(&key, &flow) {
		keys = append(keys, key)
	}
	f.must(entries.Err())
	for _, key := range keys {
		f.must(f.kernel.objects.Fragments.Delete(key))
	}
}

// counters are the values of all counters.
type counters struct{ reasons, servers map[string]tally }

func (f *fixture) counters() counters {
	f.t.Helper()
	c := counters{map[string]tally{}, map[string]tally{}}
	reasons := lookupAll[balancerCounter](f, f.kernel.objects.Reasons)
	for name, number := range reasonNumbers() {
		var sum tally
		for _, v := range reasons(number) {
			sum.Packets += v.Packets
			sum.Bytes += v.Bytes
		}
		c.reasons[name] = sum
	}
	servers := lookupAll[balancerServerCounter](f, f.kernel.objects.ServerCounters)
	for slot, key := range f.slots.bySlot {
		var sum tally
		for _, v := range servers(slot) {
			sum.Packets += v.Packets
			sum.Bytes += v.Bytes
			sum.Flows += v.Flows
		}
		name := key.service + "/" + key.server
		if _, retired := f.slots.retired[slot]; retired {
			name += ", retired"
		}
		c.servers[name] = sum
	}
	return c
}

// lookupAll reads a per-CPU array in one system call. The function that it returns has the values of one
// element.
func lookupAll[T any](f *fixture, m *ebpf.Map) func(number uint32) []T {
	f.t.Helper()
	cores := ebpf.MustPossibleCPU()
	keys := make([]uint32, m.MaxEntries())
	values := make([]T, len(keys)*cores)
	// The error is that there are no more.
	if n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, values, nil); n < len(keys) {
		f.t.Fatalf("read %v: %d of %d elements: %v", m, n, len(keys), err)
	}
	return func(number uint32) []T { return values[int(number)*cores:][:cores] }
}

func difference(before, after map[string]tally) map[string]tally {
	out := map[string]tally{}
	for name, a := range after {
		b := before[name]
		if d := (tally{a.Packets - b.Packets, a.Bytes - b.Bytes, a.Flows - b.Flows}); d != (tally{}) {
			out[name] = d
		}
	}
	return out
}

// reasonNumbers is enum reason of bpf/stats.h, by the names that metrics use.
var reasonNumbers = sync.OnceValue(func() map[string]uint32 {
	spec, err := loadBalancer()
	if err != nil {
		panic(err)
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("reason", &enum); err != nil {
		panic(err)
	}
	numbers := map[string]uint32{}
	for _, value := range enum.Values {
		name := strings.ToLower(strings.TrimPrefix(value.Name, "REASON_"))
		if name != "count" {
			numbers[name] = uint32(value.Value)
		}
	}
	return numbers
})

// check compares an outcome with the one wanted.
func (f *fixture) check(want, got outcome) {
	f.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Errorf("(-want +got):\n%s", diff)
	}
}

// layer3 is the length of the frame's packet, as its IP header says.
func layer3(frame []byte) uint64 {
	p := frame[packet.NetworkOffset(frame):]
	if p[0]>>4 == 4 {
		return uint64(p[2])<<8 | uint64(p[3])
	}
	return 40 + (uint64(p[4])<<8 | uint64(p[5]))
}

// refused is the outcome of a frame that is dropped or passed untouched.
func refused(frame []byte, reason string, length uint64) outcome {
	verdict := uint32(verdictDrop)
	if strings.HasPrefix(reason, "pass_") {
		verdict = verdictPass
	}
	return outcome{verdict, frame, map[string]tally{reason: {1, length, 0}}, map[string]tally{}}
}

// forwarded is the outcome of a frame that goes to a server of a service, as the reference
// implementation encapsulates it.
func (f *fixture) forwarded(frame []byte, flow Flow, service, server, reason string) outcome {
	f.t.Helper()
	out, err := packet.Encapsulate(frame, f.encap(flow, service, server))
	f.must(err)
	length := layer3(frame)
	placed := uint64(0)
	if reason == "forward_new" {
		placed = 1
	}
	return outcome{
		verdictRedirect, out,
		map[string]tally{reason: {1, length, 0}},
		map[string]tally{service + "/" + server: {1, length, placed}},
	}
}

// The ICMP errors that the balancer sends: type and code by the IP version.
var answerTypes = map[string]map[byte][2]uint8{
	"answer_too_big":   {4: {3, 4}, 6: {2, 0}},
	"answer_hop_limit": {4: {11, 0}, 6: {3, 0}},
}

// answered is the outcome of a frame about which its sender is told an ICMP error, with the VIP as the
// source. The MTU is that of too big.
func answered(frame []byte, reason string, mtu uint32) outcome {
	p := frame[packet.NetworkOffset(frame):]
	version := p[0] >> 4
	vip, _ := netip.AddrFromSlice(p[16:20])
	if version == 6 {
		vip, _ = netip.AddrFromSlice(p[24:40])
	}
	message := answerTypes[reason][version]
	return sentBack(frame, reason, packet.ICMPError(vip, message[0], message[1], mtu, frame,
		packet.Ethernet(packet.MAC(frame), packet.MAC(frame[6:])), packet.TrafficClass(0xc0)))
}

// sentBack is the outcome of a frame that is answered by another.
func sentBack(frame []byte, reason string, answer []byte) outcome {
	return outcome{verdictRedirect, answer, map[string]tally{reason: {1, layer3(frame), 0}}, map[string]tally{}}
}

// encap says how packets of a flow travel to a server.
func (f *fixture) encap(flow Flow, service, server string) packet.Encap {
	f.t.Helper()
	svc := f.service(service)
	for i := range svc.Servers {
		s := &svc.Servers[i]
		if s.Name != server {
			continue
		}
		e := packet.Encap{
			Kind: svc.Encapsulation, FlowLabel: f.flowLabel(flow),
			Own: f.macs[f.linkOf(server)], NextHop: hopMAC(target(&member{Server: *s})),
		}
		if s.Locator.IsValid() {
			e.Sender = f.cfg.Node.Locator.Addr()
			e.Segments = []netip.Addr{srv6.SID{Locator: s.Locator, Function: srv6.Deliver}.Addr()}
			return e
		}
		e.Destination = s.Address
		for _, source := range f.cfg.Node.Addresses {
			if source.Is4() == s.Address.Is4() {
				e.Source = source
			}
		}
		return e
	}
	f.t.Fatalf("service %s has no server %s", service, server)
	return packet.Encap{}
}

func (f *fixture) service(name string) *config.Service {
	f.t.Helper()
	for i := range f.cfg.Services {
		if f.cfg.Services[i].Name == name {
			return &f.cfg.Services[i]
		}
	}
	f.t.Fatalf("no service %s", name)
	return nil
}

// preferred is the entry of its bucket that a flow takes if it can choose.
func (f *fixture) preferred(flow Flow) int { return int(f.signature(flow) % flowsPerBucket) }

// signature is the 34 bits that stand for a flow in the flow table.
func (f *fixture) signature(flow Flow) uint64 {
	_, signature := flow.tableHash(f.serviceID(flow), &f.identity)
	return signature
}

// serviceID is the number of a flow's service.
func (f *fixture) serviceID(flow Flow) uint32 {
	f.t.Helper()
	svc := f.classify(flow)
	if svc == nil {
		f.t.Fatalf("no service takes %+v", flow)
	}
	return f.services.byName[svc.Name].id
}

func (f *fixture) flowLabel(flow Flow) uint32 {
	return uint32(f.signature(flow)) & 0xfffff
}

// bucket is the flow's in the flow table, with the kernel's own memory behind it.
func (f *fixture) bucket(flow Flow) []uint64 {
	at := f.bucketNumber(flow) * flowsPerBucket
	return f.kernel.flows.entries[at : at+flowsPerBucket]
}

// bucketNumber tells buckets of the flow table apart.
func (f *fixture) bucketNumber(flow Flow) uint32 {
	place, _ := flow.tableHash(f.serviceID(flow), &f.identity)
	return place % uint32(len(f.kernel.flows.entries)/flowsPerBucket)
}

// forgetFlows empties the flow table.
func (f *fixture) forgetFlows() {
	f.kernel.flows.sweep(func(flowEntry) bool { return false })
}

// elapseFlows makes some flows of the table as if they had been seen that many ticks earlier.
func (f *fixture) elapseFlows(ticks uint16, which func(flowEntry) bool) {
	for i, value := range f.kernel.flows.entries {
		if e := flowEntry(value); e.state() != stateFree && which(e) {
			f.kernel.flows.entries[i] = value&^flowTimeMask | uint64(e.seen()-ticks)&flowTimeMask
		}
	}
}

// placed is the server that consistent hashing names for a flow.
func (f *fixture) placed(flow Flow, service string) string {
	f.t.Helper()
	svc := f.service(service)
	var servers []tables.Server
	for _, s := range svc.Servers {
		servers = append(servers, tables.Server{Name: s.Name, Weight: *s.Weight})
	}
	table, err := tables.Build(servers, svc.Buckets, svc.Candidates)
	f.must(err)
	row := table.Row(int(bucketOf(flow.hash(&f.identity.BucketKeys), uint32(svc.Buckets))))
	return servers[row[0]].Name
}

// slot is the number of a server.
func (f *fixture) slot(service, server string) uint32 {
	f.t.Helper()
	for slot, key := range f.slots.bySlot {
		if _, retired := f.slots.retired[slot]; !retired && key.service == service && key.server == server {
			return slot
		}
	}
	f.t.Fatalf("service %s has no slot for server %s", service, server)
	return 0
}

// frame is a packet of a flow.
func (flow Flow) frame(options ...packet.Option) []byte {
	if flow.Protocol == config.UDP {
		return packet.UDP(flow.Source, flow.Destination, options...)
	}
	return packet.TCP(flow.Source, flow.Destination, options...)
}

// reverse is the flow of the other direction.
func (flow Flow) reverse() Flow {
	flow.Source, flow.Destination = flow.Destination, flow.Source
	return flow
}

// The addresses of the tests.
var (
	client4 = netip.MustParseAddrPort("192.0.2.2:40000")
	client6 = netip.MustParseAddrPort("[2001:db8:c::2]:40000")
	vip4    = netip.MustParseAddr("198.51.100.1")
	vip6    = netip.MustParseAddr("2001:db8:80::1")
)

// node is a balancer's side of every encapsulation.
func node() config.BalancerNode {
	return config.BalancerNode{
		Interface: "eth0",
		Locator:   netip.MustParsePrefix("fd00:6c:0:1::/64"),
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00:a::1")},
		Seed:      1,
		Limits:    config.Limits{Flows: 1024, Servers: 64},
	}
}

func balancerOf(services ...config.Service) *config.Balancer {
	return &config.Balancer{Node: node(), Services: services}
}

// serviceOf is a service with its defaults.
func serviceOf(name string, vip netip.Addr, port config.Port, protocol config.Protocol,
	kind config.Encapsulation, servers ...config.Server,
) config.Service {
	return config.Service{
		Name: name, VIP: vip, Port: port, Protocol: protocol,
		Placement: config.PlacementHash, Persistence: config.PersistenceTable, Encapsulation: kind,
		Candidates: 1, Buckets: 251,
		Timeouts: config.Timeouts{New: time.Minute, Established: time.Hour, Closing: time.Minute},
		Servers:  servers,
	}
}

// srv6Server has the locator fd00:5:0:<number>::/64.
func srv6Server(name string, number uint8, weight uint32) config.Server {
	locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 7: number})
	return config.Server{Name: name, Locator: netip.PrefixFrom(locator, 64), Weight: &weight}
}

func tunnelServer(name, address string) config.Server {
	one := uint32(1)
	return config.Server{Name: name, Address: netip.MustParseAddr(address), Weight: &one}
}

// flowTo is a flow of the client of the VIP's family.
func flowTo(vip netip.Addr, port uint16, protocol config.Protocol) Flow {
	source := client6
	if vip.Is4() {
		source = client4
	}
	return Flow{Protocol: protocol, Source: source, Destination: netip.AddrPortFrom(vip, port)}
}

// from is the flow with another client port.
func (flow Flow) from(port uint16) Flow {
	flow.Source = netip.AddrPortFrom(flow.Source.Addr(), port)
	return flow
}

// now is the time of the flow table's clock.
func (f *fixture) now() uint16 {
	f.t.Helper()
	now, err := f.clock.now()
	f.must(err)
	return now
}

func (e flowEntry) seen() uint16 { return uint16(e) & flowTimeMask }

// entryOf is an entry of the flow table.
func entryOf(signature uint64, slot uint32, state balancerFlowState, seen uint16) uint64 {
	return signature<<30 | uint64(slot)<<14 | uint64(state)<<12 | uint64(seen&flowTimeMask)
}

func same(want, got outcome) bool {
	return want.Verdict == got.Verdict && bytes.Equal(want.Frame, got.Frame) &&
		maps.Equal(want.Reasons, got.Reasons) && maps.Equal(want.Servers, got.Servers)
}

// setHealth makes the data path follow what a check found.
func (f *fixture) setHealth(service, server string, healthy bool) {
	f.t.Helper()
	svc := f.services.setHealth(health.Result{Service: service, Server: server, Healthy: healthy})
	if svc != nil {
		f.must(f.services.place(svc))
	}
}
