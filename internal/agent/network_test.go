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
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testnet"
)

// patience bounds every wait for the network.
const patience = 10 * time.Second

// noTCX stands for a kernel older than 6.6.
func noTCX(link.TCXOptions) (link.Link, error) { return nil, ebpf.ErrNotSupported }

func prefixes(all ...string) (out []netip.Prefix) {
	for _, p := range all {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// network is a client, a router and servers. The client is its own balancer: what it sends to a VIP
// goes through a tunnel interface to the test, which wraps it.
type network struct {
	t       *testing.T
	client  *testnet.Namespace
	router  *testnet.Namespace
	servers []*testnet.Namespace
	gateway packet.MAC // the router, as the client sees it
	tun     *os.File
	raw     int // packet socket of the client

	mu    sync.Mutex
	encap packet.Encap
}

func newNetwork(t *testing.T, servers int) *network {
	n := &network{t: t, client: testnet.New(t), router: testnet.New(t)}
	testnet.Connect(t, n.client, "eth0", prefixes("fd00:c::2/64", "10.0.0.2/24"),
		n.router, "client", prefixes("fd00:c::1/64", "10.0.0.1/24"))
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

// in runs f inside a namespace; an error ends the test.
func (n *network) in(ns *testnet.Namespace, f func() error) {
	n.t.Helper()
	if err := ns.Do(f); err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) route(ns *testnet.Namespace, to, via string) {
	n.t.Helper()
	_, dst, err := net.ParseCIDR(to)
	if err != nil {
		n.t.Fatal(err)
	}
	n.in(ns, func() error { return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)}) })
}

func (n *network) addServer(i int) {
	server := testnet.New(n.t)
	testnet.Connect(n.t, server, "eth0", prefixes(fmt.Sprintf("fd00:5:%d::2/64", i), fmt.Sprintf("10.0.%d.2/24", i)),
		n.router, fmt.Sprintf("server%d", i), prefixes(fmt.Sprintf("fd00:5:%d::1/64", i), fmt.Sprintf("10.0.%d.1/24", i)))
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
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.wrapAll()
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

func (n *network) wrapAll() {
	buffer := make([]byte, 65536)
	for {
		length, err := n.tun.Read(buffer)
		if err != nil {
			return // closed
		}
		etherType := []byte{0x86, 0xdd}
		if buffer[0]>>4 == 4 {
			etherType = []byte{8, 0}
		}
		frame := append(append(make([]byte, 12, 14+length), etherType...), buffer[:length]...)
		n.mu.Lock()
		e := n.encap
		n.mu.Unlock()
		e.NextHop = n.gateway
		wrapped, err := packet.Encapsulate(frame, e)
		if err != nil {
			continue // neighbour discovery and the like
		}
		if _, err := unix.Write(n.raw, wrapped); err != nil {
			n.t.Errorf("send %d bytes in %s: %v", len(wrapped), e.Kind, err)
		}
	}
}

func (n *network) use(e packet.Encap) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.encap = e
}

// serverSID is the SID deliver of a server, counted from 1.
func serverSID(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:5:0:%d:5::", i)) }

// running is an agent at work.
type running struct {
	*Agent
	stop func()
}

func (n *network) config(server int, encapsulation config.Encapsulation, vips ...netip.Addr) *config.Agent {
	yes := true
	cfg := &config.Agent{Node: config.AgentNode{
		Instance: fmt.Sprintf("test-%d-server%d", os.Getpid(), server), Interface: "eth0", AssignVIPs: &yes,
		Locator: netip.PrefixFrom(serverSID(server), 64).Masked(),
		Addresses: []netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("10.0.%d.2", server)), netip.MustParseAddr(fmt.Sprintf("fd00:5:%d::2", server)),
		},
	}}
	for _, vip := range vips {
		for _, protocol := range []config.Protocol{config.TCP, config.UDP} {
			cfg.Services = append(cfg.Services, config.AgentService{
				Name: fmt.Sprint(vip, protocol), VIP: vip, Port: 80, Protocol: protocol, Encapsulation: encapsulation,
			})
		}
	}
	return cfg
}

// run starts an agent on a server; it is stopped, and detached, with the test.
func (n *network) run(server int, cfg *config.Agent, attachTCX func(link.TCXOptions) (link.Link, error)) *running {
	n.t.Helper()
	ns := n.servers[server-1]
	a, err := New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		n.t.Fatal(err)
	}
	a.kernel.tc.attachTCX = attachTCX
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
	ends := n.t.Context() // before the cleanups run
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
			// The client's end may have no way to say that it is gone.
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
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		n.t.Fatal(err)
	}
	return c
}

