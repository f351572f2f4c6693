// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

var (
	balancer1 = netip.MustParseAddr("fd00:6c:0:1::")
	balancer2 = netip.MustParseAddr("fd00:6c:0:2::")
	node      = netip.MustParseAddr("fd00:5:0:1::")
)

// sidOf returns the SID of a function in a locator.
func sidOf(locator netip.Addr, function uint16) netip.Addr {
	b := locator.As16()
	binary.BigEndian.PutUint16(b[8:], function)
	return netip.AddrFrom16(b)
}

var flowStates = map[agentAgentFlowState]string{
	agentAgentFlowStateAGENT_FLOW_WAIT: "wait", agentAgentFlowStateAGENT_FLOW_DIRECT: "direct",
	agentAgentFlowStateAGENT_FLOW_ENDING: "ending", agentAgentFlowStateAGENT_FLOW_CLOSING: "closing",
	agentAgentFlowStateAGENT_FLOW_COOKIE: "cookie",
}

var encapsulations = []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap}

// setFlow adds a flow of the first balancer to the data path's table. age is in seconds.
func setFlow(t testing.TB, k *kernel, f flow, kind desired.Encapsulation, state string, age int64) {
	t.Helper()
	table := tableOf(t, k)
	if state != "" {
		entry := entryIn(state, kind)
		table.put(f, tableFlow{remembered: entry, age: time.Duration(age) * time.Second})
	} else if e := table.find(f); e != nil {
		*e = agentAgentFlowEntry{}
	}
}

// entryIn returns the entry of a flow of the first balancer.
func entryIn(state string, kind desired.Encapsulation) remembered {
	if name, acknowledged := strings.CutSuffix(state, ", acknowledged"); name == "cookie" {
		return cookieFlow(cookie{2, 1}, netip.PrefixFrom(balancer1, 64), kind, acknowledged)
	}
	return flowOf(state, netip.PrefixFrom(balancer1, 64), kind)
}

// getFlow returns the data path's entry of a flow. An expired entry counts as none.
func getFlow(t *testing.T, k *kernel, f flow) remembered {
	t.Helper()
	table := tableOf(t, k)
	e := table.find(f)
	if e == nil {
		return remembered{}
	}
	entry, ok := table.decode(*e, table.now())
	if !ok || (entry.state == "closing" && entry.age > 10*time.Second) {
		return remembered{}
	}
	return entry.remembered
}

// event is a packet from the second balancer.
type event struct {
	name     string
	function uint16
	last     bool // last server of the list
	flags    packet.TCPFlags
	cookie   int // width of the flow's cookie
	// returns tells that the balancer wants the packet back if its flow is not here.
	returns bool
}

func handshakeEvents() []event {
	all := []event{
		{"ca", connectAvail, false, packet.SYN, 0, false}, {"ca, last", connectAvail, true, packet.SYN, 0, false},
		{"cf", connectForce, true, packet.SYN, 0, false}, {"cf, not last", connectForce, false, packet.SYN, 0, false},
		{"as", ackStickiness, true, packet.ACK, 0, false}, {"as, FIN", ackStickiness, true, packet.FIN | packet.ACK, 0, false},
		{"as, RST", ackStickiness, true, packet.RST, 0, false}, {"as, SYN", ackStickiness, true, packet.SYN, 0, false},
		{"rs", recoverStickiness, false, packet.ACK, 0, false}, {"rs, last", recoverStickiness, true, packet.ACK, 0, false},
		{"rs, FIN", recoverStickiness, false, packet.FIN | packet.ACK, 0, false}, {"rs, RST", recoverStickiness, true, packet.RST, 0, false},
		{"st", steer, false, packet.ACK, 0, false}, {"st, last", steer, true, packet.ACK, 0, false},
		{"st, returns", steer, true, packet.ACK, 0, true}, {"st, RST, returns", steer, true, packet.RST, 0, true},
		{"dv", deliverAlways, true, packet.ACK, 0, false}, {"dv, RST", deliverAlways, true, packet.RST, 0, false},
	}
	for _, e := range all {
		if slices.Contains([]uint16{connectAvail, connectForce, steer}, e.function) {
			e.name, e.cookie = e.name+", cookie", 2
			all = append(all, e)
		}
	}
	return all
}

