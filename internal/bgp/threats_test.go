// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestNoRoutesAreTaken: the balancer ignores the routes of a peer, even a route to its own VIP, and
// passes none of them on to another peer.
func TestNoRoutesAreTaken(t *testing.T) {
	f := newFixture(t)
	other := newRouterAt(t, "127.0.0.2")
	f.cfg.BGP.Peers = append(f.cfg.BGP.Peers, other.peer())
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	other.await(0, routesAre(vip6, vip4))

	const stranger = "198.51.100.0/24"
	f.router.send(0, update(t, stranger, vip4))
	f.awaitReceived(t, 2)
	f.requireTable(t, vip4)
	f.tell(balancer.Unable, balancer.Ready) // a route that was passed on would come before the withdrawal
	s := other.await(0, routesAre(vip6))
	requireNextHop(t, s, vip6, "2001:db8::2")
	f.requireTable(t)
	if !f.state().Peers[0].IsEstablished() || f.router.session(1) != nil {
		t.Error("the session with the peer has ended")
	}
}

// update is a message with routes of the router.
func update(t testing.TB, prefixes ...string) *bgp.BGPMessage {
	t.Helper()
	var routes []bgp.PathNLRI
	for _, prefix := range prefixes {
		route, err := bgp.NewIPAddrPrefix(netip.MustParsePrefix(prefix))
		testhost.Must(t, err)
		routes = append(routes, bgp.PathNLRI{NLRI: route})
	}
	hop, err := bgp.NewPathAttributeNextHop(netip.MustParseAddr("127.0.0.1"))
	testhost.Must(t, err)
	return bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
			bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{routerASN}),
		}),
		hop,
	}, routes)
}

// awaitReceived waits until the library has read a number of routes of the fixture's router.
func (f *fixture) awaitReceived(t *testing.T, want uint64) {
	t.Helper()
	awaitThat(t, func() error {
		received := uint64(0)
		err := f.announcer.speaker.server.ListPeer(t.Context(), &api.ListPeerRequest{
			Address: f.router.addr().Addr().String(),
		}, func(p *api.Peer) {
			for _, family := range p.GetAfiSafis() {
				received += family.GetState().GetReceived()
			}
		})
		if received != want {
			return fmt.Errorf("the library has read %d routes, want %d: %w", received, want, err)
		}
		return nil
	})
}

// requireTable fails the test unless the speaker has exactly the IPv4 routes, all of them its own.
func (f *fixture) requireTable(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	err := f.announcer.speaker.server.ListPath(apiutil.ListPathRequest{
		TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: bgp.RF_IPv4_UC,
	}, func(prefix bgp.NLRI, paths []*apiutil.Path) {
		got = append(got, prefix.String())
		if len(paths) != 1 {
			t.Errorf("%s has %d paths", prefix, len(paths))
		}
	})
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("error %v, table %v, want %v", err, got, want)
	}
}

// awaitThat waits until a condition holds. Its error tells what is missing.
func awaitThat(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %v", patience, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestNoPortIsOpen: without the field listen, the balancer takes no connections.
func TestNoPortIsOpen(t *testing.T) {
	f := newFixture(t)
	before := listeners(t)
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	if now := listeners(t); !slices.Equal(now, before) {
		t.Errorf("sockets listen at %v, and before at %v", now, before)
	}
}

// listeners returns the local addresses, in the form of the kernel, at which this process listens.
func listeners(t *testing.T) (addresses []string) {
	t.Helper()
	own := map[string]bool{}
	files, err := os.ReadDir("/proc/self/fd")
	testhost.Must(t, err)
	for _, file := range files {
		link, _ := os.Readlink("/proc/self/fd/" + file.Name()) // may be closed meanwhile
		if inode, ok := strings.CutPrefix(link, "socket:["); ok {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile("/proc/self/net/" + table)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		testhost.Must(t, err)
		for line := range strings.Lines(string(text)) {
			const listens, address, state, inode = "0A", 1, 3, 9
			if fields := strings.Fields(line); fields[state] == listens && own[fields[inode]] {
				addresses = append(addresses, fields[address])
			}
		}
	}
	slices.Sort(addresses)
	return addresses
}

// TestStrangers: with the field listen, a host that is not a peer gets no message at all.
func TestStrangers(t *testing.T) {
	f := newFixture(t)
	free, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	testhost.Must(t, err)
	at := free.Addr().(*net.TCPAddr)
	_ = free.Close()
	f.cfg.BGP.Listen = uint16(at.Port)
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	stranger := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}
	conn, err := net.DialTCP("tcp", stranger, at)
	testhost.Must(t, err)
	defer conn.Close()
	testhost.Must(t, conn.SetReadDeadline(time.Now().Add(patience)))
	got, err := io.ReadAll(conn)
	if len(got) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error %v, and %x; want a closed connection", err, got)
	}
}

