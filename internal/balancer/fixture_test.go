// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/testhost"
)

// ownMAC is the MAC address of the balancer. Package packet sends its frames to it.
var ownMAC = packet.MAC{2, 0, 0, 0, 0, 2}

// heldMAC is the source of fragments that were held: HELD_SOURCE in bpf/balancer/path/hold.h.
var heldMAC = packet.MAC{2, 'h', 'e', 'l', 'd', 0}

// links are the interfaces through which a fixture reaches its servers, with their MTU in bytes.
// The link "bridge" is a bridge, and the others are veths.
var links = map[string]int{"out": 9000, "narrow": 1500, "bridge": 1500}

// fixture is a balancer whose data path is loaded but attached to no interface. The test sets the
// next hops.
type fixture struct {
	*Balancer
	*network
	t        testing.TB
	opener   testing.TB           // that of open; t can be that of a part of the test
	clock    *dataplane.FlowClock // the clock of this process and all further ones
	identity dataplane.Identity
	// inside is true if frames arrive on node.inside.
	inside bool
	// via contains the interfaces of servers that are not behind "out". An empty name means that
	// the server has no next hop.
	via map[string]string
	// silent contains the servers whose next hop does not answer.
	silent map[string]bool
	// foresees is true if dry runs come before frames.
	foresees bool
	// moving is true while other cores or the control plane change tables. Then a dry run can
	// decide otherwise than the run that follows.
	moving  bool
	dryRuns map[*ebpf.Program]*dataplane.DryRun // by the program of which they are dry runs
	// held is what the data path has given to the process since the last call of takeHeld.
	held []dataplane.HeldFragment
	// applied is a copy of the configuration in force: tests change theirs, and apply it again.
	applied *desired.Balancer
	// inferred is the time up to which the balancer has inferred the loads of servers.
	inferred time.Time
	mirror   *mirror // nil before the first frame that it gets
	coverage *coverage
}

// network is a network namespace with the links. No packet is ever sent on them.
type network struct {
	ns      *netdev.Namespace
	ifindex map[string]int
	macs    map[string]packet.MAC // the MAC addresses of the links
}

// sharedNetwork is the network of all fixtures whose tests do not change it. The kernel needs more
// time to make and remove a namespace than to load a data path.
var sharedNetwork = sync.OnceValues(newNetwork)

var instances atomic.Int32

// open loads a balancer with the configuration, in an instance that only this test uses.
func open(t testing.TB, cfg *desired.Balancer) *fixture {
	t.Helper()
	return openAt(t, cfg, stoppedClock(t))
}

// stoppedClock returns a flow clock that always reads 0.
func stoppedClock(t testing.TB) *dataplane.FlowClock {
	t.Helper()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	clock.Shift = standstill
	return clock
}

// wordOf returns a MAC address as the data path stores it: in memory order, in the low 48 bits.
func wordOf(mac [6]byte) (word uint64) {
	for i, b := range mac {
		word |= uint64(b) << (8 * i)
	}
	return word
}

// standstill is a shift of ticks with which the flow clock always reads 0. So the result for a
// packet does not depend on the time.
const standstill = 63

// openAt is open with the given flow clock.
func openAt(t testing.TB, cfg *desired.Balancer, clock *dataplane.FlowClock) *fixture {
	t.Helper()
	return openWith(t, cfg, clock, foresees(t.Name()))
}

// openWith is openAt. If the fixture foresees, dry runs come before frames, and the programs have
// only the features that the services need. Dry runs have all features, so a feature that the
// programs lack makes a difference.
func openWith(t testing.TB, cfg *desired.Balancer, clock *dataplane.FlowClock, foresees bool) *fixture {
	t.Helper()
	testhost.NeedNamespaces(t)
	testhost.NeedBPF(t)
	cfg.Node.Instance = fmt.Sprintf("test-%d-%d", os.Getpid(), instances.Add(1))
	if foresees {
		narrowed.Store(cfg.Node.Instance, true)
	}
	reusable := reusableFor(t, cfg, clock)
	t.Cleanup(func() {
		if err := dataplane.Detach(cfg.Node.Instance); err != nil {
			t.Error(err)
		}
	})
	f := &fixture{
		t: t, opener: t, coverage: coverageOf(t), clock: clock, via: map[string]string{}, silent: map[string]bool{},
		foresees: foresees, dryRuns: map[*ebpf.Program]*dataplane.DryRun{},
	}
	var err error
	f.network, err = sharedNetwork()
	f.must(err)
	f.start(cfg)
	reusable.record(t, &f.plane.Objects)
	f.route()
	f.attached = true // there is no interface, but next hops that are not found are now cleared
	t.Cleanup(func() {
		f.stop()
		f.checkCoverage()
	})
	if _, isFuzzer := t.(*testing.F); isFuzzer && switchtest.IsInstalled() && f.fitsSwitch() {
		f.openMirror() // the fuzz target must not use t
	}
	return f
}

