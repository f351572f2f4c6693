// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// loadTest is a server whose application accepts no connection, with real connections that are
// half-open or in the accept queue.
type loadTest struct {
	*testing.T
	*stage
	k    *kernel
	vip  netip.AddrPort
	from netip.Addr // the client
	port uint16     // of the last half-open connection
}

// newLoadTest returns a test whose accept queue has a limit.
func newLoadTest(t *testing.T, client, vip netip.AddrPort, limit int) *loadTest {
	testhost.NeedCgroup2(t)
	l := &loadTest{T: t, k: testKernel(t), stage: newStage(t), vip: vip, from: client.Addr()}
	l.port = 1024
	testhost.Must(t, pinAll(l.k))
	l.do(func() error {
		return datapath.TakeOver(l.k.log, func(t *datapath.Takeover) error {
			return l.k.startCounting(t)
		})
	})
	l.Cleanup(func() {
		if err := datapath.DetachLink(l.k.loader.PathOf(connectionCountPin)); err != nil {
			t.Error(err)
		}
	})
	l.listenOnly(vip, limit)
	return l
}

// halfOpen adds half-open connections.
func (l *loadTest) halfOpen(n int) {
	l.Helper()
	for range n {
		l.port++
		l.request(flow{netip.AddrPortFrom(l.from, l.port), l.vip})
	}
}

// configure gives the service a policy and a load source.
func (l *loadTest) configure(rule desired.Accept, source desired.Source) desired.AgentService {
	l.Helper()
	cfg := huntingConfig(desired.SRv6Encap, rule, desired.NotLocalDrop)
	for i := range cfg.Services {
		cfg.Services[i].Load = source
	}
	if err := l.k.write(newTableContent(cfg, mtu)); err != nil {
		l.Fatal(err)
	}
	for _, s := range cfg.Services {
		if s.VIP == l.vip.Addr() && s.Port.Number() == l.vip.Port() {
			return s
		}
	}
	l.Fatalf("no service has %s", l.vip)
	return desired.AgentService{}
}

// show makes the source of a service show a load of an age.
func (l *loadTest) show(s desired.AgentService, load accept.Load, age time.Duration) {
	l.Helper()
	now, err := monotonic()
	if err != nil {
		l.Fatal(err)
	}
	reading := agentLoad{Busy: load.Busy, Capacity: load.Capacity, When: uint64(now - int64(age))}
	if err := errors.Join(
		l.k.objects.Connections.Put(serviceKey(s), agentConnectionCount{Open: [2]int64{int64(load.Busy) + 3, -5}, Unseen: 2}),
		l.k.objects.Loads.Put(serviceKey(s), reading),
	); err != nil {
		l.Fatal(err)
	}
	if s.Load.Kind == desired.LoadSharedMap {
		mapLoad(l.T, l.k, serviceKey(s), load)
	}
}

// offer returns the result of an offer of a new connection. It must be called in the stage's
// network namespace.
func (l *loadTest) offer() string {
	l.Helper()
	f := flow{netip.AddrPortFrom(l.from, 1024), l.vip}
	defer setFlow(l.T, l.k, f, desired.SRv6Encap, "", 0)
	before := offers(l.T, l.k, l.vip)
	run(l.T, l.k.objects.XdpAgent, handshakeEvents()[0].frame(dialogue{flow: f}, desired.SRv6Encap))
	for result, n := range offers(l.T, l.k, l.vip) {
		if n != before[result] {
			return result
		}
	}
	return "not offered"
}

// loadOutcome is what the agent shows and does with a load.
type loadOutcome struct {
	Status, Trace Load
	Stale         bool
	// At is the result of an offer with a static threshold of the load, Above with one more.
	At, Above string
}

