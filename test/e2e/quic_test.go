// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// quicLab returns a lab with UDP services in each encapsulation, for servers of HTTP/3.
func quicLab(servers int) lab.Topology {
	t := topology("echo6-insert", "echo6-encap", "echo4-gre", "echo4-ipip")
	t.Servers = servers
	return t
}

// serverID returns the server ID of a server in hexadecimal.
func serverID(server string) string {
	return fmt.Sprintf("c4%04s", strings.TrimPrefix(server, "s"))
}

// nextServerID returns the server ID of a server after a change of the form.
func nextServerID(server string) string { return "6d" + serverID(server) }

// quicForm returns the form of connection IDs before a change.
func quicForm() *desired.QUIC {
	return &desired.QUIC{
		Form: desired.QUICLB21, Rotation: 1, ServerIDLength: 3, NonceLength: 8,
		EncodeLength: true,
	}
}

// byID gives all services persistence quic.
func byID(cfg *desired.Balancer) {
	for i := range cfg.Services {
		s := &cfg.Services[i]
		s.Persistence = desired.PersistenceQUIC
		s.QUIC = quicForm()
		for j := range s.Servers {
			s.Servers[j].QUICID = serverID(s.Servers[j].Name)
		}
	}
}

// byBothIDs gives all services another form, and keeps the form of byID as the former one.
func byBothIDs(cfg *desired.Balancer) {
	byID(cfg)
	for i := range cfg.Services {
		s := &cfg.Services[i]
		s.FormerQUIC = s.QUIC
		s.QUIC = &desired.QUIC{
			Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 4, NonceLength: 6,
		}
		for j := range s.Servers {
			server := &s.Servers[j]
			server.FormerQUICID, server.QUICID = server.QUICID, nextServerID(server.Name)
		}
	}
}

// quicServers runs quiclb/example on all servers of a lab, in place of the UDP echo.
type quicServers struct {
	program string
	running map[string]*exec.Cmd // by server
	keys    []string             // hashes of the servers' public keys
}

func startQUICServers(t *testing.T, l *lab.Lab, flags ...string) *quicServers {
	t.Helper()
	s := &quicServers{
		program: filepath.Join(t.TempDir(), "quic-server"), running: map[string]*exec.Cmd{},
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", s.program,
		"../../quiclb/example")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the server: %v\n%s", err, out)
	}
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, "echo").Stop())
	}
	t.Cleanup(s.stop)
	s.start(t, l, flags...)
	return s
}

func (s *quicServers) start(t *testing.T, l *lab.Lab, flags ...string) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleServer) {
		s.startOne(t, l, name, append([]string{
			"-server-id", serverID(name), "-rotation", "1", "-encode-length",
		}, flags...)...)
	}
}

// startOne starts one server, and waits until it listens.
func (s *quicServers) startOne(t *testing.T, l *lab.Lab, name string, flags ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	must(t, err)
	t.Cleanup(func() {
		if text, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("%s: %s", name, text)
		}
		_ = log.Close()
	})
	port := l.Topology.Services[0].Port.Number()
	cmd := exec.Command(s.program, append(flags, "-listen", fmt.Sprintf(":%d", port))...)
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, l.Node(name).Start(cmd))
	s.running[name] = cmd
	line := make(chan string, 1)
	go func() {
		text, _ := bufio.NewReader(out).ReadString('\n')
		line <- text
	}()
	select {
	case text := <-line:
		var address, key string
		if _, err := fmt.Sscan(text, &address, &key); err != nil {
			t.Fatalf("%s: the server prints %q: %v", name, text, err)
		}
		s.keys = append(s.keys, key)
	case <-time.After(patience):
		t.Fatalf("%s: the server prints no line within %v", name, patience)
	}
}

// stop stops the servers.
func (s *quicServers) stop() {
	for name := range s.running {
		s.stopOne(name)
	}
	s.keys = nil
}

func (s *quicServers) stopOne(name string) {
	_ = s.running[name].Process.Kill()
	_ = s.running[name].Wait()
	delete(s.running, name)
}

// quicConnection is a connection of HTTP/3 from the lab's client.
type quicConnection struct {
	lab     *lab.Lab
	service lab.Service
	conn    *quic.Conn
	http    *http3.ClientConn
	server  string // the one that has answered
}

