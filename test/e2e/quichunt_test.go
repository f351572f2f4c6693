// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/quic-go/quic-go/http3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/loadshm"
)

// quicHunt is a lab whose servers of HTTP/3 decide by loads that the test sets.
type quicHunt struct {
	*lab.Lab
	servers *quicServers
	loads   map[string]*loadshm.Reporter // by server
	dialled int                          // connections of clients so far
}

func upQUICHunt(t *testing.T, flags ...string) *quicHunt {
	t.Helper()
	h := &quicHunt{Lab: up(t, topology("echo6-insert", "echo6-encap", "echo4-encap")), loads: map[string]*loadshm.Reporter{}}
	h.servers = startQUICServers(t, h.Lab, flags...)
	for _, name := range nodes(h.Lab, lab.RoleServer) {
		path := filepath.Join(t.TempDir(), "load")
		load, err := loadshm.Open(path, 1)
		must(t, err)
		t.Cleanup(func() { _ = load.Close() })
		h.loads[name] = load
		reagent(t, h.Lab, name, func(s *desired.AgentService) {
			s.Load = desired.Source{Kind: desired.LoadSharedMemory, Path: path}
		})
	}
	reconfigure(t, h.Lab, func(cfg *desired.Balancer) {
		byID(cfg)
		for i := range cfg.Services {
			cfg.Services[i].Placement = desired.PlacementHunt
		}
	})
	return h
}

// set sets the loads of s1, s2 and s3, and waits until their agents know them.
func (h *quicHunt) set(t *testing.T, loads ...int) {
	t.Helper()
	for i, name := range nodes(h.Lab, lab.RoleServer) {
		h.loads[name].Set(uint32(loads[i]), 1)
		for _, s := range h.Topology.Services {
			awaitLoad(t, h.Lab, name, s.Name, loads[i])
		}
	}
}

// dial opens a connection, whose address then changes. server is the server that must get it; empty:
// any.
func (h *quicHunt) dial(t *testing.T, s lab.Service, server string) {
	t.Helper()
	c := dialQUIC(t, h.Lab, s)
	h.dialled++
	if server != "" && c.server != server {
		t.Errorf("%s: the connection is on %s, want %s", s.Name, c.server, server)
	}
	c.move(t)
	c.requireServer(t)
}

// requireOnce requires that each connection was accepted by one server, and only once, and that no
// packet was lost. A second server would count if it had got one of two datagrams of a handshake.
func (h *quicHunt) requireOnce(t *testing.T) {
	t.Helper()
	accepted := uint64(0)
	for _, name := range nodes(h.Lab, lab.RoleServer) {
		states, err := h.Node(name).AcceptStates()
		must(t, err)
		for _, state := range states {
			for _, result := range []string{"accepted", "accepted_stale", "accepted_least", "taken_back", "forced"} {
				accepted += state.Offers[result]
			}
		}
		if n := packetCounts(t, h.Node(name))["next_not_local"]; n != 0 {
			t.Errorf("%s has passed on %d packets that name it", name, n)
		}
	}
	if accepted != uint64(h.dialled) {
		t.Errorf("servers have accepted %d connections of %d", accepted, h.dialled)
	}
	requireNoDrops(t, h.Lab)
	requireAllDelivered(t, h.Lab)
}

// TestQUICHunts opens connections of HTTP/3 to servers that decide. Each ClientHello has a
// post-quantum key share, and so needs two datagrams.
func TestQUICHunts(t *testing.T) {
	t.Parallel()
	h := upQUICHunt(t)
	all := func(server string) {
		t.Helper()
		for _, s := range h.Topology.Services {
			for range 4 {
				h.dial(t, s, server)
			}
		}
	}
	h.set(t, 0, 0, 0)
	all("")
	h.set(t, 2, 3, 0)
	all("s3") // busy servers pass connections on
	h.set(t, 5, 3, 4)
	all("s2") // the last candidate hands them back
	h.dialEarly(t)

	h.servers.stop()
	h.servers.start(t, h.Lab, "-retry")
	for range 5 { // loads change during handshakes
		for _, s := range h.Topology.Services {
			for _, load := range h.loads {
				load.Set(rand.Uint32N(3), 1)
			}
			h.dial(t, s, "")
		}
	}
	h.requireOnce(t)
}