// outcome returns what the agent shows and does while the source shows a load. The present load
// should be want.
func (l *loadTest) outcome(source desired.Source, shown accept.Load, age time.Duration, want uint32,
) (o loadOutcome) {
	l.Helper()
	above := want
	if above < math.MaxUint32 {
		above++
	}
	for _, threshold := range []uint32{want, above} {
		s := l.configure(desired.Accept{
			Policy: desired.AcceptStatic, Threshold: &threshold,
		}, source)
		l.show(s, shown, age)
		l.do(func() error {
			view := tracingView(l.T, l.k)
			status, err := view.acceptState(serviceKey(s))
			if err != nil {
				return err
			}
			trace, err := view.Trace(netip.AddrPortFrom(l.from, 1024), l.vip)
			if err != nil {
				return err
			}
			if status.Stale != trace.Accept.Stale {
				return fmt.Errorf("stale by the status: %v, by trace: %v", status.Stale,
					trace.Accept.Stale)
			}
			o.Stale = status.Stale
			if status.Load != nil && trace.Accept.Load != nil {
				o.Status, o.Trace = *status.Load, *trace.Accept.Load
			}
			o.At, o.Above = o.Above, l.offer() // the result of the first threshold moves to At
			return nil
		})
	}
	return o
}

// loadCase is a load that a source shows, and what the data path adds to it.
type loadCase struct {
	name     string
	source   desired.Source
	shown    accept.Load
	waiting  bool   // the accept queue is added
	halfOpen uint32 // at most so many half-open connections are added
	capacity uint32 // 0: none
}

func loadCases() []loadCase {
	open := func(n uint32) accept.Load { return accept.Load{Busy: n, Capacity: accept.NoCapacity} }
	of := func(busy, capacity uint32) accept.Load {
		return accept.Load{Busy: busy, Capacity: capacity}
	}
	return []loadCase{
		{"connections", desired.Source{Kind: desired.LoadConnections}, open(5), false, 16, 0},
		{"many connections", desired.Source{Kind: desired.LoadConnections}, open(18), false, 18, 0},
		{"connections with workers",
			desired.Source{Kind: desired.LoadConnections, Workers: 30}, open(5), false, 30, 30},
		{"connections with a capacity",
			desired.Source{Kind: desired.LoadConnections, Workers: 30, Capacity: 17},
			open(5), false, 17, 17},
		{"accept queue", desired.Source{Kind: desired.LoadAcceptQueue}, open(99), true, 16, 0},
		{"accept queue with a capacity",
			desired.Source{Kind: desired.LoadAcceptQueue, Capacity: 19}, open(99), true, 19, 19},
		{"shared memory", desired.Source{Kind: desired.LoadSharedMemory}, of(2, 4), true, 16, 4},
		{"shared memory, large",
			desired.Source{Kind: desired.LoadSharedMemory}, of(2, 64), true, 64, 64},
		{"shared memory with a capacity",
			desired.Source{Kind: desired.LoadSharedMemory, Capacity: 2}, of(2, 64), true, 16, 2},
		{"map", desired.Source{Kind: desired.LoadSharedMap}, of(2, 64), true, 64, 64},
		{"map with a capacity",
			desired.Source{Kind: desired.LoadSharedMap, Capacity: 2}, of(2, 64), true, 16, 2},
		{"scoreboard", desired.Source{Kind: desired.LoadApache}, of(2, 150), true, 150, 150},
		{"scoreboard with a capacity",
			desired.Source{Kind: desired.LoadApache, Workers: 150, Capacity: 4},
			of(2, 150), true, 16, 4},
		{"control group", desired.Source{Kind: desired.LoadCgroup}, of(700, 2000), false, 0, 2000},
		{"control group with a capacity",
			desired.Source{Kind: desired.LoadCgroup, Capacity: 1500}, of(700, 2000), false, 0, 1500},
		{"largest", desired.Source{Kind: desired.LoadSharedMemory},
			of(math.MaxUint32-2, 4), true, 16, 4},
	}
}