// frame returns the event's packet, as a balancer sends it.
func (e event) frame(d dialogue, kind desired.Encapsulation) []byte {
	segments := []netip.Addr{candidateSID(1, srv6.Function(e.function), srv6.Offer{Cookie: e.cookie, Column: e.cookie, Returns: e.returns})}
	if !e.last {
		segments = append(segments, nextSID)
	}
	encap := packet.Encap{Kind: kind, Sender: balancer2, Segments: segments}
	options := []packet.Option{packet.Flags(e.flags), packet.Sequence(d.seq, d.ack)}
	if e.cookie > 0 {
		options = append(options, packet.Timestamps(1, 0xf1f2f381))
	}
	return to(d.client, d.vip, encap, options...)
}

// situation is the set of sockets that the kernel has for a flow.
type situation struct {
	name string
	sockets
	dialogue
	// answersOther tells that the client acknowledges the SYN-ACK of another server, which also
	// accepted its SYN.
	answersOther bool
}

// socketsFor returns the sockets that a packet with these flags matches.
func (now situation) socketsFor(flags packet.TCPFlags) sockets {
	if now.answersOther && flags&packet.ACK != 0 {
		return sockets{}
	}
	return now.sockets
}

// situations makes sockets of every kind for a VIP, and flows without sockets.
func (s *stage) situations(client, vip netip.AddrPort) []situation {
	accepted := s.listen(vip)
	from := func(port uint16) flow { return flow{netip.AddrPortFrom(client.Addr(), port), vip} }
	down := flow{client, netip.AddrPortFrom(vip.Addr(), 81)}
	connected, _ := s.connect(from(40001), accepted)
	closing, c := s.connect(from(40002), accepted)
	halfClosed, h := s.connect(from(40007), accepted)
	elsewhere := s.request(from(40006))
	elsewhere.ack += 1000
	return []situation{
		{"down", sockets{}, dialogue{flow: down, seq: 5, ack: 6}, false},
		{"listening", sockets{listening: true}, dialogue{flow: from(40003), seq: 5, ack: 6}, false},
		{"request", sockets{request: true}, s.request(from(40004)), false},
		{"request, but connected elsewhere", sockets{request: true}, elsewhere, true},
		{"connected", sockets{connected: true}, connected, false},
		{"closed by the server", sockets{connected: true}, s.closeServer(halfClosed, h), false},
		{"time wait", sockets{listening: true, timeWait: true}, s.close(closing, c), false},
		{"cookie", sockets{listening: true, cookie: true}, s.cookie(from(40005)), false},
	}
}

// huntingConfig returns services on the ports 80 and 81 of both VIPs.
func huntingConfig(kind desired.Encapsulation, accept desired.Accept, notLocal desired.NotLocal) *desired.Agent {
	cfg := testConfig()
	cfg.Services = nil
	for _, vip := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
		for _, port := range []desired.Port{80, 81} {
			cfg.Services = append(cfg.Services, desired.AgentService{
				Name: fmt.Sprint(vip, port), VIP: vip, Port: port, Protocol: desired.TCP, Encapsulation: kind,
				Accept: accept, Load: desired.Source{Kind: desired.LoadSharedMemory}, NotLocal: notLocal,
			})
		}
	}
	return cfg
}

// TestTableIII tests every combination of state, kind of socket and packet from a balancer,
// including those that should not occur. It compares the packet, the flow and the counters with the
// reference.
func TestTableIII(t *testing.T) {
	k := testKernel(t)
	seen := map[string]int{}
	for _, way := range []struct {
		kind        desired.Encapsulation
		side        string
		client, vip netip.AddrPort
	}{
		{desired.SRv6Insert, "IPv6", client6, vip6},
		{desired.SRv6Encap, "IPv6", client6, vip6},
		{desired.SRv6Encap, "IPv4", client4, vip4},
	} {
		for _, accept := range []desired.AcceptPolicy{desired.AcceptAlways, desired.AcceptNever} {
			notLocal := map[desired.AcceptPolicy]desired.NotLocal{
				desired.AcceptAlways: desired.NotLocalReset, desired.AcceptNever: desired.NotLocalDrop,
			}[accept]
			cfg := huntingConfig(way.kind, desired.Accept{Policy: accept}, notLocal)
			testhost.Must(t, k.write(newTableContent(cfg, mtu)))
			// The sockets are new each time, because some of them end after a minute.
			s := newStage(t)
			for _, now := range s.situations(way.client, way.vip) {
				for _, state := range []string{"", "wait", "direct", "ending", "closing", "closed", "cookie", "cookie, acknowledged"} {
					s.do(func() error {
						for _, e := range handshakeEvents() {
							name := fmt.Sprintf("%s/%s/%s/%s/%s/%s", way.kind, way.side, accept, now.name, state, e.name)
							seen[tryEvent(t, k, cfg, way.kind, now, state, e, name)]++
						}
						return nil
					})
				}
			}
		}
	}
	for _, reason := range []string{
		"deliver_srv6_insert", "deliver_srv6_encap", "deliver_not_local", "next_refused", "next_not_local", "drop_not_local",
		"return_not_local",
	} {
		if seen[reason] == 0 {
			t.Errorf("no packet left as %s", reason)
		}
	}
	t.Log(seen)
}