// dialQUIC opens a connection, and learns which server has it.
func dialQUIC(t *testing.T, l *lab.Lab, s lab.Service) *quicConnection {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	config := http3.ConfigureTLSConfig(&tls.Config{InsecureSkipVerify: true})
	to := net.UDPAddrFromAddrPort(s.Address())
	conn, err := quicTransport(t, l).Dial(ctx, to, config, nil)
	if err != nil {
		t.Fatalf("connect to %s: %v", s.Name, err)
	}
	c := &quicConnection{lab: l, service: s, conn: conn}
	c.http = (&http3.Transport{}).NewClientConn(conn)
	c.server, err = c.visit(t)
	must(t, err)
	return c
}

// quicTransport opens a socket on the lab's client, and so gives a connection another address.
func quicTransport(t *testing.T, l *lab.Lab) *quic.Transport {
	t.Helper()
	socket, err := l.Node("client").ListenPacket(t.Context(), "udp", ":0")
	must(t, err)
	transport := &quic.Transport{Conn: socket}
	t.Cleanup(func() {
		_ = transport.Close()
		_ = socket.Close()
	})
	return transport
}

// get requests so many octets. The caller closes the body.
func (c *quicConnection) get(t *testing.T, octets int) (*http.Response, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	url := fmt.Sprintf("https://%s/?octets=%d", c.service.Address(), octets)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	must(t, err)
	response, err := c.http.RoundTrip(request)
	if err != nil {
		return nil, fmt.Errorf("%s at %q: %w", c.service.Name, c.server, err)
	}
	return response, nil
}

// visit makes a small request. It returns the name of the server that answers.
func (c *quicConnection) visit(t *testing.T) (server string, err error) {
	t.Helper()
	response, err := c.get(t, 0)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return "", fmt.Errorf("%s at %q: %w", c.service.Name, c.server, err)
	}
	id := response.Header.Get("X-Segue-Server")
	for _, name := range nodes(c.lab, lab.RoleServer) {
		if id == serverID(name) || id == nextServerID(name) {
			return name, nil
		}
	}
	return "", fmt.Errorf("%s: unknown server ID %q", c.service.Name, id)
}

// requireServer requires that the connection's server still answers.
func (c *quicConnection) requireServer(t *testing.T) {
	t.Helper()
	if server, err := c.visit(t); err != nil || server != c.server {
		t.Errorf("%s: server %s answered before, now %q: %v",
			c.service.Name, c.server, server, err)
	}
}

// move continues the connection from another port of the client.
func (c *quicConnection) move(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	path, err := c.conn.AddPath(quicTransport(t, c.lab))
	must(t, err)
	if err := path.Probe(ctx); err != nil {
		t.Fatalf("%s at %s: probe another path: %v", c.service.Name, c.server, err)
	}
	must(t, path.Switch())
}

// TestQUICClientsMove downloads while the client's address changes. Hash would place most addresses
// on another server than the connection's. Then servers let clients prove their addresses by Retry
// packets.
func TestQUICClientsMove(t *testing.T) {
	t.Parallel()
	l := up(t, quicLab(3))
	servers := startQUICServers(t, l)
	reconfigure(t, l, byID)
	for _, s := range l.Topology.Services {
		c := dialQUIC(t, l, s)
		const moves, part = 6, 1 << 20
		response, err := c.get(t, (moves+1)*part)
		must(t, err)
		got := int64(0)
		for range moves {
			n, err := io.CopyN(io.Discard, response.Body, part)
			must(t, err)
			got += n
			c.move(t)
		}
		n, err := io.Copy(io.Discard, response.Body)
		must(t, err)
		must(t, response.Body.Close())
		if got += n; got <= (moves+1)*part {
			t.Errorf("%s: %d octets of the download arrived", s.Name, got)
		}
		c.requireServer(t)
	}
	servers.stop()
	servers.start(t, l, "-retry")
	answered := map[string]bool{}
	for _, s := range l.Topology.Services {
		for range 5 {
			c := dialQUIC(t, l, s)
			answered[c.server] = true
			c.move(t)
			c.requireServer(t)
		}
	}
	// One of three servers gets none of 20 connections with a probability of 0.001.
	if len(answered) < 2 {
		t.Errorf("only %v answer", answered)
	}
	requireNoDrops(t, l)
}