// echo sends size bytes and wants them back.
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
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		n.t.Fatal(err)
	}
	return c
}

// mss is the largest segment that a connection sends.
func mss(t *testing.T, c *net.TCPConn) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if err := errors.Join(err, raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}), err); err != nil {
		t.Fatal(err)
	}
	return int(info.Snd_mss)
}

// way is one encapsulation to server 1, and the MSS that it leaves of 1500 bytes to IPv6.
type way struct {
	name   string
	encap  packet.Encap
	reason string
	mss6   int
}

func ways() []way {
	tunnelTo := func(kind config.Encapsulation, source, destination string) packet.Encap {
		return packet.Encap{Kind: kind, Source: netip.MustParseAddr(source), Destination: netip.MustParseAddr(destination)}
	}
	return []way{
		{"insert", srv6(config.SRv6Insert, serverSID(1)), "deliver_srv6_insert", 1384},
		{"encap", srv6(config.SRv6Encap, serverSID(1)), "deliver_srv6_encap", 1400},
		{"gre over IPv4", tunnelTo(config.GRE, "10.0.0.2", "10.0.1.2"), "deliver_gre", 1396},
		{"gre over IPv6", tunnelTo(config.GRE, "fd00:c::2", "fd00:5:1::2"), "deliver_gre", 1396},
		{"ipip over IPv4", tunnelTo(config.IPIP, "10.0.0.2", "10.0.1.2"), "deliver_ipip", 1400},
		{"ipip over IPv6", tunnelTo(config.IPIP, "fd00:c::2", "fd00:5:1::2"), "deliver_ipip", 1400},
	}
}

// TestDelivers has real connections in every encapsulation, over both ways to attach to tc.
func TestDelivers(t *testing.T) {
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			cfg := n.config(1, config.SRv6Encap, vip4.Addr(), vip6.Addr())
			a := n.run(1, cfg, attachTCX)
			n.serve(1, vip4.Addr())
			n.serve(1, vip6.Addr())
			for _, w := range ways() {
				n.use(w.encap)
				next := n.config(1, w.encap.Kind, vip4.Addr(), vip6.Addr())
				if err := a.Reload(t.Context(), next); err != nil {
					t.Fatal(err)
				}
				for _, vip := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
					if vip.Is4() && w.encap.Kind == config.SRv6Insert {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s", w.name, vip), func(t *testing.T) {
						n.deliver(t, a.Agent, w, vip)
					})
				}
			}
		})
	}
}

func (n *network) deliver(t *testing.T, a *Agent, w way, vip netip.Addr) {
	outer := n.t
	n.t = t
	defer func() { n.t = outer }()
	before := counters(t, a.kernel)
	c := n.dial(vip)
	n.echo(c, 300_000)
	want := w.mss6
	if vip.Is4() {
		want += 20
	}
	if got := mss(t, c) + 12; got != want { // 12: timestamps
		t.Errorf("MSS %d, want %d", got, want)
	}
	n.echo(n.dialUDP(vip), 1000)
	after := changed(before, counters(t, a.kernel))
	if after[w.reason].Packets < 200 {
		t.Errorf("counters %v: want hundreds of %s", after, w.reason)
	}
	if after["syn_ack_clamped"].Packets == 0 {
		t.Errorf("counters %v: want a SYN-ACK clamped", after)
	}
	for reason := range after {
		if strings.HasPrefix(reason, "drop_") {
			t.Errorf("counters %v: want no drops", after)
		}
	}
}

