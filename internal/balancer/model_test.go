package balancer

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/packet"
)

// modelEntry is a flow as the model of a bucket has it.
type modelEntry struct {
	flow   Flow
	server string
	state  balancerFlowState
	seen   uint16
}

// bucketModel says what one bucket of the flow table does, in the words of docs/flow-table.md.
type bucketModel struct {
	entries [flowsPerBucket]modelEntry
	usable  map[string]bool // servers that are configured
}

func (m *bucketModel) find(flow Flow) *modelEntry {
	for i := range m.entries {
		if m.entries[i].state != stateFree && m.entries[i].flow == flow {
			return &m.entries[i]
		}
	}
	return nil
}

// packet is what the model does with a packet whose flow is placed on a server: the reason, and
// where it goes.
func (m *bucketModel) packet(flow Flow, flags packet.TCPFlags, placed string, now uint16) (reason, server string) {
	syn := flags&(packet.SYN|packet.ACK) == packet.SYN
	end := flags&(packet.FIN|packet.RST) != 0
	e := m.find(flow)
	if e != nil && m.usable[e.server] && !(syn && e.state == stateClosing) {
		if age := int(now-e.seen) & flowTimeMask; e.state == stateClosing && !end && age < 2 {
			return "forward_known", e.server // it may belong to the end
		}
		e.seen = now
		switch {
		case end:
			e.state = stateClosing
		case !syn:
			e.state = stateEstablished
		}
		return "forward_known", e.server
	}
	if e == nil {
		e = m.yielding(now)
	}
	if e == nil {
		return "forward_no_room", placed
	}
	*e = modelEntry{flow, placed, stateNew, now}
	if end {
		e.state = stateClosing
	}
	if syn {
		return "forward_new", placed
	}
	return "forward_recover", placed
}

// yielding is the entry that a new flow takes: a free one, the oldest new or closing one, the oldest
// established one if it has been idle for more than a minute.
func (m *bucketModel) yielding(now uint16) *modelEntry {
	var best *modelEntry
	rank := 0
	for i := range m.entries {
		e := &m.entries[i]
		age := int(now-e.seen) & flowTimeMask
		r := 1<<13 + age
		switch {
		case e.state == stateFree:
			r = 1 << 14
		case e.state == stateEstablished && age >= 15:
			r = age
		case e.state == stateEstablished:
			r = 0
		}
		if r > rank {
			best, rank = e, r
		}
	}
	return best
}

// crowd is flows of one bucket, more than fit.
func (f *fixture) crowd(like Flow, n int) []Flow {
	flows := []Flow{like}
	for port := uint16(1); len(flows) < n; port++ {
		if flow := like.from(port); &f.bucket(flow)[0] == &f.bucket(like)[0] {
			flows = append(flows, flow)
		}
	}
	return flows
}

// The table does with any packets, sweeps and changes of servers what the model does.
func TestTableFollowsModel(t *testing.T) {
	f := openStandard(t)
	flows := f.crowd(web, 12)
	placed := map[Flow]string{}
	for _, flow := range flows {
		placed[flow] = f.placed(flow, "web")
	}
	rapid.Check(t, func(t *rapid.T) {
		m := &bucketModel{usable: map[string]bool{"s1": true, "s2": true, "s3": true}}
		for server := range m.usable {
			f.kernel.servers.setFlags(f.slot("web", server), balancerServerFlagsSERVER_IN_USE)
		}
		clear(f.bucket(web))
		t.Repeat(map[string]func(*rapid.T){
			"packet": func(t *rapid.T) {
				flow := rapid.SampledFrom(flows).Draw(t, "flow")
				flags := packet.TCPFlags(rapid.SampledFrom([]packet.TCPFlags{
					packet.SYN, packet.SYN, packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST,
				}).Draw(t, "flags"))
				f.step(t, m, flow, flags, placed[flow])
			},
			// Time passes for all flows; ages stay clear of the limits, which have tests of their own.
			"wait": func(t *rapid.T) {
				ticks := rapid.SampledFrom([]uint16{1, 2, 100}).Draw(t, "ticks")
				for i, value := range f.bucket(web) {
					if flowEntry(value).state() == stateFree || flowEntry(value).age(f.clock()) > 2000 {
						continue
					}
					m.entries[i].seen -= ticks
					f.bucket(web)[i] = value&^flowTimeMask | uint64(uint16(value)-ticks)&flowTimeMask
				}
			},
			"sweep": func(t *rapid.T) {
				f.kernel.flows.sweep(func(e flowEntry) bool { return e.state() != stateClosing })
				for i := range m.entries {
					if m.entries[i].state == stateClosing {
						m.entries[i].state = stateFree
					}
				}
			},
			"server": func(t *rapid.T) {
				server := rapid.SampledFrom([]string{"s1", "s2", "s3"}).Draw(t, "server")
				m.usable[server] = !m.usable[server]
				flags := balancerServerFlags(0)
				if m.usable[server] {
					flags = balancerServerFlagsSERVER_IN_USE
				}
				f.kernel.servers.setFlags(f.slot("web", server), flags)
			},
			"": func(t *rapid.T) { f.agrees(t, m) },
		})
	})
}

