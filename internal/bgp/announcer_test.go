// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	vip4 = "203.0.113.1/32"
	vip6 = "2001:db8:80::1/128"
)

// fixture is an announcer with a router.
type fixture struct {
	t        *testing.T
	cfg      *desired.Balancer
	router   *router
	services chan []balancer.ServiceState
	log      *logged
	events   *events.Stream

	attempt         time.Duration // if not 0, how long a session may take to be established
	retry           time.Duration // if not 0, the time until a failed withdrawal is tried again
	works           bool          // there is a data path
	endsWithProcess bool          // as in Forwarding

	announcer *Announcer
	stop      func()
}

// logged keeps a log.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newFixture does not make the test parallel: the library keeps settings in global variables, which
// each server of the process sets.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	r := newRouter(t)
	f := &fixture{
		t: t, router: r, services: make(chan []balancer.ServiceState, 1), log: &logged{},
		events: events.NewStream(),
		cfg: &desired.Balancer{
			Node: desired.BalancerNode{Instance: "lb", State: t.TempDir()},
			BGP: &desired.BGP{
				ASN: balancerASN, RouterID: netip.MustParseAddr("192.0.2.2"), RestartTime: 77 * time.Second,
				NextHops: []netip.Addr{netip.MustParseAddr("2001:db8::2")},
				Peers:    []desired.BGPPeer{r.peer()},
			},
		},
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(f.log)
		}
	})
	return f
}

func (r *router) peer() desired.BGPPeer {
	return desired.BGPPeer{
		Address: r.addr().Addr(), ASN: routerASN, Port: r.addr().Port(), HoldTime: 9 * time.Second,
		Families: []desired.Family{desired.IPv4, desired.IPv6},
	}
}

// start starts an announcer as a process does.
func (f *fixture) start(preserved bool, abilities ...balancer.Ability) {
	f.t.Helper()
	passwords, err := config.ReadPasswords(f.cfg.BGP)
	testhost.Must(f.t, err)
	f.works = preserved
	f.announcer, err = New(f.cfg, NewPlan(f.cfg.BGP, passwords), Forwarding{
		EndsWithProcess: f.endsWithProcess, Works: func() (bool, error) { return f.works, nil },
	}, slog.New(slog.NewTextHandler(f.log, nil)))
	testhost.Must(f.t, err)
	f.works = true // the balancer attaches it
	if f.attempt != 0 {
		f.announcer.attempt = f.attempt
	}
	if f.retry != 0 {
		f.announcer.retry = f.retry
	}
	f.announcer.PublishTo(f.events)
	ctx, cancel := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.announcer.Run(ctx, f.services) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(f.stop)
	f.tell(abilities...)
}

// tell tells the abilities of a service with an IPv4 VIP, and of one with an IPv6 VIP.
func (f *fixture) tell(abilities ...balancer.Ability) { f.services <- states(abilities...) }

func states(abilities ...balancer.Ability) []balancer.ServiceState {
	return []balancer.ServiceState{
		{Service: &desired.Service{Name: "four", VIP: netip.MustParsePrefix(vip4).Addr()}, Ability: abilities[0]},
		{Service: &desired.Service{Name: "six", VIP: netip.MustParsePrefix(vip6).Addr()}, Ability: abilities[1]},
	}
}

func (f *fixture) state() *State {
	f.t.Helper()
	state, err := f.announcer.State(f.t.Context())
	testhost.Must(f.t, err)
	return state
}