// TestNextSegment goes through a server that does not have the VIP, and knows no neighbour yet.
func TestNextSegment(t *testing.T) {
	n := newNetwork(t, 2)
	first := n.run(1, n.config(1, config.SRv6Encap), link.AttachTCX)
	cfg := n.config(2, config.SRv6Encap, vip4.Addr(), vip6.Addr())
	cfg.Node.MTU = 1460 // every packet lists two servers here
	second := n.run(2, cfg, link.AttachTCX)
	n.serve(2, vip4.Addr())
	n.serve(2, vip6.Addr())
	for _, c := range []struct {
		kind config.Encapsulation
		vip  netip.Addr
	}{{config.SRv6Insert, vip6.Addr()}, {config.SRv6Encap, vip6.Addr()}, {config.SRv6Encap, vip4.Addr()}} {
		t.Run(fmt.Sprintf("%s/%s", c.kind, c.vip), func(t *testing.T) {
			outer := n.t
			n.t = t
			defer func() { n.t = outer }()
			n.use(srv6(c.kind, serverSID(1), serverSID(2)))
			before1, before2 := counters(t, first.kernel), counters(t, second.kernel)
			n.echo(n.dialUDP(c.vip), 1000)
			n.echo(n.dial(c.vip), 300_000)
			on, off := changed(before1, counters(t, first.kernel)), changed(before2, counters(t, second.kernel))
			if on["next_segment"].Packets < 10 {
				t.Errorf("counters of the first server: %v", on)
			}
			if delivered := off["deliver_"+strings.ReplaceAll(string(c.kind), "-", "_")]; delivered.Packets < 10 {
				t.Errorf("counters of the second server: %v", off)
			}
		})
	}
}

// TestNextSegmentBehindVLAN leaves alone what XDP did not check: the kernel takes the tag off before tc.
func TestNextSegmentBehindVLAN(t *testing.T) {
	n := newNetwork(t, 2)
	first := n.run(1, n.config(1, config.SRv6Encap), link.AttachTCX)
	second := n.run(2, n.config(2, config.SRv6Encap, vip6.Addr()), link.AttachTCX)
	router := packet.MAC{2, 0, 0, 0, 9, 9}
	server := packet.MAC(first.link.mac[:])
	way := srv6(config.SRv6Encap, serverSID(1), serverSID(2))
	const hopLimit = 4 + 7 // behind the tag
	tagged := set(to(client6, vip6, way, packet.VLAN(7)), hopLimit, 1)
	for _, frame := range [][]byte{tagged, to(client6, vip6, way)} {
		n.send(n.router, "server1", packet.SetMACs(frame, router, server))
	}
	n.await("the packet without a tag", func() bool {
		return counters(t, second.kernel)["deliver_srv6_encap"].Packets > 0
	})
	got := counters(t, first.kernel)
	if got["pass_not_ip"].Packets == 0 || got["next_segment"].Packets != 1 || got["drop_rewrite"].Packets != 0 {
		t.Errorf("counters of the first server: %v", got)
	}
}

// send sends a frame out of an interface.
func (n *network) send(ns *testnet.Namespace, iface string, frame []byte) {
	n.t.Helper()
	n.in(ns, func() error {
		device, err := net.InterfaceByName(iface)
		if err != nil {
			return err
		}
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: device.Index}), unix.Close(socket))
	})
}

// TestRestart replaces a running agent several times under a stream of datagrams; none is lost.
func TestRestart(t *testing.T) {
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			cfg := n.config(1, config.SRv6Insert, vip6.Addr())
			a := n.run(1, cfg, attachTCX)
			n.serve(1, vip6.Addr())
			n.use(srv6(config.SRv6Insert, serverSID(1)))
			tcp := n.dial(vip6.Addr())
			n.echo(tcp, 1000)

			stop := make(chan struct{})
			var answered sync.WaitGroup
			sent := 0
			udp := n.dialUDP(vip6.Addr())
			answered.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						n.echo(udp, 100) // each has its answer before the next
						sent++
					}
				}
			})
			for range 5 {
				a.stop()
				a = n.run(1, cfg, attachTCX)
			}
			close(stop)
			answered.Wait()
			n.echo(tcp, 1000)
			if got := counters(t, a.kernel)["deliver_srv6_insert"].Packets; got < uint64(sent) {
				t.Errorf("%d packets counted after the restarts, of at least %d", got, sent)
			}
			if c := n.dial(vip6.Addr()); mss(t, c) != 1384-12 {
				t.Errorf("MSS %d, want 1372", mss(t, c))
			}
		})
	}
}

// host is what an agent could leave behind.
type host struct {
	Addresses, Qdiscs, Filters []string
	XDP                        bool
	Pins                       bool
}