// TestQUICServersComeAndGo removes a server, adds others and drains one under live connections.
// Then all packets go to the other balancer. Connections of servers that stay are not affected.
func TestQUICServersComeAndGo(t *testing.T) {
	t.Parallel()
	l := up(t, quicLab(5))
	startQUICServers(t, l)
	with := func(names ...string) func(*desired.Balancer) {
		return func(cfg *desired.Balancer) {
			byID(cfg)
			keepServers(cfg, names...)
		}
	}
	reconfigure(t, l, with("s1", "s2", "s3"))
	must(t, l.SetNextHops("lb1"))
	var live []*quicConnection
	for _, s := range l.Topology.Services {
		for range 10 {
			live = append(live, dialQUIC(t, l, s))
		}
	}
	stay := func(moves bool) (left int) {
		t.Helper()
		for _, c := range live {
			if c.server == "s1" {
				left++
				continue
			}
			if moves {
				c.move(t)
			}
			c.requireServer(t)
		}
		return left
	}
	reconfigure(t, l, with("s2", "s3", "s4", "s5"))
	if left := stay(false); left == 0 || left == len(live) {
		t.Errorf("%d of %d connections are of the server that leaves", left, len(live))
	}
	awaitServers(t, l)
	reconfigure(t, l, func(cfg *desired.Balancer) {
		with("s2", "s3", "s4", "s5")(cfg)
		drain(cfg, "s2")
	})
	stay(true)
	must(t, l.SetNextHops("lb2"))
	stay(false)
	stay(true)
	if counted := packetCounts(t, l.Node("lb2")); counted["forward_known"] == 0 {
		t.Errorf("lb2 has counted no packets of connections: %v", counted)
	}
	for _, s := range l.Topology.Services {
		if c := dialQUIC(t, l, s); c.server == "s1" || c.server == "s2" {
			t.Errorf("%s places a new connection on %s", s.Name, c.server)
		}
	}
	requireNoDrops(t, l)
}

// requireForms requires that the status of lb1 shows the forms of a configuration.
func requireForms(t *testing.T, l *lab.Lab, change func(*desired.Balancer)) {
	t.Helper()
	cfg := l.Node("lb1").BalancerConfig()
	change(&cfg)
	view, err := inspect.OpenView(l.Node("lb1").Instance())
	must(t, err)
	defer view.Close()
	state, err := view.Snapshot()
	must(t, err)
	for _, s := range state.Services {
		i := slices.IndexFunc(cfg.Services, func(c desired.Service) bool { return c.Name == s.Name })
		want := []*desired.QUIC{cfg.Services[i].QUIC, cfg.Services[i].FormerQUIC}
		if diff := cmp.Diff(want, []*desired.QUIC{s.QUIC, s.FormerQUIC}); diff != "" {
			t.Errorf("%s: forms (-want +got):\n%s", s.Name, diff)
		}
	}
}

// TestQUICRotation changes the form of connection IDs under live connections: first on the
// balancers, then on one of the servers. Connections of both forms follow their clients. When the
// balancers know the new form alone, its connections go on.
func TestQUICRotation(t *testing.T) {
	t.Parallel()
	l := up(t, quicLab(3))
	servers := startQUICServers(t, l)
	reconfigure(t, l, byID)
	requireForms(t, l, byID)
	dial := func() (all []*quicConnection) {
		for _, s := range l.Topology.Services {
			for range 5 {
				all = append(all, dialQUIC(t, l, s))
			}
		}
		return all
	}
	// stay moves the clients of all connections that servers have kept.
	stay := func(all []*quicConnection, kept func(server string) bool) {
		t.Helper()
		stayed := 0
		for _, c := range all {
			if kept(c.server) {
				c.move(t)
				c.requireServer(t)
				stayed++
			}
		}
		if stayed == 0 {
			t.Error("no server has kept a connection")
		}
	}
	others := func(server string) bool { return server != "s1" }
	former := dial()
	reconfigure(t, l, byBothIDs)
	requireForms(t, l, byBothIDs)
	stay(former, func(string) bool { return true })
	servers.stopOne("s1")
	servers.startOne(t, l, "s1", "-server-id", nextServerID("s1"), "-rotation", "2",
		"-nonce-length", "6")
	stay(former, others)
	mixed := dial()
	stay(mixed, func(string) bool { return true })
	reconfigure(t, l, func(cfg *desired.Balancer) {
		byBothIDs(cfg)
		for i := range cfg.Services {
			cfg.Services[i].FormerQUIC = nil
			for j := range cfg.Services[i].Servers {
				cfg.Services[i].Servers[j].FormerQUICID = ""
			}
		}
	})
	stay(mixed, func(server string) bool { return server == "s1" })
	requireNoDrops(t, l)
}

