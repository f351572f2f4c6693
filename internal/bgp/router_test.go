// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/segue-lb/segue/internal/testhost"
)

// patience is the limit for everything that should happen soon.
const patience = 30 * time.Second

const (
	balancerASN = 64600
	routerASN   = 64512
)

// router is a peer that takes sessions on a loopback address, and records the messages.
type router struct {
	t        *testing.T
	listener *net.TCPListener
	supports bool // graceful restarts
	extended bool // IPv6 next hops of IPv4 routes

	mu       sync.Mutex
	mute     int // the number of first sessions that get no answer
	sessions []*received
}

// received has what the router has received in a session.
type received struct {
	conn     net.Conn
	open     *bgp.BGPOpen
	routes   map[netip.Prefix][]bgp.PathAttributeInterface
	ends     map[bgp.Family]int // End-of-RIB markers, with the number of routes before
	notified *bgp.BGPNotification
	closed   bool
}

func newRouter(t *testing.T) *router { return newRouterAt(t, "127.0.0.1") }

func newRouterAt(t *testing.T, address string) *router {
	t.Helper()
	config := net.ListenConfig{}
	config.SetMultipathTCP(false) // it has no MD5
	listener, err := config.Listen(t.Context(), "tcp", net.JoinHostPort(address, "0"))
	testhost.Must(t, err)
	r := &router{t: t, listener: listener.(*net.TCPListener), supports: true}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			r.serve(conn)
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		r.cut()
		group.Wait()
	})
	return r
}

// addr is the address at which the router listens.
func (r *router) addr() netip.AddrPort { return r.listener.Addr().(*net.TCPAddr).AddrPort() }

// serve takes part in a session until it ends.
func (r *router) serve(conn net.Conn) {
	s := &received{
		conn: conn, routes: map[netip.Prefix][]bgp.PathAttributeInterface{}, ends: map[bgp.Family]int{},
	}
	r.mu.Lock()
	r.sessions = append(r.sessions, s)
	isMute := len(r.sessions) <= r.mute
	r.mu.Unlock()
	defer func() {
		_ = conn.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		s.closed = true
	}()
	for {
		message, err := readMessage(conn)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				r.t.Logf("router: %v", err)
			}
			return
		}
		r.mu.Lock()
		answers := r.take(s, message)
		r.mu.Unlock()
		if isMute {
			continue
		}
		for _, answer := range answers {
			text, err := answer.Serialize()
			if err == nil {
				_, err = conn.Write(text)
			}
			if err != nil {
				r.t.Logf("router: %v", err)
			}
		}
	}
}

func readMessage(conn net.Conn) (*bgp.BGPMessage, error) {
	header := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(conn, header); err != nil {
		return nil, err
	}
	content := make([]byte, int(binary.BigEndian.Uint16(header[16:18]))-len(header))
	if _, err := io.ReadFull(conn, content); err != nil {
		return nil, err
	}
	return bgp.ParseBGPMessage(append(header, content...))
}

// take records a message, and returns the answers.
func (r *router) take(s *received, message *bgp.BGPMessage) (answers []*bgp.BGPMessage) {
	switch body := message.Body.(type) {
	case *bgp.BGPOpen:
		s.open = body
		return []*bgp.BGPMessage{openMessage(r.t, r.supports, r.extended), bgp.NewBGPKeepAliveMessage()}
	case *bgp.BGPKeepAlive:
		return []*bgp.BGPMessage{bgp.NewBGPKeepAliveMessage()}
	case *bgp.BGPNotification:
		s.notified = body
	case *bgp.BGPUpdate:
		s.update(body)
	}
	return nil
}

// openMessage is the OPEN of a router that supports graceful restarts and IPv6 next hops of IPv4
// routes, or does not.
func openMessage(t testing.TB, supports, extended bool) *bgp.BGPMessage {
	t.Helper()
	capabilities := []bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
		bgp.NewCapFourOctetASNumber(routerASN),
	}
	if supports { // and never sends End-of-RIB, so that a restarted balancer has to give up waiting
		capabilities = append(capabilities, bgp.NewCapGracefulRestart(false, false, 60,
			[]*bgp.CapGracefulRestartTuple{
				bgp.NewCapGracefulRestartTuple(bgp.RF_IPv4_UC, false),
				bgp.NewCapGracefulRestartTuple(bgp.RF_IPv6_UC, false),
			}))
	}
	if extended {
		capabilities = append(capabilities, bgp.NewCapExtendedNexthop([]*bgp.CapExtendedNexthopTuple{
			bgp.NewCapExtendedNexthopTuple(bgp.RF_IPv4_UC, bgp.AFI_IP6),
		}))
	}
	open, err := bgp.NewBGPOpenMessage(routerASN, 90, netip.MustParseAddr("192.0.2.1"),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(capabilities)})
	if err != nil {
		t.Error(err)
	}
	return open
}

