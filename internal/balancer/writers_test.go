// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// These rules hold for the flow table however the steps of two cores and the control plane
// interleave:
//
//   - A packet goes to a server of its own service that was configured while the packet was under
//     way. Or it is dropped because that server is being removed.
//   - An established flow that is not idle keeps its entry, whatever flows come, and however often
//     another core changes this entry or its neighbours. All its packets go to its server, even if
//     that server is drained and placement selects another one.
//   - A flow that one core has just established is not displaced by another core that saw it as
//     new.
//   - Each packet is counted once.
//   - When no packet is under way, the load of each server equals its entries.
//   - Two cores that enter one flow at the same time may make two entries of it. The entries may be
//     for two servers if the candidate table was replaced between the lookups. A lookup takes the
//     first entry, so the second one is not renewed, and expires as new flows do. So a flow keeps
//     one server once no packet is under way.

// storm is two writers of a flow table, on two cores, and the control plane at the same time.
type storm struct {
	*fixture
	buckets  uint32
	anchored []dataplane.Flow    // established on the anchors, which get no new flows then
	pool     []dataplane.Flow    // flows that come and go
	own      [2][]dataplane.Flow // flows that only one of the writers sends
	frames   map[dataplane.Flow]map[packet.TCPFlags][]byte
	// allowed are the servers to which packets of pool may go, by the MAC addresses of their next
	// hops. During a change, it contains the servers from before and after.
	allowed atomic.Pointer[map[packet.MAC]string]
	sent    [2]writer
	staying [2]uint32 // the slot of the server that stays, by number of the service
	// doubles counts flows that were seen with two entries, and split those with entries for two
	// servers.
	doubles, split int
}

// writer is what one core has sent and seen.
type writer struct {
	packets   atomic.Uint64
	bytes     uint64
	forwarded map[packet.MAC]uint64
	dropped   uint64
	settled   map[dataplane.Flow]bool // its own flows that are established on a server that stays
}

func openStorm(t testing.TB, buckets uint32) *storm {
	s := &storm{buckets: buckets, frames: map[dataplane.Flow]map[packet.TCPFlags][]byte{}}
	s.fixture = open(t, s.config(true, nil, nil))
	s.must(dataplane.Detach(s.cfg.Node.Instance))
	residents := map[uint32]int{}
	for _, flow := range crowd(100) {
		if number := s.bucketNumber(flow); len(s.anchored) < 10 && residents[number] < dataplane.FlowsPerBucket/2 {
			residents[number]++
			s.anchored = append(s.anchored, flow)
		} else if n := len(s.frames) % 10; n < len(s.own) {
			s.own[n] = append(s.own[n], flow)
		} else {
			s.pool = append(s.pool, flow)
		}
		s.frames[flow] = map[packet.TCPFlags][]byte{}
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK, packet.FIN | packet.ACK, packet.RST} {
			s.frames[flow][flags] = frameOf(flow, packet.Flags(flags))
		}
	}
	return s
}

// config returns a configuration with the given servers and an anchor for each service. The anchors
// have weight 1 or 0.
func (s *storm) config(anchors bool, web, dns []int) *desired.Balancer {
	cfg := crowded(s.buckets)
	for i, chosen := range [][]int{web, dns} {
		svc := &cfg.Services[i]
		svc.OnDrain = desired.OnDrainKeep // also the flows of UDP stay on the anchors
		weight := uint32(0)
		if anchors {
			weight = 1
		}
		number := uint8(20 * (i + 1))
		svc.Servers = []desired.Server{srv6Server("anchor-"+svc.Name, number, weight)}
		for _, n := range chosen {
			svc.Servers = append(svc.Servers, srv6Server(fmt.Sprintf("%s-%d", svc.Name, n), number+1+uint8(n), 1))
		}
	}
	return cfg
}

// macs returns the servers of a configuration, as service/server, by their next hops.
func macs(cfg *desired.Balancer) map[packet.MAC]string {
	out := map[packet.MAC]string{}
	for _, svc := range cfg.Services {
		for _, server := range svc.Servers {
			out[hopMAC(target(&server))] = svc.Name + "/" + server.Name
		}
	}
	return out
}

// anchor returns the next hop of the anchor of a flow's service.
func (s *storm) anchor(flow dataplane.Flow) packet.MAC {
	return hopMAC(target(&s.config(true, nil, nil).Services[serviceNumber(flow)].Servers[0]))
}

