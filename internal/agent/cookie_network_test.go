// SPDX-License-Identifier: Apache-2.0

package agent

//go:generate go tool bpf2go -target bpfel storages ../../bpf/test/storages.bpf.c -- -I../../bpf

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// cookieCases are the cases of TestCookies. The last two change links.
var cookieCases = []cookieCase{
	{"all packets", testCookies, false},
	{"end of sockets", testCookiesEndWithSockets, true},
	{"flood", testCookiesInAFlood, false},
	{"SYN cookies", testSYNCookies, false},
	{"window with SYN cookie", testWindowWithSYNCookie, true},
	{"repeated SYN-ACK", testCookieInRepeatedSYNACK, true},
	{"TIME_WAIT", testCookieInTimeWait, true},
	{"reset", testCookieInReset, true},
	{"keep-alive", testCookieInKeepAlive, true},
	{"Fast Open", testCookieWithFastOpen, true},
	{"echoes an hour off", testEchoesAnHourOff, true},
	{"segments", testCookieInSegments, true},
	{"GRO", testCookiesWithGRO, true},
	{"packets without a cookie", testPacketsWithoutCookie, true},
	{"half-open, packets without a cookie", testHalfOpenPacketsWithoutCookie, true},
}

func TestCookies(t *testing.T) {
	t.Parallel()
	for i, v := range variants() {
		cases := slices.DeleteFunc(slices.Clone(cookieCases), func(c cookieCase) bool {
			return c.perFamily && i < firstPerFamily
		})
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			runCookieCases(t, v, cases)
		})
	}
}

// TestCookiesOnLinks compares connections with a cookie and without. It is not parallel, because it
// measures.
func TestCookiesOnLinks(t *testing.T) {
	for _, v := range variants()[firstPerFamily:] {
		t.Run(v.String(), func(t *testing.T) {
			runCookieCases(t, v, []cookieCase{
				{"round trip", testRoundTripWithCookie, true}, {"losses", testLossesWithCookie, true},
			})
		})
	}
}

// testCookies makes connections through a balancer without state. Each packet of the server, from
// the SYN-ACK to the FIN, carries the server's column.
func testCookies(t *testing.T, n *cookieNetwork) {
	for i := range 8 { // the clock has several values
		client, server := n.connect()
		port := portOf(client)
		n.transfer(client, server, 100_000)
		n.transfer(server, client, 100_000)
		n.end(client, server)
		n.await("the server's FIN", func() bool { return len(n.sentTo(port, packet.FIN)) > 0 })
		// The first SYN waits until the network has found its neighbours.
		if got := len(n.sentTo(port, packet.SYN|packet.ACK)); got != 1 && i > 0 {
			t.Errorf("%d SYN-ACKs, want 1", got)
		}
	}
	if big := n.wire.of(func(s sentSegment) bool { return s.from == n.vip.Addr() && s.size > 1500 }); len(big) == 0 {
		t.Error("no packet of the server is to be segmented by the interface")
	}
}

// A flood of SYNs evicts the flow table before each packet of the client but the SYN. Sockets keep
// the cookies.
func testCookiesInAFlood(t *testing.T, n *cookieNetwork) {
	n.onPacket(func(s sentSegment) bool {
		if s.flags&packet.SYN == 0 {
			n.evict()
		}
		return true
	})
	for range 4 {
		client, server := n.connect()
		n.evict()
		n.transfer(server, client, 1000) // the server speaks first
		n.transfer(client, server, 20_000)
		n.end(server, client)
	}
}

// The server repeats its SYN-ACK, because the client's ACKs are lost.
func testCookieInRepeatedSYNACK(t *testing.T, n *cookieNetwork) {
	client, server := n.connect()
	n.end(client, server) // the network has found its neighbours
	n.onPacket(func(s sentSegment) bool {
		return s.flags&packet.SYN != 0 || len(n.sentTo(s.source, packet.SYN|packet.ACK)) > 1
	})
	client, server = n.connect()
	n.transfer(client, server, 1000)
	if got := len(n.sentTo(portOf(client), packet.SYN|packet.ACK)); got < 2 {
		t.Errorf("%d SYN-ACKs, want more", got)
	}
}

// In TIME_WAIT the server answers a repeated FIN. The cookie is then in the flow table, from the
// end of the connection on.
func testCookieInTimeWait(t *testing.T, n *cookieNetwork) {
	client, server := n.connect()
	port := portOf(client)
	var fin []byte
	n.onPacket(func(s sentSegment) bool {
		n.evict()
		if s.flags&packet.FIN != 0 {
			fin = s.frame
		}
		return true
	})
	n.end(server, client)
	n.await("the ACK of the client's FIN", func() bool { return len(n.sentTo(port, packet.ACK)) > 2 })
	n.await("TIME_WAIT", func() bool { return n.stateOf(port) == "time-wait" })
	n.onPacket(nil)
	before := len(n.sentTo(port, packet.ACK))
	n.repeat(fin)
	n.await("an ACK in TIME_WAIT", func() bool { return len(n.sentTo(port, packet.ACK)) > before })
}

