// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// patience bounds every wait for the network. It does not measure speed: the machine may be busy,
// or stand still for a while.
const patience = 60 * time.Second

// noTCX replaces link.AttachTCX to act as a kernel older than 6.6.
func noTCX(link.TCXOptions) (link.Link, error) { return nil, ebpf.ErrNotSupported }

// network is a client, a router and servers. The client is also the balancer: its packets to a VIP
// go through a tunnel interface to the test, which encapsulates them.
type network struct {
	t       *testing.T
	number  uint32 // of this network in this process
	client  *testhost.Namespace
	router  *testhost.Namespace
	servers []*testhost.Namespace
	gateway packet.MAC // the router's address on the client's link
	tun     *os.File
	raw     int // packet socket of the client

	mu        sync.Mutex
	encap     packet.Encap
	hunting   *hunting   // used instead of encap
	stateless *stateless // used instead of both
}

// networks is the number of networks that this process has made.
var networks atomic.Uint32

func newNetwork(t *testing.T, servers int) *network {
	t.Helper()
	testhost.NeedAgent(t)
	testhost.NeedTUN(t)
	n := &network{t: t, number: networks.Add(1), client: testhost.NewNamespace(t), router: testhost.NewNamespace(t)}
	testhost.Connect(t, n.client, "eth0", testhost.Prefixes("fd00:c::2/64", "10.0.0.2/24"),
		n.router, "client", testhost.Prefixes("fd00:c::1/64", "10.0.0.1/24"))
	n.in(n.router, func() error {
		for _, family := range []string{"ipv4", "ipv6"} {
			path := filepath.Join("/proc/sys/net", family, "conf/all/forwarding")
			if err := os.WriteFile(path, []byte("1"), 0); err != nil {
				return err
			}
		}
		l, err := netlink.LinkByName("client")
		if err == nil {
			n.gateway = packet.MAC(l.Attrs().HardwareAddr)
		}
		return err
	})
	for i := range servers {
		n.addServer(i + 1)
	}
	n.route(n.client, "fd00:5::/32", "fd00:c::1")
	n.route(n.client, "10.0.0.0/8", "10.0.0.1")
	n.balance()
	return n
}

// in runs f inside a namespace. An error ends the test.
func (n *network) in(ns *testhost.Namespace, f func() error) {
	n.t.Helper()
	testhost.Must(n.t, ns.Do(f))
}

func (n *network) route(ns *testhost.Namespace, to, via string) {
	n.t.Helper()
	_, dst, err := net.ParseCIDR(to)
	testhost.Must(n.t, err)
	n.in(ns, func() error { return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)}) })
}

func (n *network) addServer(i int) {
	server := testhost.NewNamespace(n.t)
	testhost.Connect(n.t, server, "eth0", testhost.Prefixes(fmt.Sprintf("fd00:5:%d::2/64", i), fmt.Sprintf("10.0.%d.2/24", i)),
		n.router, fmt.Sprintf("server%d", i), testhost.Prefixes(fmt.Sprintf("fd00:5:%d::1/64", i), fmt.Sprintf("10.0.%d.1/24", i)))
	n.route(server, "::/0", fmt.Sprintf("fd00:5:%d::1", i))
	n.route(server, "0.0.0.0/0", fmt.Sprintf("10.0.%d.1", i))
	n.route(n.router, fmt.Sprintf("fd00:5:0:%d::/64", i), fmt.Sprintf("fd00:5:%d::2", i))
	n.servers = append(n.servers, server)
}