// start starts a process of the instance: the first one, or one after stop. New servers have no
// next hops before route.
func (f *fixture) start(cfg *desired.Balancer) {
	f.t.Helper()
	var err error
	f.applied = copyOf(cfg)
	if f.Balancer, err = newBalancer(f.applied, secretsOf(f.t, cfg), f.clock, slog.New(slog.DiscardHandler)); err != nil {
		f.t.Fatal(err)
	}
	f.must(datapath.TakeOver(slog.New(slog.DiscardHandler), func(takeover *datapath.Takeover) error {
		return f.Balancer.fill(takeover, withoutPrograms)
	}))
	f.cfg = cfg
	f.must(f.plane.Objects.Identity.Lookup(uint32(0), &f.identity))
	f.must(f.plane.SetHost(slices.Repeat([]nexthop.Link{{Type: "veth", MAC: ownMAC}}, len(f.plane.Sides))))
}

// stop ends the process. Pinned objects stay.
func (f *fixture) stop() {
	f.t.Helper()
	for program, d := range f.dryRuns {
		f.must(d.Close())
		delete(f.dryRuns, program)
	}
	if f.Balancer != nil {
		f.must(f.Close())
	}
	f.Balancer = nil
}

// restart ends the process, and starts the next one with the same configuration.
func (f *fixture) restart() {
	f.t.Helper()
	f.restartAs(f.cfg)
}

// restartAs ends the process, and starts the next one with a configuration.
func (f *fixture) restartAs(cfg *desired.Balancer) {
	f.t.Helper()
	f.stop()
	f.start(cfg)
	f.route()
}

func (f *fixture) must(err error) {
	if err != nil {
		f.t.Helper() // it is slow, and called for each frame otherwise
		f.t.Fatal(err)
	}
}

// leaveSharedNetwork gives the fixture a network that the test may change.
func (f *fixture) leaveSharedNetwork() {
	f.t.Helper()
	var err error
	f.network, err = newNetwork()
	f.must(err)
	f.t.Cleanup(func() { f.must(f.ns.Close()) })
	f.route()
}

func newNetwork() (*network, error) {
	ns, err := netdev.NewNamespace()
	if err != nil {
		return nil, err
	}
	n := &network{ns, map[string]int{}, map[string]packet.MAC{}}
	for name, mtu := range links {
		if err := ns.Do(func() error { return n.add(name, mtu) }); err != nil {
			return nil, fmt.Errorf("link %s: %w", name, err)
		}
	}
	return n, nil
}

func (n *network) add(name string, mtu int) error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	var link netlink.Link = &netlink.Veth{LinkAttrs: attributes, PeerName: name + "-peer"}
	if name == "bridge" {
		link = &netlink.Bridge{LinkAttrs: attributes}
	}
	if err := netlink.LinkAdd(link); err != nil {
		return err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	n.ifindex[name] = link.Attrs().Index
	n.macs[name] = packet.MAC(link.Attrs().HardwareAddr)
	return errors.Join(netlink.LinkSetMTU(link, mtu), netlink.LinkSetUp(link))
}

// route gives each server its next hop.
func (f *fixture) route() {
	f.t.Helper()
	f.hops = map[netip.Addr]nexthop.Hop{}
	for _, m := range f.services.members() {
		if link := f.linkOf(m.Name); link != "" {
			to := target(&m.Server)
			f.hops[f.wayTo(to)] = nexthop.Hop{MAC: hopMAC(to), Link: f.link(link), Silent: f.silent[m.Name]}
		}
	}
	f.applyHops()
}

// link describes one of the links, as the resolver would.
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

// reaches tells whether a server has a next hop that answers.
func (f *fixture) reaches(server string) bool { return f.linkOf(server) != "" && !f.silent[server] }

