// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// client makes requests from the lab's client, each on a new connection.
type client struct {
	lab  *lab.Lab
	http http.Client
}

func newClient(l *lab.Lab) *client { return clientThatDials(l, l.Node("client").Dial) }

func clientThatDials(l *lab.Lab, dial func(ctx context.Context, network, address string) (net.Conn, error)) *client {
	return &client{l, http.Client{
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: patience,
	}}
}

// do sends a request. It returns the server that answered, and the body.
func (c *client) do(ctx context.Context, method, url string, body []byte, want int) (server string, got []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return "", nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	if got, err = io.ReadAll(resp.Body); err != nil {
		return "", nil, fmt.Errorf("%s %s: after %d bytes: %w", method, url, len(got), err)
	}
	server = resp.Header.Get("X-Segue-Server")
	switch {
	case resp.StatusCode != want:
		return server, got, fmt.Errorf("%s %s: %s from server %q", method, url, resp.Status, server)
	case !slices.Contains(nodes(c.lab, lab.RoleServer), server):
		return server, got, fmt.Errorf("%s %s: server %q is none of the service's", method, url, server)
	}
	return server, got, nil
}

// get fetches a path from a service. It returns the server that answered, and the body.
func (c *client) get(ctx context.Context, s lab.Service, path string) (server string, body []byte, err error) {
	return c.do(ctx, http.MethodGet, fmt.Sprintf("http://%s%s", s.Address(), path), nil, http.StatusOK)
}

// visitsOf has the number of visits to each lab so far, as an *atomic.Uint32 by *lab.Lab.
var visitsOf sync.Map

// fromNewAddress returns a client with an address that no visit to the lab had before, until all
// 254 are used. The kernel takes the ports of all labs' clients from one counter, which can go
// back: one client gets ports again within seconds. A SYN from such a port is taken for a late copy
// of the SYN of a connection that has just ended, and goes to the server of that connection. So
// only a new address makes a connection surely new.
func (c *client) fromNewAddress(s lab.Service) *client {
	count, _ := visitsOf.LoadOrStore(c.lab, new(atomic.Uint32))
	addresses := lab.ClientAddresses(s.VIP, 254)
	from := addresses[int(count.(*atomic.Uint32).Add(1))%len(addresses)]
	return c.from(from, s)
}

// from returns a client of a service with an address.
func (c *client) from(from netip.Addr, s lab.Service) *client {
	return clientThatDials(c.lab, func(ctx context.Context, _, _ string) (net.Conn, error) {
		return c.lab.Node("client").DialTCP(ctx, from, s.Address())
	})
}

// visit makes n new connections to a service, several at a time, and counts them by the server that
// answered.
func (c *client) visit(ctx context.Context, s lab.Service, n int) (map[string]int, error) {
	c = c.fromNewAddress(s)
	servers := make([]string, n)
	var group errgroup.Group
	group.SetLimit(8)
	for i := range servers {
		group.Go(func() (err error) {
			servers[i], _, err = c.get(ctx, s, "/")
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("service %s: %w", s.Name, err)
	}
	visits := map[string]int{}
	for _, server := range servers {
		visits[server]++
	}
	return visits, nil
}

// download fetches a file of the given size and checks its checksum.
func (c *client) download(ctx context.Context, s lab.Service, size lab.Size) error {
	server, body, err := c.get(ctx, s, "/"+size.String())
	if err != nil {
		return err
	}
	if sha256.Sum256(body) != sha256.Sum256(lab.Content(size)) {
		return fmt.Errorf("%s: server %s: the %d bytes are not those of the file", s.Name, server, len(body))
	}
	return nil
}

// upload stores a file of the given size and checks its checksum.
func (c *client) upload(ctx context.Context, s lab.Service, size lab.Size) error {
	content := lab.Content(size)
	url := fmt.Sprintf("http://%s/upload/%s", s.Address(), s.Name)
	server, _, err := c.do(ctx, http.MethodPut, url, content, http.StatusCreated)
	if err != nil {
		return err
	}
	path := c.lab.Node(server).UploadPath(s.Name)
	stored, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if sha256.Sum256(stored) != sha256.Sum256(content) {
		return fmt.Errorf("%s: server %s stored %d bytes that are not those of the file", s.Name, server, len(stored))
	}
	return os.Remove(path) // the next upload must create the file
}

// echo sends one datagram and returns the server that answered it.
func (c *client) echo(ctx context.Context, s lab.Service, content []byte) (server string, err error) {
	conn, err := c.lab.Node("client").Dial(ctx, "udp", s.Address().String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return exchange(conn, content)
}

// exchange sends a datagram and returns the name of the server that echoed it.
func exchange(conn net.Conn, content []byte) (server string, err error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := conn.Write(content); err != nil {
		return "", err
	}
	return receiveEcho(conn, content)
}

// receiveEcho returns the name of the server that echoed a datagram.
func receiveEcho(conn net.Conn, content []byte) (server string, err error) {
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	buf := make([]byte, 64<<10)
	n, err := conn.Read(buf)
	if err != nil {
		return "", err
	}
	server, reply, _ := strings.Cut(string(buf[:n]), "\n")
	if reply != string(content) {
		return server, fmt.Errorf("server %q: the %d bytes of the echo are not those sent", server, len(reply))
	}
	return server, nil
}

// spread makes connections to every TCP service. It returns an error unless exactly the named
// servers accept them.
func (c *client) spread(ctx context.Context, servers ...string) error {
	for _, s := range c.lab.Topology.Services {
		if s.Protocol != desired.TCP {
			continue
		}
		// Each of three servers gets a connection in all but one of 10^10 runs.
		visits, err := c.visit(ctx, s, 20*len(servers))
		if err != nil {
			return err
		}
		if got := slices.Sorted(maps.Keys(visits)); !slices.Equal(got, servers) {
			return fmt.Errorf("service %s: new connections go to %v, want %v", s.Name, visits, servers)
		}
	}
	return nil
}
