// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// failures returns those counts of failures in a report that are not 0.
func failures(r *Report) map[string]uint64 {
	occurred := map[string]uint64{}
	for kind, n := range r.Failures {
		if n > 0 {
			occurred[kind] = n
		}
	}
	return occurred
}

// A connection whose events cannot be watched, for example because of fs.epoll.max_user_watches, is
// a failure of this host.
func TestConnectionsThatCannotBeWatched(t *testing.T) {
	c := config(t, listen(t, respond(answer)), 3)
	g, err := newGenerator(&c)
	testhost.Must(t, err)
	epoll := g.epoll
	g.epoll = -1
	g.begin(g.now())
	for g.more {
		g.sendDue(g.now())
	}
	g.epoll = epoll
	testhost.Must(t, g.close())
	if diff := cmp.Diff(map[string]uint64{"local": 3}, failures(g.results.report(g))); diff != "" {
		t.Errorf("failures (-want +got):\n%s", diff)
	}
}

// TestFailures makes each failure that can follow a handshake, on real sockets.
func TestFailures(t *testing.T) {
	const n = 5
	silent := func(conn net.Conn, _ *http.Request) { conn.Read(make([]byte, 1)) } // until the end
	for name, test := range map[string]struct {
		serve  func(net.Conn, *http.Request)
		change func(*Config)
		want   Outcome
		text   string
	}{
		"reset": {serve: func(conn net.Conn, _ *http.Request) { conn.(*net.TCPConn).SetLinger(0) },
			want: Reset, text: "connection reset by peer"},
		"reset within the response": {serve: func(conn net.Conn, _ *http.Request) {
			conn.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"))
			conn.(*net.TCPConn).SetLinger(0)
		}, want: Reset, text: "connection reset by peer"},
		"no response": {serve: respond(""), want: Short,
			text: "closed the connection before the response"},
		"part of a head": {serve: respond("HTTP/1.1 200 OK\r\nContent-"), want: Short,
			text: "closed the connection before the response"},
		"part of a body": {serve: respond("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"),
			want: Short, text: "closed the connection before the end of the response"},
		"part of chunks": {serve: respond("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"),
			want: Short, text: "before the end of the response"},
		"timeout": {serve: silent, change: func(c *Config) { c.Timeout = 100 * time.Millisecond },
			want: Timeout, text: "no complete response within 100ms"},
		"timeout without a free connection": {serve: silent, change: func(c *Config) {
			c.Timeout, c.Connections = 100*time.Millisecond, 1
		}, want: Timeout},
		"another protocol": {serve: respond("SSH-2.0-OpenSSH_9.2\r\n\r\n"), want: Malformed,
			text: "SSH-2.0"},
		"bad chunk": {serve: respond("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"),
			want: Malformed, text: `"x", is not a hexadecimal number`},
		"status": {serve: respond("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
			want: WrongStatus, text: "/: status 503"},
		"status that is not listed": {serve: respond(answer),
			change: func(c *Config) { c.Expect.Status = []int{201, 404} }, want: WrongStatus,
			text: "/: status 200"},
		"content": {serve: respond("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
			change: func(c *Config) { c.Expect.Body = regexp.MustCompile("^bye") },
			want:   WrongContent, text: `/: the body begins with "hello"`},
	} {
		t.Run(name, func(t *testing.T) {
			c := config(t, listen(t, test.serve), n)
			if test.change != nil {
				test.change(&c)
			}
			report := run(t, c)
			if diff := cmp.Diff(map[string]uint64{test.want.String(): n}, failures(report)); diff != "" {
				t.Errorf("failures (-want +got):\n%s%v", diff, report.Errors)
			}
			if text := report.Errors[test.want.String()]; !strings.Contains(text, test.text) {
				t.Errorf("error %q, want %q", text, test.text)
			}
			if report.Failed != n || report.Succeeded != 0 || report.Latency != nil {
				t.Errorf("%+v", report)
			}
		})
	}
}

// TestExpected: responses as expected succeed, in each form of a body. They announce that the
// server closes the connection. Otherwise the next request could use the connection before the end
// arrives.
func TestExpected(t *testing.T) {
	for name, text := range map[string]string{
		"sized":     "HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
		"chunked":   "HTTP/1.1 404 Not Found\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nEnd: 1\r\n\r\n",
		"unsized":   "HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\nhello",
		"HTTP/1.0":  "HTTP/1.0 404 Not Found\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
		"100 first": "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
	} {
		for _, keepAlive := range []bool{false, true} {
			c := config(t, listen(t, respond(text)), 3)
			c.KeepAlive = keepAlive
			c.Expect = Expectation{Status: []int{404}, Body: regexp.MustCompile("^hello$")}
			if report := run(t, c); report.Succeeded != 3 {
				t.Errorf("%s, keep-alive %v: %v", name, keepAlive, report.Errors)
			}
		}
	}
}

// TestRefused connects to a port on which nothing listens.
func TestRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	url := "http://" + listener.Addr().String()
	listener.Close()
	c := config(t, url, 5)
	c.Idle = 2
	report := run(t, c)
	if diff := cmp.Diff(map[string]uint64{"refused": 5}, failures(report)); diff != "" {
		t.Errorf("failures (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Idle{Failed: 2}, report.Idle); diff != "" ||
		!strings.Contains(strings.Join(report.Warnings, "\n"),
			"2 idle connections could not be opened: connect ") {
		t.Errorf("warnings %q, idle connections (-want +got):\n%s", report.Warnings, diff)
	}
}

// TestConnectTimeout has a listener that accepts nothing. The kernel drops SYNs when the listener's
// backlog is full.
func TestConnectTimeout(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testhost.Must(t, err)
	defer unix.Close(fd)
	testhost.Must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	testhost.Must(t, unix.Listen(fd, 0))
	name, err := unix.Getsockname(fd)
	testhost.Must(t, err)
	c := config(t, fmt.Sprintf("http://127.0.0.1:%d/", name.(*unix.SockaddrInet4).Port), 8)
	c.ConnectTimeout, c.Timeout = 200*time.Millisecond, 500*time.Millisecond
	c.Idle = 2
	report := run(t, c)
	got := failures(report)
	if got["connect-timeout"] < 5 || got["connect-timeout"]+got["timeout"] != 8 || len(got) > 2 {
		t.Errorf("failures %v: %v", got, report.Errors)
	}
	if text := report.Errors["connect-timeout"]; !strings.Contains(text, "no answer within 200ms") {
		t.Errorf("error %q", text)
	}
	// The time for the whole request also counts during the handshake.
	c.ConnectTimeout, c.Timeout, c.Idle = 4*patience, 100*time.Millisecond, 0
	if got := failures(run(t, c)); got["timeout"] != 8 {
		t.Errorf("failures %v, want 8 timeouts", got)
	}
}

// TestTimeoutWhileWaiting: requests that wait too long for a connection fail without one.
func TestTimeoutWhileWaiting(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	accepted := make(chan int)
	go func() {
		n := 0
		for {
			conn, err := listener.Accept()
			if err != nil {
				accepted <- n
				return
			}
			defer conn.Close()
			n++
		}
	}()
	c := config(t, "http://"+listener.Addr().String(), 0)
	c.Arrivals = Trace(write(t, "trace", strings.Repeat("0\t/\n", 20)), sim.TimedQueries, 1)
	c.Connections, c.Timeout = 1, 100*time.Millisecond
	report := run(t, c)
	listener.Close()
	if n := <-accepted; n != 1 || report.Failures["timeout"] != 20 {
		t.Errorf("failures %v on %d connections, want 20 timeouts on 1", failures(report), n)
	}
}

// TestPortsRunOut: each client address has all ports for each destination. Without a free port a
// request fails, and the report says what to do.
func TestPortsRunOut(t *testing.T) {
	testhost.NeedNamespaces(t)
	t.Parallel() // it waits
	const ports, n = 10, 300
	err := testhost.NewNamespace(t).Do(func() error {
		const sysctl = "/proc/sys/net/ipv4/ip_local_port_range"
		if err := os.WriteFile(sysctl, fmt.Appendf(nil, "40000 %d", 40000+ports-1), 0); err != nil {
			return err
		}
		var targets []*Target
		for _, address := range []string{"127.0.0.1:80", "127.0.0.1:81"} {
			listener, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			defer listener.Close()
			targets = append(targets, target(t, "http://"+address+"/"))
		}
		for addresses, prefix := range map[int]string{1: "127.0.0.7", 4: "127.0.0.8/30"} {
			c := config(t, targets[0].URL, 0)
			c.Targets = targets
			c.Arrivals = Trace(write(t, "trace", strings.Repeat("0\t/\n", n)), sim.TimedQueries, 1)
			c.Timeout = time.Second // the kernel accepts the connections, but nothing answers
			var err error
			if c.Clients, err = ParseClients([]string{prefix}); err != nil {
				return err
			}
			report, err := Run(t.Context(), c)
			if err != nil {
				return err
			}
			want := uint64(addresses * ports * len(targets))
			if report.Failures["timeout"] != want || report.Failures["local"] != n-want {
				t.Errorf("%s: %v, want %d timeouts; the others without a port: %v", prefix,
					failures(report), want, report.Errors)
			}
			text := strings.Join(report.Warnings, "\n")
			if !strings.Contains(text,
				"all ports of the client addresses are in use; add client addresses") {
				t.Errorf("%s: warnings %q", prefix, text)
			}
		}
		return nil
	})
	testhost.Must(t, err)
}

// TestUnreachable connects to an address without a route.
func TestUnreachable(t *testing.T) {
	testhost.NeedNamespaces(t)
	err := testhost.NewNamespace(t).Do(func() error {
		report, err := Run(t.Context(), config(t, "http://[2001:db8::1]/", 3))
		if err == nil && report.Failures["unreachable"] != 3 {
			t.Errorf("failures %v: %v", failures(report), report.Errors)
		}
		return err
	})
	testhost.Must(t, err)
}

// TestClients: connections come from the client addresses in turn. A local route makes addresses.
func TestClients(t *testing.T) {
	testhost.NeedNamespaces(t)
	err := testhost.NewNamespace(t).Do(func() error {
		add := exec.Command("ip", "route", "add", "local", "2001:db8:c::100/126", "dev", "lo")
		if out, err := add.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		listener, err := net.Listen("tcp", "[::1]:80")
		if err != nil {
			return err
		}
		defer listener.Close()
		used := make(chan map[string]int)
		go func() { used <- serveAll(listener, 40) }()
		c := config(t, "http://[::1]/", 40)
		c.Clients, err = ParseClients([]string{"2001:db8:c::100/126", "::1"})
		if err != nil {
			return err
		}
		if _, err := Run(t.Context(), c); err != nil {
			return err
		}
		want := map[string]int{
			"2001:db8:c::100": 8, "2001:db8:c::101": 8, "2001:db8:c::102": 8, "2001:db8:c::103": 8, "::1": 8,
		}
		listener.Close()
		if diff := cmp.Diff(want, <-used); diff != "" {
			t.Errorf("connections by client address (-want +got):\n%s", diff)
		}
		return nil
	})
	testhost.Must(t, err)
}

// serveAll answers n connections, and counts them by the client's address.
func serveAll(listener net.Listener, n int) map[string]int {
	used := map[string]int{}
	for range n {
		conn, err := listener.Accept()
		if err != nil {
			return used
		}
		conn.Read(make([]byte, 4096))
		conn.Write([]byte(answer))
		conn.Close()
		used[netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr().String()]++
	}
	return used
}

func TestBadClients(t *testing.T) {
	for text, want := range map[string]string{
		"nonsense":         `"nonsense": must be an address or a prefix, such as 2001:db8:c::100/120`,
		"192.0.2.77":       `"192.0.2.77": is not an address of this host`,
		"192.0.2.64/30":    `"192.0.2.64/30": this host has no address in the prefix; "ip route add local 192.0.2.64/30 dev lo" adds all of them`,
		"127.0.0.0/8":      `"127.0.0.0/8": must have at most 1024 addresses`,
		"127.0.0.1 ::1":    `127.0.0.1 and ::1: must all be IPv4, or all IPv6`,
		"fe80::1%lo":       `"fe80::1%lo": must be an address or a prefix, such as 2001:db8:c::100/120`,
		"::1/200":          `"::1/200": must be an address or a prefix, such as 2001:db8:c::100/120`,
		"2001:db8::/64 :1": `"2001:db8::/64": must have at most 1024 addresses`,
	} {
		if _, err := ParseClients(strings.Fields(text)); err == nil || err.Error() != want {
			t.Errorf("%s: %v\nwant %s", text, err, want)
		}
	}
}
