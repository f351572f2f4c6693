// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	// ample is a timeout that no check of a live server should reach.
	ample = 20 * time.Second
	// brief is a timeout that a test waits for.
	brief = 50 * time.Millisecond
)

func httpTarget(address net.Addr) Target {
	return Target{
		Service: "web", Server: "s1",
		Address: address.(*net.TCPAddr).AddrPort(),
		Kind:    HTTP, Path: "/healthz", Host: "vip.test", Status: desired.DefaultStatus,
		Interval: 5 * time.Millisecond, Timeout: ample, Rise: 1, Fall: 1,
	}
}

func tcpTarget(address net.Addr) Target {
	t := httpTarget(address)
	t.Kind = TCP
	return t
}

// attempt checks a target once.
func attempt(ctx context.Context, t Target) error {
	return New(nil, slog.New(slog.DiscardHandler)).tryOnce(ctx, &t)
}

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT) {
		t.Skipf("needs IPv6 on the loopback interface, which containers may lack: %v", err)
	}
	testhost.Must(t, err)
	t.Cleanup(func() { listener.Close() })
	return listener
}

// serveRaw answers the request on every connection with the same bytes. If requested, it leaves
// the connection open until the client closes it.
func serveRaw(t *testing.T, answer string, leaveOpen bool) net.Addr {
	listener := listen(t, "127.0.0.1:0")
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
					return
				}
				_, _ = io.WriteString(conn, answer)
				if leaveOpen {
					_, _ = io.Copy(io.Discard, conn)
				}
			}()
		}
	}()
	return listener.Addr()
}

// refusing returns an address on which nothing listens and nothing else can listen.
func refusing(t *testing.T) net.Addr {
	t.Helper()
	return boundSocket(t, func(int) error { return nil })
}

// full returns the address of a listener whose queue is full, so that connecting never ends.
func full(t *testing.T) net.Addr {
	t.Helper()
	address := boundSocket(t, func(fd int) error { return unix.Listen(fd, 0) })
	for range 100 {
		conn, err := net.DialTimeout("tcp", address.String(), brief)
		if err != nil {
			return address
		}
		t.Cleanup(func() { conn.Close() })
	}
	t.Fatal("the queue of a listener with backlog 0 does not fill")
	return nil
}

func boundSocket(t *testing.T, prepare func(fd int) error) net.Addr {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testhost.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	testhost.Must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	testhost.Must(t, prepare(fd))
	local, err := unix.Getsockname(fd)
	testhost.Must(t, err)
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: local.(*unix.SockaddrInet4).Port}
}

func reasonOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestHTTPResponses(t *testing.T) {
	const headerTooLong = "HTTP/1.1 200 OK\r\nPadding: "
	tests := []struct {
		name, answer string
		want         string // the reason of the failure; empty for a success
	}{
		{"200", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ""},
		{"200 of HTTP/1.0", "HTTP/1.0 200 OK\r\n\r\nok", ""},
		{"204", "HTTP/1.1 204 No Content\r\n\r\n", ""},
		{"399", "HTTP/1.1 399 Odd\r\n\r\n", ""},
		{"400", "HTTP/1.1 400 Bad Request\r\n\r\n", "status 400"},
		{"503", "HTTP/1.1 503 Service Unavailable\r\n\r\n", "status 503"},
		{"early hints, 200", "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", ""},
		{"early hints, 500", "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 500 Broken\r\n\r\n", "status 500"},
		{"101 is final", "HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"},
		{"below 100", "HTTP/1.1 099 Odd\r\n\r\n", "status 99"},
		{"body cut short", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nok", ""},
		{"another protocol", "SSH-2.0-OpenSSH_9.2p1\r\n", "not an HTTP response"},
		{"nothing", "", "connection closed before the end of a response header"},
		{"half a header", "HTTP/1.1 200 OK\r\nServer:", "connection closed before the end of a response header"},
		{"header of 64 KiB", headerTooLong + strings.Repeat("x", maxHeader), "response header longer than 65536 bytes"},
		{"header of 60 KiB", headerTooLong + strings.Repeat("x", 60<<10) + "\r\n\r\n", ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			target := httpTarget(serveRaw(t, test.answer, false))
			if got := reasonOf(attempt(t.Context(), target)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestHTTPRequest(t *testing.T) {
	requests := make(chan *http.Request, 2)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		requests <- r
	}))
	defer server.Close()
	target := httpTarget(server.Listener.Addr())
	target.Path, target.Host = "//check me?full=1", "[2001:db8::80]:8080"
	for range 2 {
		testhost.Must(t, attempt(t.Context(), target))
	}
	first, second := <-requests, <-requests
	for _, check := range []struct{ name, got, want string }{
		{"method", first.Method, "GET"},
		{"target", first.RequestURI, "//check%20me?full=1"},
		{"host", first.Host, "[2001:db8::80]:8080"},
		{"user agent", first.UserAgent(), "segue-health"},
		{"protocol", first.Proto, "HTTP/1.1"},
		{"connection", first.Header.Get("Connection"), "close"},
	} {
		if check.got != check.want {
			t.Errorf("%s: got %q, want %q", check.name, check.got, check.want)
		}
	}
	if first.RemoteAddr == second.RemoteAddr {
		t.Errorf("both checks came from %s: one connection", first.RemoteAddr)
	}
}

func TestHTTPFollowsNoRedirect(t *testing.T) {
	var paths []string // accessed only while no check is under way
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paths = append(paths, r.URL.Path)
		http.Redirect(w, r, "/login", http.StatusFound)
	}))
	if err := attempt(t.Context(), httpTarget(server.Listener.Addr())); err != nil {
		t.Error(err)
	}
	server.Close() // waits for the handler
	if len(paths) != 1 || paths[0] != "/healthz" {
		t.Errorf("asked for %q, want only /healthz", paths)
	}
}