// hush makes the next hop of a server not answer, until route is called.
func (f *fixture) hush(slot uint32) {
	f.plane.Servers.SetFlags(slot, f.plane.Servers.Flags(slot)|dataplane.FlagUnreachable)
}

// hopMAC returns the MAC address of the next hop to a target. It is different for each server.
func hopMAC(target netip.Addr) packet.MAC {
	b := target.As16()
	return packet.MAC{2, 1, b[6], b[7], b[14], b[15]}
}

// apply reloads the configuration, with the keys in its file, as the control loop would.
func (f *fixture) apply(cfg *desired.Balancer) error {
	f.t.Helper()
	cfg.Node.Instance = f.cfg.Node.Instance
	ended, cancel := context.WithCancel(context.Background())
	cancel() // as Rehearsal.Apply
	secrets := secretsOf(f.t, cfg)
	before, next := f.cfg, copyOf(cfg)
	f.cfg = f.applied
	if err := f.ns.Do(func() error { return f.reload(ended, next, secrets, nil) }); err != nil {
		f.cfg = before
		return err
	}
	f.cfg, f.applied = cfg, next
	f.route()
	return nil
}

// copyOf copies a configuration with its services and servers.
func copyOf(cfg *desired.Balancer) *desired.Balancer {
	c := *cfg
	c.Services = slices.Clone(cfg.Services)
	for i := range c.Services {
		c.Services[i].Servers = slices.Clone(c.Services[i].Servers)
	}
	return &c
}

// placeOne makes a service follow another state, and does not wait for packets under way.
func (s *services) placeOne(want *serviceState) error {
	changes, err := s.prepareAll([]*serviceState{want})
	if err != nil {
		return err
	}
	return s.placeAll(changes)
}

func (f *fixture) mustApply(cfg *desired.Balancer) {
	f.t.Helper()
	f.must(f.apply(cfg))
}

// frameContext is struct xdp_md of Linux.
type frameContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// run runs the data path with a frame that was received on the loopback interface.
func (f *fixture) run(frame []byte) outcome {
	f.t.Helper()
	return f.runIn(frame, nil)
}

// runIn runs the data path with a frame and a context. The context can say that the frame begins
// with metadata of the driver.
func (f *fixture) runIn(frame []byte, context *frameContext) outcome {
	f.t.Helper()
	before := f.counters()
	foreseen, verdict, out := f.foreseeAndExec(frame, context)
	after := f.counters()
	o := outcome{
		Verdict: verdict,
		Frame:   out,
		Reasons: difference(before.reasons, after.reasons),
		Servers: difference(before.servers, after.servers),
	}
	if foreseen != nil {
		f.checkCounters(foreseen.decision, o)
	}
	if context == nil { // a switch does not know what drivers tell XDP
		f.runSwitch(frame, o)
	}
	return o
}

// exec is runIn without the counters.
func (f *fixture) exec(frame []byte, context *frameContext) (verdict uint32, out []byte) {
	f.t.Helper()
	_, verdict, out = f.foreseeAndExec(frame, context)
	return verdict, out
}

// foreseeAndExec runs the data path. Unless tables can change meanwhile, a dry run comes first. It
// must come to the same result, and change no flow.
func (f *fixture) foreseeAndExec(frame []byte, context *frameContext) (dry *foreseen, verdict uint32, out []byte) {
	f.t.Helper()
	f.refill()
	f.covers()
	options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)}
	metadata := 0
	if context != nil {
		context.DataEnd = uint32(len(frame))
		metadata = int(context.Data)
		options.Context = context
	}
	program := f.plane.Objects.XdpLb
	if f.inside {
		program = f.plane.Sides[1].Objects.XdpLb
	}
	if f.foresees && !f.moving {
		if f.choosesByCPU() {
			defer stayOnCPU(f.t)()
		}
		dry = f.foresee(program, options)
	}
	verdict, err := program.Run(&options)
	if err != nil {
		f.t.Fatalf("run a frame of %d bytes: %v", len(frame), err)
	}
	if dry != nil {
		f.checkSame(dry, frame, verdict, options.DataOut)
	}
	return dry, verdict, options.DataOut[metadata:]
}

// choosesByCPU tells whether a placement has a state of its own on each CPU (latest in
// bpf/balancer/place/infer.h).
func (f *fixture) choosesByCPU() bool {
	return slices.ContainsFunc(f.cfg.Services, func(s desired.Service) bool { return s.Infer != nil })
}