// balance starts the client's balancer.
func (n *network) balance() {
	n.in(n.client, func() (err error) {
		if n.tun, err = openTUN("vips"); err != nil {
			return err
		}
		l, err := netlink.LinkByName("vips")
		if err != nil {
			return err
		}
		for vip, source := range map[netip.Addr]string{vip4.Addr(): "10.0.0.2", vip6.Addr(): "fd00:c::2"} {
			route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: hostAddress(vip).IPNet, Src: net.ParseIP(source)}
			if err := errors.Join(netlink.LinkSetUp(l), netlink.RouteAdd(route)); err != nil {
				return err
			}
		}
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		if n.raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(n.raw, &unix.SockaddrLinklayer{Ifindex: eth0.Index})
	})
	done, t := make(chan struct{}), n.t
	go func() {
		defer close(done)
		n.wrapAll(t)
	}()
	n.t.Cleanup(func() {
		_ = n.tun.Close()
		<-done
		_ = unix.Close(n.raw)
	})
}

func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the tunnel device: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, fmt.Errorf("make tunnel interface %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// wrapAll encapsulates the packets that the client sends to VIPs. It ends when the tunnel interface
// is closed. If the balancer hunts, wrapAll also receives the servers' signals.
func (n *network) wrapAll(t *testing.T) {
	buffer := make([]byte, 65536)
	for {
		length, err := n.tun.Read(buffer)
		if err != nil {
			return // the interface was closed
		}
		etherType := []byte{0x86, 0xdd}
		if buffer[0]>>4 == 4 {
			etherType = []byte{8, 0}
		}
		frame := append(append(make([]byte, 12, 14+length), etherType...), buffer[:length]...)
		n.mu.Lock()
		e, h, s := n.encap, n.hunting, n.stateless
		n.mu.Unlock()
		if s != nil {
			var ok bool
			if e, ok = s.place(frame); !ok {
				continue
			}
		}
		isV6 := buffer[0]>>4 == 6
		isForBalancer := isV6 && buffer[24] == 0xfd && buffer[27] == 0x6c // fd00:6c::/32
		if h != nil && isForBalancer {
			if err := h.take(frame); err != nil {
				t.Errorf("take a signal of %d bytes: %v", len(frame), err)
			}
			continue
		}
		if h != nil {
			e = h.place(frame)
		}
		e.NextHop = n.gateway
		wrapped, err := packet.Encapsulate(frame, e)
		if err != nil {
			continue // for example neighbour discovery
		}
		if _, err := unix.Write(n.raw, wrapped); err != nil {
			t.Errorf("send %d bytes in %s: %v", len(wrapped), e.Kind, err)
		}
	}
}

func (n *network) use(e packet.Encap) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.encap = e
}

// serverSID returns the SID deliver of a server. Servers are numbered from 1.
func serverSID(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:5:0:%d:5::", i)) }

// running is a running agent.
type running struct {
	*Agent
	stop func()
}

func (n *network) config(server int, encapsulation desired.Encapsulation, vips ...netip.Addr) *desired.Agent {
	yes := true
	cfg := &desired.Agent{Node: desired.AgentNode{
		Instance: fmt.Sprintf("test-%d-%d-server%d", os.Getpid(), n.number, server), Interface: "eth0", AssignVIPs: &yes,
		Locator: netip.PrefixFrom(serverSID(server), 64).Masked(),
		Addresses: []netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("10.0.%d.2", server)), netip.MustParseAddr(fmt.Sprintf("fd00:5:%d::2", server)),
		},
	}}
	for _, vip := range vips {
		for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
			cfg.Services = append(cfg.Services, desired.AgentService{
				Name: fmt.Sprint(vip, protocol), VIP: vip, Port: 80, Protocol: protocol, Encapsulation: encapsulation,
			})
		}
	}
	return cfg
}