// An endless body must cost neither time nor memory: the check ends, and the server's writes fail.
func TestHTTPLeavesBody(t *testing.T) {
	listener := listen(t, "[::1]:0")
	written := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			written <- err
			return
		}
		defer conn.Close()
		_, err = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
		for chunk := make([]byte, 1<<16); err == nil; {
			_, err = conn.Write(chunk)
		}
		written <- err
	}()
	if err := attempt(t.Context(), httpTarget(listener.Addr())); err != nil {
		t.Error(err)
	}
	if err := <-written; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the server's end: %v", err)
	}
}

func TestUnreachableServers(t *testing.T) {
	silent := listen(t, "127.0.0.1:0") // the kernel completes the handshake, and no program accepts
	tests := []struct {
		name   string
		target Target
		want   string
	}{
		{"HTTP refused", httpTarget(refusing(t)), "connection refused"},
		{"TCP refused", tcpTarget(refusing(t)), "connection refused"},
		{"HTTP not connected", httpTarget(full(t)), "timeout after 50ms"},
		{"TCP not connected", tcpTarget(full(t)), "timeout after 50ms"},
		{"HTTP not accepted", httpTarget(silent.Addr()), "timeout after 50ms"},
		{"HTTP without an answer", httpTarget(serveRaw(t, "", true)), "timeout after 50ms"},
		{"HTTP stuck in the header", httpTarget(serveRaw(t, "HTTP/1.1 200 OK\r\nDate:", true)), "timeout after 50ms"},
		{"TCP not accepted", tcpTarget(silent.Addr()), ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if strings.HasPrefix(test.want, "timeout") {
				test.target.Timeout = brief
			}
			began := time.Now()
			err := attempt(t.Context(), test.target)
			if got := reasonOf(err); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
			if isTimeout := strings.HasPrefix(test.want, "timeout"); errors.Is(err, errTimeout) != isTimeout {
				t.Errorf("%v is a timeout: %v", err, !isTimeout)
			}
			took := time.Since(began)
			if test.target.Timeout == brief && took < brief {
				t.Errorf("a timeout of %v took %v", brief, took)
			}
		})
	}
}

// slowPath is a path that needs a long time to find out how a VIP is checked.
type slowPath struct{ takes time.Duration }

func (p slowPath) Socket(netip.Addr) (Socket, error) {
	time.Sleep(p.takes)
	return Socket{Device: "lo", Source: netip.MustParseAddr("127.0.0.1")}, nil
}

func (p slowPath) Recheck(netip.Addr) error { return nil }

// The time in which the host finds its source address does not count for the timeout.
func TestTimeoutIsTheServers(t *testing.T) {
	target := tcpTarget(listen(t, "127.0.0.1:0").Addr())
	target.OnPath = true
	synctest.Test(t, func(t *testing.T) {
		c := New(slowPath{2 * target.Timeout}, slog.New(slog.DiscardHandler))
		err := c.tryOnce(t.Context(), &target)
		if errors.Is(err, unix.EPERM) {
			t.Skip("needs CAP_NET_ADMIN to mark packets")
		}
		if err != nil {
			t.Error(err)
		}
	})
}

func TestTCPProbeResets(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			listener := listen(t, address)
			testhost.Must(t, attempt(t.Context(), tcpTarget(listener.Addr())))
			conn, err := listener.Accept()
			testhost.Must(t, err)
			defer conn.Close()
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("read: %v, want a reset", err)
			}
		})
	}
}

// A lack of descriptors on the balancer must not count against the servers.
func TestOwnShortageIsUntried(t *testing.T) {
	target := tcpTarget(listen(t, "127.0.0.1:0").Addr())
	var limit unix.Rlimit
	testhost.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	testhost.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: limit.Max}))
	err := attempt(t.Context(), target)
	testhost.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, ErrUntried) || reasonOf(err) != "not tried: too many open files" {
		t.Errorf("without descriptors: %v", err)
	}
	if err := attempt(t.Context(), target); err != nil {
		t.Errorf("with descriptors: %v", err)
	}
}

// A cancelled check ends at once and closes its connection, at whatever point it waits.
func TestCancelledCheck(t *testing.T) {
	listener := listen(t, "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	target := httpTarget(listener.Addr())
	target.Timeout = time.Hour
	ended := make(chan error, 1)
	go func() { ended <- attempt(ctx, target) }()
	conn, err := listener.Accept()
	testhost.Must(t, err)
	defer conn.Close()
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if <-ended == nil {
		t.Error("a cancelled check succeeded")
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the server's end: %v, want a reset", err)
	}
}

func TestHostHeader(t *testing.T) {
	for _, test := range []struct {
		vip         string
		port, usual uint16
		want        string
	}{
		{"192.0.2.80", 80, 80, "192.0.2.80"},
		{"192.0.2.80", 8080, 80, "192.0.2.80:8080"},
		{"2001:db8::80", 80, 80, "[2001:db8::80]"},
		{"2001:db8::80", 443, 443, "[2001:db8::80]"},
		{"2001:db8::80", 443, 80, "[2001:db8::80]:443"},
	} {
		if got := hostHeader(netip.MustParseAddr(test.vip), test.port, test.usual); got != test.want {
			t.Errorf("%s port %d: got %s, want %s", test.vip, test.port, got, test.want)
		}
	}
}