// dialEarly opens a connection, and then another one, whose request is in 0-RTT packets. Only the
// same server can read these.
func (h *quicHunt) dialEarly(t *testing.T) {
	t.Helper()
	h.set(t, 0, 2, 2)
	s := h.Topology.Services[0]
	config := http3.ConfigureTLSConfig(&tls.Config{
		InsecureSkipVerify: true, ClientSessionCache: tls.NewLRUClientSessionCache(1), ServerName: "h3",
	})
	for _, isEarly := range []bool{false, true} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err := quicTransport(t, h.Lab).DialEarly(ctx, net.UDPAddrFromAddrPort(s.Address()), config, nil)
		must(t, err)
		h.dialled++
		c := &quicConnection{lab: h.Lab, service: s, conn: conn, http: (&http3.Transport{}).NewClientConn(conn)}
		server, err := c.visit(t)
		must(t, err)
		<-conn.HandshakeComplete()
		if used := conn.ConnectionState().Used0RTT; used != isEarly || server != "s1" {
			t.Errorf("the connection is on %s, with 0-RTT: %t, want %t", server, used, isEarly)
		}
		must(t, conn.CloseWithError(0, ""))
	}
}

// TestAioquicHunts is TestQUICHunts for clients with another implementation of QUIC.
func TestAioquicHunts(t *testing.T) {
	t.Parallel()
	tool, err := filepath.Abs("../../.tools/aioquic")
	must(t, err)
	if _, err := os.Stat(tool); err != nil {
		t.Skipf("needs aioquic, which make setup-test installs: %v", err)
	}
	h := upQUICHunt(t, "-retry")
	for _, s := range h.Topology.Services {
		for _, busy := range [][]int{{0, 0, 0}, {2, 0, 2}, {9, 9, 8}} {
			h.set(t, busy...)
			const count = 4
			for _, server := range h.visitByAioquic(t, tool, s, count) {
				if want := slices.Index(busy, slices.Min(busy)); slices.Max(busy) > 0 && server != nodes(h.Lab, lab.RoleServer)[want] {
					t.Errorf("%s with the loads %v: a connection is on %s", s.Name, busy, server)
				}
			}
			h.dialled += count
		}
	}
	h.requireOnce(t)
}

// visitByAioquic opens connections, whose addresses change. It returns their servers.
func (h *quicHunt) visitByAioquic(t *testing.T, tool string, s lab.Service, count int) (servers []string) {
	t.Helper()
	client := exec.Command("python3", "testdata/aioquic_client.py",
		s.Address().Addr().String(), fmt.Sprint(s.Address().Port()), fmt.Sprint(count))
	client.Env = append(os.Environ(), "PYTHONPATH="+tool, "PYTHONDONTWRITEBYTECODE=1")
	var out, problems bytes.Buffer
	client.Stdout, client.Stderr = &out, &problems
	must(t, h.Node("client").Start(client))
	if err := client.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s", s.Name, err, problems.Bytes())
	}
	ids := strings.Fields(out.String())
	if len(ids) != 2*count {
		t.Fatalf("%s: the client prints %q", s.Name, ids)
	}
	for i := 0; i < len(ids); i += 2 {
		at := slices.IndexFunc(nodes(h.Lab, lab.RoleServer), func(name string) bool { return serverID(name) == ids[i] })
		if at < 0 || ids[i+1] != ids[i] {
			t.Fatalf("%s: the servers %s and %s have answered", s.Name, ids[i], ids[i+1])
		}
		servers = append(servers, nodes(h.Lab, lab.RoleServer)[at])
	}
	return servers
}
