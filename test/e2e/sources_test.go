// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestLoadSources lets servers decide by the load of their real applications: Apache's workers in
// the scoreboard, and the connections in nginx's accept queue.
func TestLoadSources(t *testing.T) {
	t.Parallel()
	const threshold = 4
	s := huntingServices(2)[0]
	s.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(threshold))}
	s.Load.Kind = desired.LoadAcceptQueue
	s.Exceptions = []lab.Exception{{Server: "s2", Load: desired.Source{Kind: desired.LoadApache}}}
	topology := hunting(s)
	topology.Balancers, topology.Servers = 1, 2
	l := up(t, topology)
	rows := openRows(t, l)

	t.Run("apache-scoreboard", func(t *testing.T) {
		// An incomplete request occupies a worker.
		var halves []net.Conn
		for i := range threshold {
			conn := rows.dialFirst(t, l, s, "s2")
			defer conn.Close()
			_, err := io.WriteString(conn, "GET / HTTP/1.1\r\n")
			must(t, err)
			halves = append(halves, conn)
			awaitShown(t, l, "s2", s.Name, i+1)
		}
		before := offers(t, l, "s2", s.Name)
		if before.accepted != threshold || before.refused > 0 {
			t.Errorf("Apache was busy with less, and took not all: %+v", before)
		}
		requireServer(t, s, rows.dialFirst(t, l, s, "s2"), "s1")
		if o := offers(t, l, "s2", s.Name); o.refused != 1 {
			t.Errorf("Apache is busy, and refused not one: %+v", o)
		}
		if o := offers(t, l, "s1", s.Name); o.forced != 1 {
			t.Errorf("nginx should have had to take one: %+v", o)
		}
		for _, conn := range halves {
			must(t, conn.Close())
		}
		awaitLoad(t, l, "s2", s.Name, 0)
		requireServer(t, s, rows.dialFirst(t, l, s, "s2"), "s2")
	})

	t.Run("accept-queue", func(t *testing.T) {
		signalAll(t, l.Process("s1", "nginx"), unix.SIGSTOP)
		var waiting []net.Conn
		for i := range threshold {
			waiting = append(waiting, rows.dialFirst(t, l, s, "s1"))
			awaitQueue(t, l, "s1", i+1)
		}
		requireServer(t, s, rows.dialFirst(t, l, s, "s1"), "s2")
		signalAll(t, l.Process("s1", "nginx"), unix.SIGCONT)
		for _, conn := range waiting {
			requireServer(t, s, conn, "s1")
		}
		requireServer(t, s, rows.dialFirst(t, l, s, "s1"), "s1")
		if o := offers(t, l, "s1", s.Name); o.accepted != threshold+1 || o.refused != 1 {
			t.Errorf("nginx should have refused the one that came when four waited: %+v", o)
		}
	})
	requireNoDrops(t, l)
}

// dialFirst opens a connection whose first candidate is the server. It sends no request.
func (r *rows) dialFirst(t *testing.T, l *lab.Lab, s lab.Service, server string) net.Conn {
	t.Helper()
	const ports = 1000 // each server is the first candidate for hundreds of ports
	for tried := 1; r.candidates(t, s)[0] != server; tried++ {
		if tried == ports {
			t.Fatalf("%s is the first candidate of none of %d connections", server, ports)
		}
	}
	conn, err := dialPort(t.Context(), l, s, r.port)
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// requireServer makes a request, which the server must answer, and closes the connection.
func requireServer(t *testing.T, s lab.Service, conn net.Conn, server string) {
	t.Helper()
	c := newConnection(conn, s)
	got, err := c.request()
	must(t, err)
	if got != server {
		t.Errorf("%s answers, not %s", got, server)
	}
	must(t, conn.Close())
}

// signalAll sends a signal to a process and its children.
func signalAll(t *testing.T, p *lab.Process, signal unix.Signal) {
	t.Helper()
	pid, alive := p.PID()
	if !alive {
		t.Fatalf("%s does not run", p)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	must(t, err)
	for _, child := range append(strings.Fields(string(children)), strconv.Itoa(pid)) {
		number, err := strconv.Atoi(child)
		must(t, err)
		must(t, unix.Kill(number, signal))
	}
}

// awaitQueue returns when n IPv6 connections wait for a server's application.
func awaitQueue(t *testing.T, l *lab.Lab, server string, n int) {
	t.Helper()
	eventually(t, func() error {
		out := strings.Fields(command(t, l, server, "ss", "-6Htln", "sport = :80"))
		if len(out) < 2 || out[1] != strconv.Itoa(n) {
			return fmt.Errorf("%s: the listener has %q, want %d waiting", server, out, n)
		}
		return nil
	})
}