func (s *received) update(u *bgp.BGPUpdate) {
	if isEnd, family := u.IsEndOfRib(); isEnd {
		s.ends[family] = len(s.routes)
		return
	}
	for _, route := range u.NLRI {
		s.routes[route.NLRI.(*bgp.IPAddrPrefix).Prefix] = u.PathAttributes
	}
	for _, route := range u.WithdrawnRoutes {
		delete(s.routes, route.NLRI.(*bgp.IPAddrPrefix).Prefix)
	}
	for _, attribute := range u.PathAttributes {
		switch a := attribute.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			for _, route := range a.Value {
				s.routes[route.NLRI.(*bgp.IPAddrPrefix).Prefix] = u.PathAttributes
			}
		case *bgp.PathAttributeMpUnreachNLRI:
			for _, route := range a.Value {
				delete(s.routes, route.NLRI.(*bgp.IPAddrPrefix).Prefix)
			}
		}
	}
}

// send sends a message in the session with a number.
func (r *router) send(number int, message *bgp.BGPMessage) {
	r.t.Helper()
	text, err := message.Serialize()
	if err == nil {
		_, err = r.session(number).conn.Write(text)
	}
	testhost.Must(r.t, err)
}

// cut closes all connections.
func (r *router) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sessions {
		_ = s.conn.Close()
	}
}

// session returns the session with a number, counted from 0, if there was one.
func (r *router) session(number int) *received {
	r.mu.Lock()
	defer r.mu.Unlock()
	if number >= len(r.sessions) {
		return nil
	}
	s := *r.sessions[number]
	s.routes, s.ends = maps.Clone(s.routes), maps.Clone(s.ends)
	return &s
}

// await waits until the session with a number fulfils a condition. The error of the condition tells
// what is missing.
func (r *router) await(number int, condition func(*received) error) *received {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		s, err := r.session(number), fmt.Errorf("there was no session %d", number)
		if s != nil {
			err = condition(s)
		}
		if err == nil {
			return s
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("after %v: %v", patience, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// routesAre is a condition: the router has exactly these routes, after End-of-RIB of both families.
func routesAre(prefixes ...string) func(*received) error {
	return func(s *received) error {
		var got []string
		for prefix := range s.routes {
			got = append(got, prefix.String())
		}
		slices.Sort(got)
		if !slices.Equal(got, prefixes) || len(s.ends) != 2 {
			return fmt.Errorf("routes %v, End-of-RIB %v; want %v", got, s.ends, prefixes)
		}
		return nil
	}
}

func isClosed(s *received) error {
	if !s.closed {
		return errors.New("the session has not ended")
	}
	return nil
}

// requireCease fails the test unless the session has ended by a notification that makes a peer remove
// the routes.
func (s *received) requireCease(t *testing.T) {
	t.Helper()
	if s.notified == nil || s.notified.ErrorCode != bgp.BGP_ERROR_CEASE {
		t.Errorf("notification %+v, want a Cease", s.notified)
	}
}

// restart returns the capability of RFC 4724 in a session's OPEN; nil: there is none.
func (s *received) restart() *bgp.CapGracefulRestart {
	for _, parameter := range s.open.OptParams {
		p, ok := parameter.(*bgp.OptionParameterCapability)
		if !ok {
			continue
		}
		for _, c := range p.Capability {
			if restart, ok := c.(*bgp.CapGracefulRestart); ok {
				return restart
			}
		}
	}
	return nil
}

// requireRestart fails the test unless the OPEN has the bits R, and F of both families, or none.
func (s *received) requireRestart(t *testing.T, preserved bool) {
	t.Helper()
	const restartState, notification, forwarding = 0x8, 0x4, 0x80
	c := s.restart()
	if c == nil {
		t.Fatal("the balancer does not support graceful restarts")
	}
	if got := c.Flags&restartState != 0; got != preserved {
		t.Errorf("bit R %t, want %t", got, preserved)
	}
	if c.Flags&notification != 0 {
		t.Error("bit N is set: peers would keep the routes of a dead host for the restart time")
	}
	if c.Time != 77 || len(c.Tuples) != 2 {
		t.Errorf("restart time %d s, %d families; want 77 s and 2", c.Time, len(c.Tuples))
	}
	for _, tuple := range c.Tuples {
		if got := tuple.Flags&forwarding != 0; got != preserved {
			t.Errorf("family %d: bit F %t, want %t", tuple.AFI, got, preserved)
		}
	}
}