func serviceNumber(flow dataplane.Flow) int {
	if flow.Protocol == desired.UDP {
		return 1
	}
	return 0
}

// begin establishes the anchored flows and drains their servers.
func (s *storm) begin() {
	s.t.Helper()
	s.mustApply(s.config(true, nil, nil))
	s.forgetFlows()
	for _, flow := range s.anchored {
		s.exec(s.frames[flow][packet.SYN], nil)
		s.exec(s.frames[flow][packet.ACK], nil)
	}
	s.change(s.config(false, []int{stays, 1, 2}, []int{stays, 1, 2}))
	for i, svc := range s.cfg.Services {
		s.staying[i] = s.slot(svc.Name, fmt.Sprintf("%s-%d", svc.Name, stays))
	}
	s.sent = [2]writer{}
	for i := range s.sent {
		s.sent[i].forwarded, s.sent[i].settled = map[packet.MAC]uint64{}, map[dataplane.Flow]bool{}
	}
}

// change applies another configuration. Meanwhile the servers of both configurations are allowed.
func (s *storm) change(cfg *desired.Balancer) {
	s.t.Helper()
	both := macs(s.cfg)
	for mac, server := range macs(cfg) {
		both[mac] = server
	}
	s.allowed.Store(&both)
	s.mustApply(cfg)
	after := macs(cfg)
	s.allowed.Store(&after)
}

// rage makes both writers send the given number of packets, while the control plane makes random
// changes.
func (s *storm) rage(seed uint64, packets int) {
	s.t.Helper()
	s.begin()
	before := s.counters()
	s.moving = true
	var writers sync.WaitGroup
	var running atomic.Int32
	for core := range s.sent {
		running.Add(1)
		writers.Go(func() {
			defer running.Add(-1)
			pin(s.t, core)
			s.write(&s.sent[core], s.own[core], rand.New(rand.NewPCG(seed, uint64(core))), packets)
		})
	}
	random := rand.New(rand.NewPCG(seed, 2))
	for running.Load() > 0 && !s.t.Failed() {
		s.control(random, &running)
	}
	writers.Wait()
	s.moving = false
	if !s.t.Failed() {
		s.checkCounts(before)
		s.checkLoads()
		s.checkCalm()
		s.checkLoads()
	}
}

// write sends random packets, and checks where they go.
func (s *storm) write(w *writer, own []dataplane.Flow, random *rand.Rand, packets int) {
	for range packets {
		flow, flags := s.pool[random.IntN(len(s.pool))], packet.ACK
		anchored := random.IntN(4) == 0
		if anchored {
			flow = s.anchored[random.IntN(len(s.anchored))]
		} else {
			flags = []packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST}[random.IntN(6)]
		}
		if random.IntN(2) == 0 { // both writers often send the same flows
			flow = s.pool[w.packets.Load()/4%4]
			anchored = false
		}
		owned := random.IntN(3) == 0
		if owned {
			flow, anchored = own[random.IntN(len(own))], false
			flags = []packet.TCPFlags{packet.SYN, packet.ACK, packet.ACK, packet.ACK, packet.RST}[random.IntN(5)]
		}
		frame := s.frames[flow][flags]
		allowed := *s.allowed.Load()
		verdict, out := s.exec(frame, nil)
		w.packets.Add(1)
		w.bytes += layer3(frame)
		to := packet.MAC(out)
		if verdict == verdictDrop && !anchored {
			w.dropped++
			continue
		}
		w.forwarded[to]++
		if problem := s.problem(flow, anchored, verdict, to, allowed); problem != "" {
			s.t.Errorf("%v with %v, anchored: %v: %s", flow, flags, anchored, problem)
			return
		}
		if owned && !s.checkSettled(w, flow, flags) {
			return
		}
	}
}

// stays is the number of the server that each service always has, and that passes its checks.
const stays = 9

// checkSettled checks the entry of a flow that no other core sends, after one of its packets.
func (s *storm) checkSettled(w *writer, flow dataplane.Flow, flags packet.TCPFlags) bool {
	e := s.entry(flow)
	established := e.State() == stateEstablished || e.State() == stateSilent
	settled := established && e.Server() == s.staying[serviceNumber(flow)]
	if closes := flow.Protocol == desired.TCP && flags&packet.RST != 0; w.settled[flow] && !settled && !closes {
		s.t.Errorf("%v was established, and nobody closed it: now its entry is %#x", flow, e)
		return false
	}
	w.settled[flow] = settled
	return true
}