// now returns the present load.
func (c loadCase) now(queue agentBacklog) accept.Load {
	busy := uint64(min(queue.Young, c.halfOpen))
	if c.waiting {
		busy += uint64(queue.Waiting)
	}
	if c.source.Kind != desired.LoadAcceptQueue {
		busy += uint64(c.shown.Busy)
	}
	load := accept.Load{Busy: uint32(min(busy, math.MaxUint32)), Capacity: c.capacity}
	if c.capacity == 0 {
		load.Capacity = accept.NoCapacity
	}
	return load
}

// check compares the outcome of a case, and the reference, with the present load.
func (l *loadTest) check(c loadCase, queue agentBacklog) (difference string) {
	l.Helper()
	now := c.now(queue)
	load := Load{Busy: now.Busy}
	if c.capacity != 0 {
		load.Capacity = &c.capacity
	}
	want := loadOutcome{Status: load, Trace: load, At: "refused", Above: "accepted"}
	if load.Busy == math.MaxUint32 {
		want.Above = "refused"
	}
	reference := policy{source: c.source, load: &c.shown}
	return cmp.Diff(want, l.outcome(c.source, c.shown, 0, load.Busy)) +
		cmp.Diff(now, reference.now(sockets{waiting: queue.Waiting, young: queue.Young}))
}

// TestLoadNow checks that the load is what the source shows, plus the connections that are
// half-open or in the accept queue: for policies, for the status and for traces, with real
// connections.
func TestLoadNow(t *testing.T) {
	for name, end := range map[string][2]netip.AddrPort{
		"IPv4": {client4, vip4}, "IPv6": {client6, vip6}, // of multipath TCP
	} {
		t.Run(name, func(t *testing.T) {
			l := newLoadTest(t, end[0], end[1], 4096)
			l.fill(l.from, l.vip, 3)
			l.requireYoung(20)
			if queue := l.backlog(l.k, l.vip); queue != (agentBacklog{Waiting: 3, Most: 4096}) {
				t.Errorf("the backlog is %+v", queue)
			}
			for _, c := range loadCases() {
				difference := l.whileYoung(20, func(queue agentBacklog) string {
					return l.check(c, queue)
				})
				if difference != "" {
					t.Errorf("%s (-want +got):\n%s", c.name, difference)
				}
			}
		})
	}
}

// requireYoung makes half-open connections, and requires that the agent counts each of them until
// its SYN-ACK is repeated.
func (l *loadTest) requireYoung(n int) {
	l.Helper()
	eventually(l.T, "half-open connections are young", func() bool {
		queue := l.backlog(l.k, l.vip)
		if queue.Young != 0 { // from an attempt that took longer than a second
			return false
		}
		l.halfOpen(n)
		return l.backlog(l.k, l.vip).Young == uint32(n)
	})
	l.age(l.k, l.vip)
}

// whileYoung makes a check with at least n young half-open connections, and returns its result. The
// check is repeated if half-open connections have aged meanwhile.
func (l *loadTest) whileYoung(n int, check func(queue agentBacklog) string) (found string) {
	l.Helper()
	eventually(l.T, "half-open connections stay young", func() bool {
		if young := int(l.backlog(l.k, l.vip).Young); young < n {
			l.halfOpen(n - young)
		}
		before := l.backlog(l.k, l.vip)
		found = check(before)
		return int(before.Young) >= n && before == l.backlog(l.k, l.vip)
	})
	return found
}

// A stale load stays stale, whatever the accept queue has, and a configured capacity does not make
// it known.
func TestStaleLoadStaysStale(t *testing.T) {
	l := newLoadTest(t, client6, vip6, 4096)
	l.fill(l.from, l.vip, 3)
	for _, kind := range []desired.LoadSource{
		desired.LoadApache, desired.LoadCgroup, desired.LoadSharedMemory,
	} {
		source := desired.Source{Kind: kind, Capacity: 2}
		want := loadOutcome{Stale: true, At: "accepted_stale", Above: "accepted_stale"}
		got := l.outcome(source, accept.Load{Busy: 1, Capacity: 4}, time.Minute, 0)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", kind, diff)
		}
	}
}