// TestWithdrawals follows routes while services lose and regain their servers.
func TestWithdrawals(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.HoldDown = time.Hour
	f.start(false, balancer.Ready, balancer.Unable)
	f.router.await(0, routesAre(vip4))
	f.tell(balancer.Ready, balancer.Ready) // the first announcement is not held down
	f.router.await(0, routesAre(vip6, vip4))
	f.tell(balancer.Usable, balancer.Ready)
	f.router.await(0, routesAre(vip6))
	if !strings.Contains(f.log.String(), `level=ERROR msg="route WITHDRAWN: none of its services can serve" `+
		"prefix="+vip4+" services=four") {
		t.Error("the withdrawal is not in the log")
	}
	f.tell(balancer.Ready, balancer.Ready)
	f.awaitReason(vip4, HeldDown)
	f.tell(balancer.Unable, balancer.Ready)
	f.awaitReason(vip4, NotServed)
	if p := f.state().Peers[0]; !p.KeepsRoutes || p.HoldTime != 9 || p.LocalAddress != "127.0.0.1" {
		t.Errorf("%+v", p)
	}
	metrics := `
# HELP segue_lb_bgp_drained 1 if the balancer is drained, otherwise 0.
# TYPE segue_lb_bgp_drained gauge
segue_lb_bgp_drained 0
# HELP segue_lb_bgp_prefixes Prefixes that the peer was sent.
# TYPE segue_lb_bgp_prefixes gauge
segue_lb_bgp_prefixes{peer="127.0.0.1"} 1
# HELP segue_lb_bgp_route_announced 1 if the prefix is announced, otherwise 0.
# TYPE segue_lb_bgp_route_announced gauge
segue_lb_bgp_route_announced{prefix="2001:db8:80::1/128"} 1
segue_lb_bgp_route_announced{prefix="203.0.113.1/32"} 0
# HELP segue_lb_bgp_session_established 1 if the session is established, otherwise 0.
# TYPE segue_lb_bgp_session_established gauge
segue_lb_bgp_session_established{peer="127.0.0.1"} 1
# HELP segue_lb_bgp_sessions_total How often a session was established.
# TYPE segue_lb_bgp_sessions_total counter
segue_lb_bgp_sessions_total{peer="127.0.0.1"} 1
`
	if err := testutil.CollectAndCompare(f.announcer, strings.NewReader(metrics)); err != nil {
		t.Error(err)
	}

	// A reload without hold-down lets the route return.
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.HoldDown = 0 })
	f.apply()
	f.tell(balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	if f.router.session(1) != nil {
		t.Error("a reload has reset the session")
	}
}

// TestWithdrawalThatFails: a route that cannot be withdrawn counts as announced, and is withdrawn
// later, whether its VIP cannot be served or was removed.
func TestWithdrawalThatFails(t *testing.T) {
	f := newFixture(t)
	f.retry = time.Millisecond
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	// spoil sets the services, and makes withdrawals of a route fail until the returned function is
	// called.
	spoil := func(vip string, services []balancer.ServiceState) (repair func()) {
		var sent route
		set := func(now route) {
			err := f.announcer.ask(t.Context(), func(context.Context) error {
				r := f.announcer.routes[netip.MustParsePrefix(vip)]
				sent, r.sent, f.announcer.services = r.sent, now, services
				return nil
			})
			testhost.Must(t, err)
		}
		set(route{})
		return func() { set(sent) }
	}
	awaitFailures := func(vip string) {
		t.Helper()
		failure := "msg=\"route cannot be withdrawn\" prefix=" + vip
		for deadline := time.Now().Add(patience); strings.Count(f.log.String(), failure) < 2; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no second attempt to withdraw", vip)
			}
		}
	}
	repair := spoil(vip4, states(balancer.Unable, balancer.Ready))
	awaitFailures(vip4)
	repair()
	f.router.await(0, routesAre(vip6))
	f.awaitReason(vip4, NotServed)

	repair = spoil(vip6, nil)
	awaitFailures(vip6)
	if routes := f.state().Routes; len(routes) != 1 || routes[0].Prefix != vip6 || !routes[0].Announced {
		t.Errorf("routes %+v", routes)
	}
	repair()
	f.router.await(0, routesAre())
}

// TestRequestAfterTheEnd does not wait.
func TestRequestAfterTheEnd(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := f.announcer.Drain(ctx, true); !errors.Is(err, errEnded) {
		t.Errorf("error %v", err)
	}
}

func (f *fixture) awaitReason(prefix string, want Reason) {
	f.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		var got Reason
		for _, r := range f.state().Routes {
			if r.Prefix == prefix && !r.Announced {
				got = r.Reason
			}
		}
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("%s: reason %q, want %q", prefix, got, want)
		}
		time.Sleep(time.Millisecond)
	}
}

// with returns a changed copy of the configuration.
func (f *fixture) with(change func(*desired.BGP)) *desired.BGP {
	b := *f.cfg.BGP
	b.Peers = append([]desired.BGPPeer{}, b.Peers...)
	change(&b)
	return &b
}

func (f *fixture) apply() {
	f.t.Helper()
	passwords, err := config.ReadPasswords(f.cfg.BGP)
	if err == nil {
		err = f.announcer.Apply(f.t.Context(), NewPlan(f.cfg.BGP, passwords))
	}
	testhost.Must(f.t, err)
}

