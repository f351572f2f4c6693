// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// hub takes the place of the store.
type hub struct {
	mu     sync.Mutex
	values map[string]string
	heard  map[string]func(map[string]string, error)
}

// presence is what a balancer uses of the hub.
func (h *hub) presence(name string) Presence {
	return func(ctx context.Context, _ int64, own <-chan string, heard func(map[string]string, error)) {
		h.mu.Lock()
		h.heard[name] = heard
		h.mu.Unlock()
		for {
			select {
			case value := <-own:
				h.set(name, value)
			case <-ctx.Done():
				return
			}
		}
	}
}

// set changes the value of a balancer, or removes it if it is empty, and tells all of them.
func (h *hub) set(name, value string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.values[name] = value
	if value == "" {
		delete(h.values, name)
	}
	for _, heard := range h.heard {
		heard(maps.Clone(h.values), nil)
	}
}

// fail tells a balancer that the store does not answer.
func (h *hub) fail(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard[name](nil, errors.New("no answer"))
}

// fixture is a speaker in a namespace.
type fixture struct {
	*testing.T
	*Speaker
	ns       *testhost.Namespace
	services chan []balancer.ServiceState
	log      safeBuffer
}

// safeBuffer is a buffer that several goroutines may use.
type safeBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// start starts a speaker on the interface eth0 of a namespace. Its services can serve.
func start(t *testing.T, ns *testhost.Namespace, name string, presence Presence) *fixture {
	t.Helper()
	f := &fixture{T: t, ns: ns, services: make(chan []balancer.ServiceState, 1)}
	cfg := &desired.Balancer{
		Node: desired.BalancerNode{Name: name, Interface: "eth0", Instance: name, State: t.TempDir()},
		L2:   &desired.L2{Lease: 2 * time.Second},
	}
	var err error
	f.Speaker, err = New(cfg, presence, slog.New(slog.NewTextHandler(&f.log, nil)))
	testhost.Must(t, err)
	f.follow = func(ctx context.Context, name string, to chan<- link, _ *slog.Logger) {
		_ = ns.Do(func() error { return watchLink(ctx, name, to) })
	}
	f.open = func(l link, claims chan<- message, failures chan<- error) (r *responder, err error) {
		err = ns.Do(func() error { r, err = startResponder(l, claims, failures); return err })
		return r, err
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Speaker.Run(ctx, f.services) }()
	t.Cleanup(func() {
		cancel()
		testhost.Must(t, <-ended)
	})
	f.can(balancer.Ready)
	return f
}

// can sets what all services can do.
func (f *fixture) can(ability balancer.Ability) {
	f.services <- []balancer.ServiceState{
		{Service: &desired.Service{Name: "web", VIP: vip6}, Ability: ability},
		{Service: &desired.Service{Name: "web4", VIP: vip4}, Ability: ability},
	}
}

// await waits until the speaker answers for so many VIPs.
func (f *fixture) await(want int) {
	f.Helper()
	testhost.Eventually(f, func() error {
		state := f.State()
		got := 0
		for _, v := range state.VIPs {
			if v.Answers {
				got++
			}
		}
		if got != want {
			return fmt.Errorf("%s answers for %d VIPs, want %d: %+v", f.name, got, want, state)
		}
		return nil
	})
}

// awaitLog waits until the log has a text.
func (f *fixture) awaitLog(text string) {
	f.Helper()
	testhost.Eventually(f, func() error {
		if !strings.Contains(f.log.String(), text) {
			return fmt.Errorf("no %q in\n%s", text, &f.log)
		}
		return nil
	})
}

// TestVIPsMove: two balancers share two VIPs. One that cannot serve, that is drained, or whose link
// fails leaves its VIP to the other one. If the store does not answer, nothing moves.
func TestVIPsMove(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "eth0", nil)
	h := &hub{values: map[string]string{}, heard: map[string]func(map[string]string, error){}}
	one, two := start(t, a, "one", h.presence("one")), start(t, b, "two", h.presence("two"))
	one.await(1)
	two.await(1)
	one.can(balancer.Unable)
	one.await(0)
	two.await(2)
	one.can(balancer.Ready)
	one.await(1)
	testhost.Must(t, two.Drain(t.Context(), false))
	two.await(0)
	one.await(2)
	if since, err := two.drain.Since(); since == nil || err != nil {
		t.Errorf("the drain is not stored: %v", err)
	}
	testhost.Must(t, two.Undrain(t.Context()))
	two.await(1)
	one.await(1)

	h.fail("one")
	one.awaitLog("vips stay where they are")
	h.set("two", "") // one does not hear it
	two.await(1)
	h.set("one", present{ID: "of another process"}.text())
	one.awaitLog("node.name must be unique")
}