// run starts an agent on a server. The agent is stopped and detached when the test ends.
func (n *network) run(server int, cfg *desired.Agent, attachTCX func(link.TCXOptions) (link.Link, error)) *running {
	n.t.Helper()
	ns := n.servers[server-1]
	var reused *reusable
	if _, err := os.Stat(datapath.Dir(cfg.Node.Instance)); errors.Is(err, os.ErrNotExist) {
		reused = reuseFor(n.t, &cfg.Node)
	}
	a, err := New(cfg, secretsOf(n.t, cfg), slog.New(slog.DiscardHandler))
	testhost.Must(n.t, err)
	if reused != nil {
		reused.record(n.t, a.kernel)
	}
	a.kernel.loader.AttachTCX = attachTCX
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- ns.Do(func() error { return a.Run(ctx) }) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(<-done, a.Close()); err != nil {
			n.t.Error(err)
		}
	})
	n.t.Cleanup(func() {
		if n.t.Failed() {
			n.t.Logf("counters of server %d: %v", server, counters(n.t, a.kernel))
		}
		stop()
		if _, err := os.Stat(datapath.Dir(cfg.Node.Instance)); err == nil {
			n.detach(server, cfg.Node.Instance)
		}
	})
	select {
	case <-a.Ready():
	case <-time.After(patience):
		n.t.Fatal("the agent is not ready")
	case err := <-done:
		done <- err
		n.t.Fatal("the agent ended early")
	}
	return &running{a, stop}
}

func (n *network) detach(server int, instance string) {
	n.t.Helper()
	n.in(n.servers[server-1], func() error { return Detach(instance) })
}

// serve echoes TCP and UDP on a VIP of a server until the test ends.
func (n *network) serve(server int, vip netip.Addr) {
	n.t.Helper()
	ends := n.t.Context() // ends before the cleanups run
	var listener *net.TCPListener
	var conn *net.UDPConn
	n.in(n.servers[server-1], func() (err error) {
		addr := netip.AddrPortFrom(vip, 80)
		if listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr)); err != nil {
			return err
		}
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
		return err
	})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			// The client may be unable to close its end.
			stop := context.AfterFunc(ends, func() { _ = c.Close() })
			group.Go(func() {
				defer stop()
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	group.Go(func() {
		buffer := make([]byte, 2048)
		for {
			length, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(buffer[:length], from)
		}
	})
	n.t.Cleanup(func() {
		_, _ = listener.Close(), conn.Close()
		group.Wait()
	})
}

func (n *network) dial(vip netip.Addr) *net.TCPConn {
	n.t.Helper()
	var c *net.TCPConn
	n.in(n.client, func() error {
		dialer := net.Dialer{Timeout: patience}
		conn, err := dialer.Dial("tcp", netip.AddrPortFrom(vip, 80).String())
		if err == nil {
			c = conn.(*net.TCPConn)
		}
		return err
	})
	n.t.Cleanup(func() { _ = c.Close() })
	testhost.Must(n.t, c.SetDeadline(time.Now().Add(patience)))
	return c
}

// echo sends size bytes and expects to receive them again.
func (n *network) echo(c net.Conn, size int) {
	n.t.Helper()
	sent := bytes.Repeat([]byte("segue "), size/6+1)[:size]
	failed := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		failed <- err
	}()
	got := make([]byte, size)
	_, err := io.ReadFull(c, got)
	if err := errors.Join(err, <-failed); err != nil {
		n.t.Fatalf("echo of %d bytes: %v", size, err)
	}
	if !bytes.Equal(sent, got) {
		n.t.Fatalf("echo of %d bytes came back different", size)
	}
}

func (n *network) dialUDP(vip netip.Addr) *net.UDPConn {
	n.t.Helper()
	var c *net.UDPConn
	n.in(n.client, func() (err error) {
		c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(vip, 80)))
		return err
	})
	n.t.Cleanup(func() { _ = c.Close() })
	testhost.Must(n.t, c.SetDeadline(time.Now().Add(patience)))
	return c
}

// mss returns the size of the largest segment that a connection sends, in bytes.
func mss(t *testing.T, c *net.TCPConn) int {
	t.Helper()
	raw, err := c.SyscallConn()
	testhost.Must(t, err)
	var info *unix.TCPInfo
	if err := errors.Join(err, raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}), err); err != nil {
		t.Fatal(err)
	}
	return int(info.Snd_mss)
}
