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
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
)

// What must hold of the flow table however two cores and the control plane interleave:
//
//   - A packet goes to a server of its own service that was configured while the packet was on its way,
//     or is dropped because that server is just being removed.
//   - An established flow that is not idle stays: whatever flows come, and however often another core
//     changes its entry or those beside it, each of its packets goes to the server that it has, even if
//     that is drained and placement names another.
//   - A flow that one core has just established is not evicted by another that still saw it as new.
//   - Every packet is counted once.
//   - Two cores that enter one flow at the same time may make two entries of it, for two servers if the
//     service's table was swapped between their lookups. Lookups take the first, so that the second
//     is not renewed and leaves as new flows do: once no packet is on its way, a flow keeps one server.

// storm is two writers of a flow table, on two cores, and the control plane beside them.
type storm struct {
	*fixture
	buckets  uint32
	anchored []dataplane.Flow    // established on the anchors, which then get no new flows
	pool     []dataplane.Flow    // that come and go
	own      [2][]dataplane.Flow // each sent by one writer only
	frames   map[dataplane.Flow]map[packet.TCPFlags][]byte
	// allowed are the servers, by the MAC addresses of their next hops, that packets of pool may go to.
	// During a change it has those from before and after.
	allowed atomic.Pointer[map[packet.MAC]string]
	sent    [2]writer
	staying [2]uint32 // slots, by the number of the service
	// doubles are how often a flow was seen with two entries; split, with entries for two servers.
	doubles, split int
}

// writer is what one core has seen.
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

// config has an anchor for each service, which gets all new flows or none, and the given servers, of
// five besides number 9, so that their slots go from one to the other.
func (s *storm) config(anchors bool, web, dns []int) *config.Balancer {
	cfg := crowded(s.buckets)
	for i, chosen := range [][]int{web, dns} {
		svc := &cfg.Services[i]
		weight := uint32(0)
		if anchors {
			weight = 1
		}
		number := uint8(20 * (i + 1))
		svc.Servers = []config.Server{srv6Server("anchor-"+svc.Name, number, weight)}
		for _, n := range chosen {
			svc.Servers = append(svc.Servers, srv6Server(fmt.Sprintf("%s-%d", svc.Name, n), number+1+uint8(n), 1))
		}
	}
	return cfg
}

// macs are the next hops of the servers of a service.
func macs(cfg *config.Balancer) map[packet.MAC]string {
	out := map[packet.MAC]string{}
	for _, svc := range cfg.Services {
		for _, server := range svc.Servers {
			out[hopMAC(target(&server))] = svc.Name + "/" + server.Name
		}
	}
	return out
}

// anchor is the next hop of the anchor of a flow's service.
func (s *storm) anchor(flow dataplane.Flow) packet.MAC {
	return hopMAC(target(&s.config(true, nil, nil).Services[serviceNumber(flow)].Servers[0]))
}