// TestEvents follows the events of a route, a session and a drain.
func TestEvents(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Unable)
	f.router.await(0, routesAre(vip4))
	f.drain(true)
	f.drain(false)
	f.tell(balancer.Usable, balancer.Unable)
	f.router.await(0, routesAre())
	f.router.cut()
	var got []string
	for last := uint64(0); len(got) < 7; {
		more, err := f.events.After(t.Context(), last)
		testhost.Must(t, err)
		for _, e := range more {
			got = append(got, fmt.Sprint(e.Kind, " ", e.Prefix, e.Peer))
			last = e.ID
		}
	}
	want := []string{
		"route_announced " + vip4, "session_up 127.0.0.1", "route_withdrawn " + vip4, "drained ",
		"route_announced " + vip4, "undrained ", "route_withdrawn " + vip4,
	}
	if !slices.Equal(got[:len(want)], want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

// TestReload: a change of routes has no effect on sessions. A change of a peer resets its session.
func TestReload(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Ready)
	s := f.router.await(0, routesAre(vip6, vip4))
	requireNextHop(t, s, vip4, "127.0.0.1") // that of the session
	requireNextHop(t, s, vip6, "2001:db8::2")
	f.cfg.BGP = f.with(func(b *desired.BGP) {
		b.Communities = []desired.Community{"64600:1", "no-export", "4200000000:1:2"}
		b.NextHops = append(b.NextHops, netip.MustParseAddr("192.0.2.9"))
	})
	f.apply()
	s = f.router.await(0, func(s *received) error {
		if got := attribute[*bgp.PathAttributeCommunities](s, vip4); got == nil {
			return fmt.Errorf("attributes %v", s.routes)
		}
		return routesAre(vip6, vip4)(s)
	})
	requireNextHop(t, s, vip4, "192.0.2.9")
	standard := attribute[*bgp.PathAttributeCommunities](s, vip4)
	large := attribute[*bgp.PathAttributeLargeCommunities](s, vip4)
	if len(standard.Value) != 2 || standard.Value[0] != 64600<<16|1 || standard.Value[1] != 0xffffff01 ||
		len(large.Values) != 1 || *large.Values[0] != (bgp.LargeCommunity{ASN: 4200000000, LocalData1: 1, LocalData2: 2}) {
		t.Errorf("communities %v, %v", standard, large)
	}
	f.services <- []balancer.ServiceState{{ // a service gets another name
		Service: &desired.Service{Name: "other", VIP: netip.MustParsePrefix(vip6).Addr()}, Ability: balancer.Ready,
	}}
	f.router.await(0, routesAre(vip6))
	if f.router.session(1) != nil || strings.Contains(f.log.String(), "WITHDRAWN") {
		t.Error("a reload has reset the session, or withdrawn the route")
	}

	f.cfg.BGP = f.with(func(b *desired.BGP) { b.Peers[0].HoldTime = 12 * time.Second })
	f.apply()
	if s := f.router.await(0, isClosed); s.notified == nil {
		t.Error("no notification")
	}
	if s := f.router.await(1, routesAre(vip6)); s.open.HoldTime != 12 {
		t.Errorf("hold time %d", s.open.HoldTime)
	}
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.Peers = nil })
	f.apply()
	f.router.await(1, isClosed)
	if peers := f.state().Peers; len(peers) != 0 {
		t.Errorf("%+v", peers)
	}
}

// attribute returns an attribute of a route, or the zero value.
func attribute[T bgp.PathAttributeInterface](s *received, prefix string) (none T) {
	for _, a := range s.routes[netip.MustParsePrefix(prefix)] {
		if found, ok := a.(T); ok {
			return found
		}
	}
	return none
}

func requireNextHop(t *testing.T, s *received, prefix, want string) {
	t.Helper()
	got := ""
	if a := attribute[*bgp.PathAttributeNextHop](s, prefix); a != nil {
		got = a.Value.String()
	}
	if a := attribute[*bgp.PathAttributeMpReachNLRI](s, prefix); a != nil {
		got = a.Nexthop.String()
	}
	if got != want {
		t.Errorf("%s: next hop %s, want %s", prefix, got, want)
	}
}