// TestStartWithoutStore: a balancer that starts while the store does not answer answers for all
// VIPs that it can serve, and for its share when the store answers.
func TestStartWithoutStore(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "eth0", nil)
	store := make(chan map[string]string)
	f := start(t, a, "one", func(
		ctx context.Context, _ int64, own <-chan string, heard func(map[string]string, error),
	) {
		heard(nil, errors.New("no answer"))
		value := ""
		for ctx.Err() == nil {
			select {
			case value = <-own:
			case others := <-store:
				others["one"] = value
				heard(others, nil)
			case <-ctx.Done():
			}
		}
	})
	f.await(2)
	f.awaitLog("this balancer answers for all vips")
	f.can(balancer.Unable)
	f.await(0)
	f.can(balancer.Ready)
	f.await(2)
	store <- map[string]string{"two": present{ID: "2", VIPs: []netip.Addr{vip4, vip6}}.text()}
	f.await(1)
}

// TestHostsFindTheBalancer: the kernel of another host finds both VIPs. When the host claims a VIP
// itself, the balancer announces the VIP again, once.
func TestHostsFindTheBalancer(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "eth0", testhost.Prefixes("203.0.113.99/24", "2001:db8:80::99/64"))
	stranger := listen(t, b)
	f := start(t, a, "one", nil)
	f.await(2)
	for _, vip := range []netip.Addr{vip4, vip6} {
		testhost.Eventually(t, func() error { return b.Do(func() error { return findsAt(vip, f.State().MAC) }) })
	}
	const claims = 3
	for range claims {
		testhost.Must(t, stranger.sendAll(announcements(otherMAC, vip4)[0]))
	}
	testhost.Eventually(t, func() error {
		if got := f.State().Claims; got != claims {
			return fmt.Errorf("%d claims", got)
		}
		return nil
	})
	if n := strings.Count(f.log.String(), "mac="+otherMAC.String()); n != 1 {
		t.Errorf("%d lines about claims in\n%s", n, &f.log)
	}
	if f.State().Answers < 2 {
		t.Errorf("%d answers", f.State().Answers)
	}
	// A new leader announces an IPv4 VIP five times by two frames. Then it only asks for other hosts.
	awaitAnnouncements(t, stranger, vip4, 2*announceTimes+2)
}

// listen opens a socket on the interface of a namespace.
func listen(t *testing.T, ns *testhost.Namespace) (s *socket) {
	t.Helper()
	testhost.Must(t, ns.Do(func() (err error) {
		s, err = openSocket(readLink("eth0").ifindex)
		return err
	}))
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// awaitAnnouncements reads until it has so many announcements of a VIP.
func awaitAnnouncements(t *testing.T, s *socket, vip netip.Addr, want int) {
	t.Helper()
	testhost.Must(t, s.SetReadDeadline(time.Now().Add(testhost.Patience)))
	for got := 0; got < want; {
		frame := make([]byte, longestMessage)
		n, err := s.Read(frame)
		if err != nil {
			t.Fatalf("%d announcements of %s, want %d: %v", got, vip, want, err)
		}
		if m, ok := read(frame[:n]); ok && m.claims == vip && bytes.Equal(frame[:6], broadcast) {
			got++
		}
	}
}

// findsAt makes the kernel of the calling thread's namespace look for a VIP. It returns an error
// unless the kernel has found a MAC address.
func findsAt(vip netip.Addr, mac string) error {
	conn, err := net.Dial("udp", netip.AddrPortFrom(vip, 9).String())
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{0}); err != nil {
		return err
	}
	all, err := netlink.NeighList(0, 0)
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.IP.Equal(vip.AsSlice()) && n.HardwareAddr.String() == mac {
			return nil
		}
	}
	return fmt.Errorf("the kernel has not found %s at %s: %v", vip, mac, all)
}

// TestAnnouncesToHostsOfNewcomers: when another balancer appears, VIPs are announced again, because
// hosts may have learned of it while it had no store. It does not matter that its VIPs change.
func TestAnnouncesToHostsOfNewcomers(t *testing.T) {
	t.Parallel()
	s, err := New(&desired.Balancer{Node: desired.BalancerNode{Name: "one"}, L2: &desired.L2{}}, nil, slog.Default())
	testhost.Must(t, err)
	vip := &vipState{}
	s.vips[vip6] = vip
	one, two := present{ID: "1"}.text(), present{ID: "2"}.text()
	for i, c := range []struct {
		values map[string]string
		want   int
	}{
		{map[string]string{"one": one}, 0},
		{map[string]string{"one": one, "two": two}, announceTimes},
		{map[string]string{"one": one, "two": present{ID: "2", VIPs: []netip.Addr{vip6}}.text()}, 0},
		{map[string]string{"one": one}, 0},
		{map[string]string{"one": one, "two": two}, announceTimes},
		{map[string]string{"one": one, "two": present{ID: "3"}.text()}, announceTimes},
	} {
		vip.left = 0
		s.takeBalancers(balancers{values: c.values})
		if vip.left != c.want {
			t.Errorf("step %d: %d announcements, want %d", i, vip.left, c.want)
		}
	}
}