// tryEvent passes the packet of an event to the data path and to the reference, and compares the
// results. It returns the reason by the reference.
func tryEvent(t *testing.T, k *kernel, cfg *desired.Agent, kind desired.Encapsulation, now situation, state string, e event, name string) string {
	ref := newReference(cfg)
	ref.sockets = func(flow) sockets { return now.socketsFor(e.flags) }
	var age int64
	if state == "closed" { // eleven seconds ago, so the entry has expired
		age, state = 11, "closing"
	} else if state != "" {
		ref.flows[now.flow] = entryIn(state, kind)
	}
	setFlow(t, k, now.flow, kind, state, age)
	frame := e.frame(now.dialogue, kind)
	refill(t, k)
	before, offersBefore := counters(t, k), offers(t, k, now.vip)
	verdict, out := runAgent(t, k, frame)
	got := slices.Collect(maps.Keys(changed(before, counters(t, k))))
	reason, want := ref.receive(frame)
	if !slices.Equal(got, []string{reason}) || !bytes.Equal(out, want) {
		t.Errorf("%s: left as %v, verdict %d; want %s", name, got, verdict, reason)
	}
	if drop := strings.HasPrefix(reason, "drop_"); drop != (verdict == xdpDrop) {
		t.Errorf("%s: verdict %d for %s", name, verdict, reason)
	}
	if diff := cmp.Diff(fmt.Sprint(ref.flows[now.flow]), fmt.Sprint(getFlow(t, k, now.flow))); diff != "" {
		t.Errorf("%s: flow (-want +got): %s", name, diff)
	}
	offersAfter := offers(t, k, now.vip)
	for result := range offersAfter {
		if n := int(offersAfter[result] - offersBefore[result]); n != ref.offers[result] {
			t.Errorf("%s: %d more %s, want %d", name, n, result, ref.offers[result])
		}
	}
	return reason
}

// offers returns the numbers of offers to a service, by outcome.
func offers(t testing.TB, k *kernel, vip netip.AddrPort) map[string]uint64 {
	t.Helper()
	return offersOf(t, k, serviceKey(desired.AgentService{VIP: vip.Addr(), Port: desired.Port(vip.Port())}))
}

// offersOf is offers for the key of a service.
func offersOf(t testing.TB, k *kernel, key agentServiceKey) map[string]uint64 {
	t.Helper()
	a, err := k.view().acceptance(key)
	if a == nil || err != nil {
		t.Fatalf("the service %v has no accept policy: %v", addressOf(key), err)
	}
	all, err := k.view().offerCounters(a)
	testhost.Must(t, err)
	return all
}

// TestRepeatedSYN checks that a SYN is delivered whatever the policy says, for as long as it may be
// a repetition. A later SYN from the same port is a new connection.
func TestRepeatedSYN(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	s.listen(vip6)
	cfg := huntingConfig(desired.SRv6Insert, desired.Accept{Policy: desired.AcceptNever}, desired.NotLocalDrop)
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	f := flow{client6, vip6}
	for age, want := range map[int64]string{0: "deliver_srv6_insert", 100: "deliver_srv6_insert", 121: "next_refused"} {
		setFlow(t, k, f, desired.SRv6Insert, "wait", age)
		s.do(func() error {
			trace, err := tracingView(t, k).Trace(f.client, f.vip)
			if err == nil && !strings.HasPrefix(want, trace.Answers[0].Outcome) {
				t.Errorf("after %d s: traced as %s, want %s", age, trace.Answers[0].Outcome, want)
			}
			before := counters(t, k)
			runAgent(t, k, handshakeEvents()[0].frame(dialogue{flow: f}, desired.SRv6Insert))
			if got := slices.Collect(maps.Keys(changed(before, counters(t, k)))); !slices.Equal(got, []string{want}) {
				t.Errorf("after %d s: left as %v, want %s", age, got, want)
			}
			return err
		})
	}
}