// With SYN cookies the server has no socket for a half-open connection. The low bits of the
// timestamp in its SYN-ACK hold what the client has offered, and the column displaces some of them.
// The connection has all that the client has offered nevertheless.
func testSYNCookies(t *testing.T, n *cookieNetwork) {
	received, failed := n.netstat("SyncookiesRecv"), n.netstat("SyncookiesFailed")
	n.set(n.servers[1], "tcp_syncookies", "2")
	n.set(n.servers[1], "tcp_ecn", "1")
	n.onPacket(func(s sentSegment) bool {
		if s.flags&packet.SYN == 0 {
			n.evict()
		}
		return true
	})
	for i := range 12 {
		// The window scale depends on the largest buffer.
		n.set(n.client, "tcp_rmem", fmt.Sprintf("4096 131072 %d", 65536<<(i%12)))
		n.set(n.client, "tcp_ecn", fmt.Sprint(i/2%2))
		n.set(n.client, "tcp_sack", fmt.Sprint(i/3%2))
		client, server := n.connect()
		asked, got := tcpInfo(t, client), tcpInfo(t, server)
		_, want := scales(&asked)
		if scale, _ := scales(&got); scale != want || got.Options != asked.Options {
			t.Errorf("the server has window scale %d and options %#x, want %d and %#x", scale, got.Options, want, asked.Options)
		}
		if asked.Options&hasTimestamps == 0 {
			t.Errorf("the options are %#x, without timestamps", asked.Options)
		}
		n.transfer(server, client, 1000)
		n.transfer(client, server, 20_000)
		n.end(client, server)
	}
	received, failed = n.netstat("SyncookiesRecv")-received, n.netstat("SyncookiesFailed")-failed
	if received < 12 || failed != 0 {
		t.Errorf("%d SYN cookies were received, and %d failed; want 12 and 0", received, failed)
	}
}

// A window of more than 64 KB is used, though its scale was in displaced bits.
func testWindowWithSYNCookie(t *testing.T, n *cookieNetwork) {
	n.set(n.servers[1], "tcp_syncookies", "2")
	n.set(n.client, "tcp_rmem", "4096 4194304 4194304")
	client, server := n.connect()
	const size = 500_000
	written := make(chan error, 1)
	go func() {
		_, err := server.Write(make([]byte, size))
		written <- err
	}()
	// The client's application reads nothing, so all of it is in the window.
	n.await("acknowledgements of what nobody reads", func() bool { return tcpInfo(t, server).Bytes_acked > 200_000 })
	_, err := io.ReadFull(client, make([]byte, size))
	testhost.Must(t, errors.Join(err, <-written))
}

// An application resets a connection. The reset has timestamps, as all packets of sockets.
func testCookieInReset(t *testing.T, n *cookieNetwork) {
	client, server := n.connect()
	n.transfer(client, server, 1000)
	n.evict()
	testhost.Must(t, errors.Join(server.SetLinger(0), server.Close()))
	n.await("a reset", func() bool { return len(n.sentTo(portOf(client), packet.RST)) > 0 })
}

// The server asks whether a silent client is still there.
func testCookieInKeepAlive(t *testing.T, n *cookieNetwork) {
	client, server := n.connect()
	n.transfer(client, server, 1000)
	n.evict()
	before := len(n.sentTo(portOf(client), packet.ACK))
	err := server.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second})
	testhost.Must(t, err)
	n.await("two keep-alives", func() bool { return len(n.sentTo(portOf(client), packet.ACK)) >= before+2 })
	n.transfer(server, client, 1000)
}