// problem says what is wrong with the destination of a packet, or returns an empty text. The
// argument allowed is from the time before the packet was sent.
func (s *storm) problem(flow dataplane.Flow, anchored bool, verdict uint32, to packet.MAC, allowed map[packet.MAC]string) string {
	if verdict != verdictRedirect {
		return "the verdict is " + verdicts[verdict]
	}
	anchor := s.anchor(flow)
	if anchored != (to == anchor) {
		return fmt.Sprintf("went to %v, while its anchor is %v", to, anchor)
	}
	server, ok := allowed[to]
	if !ok {
		server, ok = (*s.allowed.Load())[to]
	}
	service := s.cfg.Services[serviceNumber(flow)].Name
	if !ok || server[:len(service)+1] != service+"/" {
		return fmt.Sprintf("went to %v (%q), which is no server of %s now", to, server, service)
	}
	return ""
}

// control makes one random change of the control plane.
func (s *storm) control(random *rand.Rand, running *atomic.Int32) {
	s.t.Helper()
	switch random.IntN(6) {
	case 0: // so few servers that slots go from one to another
		pick := func() []int { return append([]int{stays}, random.Perm(5)[:random.IntN(4)]...) }
		s.change(s.config(false, pick(), pick()))
	case 1:
		svc := &s.cfg.Services[random.IntN(2)]
		if others := svc.Servers[2:]; len(others) > 0 { // without the anchor and number 9
			s.setHealth(svc.Name, others[random.IntN(len(others))].Name, random.IntN(2) == 0)
		}
	case 2: // a real sweep comes seconds after the one before
		s.must(s.sweep())
		s.letPass(running)
	default:
		s.checkAnchored(s.sweepSome(random))
		s.countDoubles()
	}
}

// sweepSome frees the new and closing entries of some slots, as a sweep does after their timeout. It
// makes the established ones of some slots silent.
func (s *storm) sweepSome(random *rand.Rand) []dataplane.SweptServer {
	s.t.Helper()
	kept, err := s.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot := range s.plane.Objects.ServerCounters.MaxEntries() {
			lifetimes := dataplane.Forever
			if random.IntN(3) == 0 {
				lifetimes.New, lifetimes.Closed = 0, 0
			}
			if random.IntN(3) == 0 {
				lifetimes.Silent = 0
			}
			if !yield(slot, lifetimes) {
				return
			}
		}
	})
	s.must(err)
	return kept
}

func (s *storm) countDoubles() {
	for _, flow := range s.pool {
		bucket, signature := s.lookUp(flow)
		first := bucket.find(signature)
		for _, e := range bucket {
			if e.State() == stateFree || e.Signature() != signature || e == first {
				continue
			}
			s.doubles++
			if e.Server() != first.Server() {
				s.split++
			}
		}
	}
}

// checkAnchored checks that the anchors have all their established flows, and no others.
func (s *storm) checkAnchored(kept []dataplane.SweptServer) {
	s.t.Helper()
	for number, svc := range []string{"web", "dns"} {
		want := dataplane.FlowCounts{}
		for _, flow := range s.anchored {
			if serviceNumber(flow) == number {
				want.Established++
			}
		}
		got := countsOf(kept[s.slot(svc, "anchor-"+svc)].Flows[:])
		got.Established, got.Silent = got.Established+got.Silent, 0
		if got != want {
			s.t.Errorf("the anchor of %s has %+v, want %+v", svc, got, want)
		}
	}
}

// letPass waits until the packets that are under way have left the data path.
func (s *storm) letPass(running *atomic.Int32) {
	for i := range s.sent {
		for at := s.sent[i].packets.Load(); s.sent[i].packets.Load() == at && running.Load() == 2; {
			runtime.Gosched()
		}
	}
}