func (n *network) inspect(server int, instance string) (h host) {
	n.t.Helper()
	n.in(n.servers[server-1], func() error {
		all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range all {
			if !a.IP.IsLinkLocalUnicast() {
				h.Addresses = append(h.Addresses, a.IPNet.String())
			}
		}
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		slices.Sort(h.Addresses)
		h.XDP = eth0.Attrs().Xdp != nil && eth0.Attrs().Xdp.Attached
		qdiscs, err := netlink.QdiscList(eth0)
		if err != nil {
			return err
		}
		for _, q := range qdiscs {
			h.Qdiscs = append(h.Qdiscs, q.Type())
			if q.Type() != "clsact" {
				continue
			}
			for _, at := range []hook{ingress, egress} {
				filters, err := netlink.FilterList(eth0, at.parent)
				if err != nil {
					return err
				}
				for _, f := range filters {
					h.Filters = append(h.Filters, f.(*netlink.BpfFilter).Name)
				}
			}
		}
		return nil
	})
	_, err := os.Stat(datapath.Dir(instance))
	h.Pins = err == nil
	return h
}

// TestDetach leaves the host as it was, also where a VIP and a clsact were there before.
func TestDetach(t *testing.T) {
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/VIP and clsact before: %v", name, before), func(t *testing.T) {
				n := newNetwork(t, 1)
				cfg := n.config(1, config.GRE, vip4.Addr(), vip6.Addr())
				if before {
					n.in(n.servers[0], func() error {
						lo, err := netlink.LinkByName("lo")
						if err != nil {
							return err
						}
						eth0, err := netlink.LinkByName("eth0")
						if err != nil {
							return err
						}
						return errors.Join(netlink.AddrAdd(lo, hostAddress(vip4.Addr())),
							netlink.QdiscAdd(clsact(eth0.Attrs().Index)))
					})
				}
				was := n.inspect(1, cfg.Node.Instance)
				for range 2 { // the second process did not see what was before
					n.run(1, cfg, attachTCX).stop()
				}
				during := n.inspect(1, cfg.Node.Instance)
				if !during.XDP || !during.Pins || len(during.Addresses) == len(was.Addresses) ||
					(len(during.Filters) == 2) != (name == "clsact") {
					t.Errorf("at work: %+v", during)
				}
				if err := n.router.Do(func() error { return Detach(cfg.Node.Instance) }); err == nil {
					t.Error("detached from another network namespace")
				}
				if diff := cmp.Diff(during, n.inspect(1, cfg.Node.Instance)); diff != "" {
					t.Errorf("after a refusal (-before +after):\n%s", diff)
				}
				n.detach(1, cfg.Node.Instance)
				if diff := cmp.Diff(was, n.inspect(1, cfg.Node.Instance)); diff != "" {
					t.Errorf("before and after (-before +after):\n%s", diff)
				}
			})
		}
	}
}

// TestOtherNamespace refuses to start where an interface of the same index is not the instance's.
func TestOtherNamespace(t *testing.T) {
	n := newNetwork(t, 2)
	cfg := n.config(1, config.GRE, vip4.Addr())
	n.run(1, cfg, link.AttachTCX).stop()
	at1, at2 := n.inspect(1, cfg.Node.Instance), n.inspect(2, cfg.Node.Instance)
	a, err := New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	err = n.servers[1].Do(func() error { return a.Run(t.Context()) })
	if err == nil || !strings.Contains(err.Error(), "another network namespace") {
		t.Errorf("error %v", err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(at1, n.inspect(1, cfg.Node.Instance)); diff != "" {
		t.Errorf("on its host (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(at2, n.inspect(2, cfg.Node.Instance)); diff != "" {
		t.Errorf("on the other host (-before +after):\n%s", diff)
	}
}

// TestOtherInterface restarts an agent on another interface, and finds none of it on the one before.
func TestOtherInterface(t *testing.T) {
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			testnet.Connect(t, n.servers[0], "eth1", nil, n.router, "second", nil)
			cfg := n.config(1, config.GRE, vip4.Addr())
			was := n.inspect(1, cfg.Node.Instance)
			n.run(1, cfg, attachTCX).stop()
			other := *cfg
			other.Node.Interface = "eth1"
			n.run(1, &other, attachTCX).stop()
			now := n.inspect(1, cfg.Node.Instance)
			if now.XDP || !slices.Equal(now.Qdiscs, was.Qdiscs) || len(now.Filters) != 0 {
				t.Errorf("left on eth0: %+v, before %+v", now, was)
			}
			n.in(n.servers[0], func() error { return datapath.CheckRole(cfg.Node.Instance, datapath.RoleAgent) })
			n.detach(1, cfg.Node.Instance)
			n.in(n.servers[0], func() error {
				eth1, err := netlink.LinkByName("eth1")
				if err != nil {
					return err
				}
				qdiscs, err := netlink.QdiscList(eth1)
				for _, q := range qdiscs {
					if q.Type() == "clsact" {
						t.Error("a clsact is left on eth1")
					}
				}
				return err
			})
		})
	}
}