// dynamicRule returns the dynamic policy. A window time of 0 means that windows may be short.
func dynamicRule(window uint32, epsilon float64, initial uint32, windowTime time.Duration) desired.Accept {
	return desired.Accept{
		Policy: desired.AcceptDynamic, Window: window, WindowTime: &windowTime, Epsilon: &epsilon, Initial: &initial,
	}
}

// TestAlgorithm2 gives the dynamic policy and the reference the same loads.
func TestAlgorithm2(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	s.listen(vip6)
	seen := map[uint32]bool{}
	for seed := range uint64(30) {
		random := rand.New(rand.NewPCG(seed, 2))
		window, epsilon, initial := 1+random.Uint32N(60), float64(random.IntN(50))/100, random.Uint32N(6)
		cfg := huntingConfig(desired.SRv6Insert, dynamicRule(window, epsilon, initial, 0), desired.NotLocalDrop)
		testhost.Must(t, errors.Join(datapath.Keep(k.objects.Acceptances, map[agentServiceKey]agentAcceptance{}), k.write(newTableContent(cfg, mtu))))
		want := newPolicy(cfg.Services[2])
		want.load = &accept.Load{Capacity: 1 + random.Uint32N(8)}
		key := serviceKey(cfg.Services[2])
		s.do(func() error {
			for i := range 600 {
				want.load.Busy = random.Uint32N(10)
				tryOffer(t, k, key, want, flow{netip.AddrPortFrom(client6.Addr(), uint16(1024+i)), vip6}, seed, i)
				seen[want.Policy.(*accept.Dynamic).Threshold] = true
			}
			return nil
		})
	}
	if len(seen) < 5 {
		t.Errorf("thresholds seen: %v", seen)
	}
}

// tryOffer makes an offer to the data path and to the reference, want. It compares the results, and
// the states of the dynamic policy.
func tryOffer(t *testing.T, k *kernel, key agentServiceKey, want *policy, f flow, seed uint64, i int) {
	t.Helper()
	load := agentLoad{Busy: want.load.Busy, Capacity: want.load.Capacity, When: uint64(lasting(t))}
	testhost.Must(t, k.objects.Loads.Put(key, load))
	setFlow(t, k, f, desired.SRv6Insert, "", 0)
	before := offers(t, k, f.vip)
	runAgent(t, k, handshakeEvents()[0].frame(dialogue{flow: f}, desired.SRv6Insert))
	after, result := offers(t, k, f.vip), want.offer(sockets{listening: true})
	for name := range after {
		if got := after[name] - before[name]; (got == 1) != (name == result) {
			t.Fatalf("seed %d, offer %d of busy %d: %d more %s, want %s", seed, i, want.load.Busy, got, name, result)
		}
	}
	var got agentAcceptance
	testhost.Must(t, k.objects.Acceptances.Lookup(key, &got))
	state := *want.Policy.(*accept.Dynamic)
	if got.Threshold != state.Threshold || got.Attempts != state.Attempts || got.Accepted != state.Accepted {
		t.Fatalf("seed %d, offer %d: threshold %d, attempts %d, accepted %d; want %+v", seed, i,
			got.Threshold, got.Attempts, got.Accepted, state)
	}
}