func serviceNumber(flow dataplane.Flow) int {
	if flow.Protocol == config.UDP {
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

// change reloads; meanwhile the servers of both configurations are allowed.
func (s *storm) change(cfg *config.Balancer) {
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

// rage has both writers send that many packets while the control plane does whatever it does.
func (s *storm) rage(seed uint64, packets int) {
	s.t.Helper()
	s.begin()
	before := s.counters()
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
	if !s.t.Failed() {
		s.checkCounts(before)
		s.checkCalm()
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
		if random.IntN(2) == 0 { // often both writers are at the same flows
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

// stays is the number of the server of each service that is always there, and passes its checks.
const stays = 9

// checkSettled looks a flow up that no other core sends, after a packet of it.
func (s *storm) checkSettled(w *writer, flow dataplane.Flow, flags packet.TCPFlags) bool {
	e := s.plane.Flows.Find(flow, s.serviceID(flow), &s.identity)
	settled := e.State() == stateEstablished && e.Server() == s.staying[serviceNumber(flow)]
	if closes := flow.Protocol == config.TCP && flags&packet.RST != 0; w.settled[flow] && !settled && !closes {
		s.t.Errorf("%v was established, and nobody closed it: now its entry is %#x", flow, e)
		return false
	}
	w.settled[flow] = settled
	return true
}

// problem is what is wrong with where a packet went; the servers allowed are those when it set out.
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

// control does one of the things that the control plane does.
func (s *storm) control(random *rand.Rand, running *atomic.Int32) {
	s.t.Helper()
	switch random.IntN(6) {
	case 0:
		pick := func() []int { return append([]int{stays}, random.Perm(5)[:random.IntN(4)]...) }
		s.change(s.config(false, pick(), pick()))
	case 1:
		svc := &s.cfg.Services[random.IntN(2)]
		if others := svc.Servers[2:]; len(others) > 0 { // behind the anchor and the one that stays
			s.setHealth(svc.Name, others[random.IntN(len(others))].Name, random.IntN(2) == 0)
		}
	case 2: // as the balancer's, which is seconds after the one before
		s.must(s.sweep())
		s.letPass(running)
	default:
		s.checkAnchored(s.sweepSome(random.Uint64()))
		s.countDoubles()
	}
}

// sweepSome frees new and closing entries as a sweep would that comes after their time.
func (s *storm) sweepSome(some uint64) dataplane.FlowCountsBySlot {
	return s.plane.Flows.Sweep(func(e dataplane.FlowEntry) bool {
		return e.State() == stateEstablished || (e.Signature()^some)%3 != 0
	})
}

func (s *storm) countDoubles() {
	for _, flow := range s.pool {
		bucket, signature := s.plane.Flows.Bucket(flow, s.serviceID(flow), &s.identity)
		first := bucket.Find(signature)
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

// checkAnchored checks that no established flow has gone, and no other come to the anchors.
func (s *storm) checkAnchored(counts dataplane.FlowCountsBySlot) {
	s.t.Helper()
	for number, svc := range []string{"web", "dns"} {
		want := dataplane.FlowCounts{}
		for _, flow := range s.anchored {
			if serviceNumber(flow) == number {
				want.Established++
			}
		}
		if got := counts.Of(s.slot(svc, "anchor-"+svc)); got != want {
			s.t.Errorf("the anchor of %s has %+v, want %+v", svc, got, want)
		}
	}
}

// letPass waits until the packets that are on their way have left.
func (s *storm) letPass(running *atomic.Int32) {
	for i := range s.sent {
		for at := s.sent[i].packets.Load(); s.sent[i].packets.Load() == at && running.Load() == 2; {
			runtime.Gosched()
		}
	}
}

// checkCounts compares what was counted with what the writers sent.
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

// checkCalm checks that each flow has one server once the storm is over, and that all entries of it
// are for servers of its service.
func (s *storm) checkCalm() {
	s.t.Helper()
	for _, flow := range slices.Concat(s.anchored, s.own[0], s.own[1], s.pool) {
		service := s.cfg.Services[serviceNumber(flow)].Name
		bucket, signature := s.plane.Flows.Bucket(flow, s.serviceID(flow), &s.identity)
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

// packetsPerStorm is how many each writer sends.
const packetsPerStorm = 30000

// Two writers for some seconds, in tables where there is hardly any room and where there is some.
func TestTwoWriters(t *testing.T) {
	for _, buckets := range []uint32{2, 16} {
		t.Run(fmt.Sprintf("%d buckets", buckets), func(t *testing.T) {
			s := openStorm(t, buckets)
			storms := 0
			for start := time.Now(); time.Since(start) < 2*time.Second && !t.Failed(); storms++ {
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

// FuzzTwoWriters is TestTwoWriters for as long as one likes. What goes wrong depends on timing, too: an
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

// pin keeps a goroutine on one of the CPUs it may use, for the rest of its life.
func pin(t testing.TB, number int) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
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
