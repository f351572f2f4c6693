// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// randomRule returns a random accept policy, with short windows, and a random treatment of flows
// that are not local.
func randomRule(random *rand.Rand) (desired.Accept, desired.NotLocal) {
	small := random.Uint32N(4)
	accept := []desired.Accept{
		{Policy: desired.AcceptAlways}, {Policy: desired.AcceptNever}, {Policy: desired.AcceptLeast},
		{Policy: desired.AcceptStatic, Threshold: &small},
		dynamicRule(1+small, 0.1, small, 0), dynamicRule(1+small, 0.1, small, 0), // twice as often as others
	}
	notLocal := []desired.NotLocal{desired.NotLocalDrop, desired.NotLocalReset}
	return accept[random.IntN(len(accept))], notLocal[random.IntN(2)]
}

// randomSource returns a random load source. One half is shared memory.
func randomSource(random *rand.Rand) desired.Source {
	kinds := []desired.LoadSource{desired.LoadConnections, desired.LoadAcceptQueue, desired.LoadCgroup}
	source := desired.Source{Kind: desired.LoadSharedMemory, Capacity: random.Uint32N(3)}
	if random.IntN(2) == 0 {
		source.Kind = kinds[random.IntN(len(kinds))]
	}
	return source
}

// randomLoad reports a load, or makes the load missing or stale.
func randomLoad(t *testing.T, k *kernel, random *rand.Rand, vip netip.AddrPort) {
	t.Helper()
	load := agentLoad{Busy: random.Uint32N(4), Capacity: random.Uint32N(4), When: uint64(lasting(t))}
	if random.IntN(4) == 0 {
		load.When = uint64(random.IntN(2)) // never, or long ago
	}
	testhost.Must(t, k.objects.Loads.Put(serviceKey(desired.AgentService{VIP: vip.Addr(), Port: desired.Port(vip.Port())}), load))
}

// Trace predicts what the data path does, for any packet in any state, and changes nothing.
func TestTraceAgreesWithDataPath(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	sides := [][]situation{s.situations(client4, vip4), s.situations(client6, vip6)}
	s.age(k, vip4, vip6) // so that the load is the same in both runs
	random := rand.New(rand.NewPCG(4, 6))
	view := tracingView(t, k)
	seen := map[string]int{}
	for range 200 {
		accept, notLocal := randomRule(random)
		cfg := huntingConfig(desired.SRv6Encap, accept, notLocal)
		for i := range cfg.Services {
			cfg.Services[i].Load = randomSource(random)
		}
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
		s.do(func() error {
			for range 30 {
				now := sides[random.IntN(2)][random.IntN(len(sides[0]))]
				state := []string{"", "wait", "direct", "ending", "closing", "closed"}[random.IntN(6)]
				e := handshakeEvents()[random.IntN(len(handshakeEvents()))]
				if e.returns {
					continue // no balancer wants the packet of a trace back
				}
				isSought := e.function == recoverStickiness || e.function == steer
				if isSought && (now.cookie || now.answersOther) {
					continue // the packet of a trace carries no cookie
				}
				randomLoad(t, k, random, now.vip)
				if state == "closed" {
					setFlow(t, k, now.flow, desired.SRv6Encap, "closing", 11)
				} else {
					setFlow(t, k, now.flow, desired.SRv6Encap, state, 0)
				}
				seen[agree(t, k, view, now, e)]++
			}
			return nil
		})
	}
	for _, outcome := range []string{"deliver accepted", "deliver accepted_stale", "deliver forced", "deliver ", "next_refused refused",
		"next_refused refused_down", "next_not_local ", "drop_not_local ", "deliver_not_local "} {
		if seen[outcome] == 0 {
			t.Errorf("no packet met %q: %v", outcome, seen)
		}
	}
}