// TestPasswordIsRequired: segments without the right signature make no session.
func TestPasswordIsRequired(t *testing.T) {
	f := newFixture(t)
	f.router.control(func(fd int) error {
		sig := &unix.TCPMD5Sig{Keylen: uint16(len(secret))}
		copy(sig.Key[:], secret)
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], net.IPv4(127, 0, 0, 1).To4()) // after the port
		return unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, sig)
	})
	for _, test := range []struct{ password, counter string }{
		{"", "TCPMD5NotFound"},
		{"wrong", "TCPMD5Failure"},
		{secret, ""},
	} {
		before := counted(t, test.counter)
		f.cfg.BGP = f.with(func(b *desired.BGP) {
			if test.password != "" {
				b.Peers[0].PasswordFile = writePassword(t, test.password)
			}
		})
		f.start(false, balancer.Ready, balancer.Ready)
		if test.counter == "" {
			f.router.await(0, routesAre(vip6, vip4))
			continue
		}
		awaitThat(t, func() error {
			if counted(t, test.counter) == before {
				return fmt.Errorf("no segment was counted as %s", test.counter)
			}
			return nil
		})
		f.stop()
		if f.router.session(0) != nil {
			t.Errorf("password %q: there is a session", test.password)
		}
	}
}

const secret = "secret"

func writePassword(t *testing.T, password string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "password")
	testhost.Must(t, os.WriteFile(file, []byte(password+"\n"), 0o600))
	return file
}

// TestTTLSecurity: with ttl-security, packets of a router that may have come through another router
// make no session (RFC 5082).
func TestTTLSecurity(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.Peers[0].TTLSecurity = true
	const counter = "TCPMinTTLDrop"
	before := counted(t, counter)
	f.start(false, balancer.Ready, balancer.Ready)
	awaitThat(t, func() error {
		if counted(t, counter) == before {
			return errors.New("no packet was dropped for its TTL")
		}
		return nil
	})
	if s := f.router.session(0); s != nil {
		t.Error("packets with a TTL of 64 make a session")
	}
	f.router.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 255) })
	f.router.await(0, routesAre(vip6, vip4))
}

// control sets an option of the socket at which the router listens, and of those that it accepts.
func (r *router) control(set func(fd int) error) {
	r.t.Helper()
	conn, err := r.listener.SyscallConn()
	if err == nil {
		failed := conn.Control(func(fd uintptr) { err = set(int(fd)) })
		err = errors.Join(err, failed)
	}
	testhost.Must(r.t, err)
}

// counted returns a counter of the kernel's TCP.
func counted(t *testing.T, name string) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/net/netstat")
	testhost.Must(t, err)
	lines := bytes.Split(text, []byte("\n"))
	names, values := strings.Fields(string(lines[0])), strings.Fields(string(lines[1]))
	i := slices.Index(names, name)
	if i < 0 {
		return 0
	}
	value, err := strconv.Atoi(values[i])
	testhost.Must(t, err)
	return value
}