// checkCounts compares the counters with the packets that the writers have sent.
func (s *storm) checkCounts(before counters) {
	s.t.Helper()
	after := s.counters()
	var want, got tally
	forwarded, dropped := uint64(0), uint64(0)
	for i := range s.sent {
		w := &s.sent[i]
		want.Packets += w.packets.Load()
		want.Bytes += w.bytes
		dropped += w.dropped
	}
	for reason, n := range difference(before.reasons, after.reasons) {
		got.Packets += n.Packets
		got.Bytes += n.Bytes
		switch reason {
		case "drop_no_next_hop":
			dropped -= n.Packets
		case "forward_new", "forward_known", "forward_recover", "forward_no_room":
			forwarded += n.Packets
		default:
			s.t.Errorf("%d packets left as %s", n.Packets, reason)
		}
	}
	if want != got || dropped != 0 {
		s.t.Errorf("counted %+v, sent %+v; %d more were dropped than counted for that", got, want, int64(dropped))
	}
	for mac, server := range macs(s.config(true, nil, nil)) {
		sent := s.sent[0].forwarded[mac] + s.sent[1].forwarded[mac]
		if counted := after.servers[server].Packets - before.servers[server].Packets; counted != sent {
			s.t.Errorf("%s: counted %d packets, %d came", server, counted, sent)
		}
	}
}

// checkCalm checks that each flow has one server after the storm, and that all its entries are for
// servers of its service.
func (s *storm) checkCalm() {
	s.t.Helper()
	for _, flow := range slices.Concat(s.anchored, s.own[0], s.own[1], s.pool) {
		service := s.cfg.Services[serviceNumber(flow)].Name
		bucket, signature := s.lookUp(flow)
		for _, e := range bucket {
			if e.State() != stateFree && e.Signature() == signature && s.slots.Server(e.Server()).Service != service {
				s.t.Errorf("an entry of %v is for slot %d, which is %+v", flow, e.Server(), s.slots.Server(e.Server()))
			}
		}
		var to []packet.MAC
		for range 3 {
			_, out := s.exec(s.frames[flow][packet.ACK], nil)
			to = append(to, packet.MAC(out))
		}
		if to[0] != to[1] || to[1] != to[2] {
			s.t.Errorf("three packets of %v went to %v", flow, to)
		}
	}
}

// packetsPerStorm is the number of packets that each writer sends.
const packetsPerStorm = 5000

// Two writers send for some seconds, with tables that have hardly any room and with tables that
// have some.
func TestTwoWriters(t *testing.T) {
	for _, buckets := range []uint32{2, 16} {
		t.Run(fmt.Sprintf("%d buckets", buckets), func(t *testing.T) {
			s := openStorm(t, buckets)
			storms := 0
			for start := time.Now(); time.Since(start) < 400*time.Millisecond*time.Duration(*collisions) && !t.Failed(); storms++ {
				seed := rand.Uint64()
				s.rage(seed, packetsPerStorm)
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			}
			t.Logf("%d storms of %d packets; two entries of a flow were seen %d times, for two servers %d times",
				storms, len(s.sent)*packetsPerStorm, s.doubles, s.split)
		})
	}
}

// FuzzTwoWriters is TestTwoWriters without a limit of time. Failures depend on timing as well: an
// input that fails once may pass the next time.
func FuzzTwoWriters(f *testing.F) {
	storms := []*storm{openStorm(f, 2), openStorm(f, 16)}
	f.Add(uint64(0))
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) {
		s := storms[seed%2]
		s.t = t
		s.rage(seed, packetsPerStorm)
	})
}

// pin keeps a goroutine on one of the CPUs that it may use, until the goroutine ends.
func pin(t testing.TB, number int) {
	runtime.LockOSThread() // without an unlock, the thread ends with the goroutine
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Errorf("read the CPUs: %v", err)
	}
	for cpu, left := 0, number%allowed.Count(); left >= 0; cpu++ {
		if allowed.IsSet(cpu) {
			one.Zero()
			one.Set(cpu)
			left--
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Errorf("run on one CPU: %v", err)
	}
}

// stayOnCPU keeps a goroutine on one CPU until the returned function is called.
func stayOnCPU(t testing.TB) (leave func()) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatalf("read the CPUs: %v", err)
	}
	pin(t, rand.IntN(allowed.Count()))
	return func() {
		if err := unix.SchedSetaffinity(0, &allowed); err != nil {
			t.Errorf("run on all CPUs: %v", err)
		}
		runtime.UnlockOSThread()
	}
}
