// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/lab"
)

// TestPacketsWithoutASocketGoToTheSameBalancer closes a client's connections silently. The client's
// kernel answers the servers' further packets with resets that belong to no socket. Routers must
// send these resets to the balancer that knows the connection.
func TestPacketsWithoutASocketGoToTheSameBalancer(t *testing.T) {
	t.Parallel()
	const connections = 32 // an error sends about half of the resets to the other balancer
	l := shared(t, topology(mixed...))
	before := tcpCounts(t, l)
	for i := range connections {
		vanish(t, l, l.Topology.Services[i%len(l.Topology.Services)])
	}
	eventually(t, func() error {
		if n := tcpCounts(t, l).since(before).resets; n < connections {
			return fmt.Errorf("%d resets were sent, want %d", n, connections)
		}
		return nil
	})
	start := time.Now()
	eventually(t, func() error {
		var closing uint64
		for _, name := range nodes(l, lab.RoleBalancer) {
			flows, err := countedSince(t, l.Node(name), start)
			if err != nil {
				return err
			}
			closing += flows.Closing
		}
		if closing < connections {
			return fmt.Errorf("%d flows are closing, want %d", closing, connections)
		}
		return nil
	})
	for _, name := range nodes(l, lab.RoleBalancer) {
		if n := packetCounts(t, l.Node(name))["forward_recover"]; n > 0 {
			t.Errorf("%s placed %d packets anew, which belong to flows of the other balancer", name, n)
		}
	}
}

// vanish makes a request on a new connection, and forgets the connection when the answer begins.
func vanish(t *testing.T, l *lab.Lab, s lab.Service) {
	t.Helper()
	conn, err := dialPort(t.Context(), l, s, 0)
	must(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "GET /%s HTTP/1.1\r\nHost: lab\r\n\r\n", lab.Size(1e6))
	must(t, err)
	_, err = io.ReadFull(conn, make([]byte, 1))
	must(t, err)
	raw, err := conn.(*net.TCPConn).SyscallConn()
	must(t, err)
	var repair error
	must(t, raw.Control(func(fd uintptr) {
		repair = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1)
	}))
	must(t, repair) // a socket under repair is closed without a packet
}