// With TCP Fast Open (RFC 7413), the server has a connection and sends data as soon as it has got
// the SYN.
func testCookieWithFastOpen(t *testing.T, n *cookieNetwork) {
	const clientWithoutCookie, serverWithoutCookie = "5", "514" // of Fast Open
	n.set(n.client, "tcp_fastopen", clientWithoutCookie)
	n.set(n.servers[1], "tcp_fastopen", serverWithoutCookie)
	n.setOption(n.listener.(*net.TCPListener), unix.TCP_FASTOPEN, 16)
	carried := 0
	n.onPacket(func(s sentSegment) bool {
		if s.flags&packet.SYN != 0 {
			carried += s.size
		} else {
			n.evict()
		}
		return true
	})
	for range 4 {
		client := n.fastOpen([]byte("request"))
		server := <-n.accepted
		t.Cleanup(func() { _ = server.Close() })
		if _, err := io.ReadFull(server, make([]byte, len("request"))); err != nil {
			t.Fatal(err)
		}
		n.transfer(server, client, 50_000)
		n.transfer(client, server, 50_000)
		n.end(server, client)
	}
	if want := 4 * len("request"); carried != want {
		t.Errorf("the SYNs carry %d bytes, want %d", carried, want)
	}
}

// A cookie ends with its socket, however the connection ends.
func testCookiesEndWithSockets(t *testing.T, n *cookieNetwork) {
	count := n.countCookies()
	var open []*net.TCPConn
	for i := range 40 {
		client, server := n.connect()
		switch i % 4 {
		case 0:
			n.end(client, server)
		case 1:
			n.end(server, client) // and TIME_WAIT
		case 2:
			testhost.Must(t, errors.Join(server.SetLinger(0), server.Close()))
		default:
			open = append(open, server)
		}
	}
	requireCount := func(want int) {
		testhost.Eventually(t, func() error {
			if got := count(); got != want {
				return fmt.Errorf("%d sockets have a cookie, want %d", got, want)
			}
			return nil
		})
	}
	requireCount(len(open))
	for _, server := range open {
		testhost.Must(t, errors.Join(server.SetLinger(0), server.Close()))
	}
	requireCount(0)
}

// The interface segments what the stack sends: each segment has the cookie and a valid checksum.
func testCookieInSegments(t *testing.T, n *cookieNetwork) {
	// The router's end segments and completes checksums, instead of the client.
	n.setOffloads(n.router, "client", false, slices.Concat(netdev.TSO, []string{netdev.GSO, netdev.Checksum})...)
	segments := n.watch(n.client, "eth0")
	const size = 3_000_000
	client, server := n.connect()
	n.transfer(server, client, size)
	fromServer := func(s sentSegment) bool { return s.from == n.vip.Addr() && s.size > 0 }
	mask := uint32(1)<<n.width - 1
	var all []sentSegment
	n.await("the last segment", func() bool {
		bytes := 0
		all = segments.of(fromServer)
		for _, s := range all {
			bytes += s.size
		}
		return bytes >= size
	})
	for _, s := range all {
		if s.size > 1500 || !s.Found || s.Value&mask != uint32(n.column) {
			t.Errorf("a segment of %d bytes has the timestamps %+v, want column %d", s.size, s.stamps, n.column)
		}
		if !s.hasValidChecksum() {
			t.Errorf("the checksum of a segment of %d bytes is wrong", s.size)
		}
	}
	if whole := len(n.wire.of(fromServer)); whole > len(all)/4 {
		t.Errorf("the client got %d segments, which the server sent as %d packets", len(all), whole)
	}
}

// In the client's name, anybody sends packets without timestamps. A balancer with hints sends them
// by recover-stickiness, or by the hint of another flow. The server's packets carry the cookie as
// before. One of them is a signal, because some balancer may not know the flow.
func testPacketsWithoutCookie(t *testing.T, n *cookieNetwork) {
	for _, c := range []struct {
		function uint16
		flags    packet.TCPFlags
		signal   string
	}{
		{recoverStickiness, packet.ACK, "create"},
		{recoverStickiness, packet.RST, "remove"},
		{steer, packet.ACK, "remove"},
	} {
		client, server := n.connect()
		n.transfer(client, server, 1000)
		n.forge(n.packetOf(portOf(client)), c.function, c.flags)
		n.await("the forged packet", func() bool {
			return len(n.stack.of(func(s sentSegment) bool { return s.source == portOf(client) && !s.Found })) > 0
		})
		for range 20 {
			n.transfer(server, client, 10) // a signal fits
		}
		n.transfer(server, client, 100_000)
		n.transfer(client, server, 100_000)
		n.end(server, client)
		n.signals[c.signal]++
		n.await("a signal: "+c.signal, func() bool {
			sent, err := n.sentSignals()
			return err == nil && sent[c.signal] >= uint64(n.signals[c.signal])
		})
	}
}

