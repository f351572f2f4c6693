// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// TestRoundTrip checks that a distant client ends its handshake, and sends its request and the end
// of its connection, only when replies have reached it. It does so for each way in which a server
// ends the response.
func TestRoundTrip(t *testing.T) {
	const n, trip = 200, 30 * time.Millisecond
	for name, serve := range map[string]func(net.Conn){
		"closed by the server": func(conn net.Conn) { io.WriteString(conn, answer) },
		"ended by the server's close": func(conn net.Conn) {
			io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\nbody")
		},
		"reset by the server": func(conn net.Conn) {
			io.WriteString(conn, answer)
			conn.(*net.TCPConn).SetLinger(0)
		},
		"kept by the server": func(conn net.Conn) {
			io.WriteString(conn, answer)
			answered := time.Now()
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("bytes after the request")
			}
			if took := time.Since(answered); took < trip {
				t.Errorf("the client closes %v after the response, want %v at least", took, trip)
			}
		},
	} {
		var served atomic.Int64
		c := config(t, listen(t, func(conn net.Conn, _ *http.Request) {
			served.Add(1)
			if rtt := handshake(t, conn); rtt < trip {
				t.Errorf("%s: the server has waited %v for the end of the handshake, want %v at least", name, rtt, trip)
			}
			serve(conn)
		}), n)
		// With so many requests at once, ends of connections arrive before responses are read.
		c.Arrivals = Constant{Rate: 1e6}
		// By the clock, a round trip takes trip. The log has half of each time by the clock.
		c.RoundTrip, c.Scale = new(sim.Constant(trip.Seconds()/2)), 0.5
		report, log := runLogged(t, c)
		if report.Succeeded != n || served.Load() != n || report.Connections != n {
			t.Errorf("%s: %d of %d requests succeeded on %d connections: %v", name,
				report.Succeeded, n, report.Connections, report.Errors)
		}
		for _, l := range log {
			if l.latency < trip.Seconds() {
				t.Errorf("%s: latency %v s, want at least two round trips", name, l.latency)
			}
		}
		if report.Connect.P50 < trip.Seconds() {
			t.Errorf("%s: the median handshake takes %v s, want a round trip", name, report.Connect.P50)
		}
	}
}

// handshake returns how long a server waited for the last packet of a connection's handshake.
func handshake(t *testing.T, conn net.Conn) (rtt time.Duration) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	testhost.Must(t, err)
	testhost.Must(t, raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		testhost.Must(t, err)
		rtt = time.Duration(info.Rtt) * time.Microsecond
	}))
	return rtt
}

// TestRoundTripOfRefused checks that a request fails if the server closes the connection before a
// distant client would know that the connection exists.
func TestRoundTripOfRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() { listener.Close() })
	c := config(t, "http://"+listener.Addr().String(), 3)
	c.RoundTrip = new(sim.Constant(0.4)) // the server has the connection after 0.2 s
	report, _ := runLogged(t, c)
	if report.Failures[Short.String()] != 3 {
		t.Errorf("failures %v, want 3 that are too short", report.Failures)
	}
}