// refill permits all cores to send answers, to copy errors and to hold fragments again.
func (f *fixture) refill() {
	f.t.Helper()
	f.setAnswered(0)
	if f.plane.Held.Pending() {
		f.readHeld()
		f.must(datapathtest.Zero(f.plane.Objects.HoldBudgets))
	}
}

// readHeld takes the fragments that the data path has given to the process.
func (f *fixture) readHeld() {
	f.t.Helper()
	for f.plane.Held.Pending() {
		held, err := f.plane.Held.Read(time.Now().Add(patience))
		f.must(err)
		f.held = append(f.held, held)
	}
}

// takeHeld returns the fragments that the data path has given to the process since the last call.
func (f *fixture) takeHeld() []dataplane.HeldFragment {
	f.t.Helper()
	f.readHeld()
	held := f.held
	f.held = nil
	return held
}

// setAnswered sets the time up to which all cores have used their rates of answers and of copied
// errors, in nanoseconds.
func (f *fixture) setAnswered(ns uint64) {
	for _, m := range []*ebpf.Map{f.plane.Objects.Answers, f.plane.Objects.Copied} {
		kinds := make([]uint32, m.MaxEntries())
		for i := range kinds {
			kinds[i] = uint32(i)
		}
		_, err := m.BatchUpdate(kinds, slices.Repeat([]uint64{ns}, len(kinds)*ebpf.MustPossibleCPU()), nil)
		f.must(err)
	}
}

// forgetFragments empties the table of first fragments.
func (f *fixture) forgetFragments() {
	f.t.Helper()
	var keys []dataplane.FragmentKey
	var key dataplane.FragmentKey
	var flow dataplane.FragmentFlow
	entries := f.plane.Objects.Fragments.Iterate()
	for entries.Next(&key, &flow) {
		keys = append(keys, key)
	}
	f.must(entries.Err())
	for _, key := range keys {
		f.must(f.plane.Objects.Fragments.Delete(key))
	}
}

func (f *fixture) service(name string) *desired.Service {
	f.t.Helper()
	for i := range f.cfg.Services {
		if f.cfg.Services[i].Name == name {
			return &f.cfg.Services[i]
		}
	}
	f.t.Fatalf("no service %s", name)
	return nil
}

// preferred returns the number of the entry that a flow takes if all entries of its bucket are
// free.
func (f *fixture) preferred(flow dataplane.Flow) int {
	return int(f.signature(flow) % dataplane.FlowsPerBucket)
}

// signature returns the 34 bits that identify a flow in the flow table.
func (f *fixture) signature(flow dataplane.Flow) uint64 {
	_, signature := flow.TableHash(f.serviceID(flow), &f.identity)
	return signature
}

// serviceID returns what stands for the service and the VIP in the hashes of a flow.
func (f *fixture) serviceID(flow dataplane.Flow) uint32 {
	f.t.Helper()
	svc := f.classify(flow)
	if svc == nil {
		f.t.Fatalf("no service takes %+v", flow)
	}
	key := *svc
	key.VIP, key.Port = flow.Destination.Addr(), svc.AllPorts()[0]
	if entry := f.plane.Services.Find(dataplane.ServiceKey(&key)); entry != nil {
		return entry.FlowWord()
	}
	return f.services.byName[svc.Name].id
}

// flowLabel returns the outer flow label of a flow's packets.
func (f *fixture) flowLabel(flow dataplane.Flow) uint32 { return f.label(flow) & 0xfffff }

// label returns the bits of a flow's hash for outer headers. They do not depend on the flow table if
// the table cannot have flows of the service.
func (f *fixture) label(flow dataplane.Flow) uint32 {
	svc := f.services.byName[f.classify(flow).Name]
	if svc.Persistence != desired.PersistenceTable && !svc.rule.HasFormerFlows() {
		return labelOf(flow)
	}
	return uint32(f.signature(flow))
}

// sourceOf returns the outer source of a flow's packets to a tunnel's end.
func (f *fixture) sourceOf(flow dataplane.Flow, destination netip.Addr) (source netip.Addr) {
	for _, address := range f.cfg.Node.Addresses {
		if address.Is4() == destination.Is4() {
			source = address
		}
	}
	if prefix := f.cfg.Node.TunnelSources; prefix.IsValid() && source.Is4() {
		bytes := source.As4()
		var label [4]byte
		binary.LittleEndian.PutUint32(label[:], murmur(f.label(flow)))
		for bit := prefix.Bits(); bit < 32; bit++ {
			mask := byte(0x80) >> (bit % 8)
			bytes[bit/8] = bytes[bit/8]&^mask | label[bit/8]&mask
		}
		source = netip.AddrFrom4(bytes)
	}
	return source
}

