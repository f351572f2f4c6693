// SPDX-License-Identifier: Apache-2.0

package health

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestStatusAndBody(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nstate: ready"
	long := "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat("x", desired.MaxCheckedBody-5) + "ready"
	tests := []struct {
		name, answer, status, body string
		want                       string
	}{
		{"status listed", "HTTP/1.1 404 No\r\n\r\n", "200-299, 404", "", ""},
		{"status not listed", "HTTP/1.1 300 No\r\n\r\n", "200-299, 404", "", "status 300"},
		{"first of a range", "HTTP/1.1 200 OK\r\n\r\n", "200-299", "", ""},
		{"last of a range", "HTTP/1.1 299 OK\r\n\r\n", "200-299", "", ""},
		{"body contains", ok, "200", "ready", ""},
		{"body is all", ok, "200", "state: ready", ""},
		{"body differs", ok, "200", "Ready", "the first 12 bytes of the body do not contain the text"},
		{"status comes first", ok, "204", "Ready", "status 200"},
		{"body is empty", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "200", "ready",
			"the first 0 bytes of the body do not contain the text"},
		{"body in chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nrea\r\n2\r\ndy\r\n0\r\n\r\n",
			"200", "ready", ""},
		{"body cut short", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nready", "200", "ready", ""},
		{"text at the end of what is read", long, "200", "ready", ""},
		{"text behind what is read", long[:len(long)-5] + "xready", "200", "ready",
			"the first 65536 bytes of the body do not contain the text"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			target := httpTarget(serveRaw(t, test.answer, false))
			target.Status, target.Body = test.status, test.body
			if got := reasonOf(attempt(t.Context(), target)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestHTTPS(t *testing.T) {
	names := make(chan string, 1)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		names <- r.TLS.ServerName
		if r.Host != "vip.test:8443" {
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	}))
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	server.StartTLS()
	defer server.Close()
	target := httpTarget(server.Listener.Addr())
	target.Kind, target.Host = HTTPS, "vip.test:8443"
	if err := attempt(t.Context(), target); err != nil {
		t.Error(err)
	}
	if name := <-names; name != "vip.test" {
		t.Errorf("server name %q", name)
	}
	target.Verify = true
	if got := reasonOf(attempt(t.Context(), target)); !strings.HasPrefix(got, "certificate: x509: ") {
		t.Errorf("a certificate of an unknown authority: %q", got)
	}
	target = httpTarget(serveRaw(t, "HTTP/1.1 200 OK\r\n\r\n", false))
	target.Kind = HTTPS
	if got := reasonOf(attempt(t.Context(), target)); got != "the TLS handshake failed" {
		t.Errorf("a server without TLS: %q", got)
	}
	target = tcpTarget(listen(t, "127.0.0.1:0").Addr())
	target.Kind, target.Timeout, target.Status, target.Path = HTTPS, brief, "200", "/"
	if got := reasonOf(attempt(t.Context(), target)); got != "timeout after 50ms" {
		t.Errorf("a server that says nothing: %q", got)
	}
}

func TestUDP(t *testing.T) {
	tests := []struct {
		name, answer, expected, want string
	}{
		{"any answer", "\x00", "", ""},
		{"empty answer", "", "", ""},
		{"expected", "version 4", "ion", ""},
		{"another", "version 4", "v5", "the answer does not contain the expected bytes"},
		{"silence", "none", "", "timeout after 50ms"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			testhost.Must(t, err)
			defer socket.Close()
			go func() {
				request := make([]byte, 100)
				n, from, err := socket.ReadFromUDPAddrPort(request)
				if err == nil && string(request[:n]) == "ping" && test.answer != "none" {
					_, _ = socket.WriteToUDPAddrPort([]byte(test.answer), from)
				}
			}()
			target := udpTarget(socket)
			target.Answer = test.expected
			if test.answer == "none" {
				target.Timeout = brief
			}
			if got := reasonOf(attempt(t.Context(), target)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// An answer counts only if it comes from the port that was asked, and answers this check.
func TestUDPOfStrangers(t *testing.T) {
	var sockets [2]*net.UDPConn
	for i := range sockets {
		socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		testhost.Must(t, err)
		defer socket.Close()
		sockets[i] = socket
	}
	asked, stranger := sockets[0], sockets[1]
	go func() {
		var former netip.AddrPort
		for request := make([]byte, 100); ; {
			_, from, err := asked.ReadFromUDPAddrPort(request)
			if err != nil {
				return
			}
			_, _ = stranger.WriteToUDPAddrPort([]byte("pong"), from)
			if former.IsValid() {
				_, _ = asked.WriteToUDPAddrPort([]byte("pong"), former)
			}
			former = from
		}
	}()
	target := udpTarget(asked)
	target.Timeout = brief
	for range 2 {
		if got := reasonOf(attempt(t.Context(), target)); got != "timeout after 50ms" {
			t.Errorf("got %q", got)
		}
	}
}

// A port on which nothing listens answers by ICMP.
func TestUDPRefused(t *testing.T) {
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	testhost.Must(t, err)
	target := udpTarget(socket)
	socket.Close()
	if got := reasonOf(attempt(t.Context(), target)); got != "connection refused" {
		t.Errorf("got %q", got)
	}
}

func udpTarget(socket *net.UDPConn) Target {
	return Target{
		Kind: UDP, Request: "ping", Timeout: ample,
		Address: netip.MustParseAddrPort(socket.LocalAddr().String()),
	}
}