// testHalfOpenPacketsWithoutCookie does the same as testPacketsWithoutCookie, while the connection
// is half-open and has no socket to keep the cookie. The server repeats its SYN-ACK with the
// cookie.
func testHalfOpenPacketsWithoutCookie(t *testing.T, n *cookieNetwork) {
	client, server := n.connect()
	first := portOf(client)
	n.end(client, server) // the network has found its neighbours
	n.onPacket(func(s sentSegment) bool {
		if s.source == first || s.flags&packet.SYN != 0 || len(n.sentTo(s.source, packet.SYN|packet.ACK)) > 1 {
			return true
		}
		n.forge(s, recoverStickiness, packet.PSH)
		n.forge(s, steer, packet.PSH)
		n.forge(s, connectAvail, packet.SYN)
		return false
	})
	client, server = n.connect()
	n.transfer(client, server, 1000)
	if got := len(n.sentTo(portOf(client), packet.SYN|packet.ACK)); got < 2 {
		t.Errorf("%d SYN-ACKs, want more", got)
	}
}

// The server's stack merges segments behind XDP (GRO), after their echoes were restored.
func testCookiesWithGRO(t *testing.T, n *cookieNetwork) {
	n.mergeFor(n.servers[1], "eth0", 100*time.Microsecond)
	client, server := n.connect()
	n.transfer(client, server, 3_000_000)
	if len(n.stack.of(func(s sentSegment) bool { return s.from != n.vip.Addr() && s.size > 1500 })) == 0 {
		t.Error("no packets of the client were merged")
	}
}

// The round trip that the server measures does not depend on the cookie. A busy machine only makes
// round trips longer, so the shortest ones of several connections are compared.
func testRoundTripWithCookie(t *testing.T, n *cookieNetwork) {
	measure := func(use bool) (rtt, received time.Duration) {
		n.useCookies(use)
		client, server := n.connect()
		for range 200 {
			n.transfer(client, server, 100)
			n.transfer(server, client, 100)
		}
		n.transfer(client, server, 1_000_000) // the receiver measures, too
		info := tcpInfo(t, server)
		return time.Duration(info.Rtt) * time.Microsecond, time.Duration(info.Rcv_rtt) * time.Microsecond
	}
	measure(true) // the network finds its neighbours
	rtt, received := map[bool]time.Duration{}, map[bool]time.Duration{}
	for i := range 3 {
		for _, use := range []bool{false, true} {
			a, b := measure(use)
			t.Logf("with cookie: %t, round trip: %v, as receiver: %v", use, a, b)
			if i == 0 {
				rtt[use], received[use] = a, b
			}
			rtt[use], received[use] = min(rtt[use], a), min(received[use], b)
		}
	}
	const most = 5 * time.Millisecond
	if (rtt[true]-rtt[false]).Abs() > most || (received[true]-received[false]).Abs() > most {
		t.Errorf("round trip: %v with cookie, %v without; as receiver: %v, %v",
			rtt[true], rtt[false], received[true], received[false])
	}
}

// On a link that drops packets, the server undoes no more of what it does for losses than without
// cookies. Timestamps are one of the signs that a packet was repeated in vain (RFC 3522).
func testLossesWithCookie(t *testing.T, n *cookieNetwork) {
	const bytesPerSecond, burst, queue = 25_000_000, 20_000, 60_000
	n.limitRate(n.router, "client", bytesPerSecond, burst, queue)
	undone := map[bool]int{}
	for range 3 {
		for _, use := range []bool{false, true} {
			n.useCookies(use)
			before := n.netstat(undoCounters...)
			client, server := n.connect()
			n.transfer(server, client, 10_000_000)
			if info := tcpInfo(t, server); info.Total_retrans == 0 {
				t.Error("no packet was lost")
			}
			n.end(server, client)
			undone[use] += n.netstat(undoCounters...) - before
		}
	}
	t.Logf("%d times undone with cookies, %d without", undone[true], undone[false])
	if undone[true] > undone[false]+5 {
		t.Errorf("%d times undone with cookies, %d without", undone[true], undone[false])
	}
}

// undoCounters count what senders undo because they have repeated packets in vain.
var undoCounters = []string{
	"TCPFullUndo", "TCPPartialUndo", "TCPDSACKUndo", "TCPLossUndo", "TCPSpuriousRTOs", "TCPTSReorder",
	"TCPSpuriousRtxHostQueues",
}

// A bad echo, an hour early or late, has the same result with a cookie as without. A client's ACK
// that completes the handshake is rejected, by kernels that do so, and data arrive.
func testEchoesAnHourOff(t *testing.T, n *cookieNetwork) {
	rejected := map[bool]int{}
	for _, use := range []bool{false, true} {
		for _, hour := range []int32{-3600_000, 3600_000} {
			n.useCookies(use)
			before := n.netstat("TSEcrRejected")
			n.handshakeWithEcho(hour)
			n.dataWithEcho(hour)
			rejected[use] += n.netstat("TSEcrRejected") - before
		}
	}
	// The stacks of a slow machine repeat packets, which are rejected again.
	if (rejected[true] > 0) != (rejected[false] > 0) {
		t.Errorf("%d echoes are rejected with cookies, and %d without", rejected[true], rejected[false])
	}
	n.rejected += rejected[true] + rejected[false]
	t.Logf("%d echoes are rejected", rejected[true]+rejected[false])
}