// step gives one packet to both.
func (f *fixture) step(t *rapid.T, m *bucketModel, flow Flow, flags packet.TCPFlags, placed string) {
	before := *m
	now := f.clock()
	got := f.run(flow.frame(packet.Flags(flags)))
	if f.clock() != now { // the entry says which of the two ticks it was
		if e := f.kernel.flows.find(flow, f.serviceID(flow), &f.identity); e != 0 {
			now = e.seen()
		}
	}
	reason, server := m.packet(flow, flags, placed, now)
	if reasonOf(got) != reason || serverOf(got) != "web/"+server {
		t.Fatalf("%v with %#x: %s to %s, want %s to %s; bucket before: %+v",
			flow.Source, flags, reasonOf(got), serverOf(got), reason, server, before.entries)
	}
}

// agrees compares the bucket with the model's.
func (f *fixture) agrees(t *rapid.T, m *bucketModel) {
	for i, value := range f.bucket(web) {
		want := uint64(0)
		if e := m.entries[i]; e.state != stateFree {
			want = entryOf(f.signature(e.flow), f.slot("web", e.server), e.state, e.seen)
		}
		if value != want {
			t.Fatalf("entry %d is %#x, want %#x: %+v", i, value, want, m.entries[i])
		}
	}
}

func (e flowEntry) seen() uint16 { return uint16(e) & flowTimeMask }

// Packets of the same flows on all cores, while the sweeper takes entries away under them: every
// packet goes to the server that its flow is placed on, and the table names no other.
func TestConcurrentWriters(t *testing.T) {
	f := openStandard(t)
	flows := append(f.crowd(web, 20), f.crowd(web.from(9), 5)...)
	slots := map[uint64]uint32{}
	macs := map[Flow]packet.MAC{}
	for _, flow := range flows {
		server := f.placed(flow, "web")
		slots[f.signature(flow)] = f.slot("web", server)
		macs[flow] = f.encap(flow, "web", server).NextHop
	}
	before := f.counters()
	ctx, cancel := context.WithCancel(t.Context())
	var sweeper, writers sync.WaitGroup
	sweeper.Go(func() {
		for i := uint64(0); ctx.Err() == nil; i++ {
			f.kernel.flows.sweep(func(e flowEntry) bool { return (e.signature()+i)%3 != 0 })
			runtime.Gosched()
		}
	})
	const packets = 5000
	cores := min(runtime.NumCPU(), 4)
	for core := range cores {
		writers.Go(func() {
			pin(t, core)
			for i := range packets {
				flow := flows[(i*7+core*3)%len(flows)]
				flags := []packet.TCPFlags{packet.SYN, packet.ACK, packet.ACK, packet.FIN}[i/len(flows)%4]
				out := make([]byte, 256)
				verdict, err := f.kernel.objects.XdpLb.Run(&ebpf.RunOptions{
					Data: flow.frame(packet.Flags(flags)), DataOut: out,
				})
				if err != nil || verdict != verdictRedirect {
					t.Errorf("%v: verdict %d, %v", flow.Source, verdict, err)
					return
				}
				if got := packet.MAC(out); got != macs[flow] {
					t.Errorf("%v went to %v, want %v", flow.Source, got, macs[flow])
					return
				}
			}
		})
	}
	writers.Wait()
	cancel()
	sweeper.Wait()
	total := uint64(0)
	for _, n := range difference(before.reasons, f.counters().reasons) {
		total += n.Packets
	}
	if want := uint64(cores * packets); total != want {
		t.Errorf("%d packets counted of %d", total, want)
	}
	for i, value := range f.kernel.flows.entries {
		if e := flowEntry(value); e.state() != stateFree && slots[e.signature()] != e.server() {
			t.Errorf("entry %d, %#x, names slot %d, want %d", i, value, e.server(), slots[e.signature()])
		}
	}
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