// TestUncheckedServices: without results of health checks, no route is announced and none withdrawn.
func TestUncheckedServices(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.HoldDown = time.Hour
	f.start(false, balancer.Ready, balancer.Unchecked)
	f.router.await(0, routesAre(vip4))
	f.awaitReason(vip6, Unchecked)
	if log := f.log.String(); strings.Contains(log, "level=ERROR") || !strings.Contains(log,
		`msg="route is not announced yet: no server has passed a health check" prefix=`+vip6+" services=six") {
		t.Error("the log does not say so, or has an error")
	}
	f.tell(balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.tell(balancer.Unchecked, balancer.Unchecked)
	f.tell(balancer.Unchecked, balancer.Unable)
	f.router.await(0, routesAre(vip4)) // the unchecked VIP keeps its route
	f.tell(balancer.Unable, balancer.Unchecked)
	f.router.await(0, routesAre())
	f.stop()

	// A restart finds results in the data path, except for services that are new.
	f.start(true, balancer.Ready, balancer.Unchecked)
	f.router.await(1, routesAre(vip4))
	f.awaitReason(vip6, Unchecked)
}

// TestVIPWithoutPeer: a VIP whose family no peer takes is not announced, until a reload changes that.
func TestVIPWithoutPeer(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.HoldDown = time.Hour
	six := f.cfg.BGP.Peers[0]
	f.cfg.BGP.Peers[0].Families = []desired.Family{desired.IPv4}
	f.start(false, balancer.Ready, balancer.Ready)
	f.awaitReason(vip6, NoPeer)
	f.router.await(0, func(s *received) error {
		if len(s.routes) != 1 {
			return fmt.Errorf("routes %v", s.routes)
		}
		return nil
	})
	if !strings.Contains(f.log.String(), "level=ERROR msg=\"route is NOT announced: no peer takes routes of "+
		"its family\" prefix="+vip6+" services=six") {
		t.Error("the log does not say so")
	}
	f.tell(balancer.Ready, balancer.Unable)
	f.tell(balancer.Ready, balancer.Ready)
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.Peers[0] = six })
	f.apply()
	f.router.await(1, routesAre(vip6, vip4))
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.Peers[0].Families = []desired.Family{desired.IPv4} })
	f.apply()
	f.awaitReason(vip6, NoPeer)
	if strings.Count(f.log.String(), "no peer takes routes") != 2 {
		t.Error("the log does not say so once each time")
	}
}

// TestIPv6NextHops: IPv4 routes in an IPv6 session have the balancer's IPv6 address as their next hop,
// unless one is configured. A peer that does not support this counts as one without a session.
func TestIPv6NextHops(t *testing.T) {
	f := newFixture(t)
	f.router = newRouterAt(t, "::1")
	f.cfg.BGP.NextHops, f.cfg.BGP.Peers = nil, []desired.BGPPeer{f.router.peer()}
	const problem = "bgp peer takes no IPv4 routes: it does not support their IPv6 next hops (RFC 8950)"
	f.start(false, balancer.Ready, balancer.Ready)
	s := f.router.await(0, routesAre(vip6, vip4))
	requireNextHop(t, s, vip4, "::1")
	requireNextHop(t, s, vip6, "::1")
	awaitEstablished := func(want4 int) {
		t.Helper()
		awaitThat(t, func() error {
			for _, r := range f.state().Routes {
				if want := map[string]int{vip4: want4, vip6: 1}[r.Prefix]; r.Established != want {
					return fmt.Errorf("%+v, want %d established peers", r, want)
				}
			}
			if strings.Count(f.log.String(), problem) != 1 {
				return errors.New("the log does not say so once")
			}
			return nil
		})
	}
	awaitEstablished(0)
	f.router.mu.Lock()
	f.router.extended = true
	f.router.mu.Unlock()
	f.router.cut()
	f.router.await(1, routesAre(vip6, vip4))
	awaitEstablished(1)
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.NextHops = []netip.Addr{netip.MustParseAddr("192.0.2.2")} })
	f.apply()
	f.router.await(1, func(s *received) error {
		if a := attribute[*bgp.PathAttributeNextHop](s, vip4); a == nil || a.Value.String() != "192.0.2.2" {
			return fmt.Errorf("attributes %v", s.routes)
		}
		return nil
	})
}

// TestPeersOfFamily: peersOf counts the peers that take routes of a family, and those with a
// session.
func TestPeersOfFamily(t *testing.T) {
	one, two, six := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1")
	a := &Announcer{
		plan: &Plan{bgp: &desired.BGP{Peers: []desired.BGPPeer{
			{Address: one, Families: []desired.Family{desired.IPv4}},
			{Address: two, Families: []desired.Family{desired.IPv4, desired.IPv6}},
			{Address: six, Families: []desired.Family{desired.IPv4, desired.IPv6}}, // does not take IPv6 next hops
		}}},
		peers: map[string]*peerState{
			one.String(): {Peer: Peer{State: established}}, two.String(): {Peer: Peer{State: down}},
			six.String(): {Peer: Peer{State: established}},
		},
	}
	for family, want := range map[desired.Family][2]int{desired.IPv4: {3, 1}, desired.IPv6: {2, 1}} {
		if all, established := a.peersOf(family); [2]int{all, established} != want {
			t.Errorf("%s: %d peers, %d with a session, want %v", family, all, established, want)
		}
	}
}