// agree compares the prediction of trace with the result for an event's packet.
func agree(t *testing.T, k *kernel, view *View, now situation, e event) string {
	t.Helper()
	key := serviceKey(desired.AgentService{VIP: now.vip.Addr(), Port: desired.Port(now.vip.Port())})
	var acceptance [2]agentAcceptance
	read := func(i int) error { return k.objects.Acceptances.Lookup(key, &acceptance[i]) }
	flowBefore, err := getFlow(t, k, now.flow), read(0)
	refill(t, k)
	trace, traceErr := view.Trace(now.client, now.vip)
	testhost.Must(t, errors.Join(err, traceErr, read(1)))
	if acceptance[0] != acceptance[1] || flowBefore != getFlow(t, k, now.flow) {
		t.Fatalf("trace changed the policy or the flow: %+v", acceptance)
	}
	at := slices.IndexFunc(trace.Answers, func(a Answer) bool {
		return a.Function == srv6.Function(e.function).String() && a.Last == e.last
	})
	want := trace.Answers[at]
	before, offersBefore := counters(t, k), offers(t, k, now.vip)
	runAgent(t, k, e.frame(now.dialogue, desired.SRv6Encap))
	got := Answer{Function: want.Function, Last: want.Last}
	for reason := range maps.Keys(changed(before, counters(t, k))) {
		got.Outcome += strings.TrimSuffix(reason, "_srv6_encap")
	}
	for result, n := range offers(t, k, now.vip) {
		if n != offersBefore[result] {
			got.Offer += result
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s, %s with flow %+v: -trace +data path:\n%s\n%+v", now.name, e.name, flowBefore, diff, trace.Accept)
	}
	return got.Outcome + " " + got.Offer
}

// Trace shows the state of the flow and of the socket, and the service. In another network
// namespace the sockets are unknown.
func TestTraceOfConnection(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	cfg := huntingConfig(desired.SRv6Insert, desired.Accept{Policy: desired.AcceptNever}, desired.NotLocalDrop)
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	view := tracingView(t, k)
	sockets := map[string]string{"down": "none", "listening": "listening", "request": "request",
		"request, but connected elsewhere": "request", "connected": "established",
		"time wait": "time-wait", "cookie": "listening",
		"closed by the server": "fin-wait-2"}
	for _, now := range s.situations(client6, vip6) {
		setFlow(t, k, now.flow, desired.SRv6Insert, "direct", 3)
		s.do(func() error {
			got, err := view.Trace(now.client, now.vip)
			if err != nil {
				return err
			}
			port := cfg.Services[2].Name
			if now.vip.Port() == 81 {
				port = cfg.Services[3].Name
			}
			if got.Socket != sockets[now.name] || got.Service != port || !got.Served || got.Flow.State != "direct" ||
				got.Flow.Balancer.Addr() != balancer1 || got.Flow.Age < 2.9 || got.Accept.Policy != desired.AcceptNever {
				t.Errorf("%s: %+v", now.name, got)
			}
			return nil
		})
	}
	view.here = false
	if got, err := view.Trace(client6, vip6); err != nil || got.Socket != "" || got.Answers != nil {
		t.Errorf("in another namespace: %+v, error %v", got, err)
	}
	view.here = true
	if got, err := view.Trace(client6, other6); err != nil || got.Served || got.Service != "" || got.Answers[0].Outcome != "next_segment" {
		t.Errorf("of another VIP: %+v, error %v", got, err)
	}
}

// Trace knows what unusual servers do: one with a policy for all ports beside a service without a
// policy, one without a locator, and one whose interface leads out of the domain.
func TestTraceOfUnusualServers(t *testing.T) {
	s := newStage(t)
	s.listen(vip4)
	nowhere := testConfig()
	nowhere.Node.Locator = netip.Prefix{}
	for name, c := range map[string]struct {
		cfg     *desired.Agent
		service string
		answer  *Answer // the first one
	}{
		"all ports":    {testConfig(), "all", &Answer{Function: "connect-avail", Outcome: "next_refused", Offer: "refused"}},
		"outside":      {outsideConfig(), "gre", &Answer{Function: "connect-avail", Outcome: "drop_outside"}},
		"tunnels only": {nowhere, "gre", nil},
	} {
		t.Run(name, func(t *testing.T) {
			k := testKernelOf(t, c.cfg)
			s.do(func() error {
				got, err := tracingView(t, k).Trace(client4, vip4)
				if err != nil {
					return err
				}
				if got.Service != c.service || got.Socket != "listening" || got.Flow.State != "listen" || !got.Served {
					t.Errorf("%+v, want service %s and a listening socket", got, c.service)
				}
				var first *Answer
				if len(got.Answers) > 0 {
					first = &got.Answers[0]
				}
				if diff := cmp.Diff(c.answer, first); diff != "" {
					t.Errorf("the first answer (-want +got):\n%s", diff)
				}
				return nil
			})
		})
	}
}

// Trace follows a live connection on two servers. It shows which server has the connection, and how
// the connection ends.
func TestTraceOfLiveConnection(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 2)
	var instances []string
	for i, policy := range []desired.AcceptPolicy{desired.AcceptNever, desired.AcceptAlways} {
		cfg := n.config(i+1, desired.SRv6Insert, vip6.Addr())
		cfg.Services[0].Accept.Policy = policy
		n.run(i+1, cfg, link.AttachTCX)
		n.serve(i+1, vip6.Addr())
		instances = append(instances, cfg.Node.Instance)
	}
	n.hunt(desired.SRv6Insert)
	c := n.dial(vip6.Addr())
	n.echo(c, 100)
	client := c.LocalAddr().(*net.TCPAddr).AddrPort()
	trace := func(server int) (trace *Trace) {
		t.Helper()
		n.in(n.servers[server-1], func() error {
			view, err := OpenView(instances[server-1])
			if err != nil {
				return err
			}
			defer view.Close()
			trace, err = view.Trace(client, netip.AddrPortFrom(vip6.Addr(), 80))
			return err
		})
		return trace
	}
	if got := trace(1); got.Socket != "listening" || got.Flow.State != "listen" || got.Answers[0].Outcome != "next_refused" {
		t.Errorf("at the server that refused: %+v", got)
	}
	if got := trace(2); got.Socket != "established" || got.Flow.State != "direct" {
		t.Errorf("at the server that took it: %+v", got)
	}
	testhost.Must(t, c.Close())
	eventually(t, "the end is signalled", func() bool { return trace(2).Flow.State == "closing" })

	next := func() (next *NextSegment) {
		t.Helper()
		n.in(n.servers[0], func() error {
			view, err := OpenView(instances[0])
			if err != nil {
				return err
			}
			defer view.Close()
			next, err = view.FindNext(netip.MustParseAddr("fd00:5:0:2:2::"))
			return err
		})
		return next
	}
	if got := next(); got.Problem != "" || got.Router == nil {
		t.Errorf("by the default route: %+v", got)
	}
	_, all, _ := net.ParseCIDR("::/0")
	_, locator, _ := net.ParseCIDR("fd00:5:0:2::/64")
	var gateway net.IP
	n.in(n.servers[0], func() error {
		routes, err := netlink.RouteGet(locator.IP)
		if err == nil {
			gateway = routes[0].Gw
		}
		return errors.Join(err, netlink.RouteAdd(&netlink.Route{Dst: locator, Gw: gateway}))
	})
	if got := next(); got.Problem != "" || got.Router != nil {
		t.Errorf("by a route of its own: %+v", got)
	}
	n.in(n.servers[0], func() error {
		return errors.Join(netlink.RouteDel(&netlink.Route{Dst: all}), netlink.RouteDel(&netlink.Route{Dst: locator}))
	})
	if got := next(); !strings.HasPrefix(got.Problem, "no route to fd00:5:0:2:2::") {
		t.Errorf("without a route: %+v", got)
	}
}