// handshakeWithEcho makes a connection whose first ACK comes with another echo before.
func (n *cookieNetwork) handshakeWithEcho(off int32) {
	n.t.Helper()
	acks := n.holdBack(func(s sentSegment) bool { return s.flags&packet.SYN == 0 })
	client := n.dial(n.vip.Addr())
	n.repeat((<-acks).withEchoOff(off))
	n.onPacket(nil)
	if _, err := client.Write([]byte("hello")); err != nil {
		n.t.Fatal(err)
	}
	server := <-n.accepted
	n.t.Cleanup(func() { _ = server.Close() })
	if _, err := io.ReadFull(server, make([]byte, len("hello"))); err != nil {
		n.t.Fatal(err)
	}
}

// dataWithEcho makes a connection in which data come with another echo.
func (n *cookieNetwork) dataWithEcho(off int32) {
	n.t.Helper()
	client, server := n.connect()
	n.transfer(client, server, 1000)
	data := n.holdBack(func(s sentSegment) bool { return s.size > 0 })
	if _, err := client.Write([]byte("hello")); err != nil {
		n.t.Fatal(err)
	}
	n.repeat((<-data).withEchoOff(off))
	if _, err := io.ReadFull(server, make([]byte, len("hello"))); err != nil {
		n.t.Fatal(err)
	}
	n.onPacket(nil)
	n.transfer(server, client, 1000)
	n.transfer(client, server, 1000)
}

// Without timestamps there is no cookie. Packets are delivered as they are.
func TestNoTimestamps(t *testing.T) {
	t.Parallel()
	for name, at := range withoutTimestamps() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newCookieNetwork(t, variant{kind: desired.SRv6Encap, vip: vip4, width: 2, columns: []int{0, 2}})
			n.hasNoTimestamps = true
			n.set(at(n)[1], "tcp_timestamps", "0")
			client, server := n.connect()
			n.transfer(client, server, 100_000)
			n.transfer(server, client, 100_000)
			n.end(client, server)
		})
	}
}

// withoutTimestamps returns the namespaces without timestamps, for server 1 and server 2.
func withoutTimestamps() map[string]func(*cookieNetwork) [2]*testhost.Namespace {
	return map[string]func(*cookieNetwork) [2]*testhost.Namespace{
		"client": func(n *cookieNetwork) [2]*testhost.Namespace { return [2]*testhost.Namespace{n.client, n.client} },
		"server": func(n *cookieNetwork) [2]*testhost.Namespace { return [2]*testhost.Namespace(n.servers) },
	}
}

// Server 1 accepts all connections. But it has no timestamps to tell its column, so it takes only
// those of column 0.
func TestOffersWithoutTimestamps(t *testing.T) {
	t.Parallel()
	for name, at := range withoutTimestamps() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newCookieNetwork(t, variant{
				kind: desired.SRv6Insert, vip: vip6, width: 1, columns: []int{1, 0}, first: desired.AcceptAlways,
			})
			n.hasNoTimestamps = name == "client"
			n.serve(1, n.vip.Addr())
			n.set(at(n)[0], "tcp_timestamps", "0")
			first := n.agents[0]
			if err := first.Reload(t.Context(), first.cfg, desired.Secrets{}); err != nil { // it reads the setting at once
				t.Fatal(err)
			}
			n.await("the agent's notice", func() bool {
				var off uint32
				testhost.Must(t, first.kernel.objects.TimestampsAreOff.Get(&off))
				return (off == 1) == (name == "server")
			})
			n.connect() // to server 2
			n.setColumns(0, 1)
			n.echo(n.dial(n.vip.Addr()), 1000) // by server 1
		})
	}
}

// A new process of the agent keeps the cookies of connections.
func TestCookiesOutliveTheAgent(t *testing.T) {
	t.Parallel()
	n := newCookieNetwork(t, variant{kind: desired.SRv6Encap, vip: vip6, width: 2, columns: []int{0, 2}})
	client, server := n.connect()
	n.transfer(client, server, 1000)
	n.evict()
	cfg := n.agent.cfg
	n.agent.stop()
	n.agent = n.run(2, cfg, link.AttachTCX)
	n.transfer(server, client, 100_000)
	n.transfer(client, server, 100_000)
	n.end(server, client)
}