// TestWindowTime fills windows within their shortest time, as a flood does. The threshold stays.
// Then the time has passed, and the next offer ends the window, by the share of all its offers.
func TestWindowTime(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	s.listen(vip6)
	const initial = 4
	cfg := huntingConfig(desired.SRv6Insert, dynamicRule(10, 0.1, initial, time.Hour), desired.NotLocalDrop)
	key := serviceKey(cfg.Services[2])
	for i, test := range []struct {
		busy [2]uint32 // of the offers, by turns
		want uint32    // threshold
	}{{[2]uint32{0, 3}, 3}, {[2]uint32{4, 9}, 5}, {[2]uint32{0, 9}, 4}} {
		testhost.Must(t, errors.Join(datapath.Keep(k.objects.Acceptances, map[agentServiceKey]agentAcceptance{}), k.write(newTableContent(cfg, mtu))))
		want := newPolicy(cfg.Services[2])
		want.load = &accept.Load{Capacity: 8}
		policy := want.Policy.(*accept.Dynamic)
		s.do(func() error {
			beganBefore(t, k, key, policy, 0)
			for n := range 100 {
				want.load.Busy = test.busy[n%2]
				tryOffer(t, k, key, want,
					flow{netip.AddrPortFrom(client6.Addr(), uint16(1024+n)), vip6}, uint64(i), n)
			}
			if policy.Threshold != initial || policy.Attempts != 100 {
				t.Errorf("%v: the flood has changed the threshold: %+v", test.busy, policy)
			}
			beganBefore(t, k, key, policy, 2*time.Hour)
			want.load.Busy = test.busy[0]
			tryOffer(t, k, key, want, flow{client6, vip6}, uint64(i), 100)
			if policy.Threshold != test.want || policy.Attempts != 0 {
				t.Errorf("%v: threshold %d after the window, want %d", test.busy, policy.Threshold,
					test.want)
			}
			return nil
		})
	}
}

// beganBefore lets the present window of the data path and of the reference begin a time before
// now.
func beganBefore(t *testing.T, k *kernel, key agentServiceKey, policy *accept.Dynamic, before time.Duration) {
	t.Helper()
	var a agentAcceptance
	testhost.Must(t, k.objects.Acceptances.Lookup(key, &a))
	policy.Began = coarseTime() - before
	a.Began = uint64(policy.Began)
	testhost.Must(t, k.objects.Acceptances.Update(key, a, ebpf.UpdateLock))
}

// coarseTime is the clock of the dynamic policy.
func coarseTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}

// TestStaleLoad checks that all connections are accepted when the load is unknown or too old.
func TestStaleLoad(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	s.listen(vip6)
	threshold := uint32(0)
	cfg := huntingConfig(desired.SRv6Insert, desired.Accept{Policy: desired.AcceptStatic, Threshold: &threshold}, desired.NotLocalDrop)
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	key := serviceKey(cfg.Services[2])
	for name, c := range map[string]struct {
		age  time.Duration // 0: never reported
		want string
	}{"never": {0, "accepted_stale"}, "fresh": {time.Millisecond, "refused"}, "old": {2 * time.Second, "accepted_stale"}} {
		s.do(func() error {
			now, err := monotonic()
			if err != nil {
				return err
			}
			if err := datapath.Keep(k.objects.Loads, map[agentServiceKey]bool{}); err != nil {
				return err
			}
			if c.age != 0 {
				if err := k.objects.Loads.Put(key, agentLoad{Busy: 1, Capacity: 4, When: uint64(now - int64(c.age))}); err != nil {
					return err
				}
			}
			setFlow(t, k, flow{client6, vip6}, desired.SRv6Insert, "", 0)
			before := offers(t, k, vip6)
			runAgent(t, k, handshakeEvents()[0].frame(dialogue{flow: flow{client6, vip6}}, desired.SRv6Insert))
			if after := offers(t, k, vip6); after[c.want] != before[c.want]+1 {
				t.Errorf("%s: before %v, after %v, want one more %s", name, before, after, c.want)
			}
			return nil
		})
	}
}

// TestReloadKeepsThreshold checks that an unchanged policy keeps its threshold, and that another
// policy starts with its initial one.
func TestReloadKeepsThreshold(t *testing.T) {
	k := testKernel(t)
	cfg := huntingConfig(desired.SRv6Insert, dynamicRule(50, 0.1, 1, 0), desired.NotLocalDrop)
	key := serviceKey(cfg.Services[0])
	threshold := func() uint32 {
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
		var a agentAcceptance
		testhost.Must(t, k.objects.Acceptances.Lookup(key, &a))
		return a.Threshold
	}
	threshold()
	learned := newAcceptance(cfg.Services[0])
	learned.Threshold = 7
	testhost.Must(t, k.objects.Acceptances.Update(key, learned, ebpf.UpdateLock))
	if got := threshold(); got != 7 {
		t.Errorf("threshold %d after a reload, want 7", got)
	}
	three := uint32(3)
	cfg.Services[0].Accept.Initial = &three
	if got := threshold(); got != 3 {
		t.Errorf("threshold %d with another initial one, want 3", got)
	}
}