// murmur is the finalizer of MurmurHash3.
func murmur(h uint32) uint32 {
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	return h ^ h>>16
}

// bucket returns the flow's bucket of the flow table. The slice is the memory of the kernel.
func (f *fixture) bucket(flow dataplane.Flow) []uint64 {
	at := f.bucketNumber(flow) * dataplane.FlowsPerBucket
	return f.plane.Flows.Entries[at : at+dataplane.FlowsPerBucket]
}

// bucketNumber returns the number of the flow's bucket in the flow table.
func (f *fixture) bucketNumber(flow dataplane.Flow) uint32 {
	place, _ := flow.TableHash(f.serviceID(flow), &f.identity)
	return uint32(bucketNumber(f.plane.Flows, place))
}

// forgetFlows empties the flow table and the table of half-open flows.
func (f *fixture) forgetFlows() {
	clear(f.plane.Flows.Entries)
	clear(f.plane.HalfOpen.Entries)
	clear(f.plane.Observed.Entries)
	f.plane.Loads.Clear()
}

// totalOf counts the flows of a table by state.
func totalOf(t *dataplane.FlowTable) (total dataplane.FlowCounts) {
	for _, value := range t.Entries {
		switch dataplane.FlowEntry(value).State() {
		case stateNew:
			total.New++
		case stateEstablished:
			total.Established++
		case stateClosing, stateClosed:
			total.Closing++
		}
	}
	return total
}

// elapseFlows makes flows look as if their last packet had come the given number of ticks earlier.
// It changes the entries for which which returns true.
func (f *fixture) elapseFlows(ticks uint16, which func(dataplane.FlowEntry) bool) {
	for i, value := range f.plane.Flows.Entries {
		if e := dataplane.FlowEntry(value); e.State() != stateFree && which(e) {
			f.plane.Flows.Entries[i] = entryOf(e.Signature(), e.Server(), e.State(), seenOf(e)-ticks)
		}
	}
}

// placed returns the server that consistent hashing selects for a flow.
func (f *fixture) placed(flow dataplane.Flow, service string) string {
	f.t.Helper()
	svc := f.service(service)
	table, err := serversets.SetOf(svc).Table()
	f.must(err)
	row := table.Row(flow.BucketOf(svc, &f.identity.BucketKeys, svc.Buckets))
	return table.Servers[row[0]].Name
}

func (f *fixture) slot(service, server string) uint32 {
	f.t.Helper()
	for slot, key := range f.slots.All() {
		if !f.slots.IsRetired(slot) && key.Service == service && key.Server == server {
			return slot
		}
	}
	f.t.Fatalf("service %s has no slot for server %s", service, server)
	return 0
}

// now returns the time of the flow table's clock, in ticks.
func (f *fixture) now() uint16 {
	f.t.Helper()
	now, err := f.clock.Now()
	f.must(err)
	return now
}

// timeMaskOf returns the bits of an entry that have the time: fewer if the flow has ended.
func timeMaskOf(state dataplane.FlowState) uint16 {
	if state == stateClosing || state == stateClosed {
		return dataplane.FlowEndedTimeMask
	}
	return dataplane.FlowTimeMask
}

func seenOf(e dataplane.FlowEntry) uint16 { return uint16(e) & timeMaskOf(e.State()) }

// entryOf returns an entry of the flow table.
func entryOf(signature uint64, slot uint32, state dataplane.FlowState, seen uint16) uint64 {
	if state == stateFree {
		return 0
	}
	seen &= timeMaskOf(state)
	if state == stateClosing {
		seen |= dataplane.FlowByClient
	}
	return signature<<30 | uint64(slot)<<14 | uint64(state&3)<<12 | uint64(seen)
}

// setHealth applies the result of a health check to the data path.
func (f *fixture) setHealth(service, server string, healthy bool) {
	f.t.Helper()
	svc := f.services.setHealth(health.Result{Service: service, Server: server, Healthy: healthy})
	if svc != nil {
		f.services.admit(svc)
	}
}