// quicIDs counts the connection IDs that a server's agent has compared, by result.
func quicIDs(t *testing.T, l *lab.Lab, server string) map[string]uint64 {
	t.Helper()
	view, err := agent.OpenView(l.Node(server).Instance())
	must(t, err)
	defer view.Close()
	state, err := view.Snapshot()
	must(t, err)
	all := map[string]uint64{}
	for _, s := range state.Services {
		for result, ids := range s.QUIC.IDs {
			all[result] += ids.Packets
		}
	}
	return all
}

// requireOwnIDs requires that a server's agent has counted the server's own IDs only.
func requireOwnIDs(t *testing.T, l *lab.Lab, server string) {
	t.Helper()
	ids := quicIDs(t, l, server)
	if ids["issued_own"] == 0 || ids["issued_other"] != 0 || ids["delivered_other"] != 0 {
		t.Errorf("%s counts the IDs %v", server, ids)
	}
	if log := readLog(t, l.Process(server, "agent")); strings.Contains(log, "connection IDs") {
		t.Errorf("the agent of %s warns:\n%s", server, log)
	}
}

// dialUntil opens connections, which may fail, until these servers count IDs with the result.
func dialUntil(t *testing.T, l *lab.Lab, result string, servers ...string) {
	t.Helper()
	config := http3.ConfigureTLSConfig(&tls.Config{InsecureSkipVerify: true})
	to := net.UDPAddrFromAddrPort(l.Topology.Services[0].Address())
	eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _ = quicTransport(t, l).Dial(ctx, to, config, nil)
		for _, name := range servers {
			if quicIDs(t, l, name)[result] == 0 {
				return fmt.Errorf("%s counts no ID as %s", name, result)
			}
		}
		return nil
	})
}

// TestQUICServerIDs gives a server a program that issues the ID of another server, as a copied
// image does. Its connections fail, and balancers count their packets as known: only its agent
// notices. Then the balancers have exchanged the IDs of two servers, and both agents notice.
func TestQUICServerIDs(t *testing.T) {
	t.Parallel()
	l := up(t, quicLab(2))
	servers := startQUICServers(t, l)
	reconfigure(t, l, byID)
	for _, name := range nodes(l, lab.RoleServer) {
		reagent(t, l, name, func(s *desired.AgentService) {
			s.QUIC, s.QUICID = quicForm(), serverID(name)
		})
	}
	for _, s := range l.Topology.Services {
		for range 10 {
			c := dialQUIC(t, l, s)
			c.move(t)
			c.requireServer(t)
		}
	}
	requireOwnIDs(t, l, "s1")
	requireOwnIDs(t, l, "s2")

	before := packetCounts(t, l.Node("lb1"))
	servers.stopOne("s2")
	servers.startOne(t, l, "s2", "-server-id", serverID("s1"), "-rotation", "1", "-encode-length")
	dialUntil(t, l, "issued_other", "s2")
	eventually(t, func() error {
		log := readLog(t, l.Process("s2", "agent"))
		for _, text := range []string{
			"level=WARN", "issues connection IDs", "service=" + l.Topology.Services[0].Name,
			"last_id=2b" + serverID("s1"), "quic_id=" + serverID("s2"),
		} {
			if !strings.Contains(log, text) {
				return fmt.Errorf("the log of the agent of s2 has no %s", text)
			}
		}
		return nil
	})
	requireOwnIDs(t, l, "s1")
	after := packetCounts(t, l.Node("lb1"))
	if after["forward_recover"] != before["forward_recover"] {
		t.Errorf("lb1 counts packets that name no server: %v, then %v", before, after)
	}
	counted := quicIDs(t, l, "s2")
	must(t, l.Process("s2", "agent").Stop())
	must(t, l.Process("s2", "agent").Start(t.Context()))
	if now := quicIDs(t, l, "s2"); now["issued_other"] < counted["issued_other"] {
		t.Errorf("a restart of the agent of s2 lost counts: %v, then %v", counted, now)
	}

	servers.stopOne("s2")
	servers.startOne(t, l, "s2", "-server-id", serverID("s2"), "-rotation", "1", "-encode-length")
	reconfigure(t, l, func(cfg *desired.Balancer) {
		byID(cfg)
		for i := range cfg.Services {
			s := cfg.Services[i].Servers
			s[0].QUICID, s[1].QUICID = s[1].QUICID, s[0].QUICID
		}
	})
	dialUntil(t, l, "delivered_other", "s1", "s2")
}