// In another network namespace, and for a service of all ports, the status has the load without the
// accept queue, which is unknown there.
func TestLoadWithoutListener(t *testing.T) {
	l := newLoadTest(t, client6, vip6, 4096)
	l.fill(l.from, l.vip, 3)
	threshold := uint32(9)
	rule := desired.Accept{Policy: desired.AcceptStatic, Threshold: &threshold}
	for name, c := range map[string]struct {
		here bool
		port desired.Port
		want uint32
	}{
		"here":                 {true, 80, 5},
		"in another namespace": {false, 80, 2},
		"all ports":            {true, desired.AllPorts, 2},
	} {
		cfg := huntingConfig(desired.SRv6Encap, rule, desired.NotLocalDrop)
		cfg.Services = cfg.Services[2:3]
		cfg.Services[0].Port = c.port
		testhost.Must(t, l.k.write(newTableContent(cfg, mtu)))
		l.show(cfg.Services[0], accept.Load{Busy: 2, Capacity: 4}, 0)
		l.do(func() error {
			view := l.k.view()
			view.here = c.here
			status, err := view.acceptState(serviceKey(cfg.Services[0]))
			if err == nil && (status.Load == nil || status.Load.Busy != c.want) {
				t.Errorf("%s: the load is %s, want %d", name, status.DescribeLoad(), c.want)
			}
			return err
		})
	}
}

// The threshold of the dynamic policy never exceeds the capacity. Without a capacity, it never
// exceeds the limit of the accept queue.
func TestDynamicIsBounded(t *testing.T) {
	const limit = 8
	l := newLoadTest(t, client6, vip6, limit)
	l.fill(l.from, l.vip, limit+1) // the kernel admits one more than the limit
	rule := dynamicRule(1, 0.1, 1, 0)
	for name, c := range map[string]struct {
		source desired.Source
		shown  accept.Load
		want   uint32
	}{
		"connections": {desired.Source{Kind: desired.LoadConnections},
			accept.Load{Busy: 100, Capacity: accept.NoCapacity}, limit},
		"connections with workers": {desired.Source{Kind: desired.LoadConnections, Workers: 12},
			accept.Load{Busy: 100, Capacity: accept.NoCapacity}, 12},
		"connections with a capacity": {
			desired.Source{Kind: desired.LoadConnections, Workers: 12, Capacity: 3},
			accept.Load{Busy: 100, Capacity: accept.NoCapacity}, 3},
		"accept queue": {desired.Source{Kind: desired.LoadAcceptQueue}, accept.Load{}, limit},
		"accept queue with a capacity": {
			desired.Source{Kind: desired.LoadAcceptQueue, Capacity: 5}, accept.Load{}, 5},
		"shared memory": {desired.Source{Kind: desired.LoadSharedMemory},
			accept.Load{Busy: 100, Capacity: 11}, 11},
		"shared memory with a capacity": {
			desired.Source{Kind: desired.LoadSharedMemory, Capacity: 2},
			accept.Load{Busy: 100, Capacity: 11}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			none := map[agentServiceKey]agentAcceptance{}
			testhost.Must(t, datapath.Keep(l.k.objects.Acceptances, none))
			s := l.configure(rule, c.source)
			reference := newPolicy(s)
			reference.load = &c.shown
			local := sockets{listening: true, waiting: limit + 1, most: limit}
			l.do(func() error {
				for range 20 {
					l.show(s, c.shown, 0)
					if got, want := l.offer(), reference.offer(local); got != want {
						t.Errorf("%s, want %s", got, want)
					}
				}
				return nil
			})
			var got agentAcceptance
			testhost.Must(t, l.k.objects.Acceptances.Lookup(serviceKey(s), &got))
			if got.Threshold != c.want {
				t.Errorf("the threshold is %d, want %d", got.Threshold, c.want)
			}
			if want := reference.Policy.(*accept.Dynamic).Threshold; want != c.want {
				t.Errorf("the reference's threshold is %d, want %d", want, c.want)
			}
		})
	}
}
