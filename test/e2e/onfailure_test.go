// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
)

// session is a client's connection that stays open.
type session struct {
	conn   net.Conn
	reader *bufio.Reader
	server string
}

// ask makes a request on the connection, and returns the server that answered.
func (s *session) ask() (server string, err error) {
	if err := s.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprint(s.conn, "GET / HTTP/1.1\r\nHost: vip\r\n\r\n"); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(s.reader, nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return response.Header.Get("X-Segue-Server"), err
}

// TestConnectionsOfAFailedServerAreReset disconnects a server. Its connections do not hang: another
// server resets them at the client's next packet. All other connections continue.
func TestConnectionsOfAFailedServerAreReset(t *testing.T) {
	t.Parallel()
	topology := topology("http6-insert", "http4-gre")
	topology.Balancers = 1
	for i := range topology.Services {
		topology.Services[i].OnFailure = desired.OnFailureReset
		topology.Services[i].Health = &desired.Health{
			TCP: &desired.TCPCheck{}, Interval: 200 * time.Millisecond, Fall: 2,
		}
	}
	l := up(t, topology)
	var sessions []*session
	held := map[string]int{}
	for _, s := range l.Topology.Services {
		for range 20 {
			conn, err := l.Node("client").Dial(t.Context(), "tcp", s.Address().String())
			must(t, err)
			defer conn.Close()
			opened := &session{conn: conn, reader: bufio.NewReader(conn)}
			opened.server, err = opened.ask()
			must(t, err)
			sessions = append(sessions, opened)
			held[opened.server+" of "+s.Name]++
		}
	}
	for _, s := range l.Topology.Services {
		if held["s3 of "+s.Name] == 0 {
			t.Fatalf("no connection is on s3: %v", held)
		}
	}
	must(t, l.Node("fabric").Do(func() error {
		port, err := netlink.LinkByName("s3")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(port)
	}))
	lb := l.Node("lb1")
	eventually(t, func() error { return conditionsAre(t, lb, "s3", inspect.ServerFailing) })
	for _, s := range sessions {
		server, err := s.ask()
		switch {
		case s.server != "s3" && (err != nil || server != s.server):
			t.Errorf("a connection to %s: %q, %v", s.server, server, err)
		case s.server == "s3" && !errors.Is(err, unix.ECONNRESET):
			t.Errorf("a connection to s3: %q, %v, want a reset", server, err)
		}
	}
	requireNoDrops(t, l)
}
