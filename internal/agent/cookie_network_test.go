// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf/link"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testnet"
)

// TestCookies makes connections through a balancer without state. Each packet of the server, from
// the SYN-ACK to the FIN, carries the server's column.
func TestCookies(t *testing.T) {
	eachVariant(t, func(t *testing.T, n *cookieNetwork) {
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
	})
}

// A flood of SYNs evicts the flow table before each packet of the client but the SYN. Sockets keep
// the cookies.
func TestCookiesInAFlood(t *testing.T) {
	eachVariant(t, func(t *testing.T, n *cookieNetwork) {
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
	})
}

// The server repeats its SYN-ACK, because the client's ACKs are lost.
func TestCookieInRepeatedSYNACK(t *testing.T) {
	eachVariant(t, func(t *testing.T, n *cookieNetwork) {
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
	})
}

// In TIME_WAIT the server answers a repeated FIN. The cookie is then in the flow table, from the end
// of the connection on.
func TestCookieInTimeWait(t *testing.T) {
	eachVariant(t, func(t *testing.T, n *cookieNetwork) {
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
	})
}

// With SYN cookies the server has no socket for a half-open connection. The low bits of the
// timestamp in its SYN-ACK hold what the client has offered, and the column displaces some of them.
// The connection has all that the client has offered nevertheless.
func TestSYNCookies(t *testing.T) {
	eachVariant(t, func(t *testing.T, n *cookieNetwork) {
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
		if n.netstat("SyncookiesRecv") < 12 || n.netstat("SyncookiesFailed") != 0 {
			t.Errorf("%d SYN cookies were received, and %d failed; want 12 and 0", n.netstat("SyncookiesRecv"), n.netstat("SyncookiesFailed"))
		}
	})
}

// Without timestamps there is no cookie. Packets are delivered as they are.
func TestNoTimestamps(t *testing.T) {
	for name, at := range map[string]func(*cookieNetwork) *testnet.Namespace{
		"client": func(n *cookieNetwork) *testnet.Namespace { return n.client },
		"server": func(n *cookieNetwork) *testnet.Namespace { return n.servers[1] },
	} {
		t.Run(name, func(t *testing.T) {
			n := newCookieNetwork(t, desired.SRv6Encap, vip4, 2, 0, 2)
			n.set(at(n), "tcp_timestamps", "0")
			client, server := n.connect()
			n.transfer(client, server, 100_000)
			n.transfer(server, client, 100_000)
			n.end(client, server)
			for _, s := range n.sentTo(portOf(client), 0) {
				if s.Found {
					t.Errorf("a packet with %v has timestamps", s.flags)
				}
			}
		})
	}
}

// A new process of the agent keeps the cookies of connections.
func TestCookiesOutliveTheAgent(t *testing.T) {
	n := newCookieNetwork(t, desired.SRv6Encap, vip6, 2, 0, 2)
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