// TestFailedStart leaves nothing either.
func TestFailedStart(t *testing.T) {
	n := newNetwork(t, 1)
	cfg := n.config(1, config.GRE, vip4.Addr())
	was := n.inspect(1, cfg.Node.Instance)
	a, err := New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	a.kernel.tc.attachTCX = func(link.TCXOptions) (link.Link, error) { return nil, refused }
	err = n.servers[0].Do(func() error { return a.Run(t.Context()) })
	if !errors.Is(err, refused) {
		t.Errorf("error %v, want %v", err, refused)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(was, n.inspect(1, cfg.Node.Instance)); diff != "" {
		t.Errorf("before and after (-before +after):\n%s", diff)
	}
}

// TestReload takes on and lets go of services, and refuses what needs a restart.
func TestReload(t *testing.T) {
	n := newNetwork(t, 1)
	cfg := n.config(1, config.SRv6Encap, vip4.Addr())
	a := n.run(1, cfg, link.AttachTCX)
	n.serve(1, vip4.Addr())
	n.use(srv6(config.SRv6Encap, serverSID(1)))
	n.echo(n.dial(vip4.Addr()), 1000)

	if err := a.Reload(t.Context(), n.config(1, config.SRv6Encap, vip4.Addr(), vip6.Addr())); err != nil {
		t.Fatal(err)
	}
	n.serve(1, vip6.Addr())
	n.echo(n.dial(vip6.Addr()), 1000)

	bad := n.config(1, config.SRv6Encap)
	bad.Node.Interface = "eth1"
	if err := a.Reload(t.Context(), bad); err == nil {
		t.Error("another interface: no error")
	}
	n.echo(n.dial(vip4.Addr()), 1000)

	if err := a.Reload(t.Context(), n.config(1, config.SRv6Encap, vip6.Addr())); err != nil {
		t.Fatal(err)
	}
	want := []string{"10.0.1.2/24", "127.0.0.1/8", "2001:db8:80::1/128", "::1/128", "fd00:5:1::2/64"}
	if diff := cmp.Diff(want, n.inspect(1, cfg.Node.Instance).Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	before := counters(t, a.kernel)
	if _, err := n.dialUDP(vip4.Addr()).Write([]byte("gone")); err != nil {
		t.Fatal(err)
	}
	n.await("a drop of the VIP that is gone", func() bool {
		return changed(before, counters(t, a.kernel))["drop_not_served"].Packets == 1
	})
}

// TestFollowsInterface changes the MAC address and the MTU under a running agent.
func TestFollowsInterface(t *testing.T) {
	n := newNetwork(t, 1)
	a := n.run(1, n.config(1, config.SRv6Insert, vip6.Addr()), link.AttachTCX)
	n.serve(1, vip6.Addr())
	n.use(srv6(config.SRv6Insert, serverSID(1)))
	mac := net.HardwareAddr{2, 0, 0, 0, 7, 7}
	n.in(n.servers[0], func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetHardwareAddr(eth0, mac), netlink.LinkSetMTU(eth0, 1400))
	})
	n.in(n.router, func() error {
		l, err := netlink.LinkByName("server1")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: net.ParseIP("fd00:5:1::2"), HardwareAddr: mac})
	})
	n.await("the new MTU", func() bool {
		var size uint32
		key := serviceKey(config.AgentService{VIP: vip6.Addr(), Port: 80})
		return a.kernel.objects.SegmentSizes.Lookup(key, &size) == nil && size == 1284
	})
	c := n.dial(vip6.Addr())
	n.echo(c, 10_000)
	if got := mss(t, c); got != 1284-12 {
		t.Errorf("MSS %d, want 1272", got)
	}
}

// await waits until a condition holds that nobody tells of.
func (n *network) await(what string, holds func() bool) {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for !holds() {
		if time.Now().After(deadline) {
			n.t.Fatalf("waited %s for %s", patience, what)
		}
		time.Sleep(time.Millisecond)
	}
}
