// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/link"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// stateless is a balancer that keeps no state: the cookie in a packet names its server.
type stateless struct {
	kind    desired.Encapsulation
	width   int
	columns []int // of servers, from server 1

	mu sync.Mutex
	// before is called before a packet of the client is sent. If it returns false, the packet is
	// lost.
	before func(sentSegment) bool
	failed error // the first packet whose cookie names no server
	// withoutCookies tells that new connections have no cookie: server 2 gets all their packets.
	withoutCookies bool
	plain          map[uint16]bool // ports of clients of connections without a cookie
}

// sentSegment is a TCP packet on a link.
type sentSegment struct {
	frame       []byte
	from        netip.Addr
	source      uint16
	destination uint16
	flags       packet.TCPFlags
	size        int // bytes of data
	stamps
}

func readSegment(frame []byte) (s sentSegment, ok bool) {
	decoded := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.NoCopy)
	tcp, ok := decoded.Layer(layers.LayerTypeTCP).(*layers.TCP)
	if !ok {
		return s, false
	}
	from, _ := netip.AddrFromSlice(decoded.NetworkLayer().NetworkFlow().Src().Raw())
	s = sentSegment{
		frame: slices.Clone(frame), from: from, source: uint16(tcp.SrcPort), destination: uint16(tcp.DstPort),
		flags: packet.TCPFlags(tcp.Contents[13]), size: len(tcp.Payload),
	}
	for _, o := range tcp.Options {
		if o.OptionType == layers.TCPOptionKindTimestamps && len(o.OptionData) == 8 {
			s.stamps = stamps{true, binary.BigEndian.Uint32(o.OptionData), binary.BigEndian.Uint32(o.OptionData[4:])}
		}
	}
	return s, true
}

// place returns the encapsulation of a client's frame. It returns false if the frame is lost.
func (s *stateless) place(frame []byte) (packet.Encap, bool) {
	segment, ok := readSegment(frame)
	if !ok {
		return packet.Encap{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.before != nil && !s.before(segment) {
		return packet.Encap{}, false
	}
	return s.encap(segment)
}

// encap returns the encapsulation of a client's packet, by its cookie.
func (s *stateless) encap(segment sentSegment) (packet.Encap, bool) {
	e := packet.Encap{Kind: s.kind, Sender: sender}
	if segment.flags&packet.SYN != 0 {
		s.plain[segment.source] = s.withoutCookies
	}
	if s.plain[segment.source] {
		e.Segments = []netip.Addr{serverSID(2)}
		return e, true
	}
	mask := uint32(1)<<s.width - 1
	for i, column := range s.columns {
		sid := srv6.SID{Locator: netip.PrefixFrom(serverSID(i+1), 64).Masked(), Function: srv6.Steer}
		sid.Argument = srv6.Offer{Cookie: s.width}.Argument()
		if segment.flags&packet.SYN != 0 {
			sid.Function = srv6.ConnectAvail
			sid.Argument = srv6.Offer{Cookie: s.width, Column: column}.Argument()
		} else if segment.Found && segment.Echo&mask != uint32(column) {
			continue
		}
		e.Segments = append(e.Segments, sid.Addr())
	}
	if len(e.Segments) == 0 && s.failed == nil {
		s.failed = fmt.Errorf("a packet with %v echoes %#x: no server has this column", segment.flags, segment.Echo)
	}
	return e, len(e.Segments) > 0
}

func (s *stateless) onPacket(before func(sentSegment) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

// setColumns changes the servers' columns for new connections.
func (s *stateless) setColumns(columns ...int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.columns = columns
}

// useCookies sets whether new connections have cookies.
func (s *stateless) useCookies(use bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.withoutCookies = !use
}

// recorder records the TCP packets on an interface until the test ends.
type recorder struct {
	mu   sync.Mutex
	sent []sentSegment
}

func (n *network) watch(ns *testhost.Namespace, iface string) *recorder {
	n.t.Helper()
	var file *os.File
	n.in(ns, func() error {
		device, err := net.InterfaceByName(iface)
		if err != nil {
			return err
		}
		const protocol = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), iface)
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: device.Index, Protocol: protocol}))
	})
	w, done := &recorder{}, make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, 1<<17)
		for {
			length, err := file.Read(buffer)
			if err != nil {
				return
			}
			if s, ok := readSegment(buffer[:length]); ok {
				w.mu.Lock()
				w.sent = append(w.sent, s)
				w.mu.Unlock()
			}
		}
	}()
	n.t.Cleanup(func() {
		_ = file.Close()
		<-done
	})
	return w
}

func (w *recorder) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = nil
}

// of returns the packets so far that fulfil a condition.
func (w *recorder) of(is func(sentSegment) bool) (all []sentSegment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.sent {
		if is(s) {
			all = append(all, s)
		}
	}
	return all
}

// cookieNetwork is a network with a stateless balancer. Server 1 refuses all connections, so server
// 2 gets them.
type cookieNetwork struct {
	*network
	*stateless
	vip      netip.AddrPort
	agents   [2]*running
	agent    *running // of server 2
	table    *flowTable
	wire     *recorder // between the router and server 2
	stack    *recorder // what the stack of server 2 sends and receives
	listener net.Listener
	accepted chan *net.TCPConn

	column          int  // of server 2, in the timestamps that it sends
	hasNoTimestamps bool // one end has none
	rejected        int  // echoes that the stack is to reject
	// signals are the signals that the agent is to send.
	signals map[string]int
}

// A variant is a way of packets to the server, and the servers' columns.
type variant struct {
	kind    desired.Encapsulation
	vip     netip.AddrPort
	width   int
	columns []int
	first   desired.AcceptPolicy // of server 1; default never
}

func newCookieNetwork(t *testing.T, v variant) *cookieNetwork {
	testhost.NeedCgroup2(t)
	n := &cookieNetwork{
		network: newNetwork(t, 2), vip: v.vip, accepted: make(chan *net.TCPConn, 1), column: v.columns[1],
		signals:   map[string]int{},
		stateless: &stateless{kind: v.kind, width: v.width, columns: v.columns, plain: map[uint16]bool{}},
	}
	for i, policy := range []desired.AcceptPolicy{cmp.Or(v.first, desired.AcceptNever), desired.AcceptAlways} {
		cfg := n.config(i+1, v.kind, v.vip.Addr())
		cfg.Node.MTU = 1500 - 24 // SYNs list two servers
		cfg.Services[0].Accept.Policy = policy
		cfg.Services[0].Load.Kind = desired.LoadAcceptQueue
		n.agents[i] = n.run(i+1, cfg, link.AttachTCX)
	}
	n.agent = n.agents[1]
	n.table = tableOf(t, n.agent.kernel)
	n.wire, n.stack = n.watch(n.router, "server2"), n.watch(n.servers[1], "eth0")
	n.network.mu.Lock()
	n.network.stateless = n.stateless
	n.network.mu.Unlock()
	n.listen()
	t.Cleanup(n.check)
	return n
}

// listen starts an application on server 2. Half of the tests use multipath TCP, as Go programs do,
// which has sockets of another kind.
func (n *cookieNetwork) listen() {
	n.in(n.servers[1], func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(n.vip.Addr().Is6())
		n.listener, err = config.Listen(n.t.Context(), "tcp", n.vip.String())
		return err
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := n.listener.Accept()
			if err != nil {
				return
			}
			n.accepted <- c.(*net.TCPConn)
		}
	}()
	n.t.Cleanup(func() {
		_ = n.listener.Close()
		<-done
	})
}

// connect returns both ends of a new connection.
func (n *cookieNetwork) connect() (client, server *net.TCPConn) {
	n.t.Helper()
	client = n.dial(n.vip.Addr())
	select {
	case server = <-n.accepted:
	case <-time.After(patience):
		n.t.Fatal("the application gets no connection")
	}
	n.t.Cleanup(func() { _ = server.Close() })
	testhost.Must(n.t, server.SetDeadline(time.Now().Add(patience)))
	return client, server
}

// transfer sends data from one end to the other.
func (n *cookieNetwork) transfer(from, to net.Conn, size int) {
	n.t.Helper()
	sent, got := bytes.Repeat([]byte("segue "), size/6+1)[:size], make([]byte, size)
	failed := make(chan error, 1)
	go func() {
		_, err := from.Write(sent)
		failed <- err
	}()
	_, err := io.ReadFull(to, got)
	if err := errors.Join(err, <-failed); err != nil {
		n.t.Fatalf("transfer of %d bytes: %v", size, err)
	}
	if !bytes.Equal(sent, got) {
		n.t.Fatalf("%d bytes arrived different", size)
	}
}

// end closes one end, and then the other.
func (n *cookieNetwork) end(first, second *net.TCPConn) {
	n.t.Helper()
	testhost.Must(n.t, first.Close())
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		n.t.Fatalf("the other end of a closed connection reads %v, want the end", err)
	}
	testhost.Must(n.t, second.Close())
}

func portOf(c net.Conn) uint16 { return uint16(c.LocalAddr().(*net.TCPAddr).Port) }

// sentTo returns the packets with all of the flags that server 2 has sent to a port of the client.
func (n *cookieNetwork) sentTo(port uint16, flags packet.TCPFlags) []sentSegment {
	return n.wire.of(func(s sentSegment) bool {
		return s.from == n.vip.Addr() && s.destination == port && s.flags&flags == flags
	})
}

// check compares what the server has sent and received with the rules for all packets.
func (n *cookieNetwork) check() {
	mask := uint32(1)<<n.width - 1
	last := map[uint16]uint32{}
	n.stateless.mu.Lock()
	defer n.stateless.mu.Unlock()
	for _, s := range n.wire.of(func(s sentSegment) bool { return s.from == n.vip.Addr() && !n.plain[s.destination] }) {
		if s.Found == n.hasNoTimestamps {
			n.t.Errorf("a packet with %v and %d bytes: it has timestamps: %t", s.flags, s.size, s.Found)
		}
		if !s.Found {
			continue
		}
		if s.Value&mask != uint32(n.column) {
			n.t.Errorf("a packet with %v and %d bytes has the timestamp %#x, want column %d", s.flags, s.size, s.Value, n.column)
		}
		if before, ok := last[s.destination]; ok && int32(s.Value-before) < 0 {
			n.t.Errorf("the timestamp %#x of a packet with %v follows %#x", s.Value, s.flags, before)
		}
		last[s.destination] = s.Value
	}
	if n.failed != nil {
		n.t.Error(n.failed)
	}
	if got := n.netstat("TSEcrRejected"); got != n.rejected {
		n.t.Errorf("the stack has rejected %d echoes, want %d", got, n.rejected)
	}
	signals, err := n.sentSignals()
	if err != nil && !errors.Is(err, unix.EBADF) { // an agent that has ended has closed its counters
		n.t.Error(err)
	}
	for name, count := range signals {
		if count != uint64(n.signals[name]) {
			n.t.Errorf("%d packets have signals (%s), want %d", count, name, n.signals[name])
		}
	}
}

// sentSignals returns the signals of server 2.
func (n *cookieNetwork) sentSignals() (map[string]uint64, error) {
	return sums(n.agent.kernel.objects.Signals, n.agent.kernel.labels.signals)
}

// netstat returns the sum of counters of server 2's stack. A counter is 0 if the kernel does not
// have it.
func (n *cookieNetwork) netstat(counters ...string) (sum int) {
	n.t.Helper()
	n.in(n.servers[1], func() error {
		text, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		rows := strings.Split(string(text), "\n")
		names, values := strings.Fields(rows[0]), strings.Fields(rows[1])
		for i, name := range names {
			if value := 0; slices.Contains(counters, name) {
				_, scanned := fmt.Sscan(values[i], &value)
				err = errors.Join(err, scanned)
				sum += value
			}
		}
		return err
	})
	return sum
}

// set sets a variable of a namespace's stack until the test ends.
func (n *cookieNetwork) set(ns *testhost.Namespace, name, value string) {
	n.t.Helper()
	path := "/proc/sys/net/ipv4/" + name
	var before []byte
	n.in(ns, func() (err error) {
		if before, err = os.ReadFile(path); err != nil {
			return err
		}
		return os.WriteFile(path, []byte(value), 0)
	})
	n.t.Cleanup(func() { n.in(ns, func() error { return os.WriteFile(path, before, 0) }) })
}

// hasTimestamps is TCPI_OPT_TIMESTAMPS.
const hasTimestamps = 1

// tcpInfo returns TCP_INFO of a connection.
func tcpInfo(t *testing.T, c *net.TCPConn) (info unix.TCPInfo) {
	t.Helper()
	raw, err := c.SyscallConn()
	testhost.Must(t, err)
	if err := raw.Control(func(fd uintptr) {
		size := uint32(unsafe.Sizeof(info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			err = errno
		}
	}); err != nil {
		t.Fatal(err)
	}
	return info
}

// scales returns the window scales of a connection in both directions.
func scales(info *unix.TCPInfo) (sent, received uint8) {
	b := (*[8]byte)(unsafe.Pointer(info))[6] // the package has no field for it
	return b & 0xf, b >> 4
}

func variants() []variant {
	return []variant{
		{kind: desired.SRv6Insert, vip: vip6, width: 1, columns: []int{1, 0}},
		{kind: desired.SRv6Encap, vip: vip4, width: 1, columns: []int{0, 1}},
		{kind: desired.SRv6Encap, vip: vip6, width: 2, columns: []int{0, 2}},
		{kind: desired.SRv6Encap, vip: vip4, width: 3, columns: []int{0, 5}},
		{kind: desired.SRv6Insert, vip: vip6, width: 3, columns: []int{1, 6}},
	}
}

// firstPerFamily is the number of the first of two variants, one for IPv4 and one for IPv6.
const firstPerFamily = 3

func (v variant) String() string {
	return fmt.Sprintf("%s/%s/%d bits, column %d", v.kind, v.vip.Addr(), v.width, v.columns[1])
}

// cookieCase is a test in a cookieNetwork.
type cookieCase struct {
	name      string
	run       func(*testing.T, *cookieNetwork)
	perFamily bool // one variant for each family is enough
}

// runCookieCases runs cases in one network, one after the other, until one fails. The kernel needs
// more time for the programs of a network than for the packets of a case.
func runCookieCases(t *testing.T, v variant, cases []cookieCase) {
	n := newCookieNetwork(t, v)
	for _, c := range cases {
		if !t.Run(c.name, func(t *testing.T) {
			n.lend(t)
			c.run(t, n)
		}) {
			return
		}
	}
}

// lend makes a case use the network. When the case ends, its packets are checked and forgotten.
func (n *cookieNetwork) lend(t *testing.T) {
	owner := n.t
	n.t = t
	t.Cleanup(func() {
		n.onPacket(nil)
		n.check()
		n.wire.forget()
		n.stack.forget()
		n.t = owner
	})
}

// evict empties the flow table of server 2, as a flood of SYNs does.
func (n *cookieNetwork) evict() { clear(n.table.entries) }

// stateOf returns the state of the socket that gets the packets from a client's port.
func (n *cookieNetwork) stateOf(port uint16) (state string) {
	n.t.Helper()
	client := netip.MustParseAddr("10.0.0.2")
	if n.vip.Addr().Is6() {
		client = netip.MustParseAddr("fd00:c::2")
	}
	n.in(n.servers[1], func() error {
		sockets, err := querySockets(n.agent.kernel.objects.QuerySocket, unix.IPPROTO_TCP, netip.AddrPortFrom(client, port), n.vip)
		state = socketName(sockets.State)
		return err
	})
	return state
}

// repeat sends a frame of the client again.
func (n *cookieNetwork) repeat(frame []byte) {
	n.t.Helper()
	segment, _ := readSegment(frame)
	n.stateless.mu.Lock()
	e, ok := n.stateless.encap(segment)
	n.stateless.mu.Unlock()
	e.NextHop = n.gateway
	wrapped, err := packet.Encapsulate(frame, e)
	if err != nil || !ok {
		n.t.Fatalf("repeat a packet: %v", err)
	}
	if _, err := unix.Write(n.raw, wrapped); err != nil {
		n.t.Fatal(err)
	}
}

// packetOf waits for a packet of a client's port that has reached the stack of server 2.
func (n *cookieNetwork) packetOf(port uint16) (last sentSegment) {
	n.t.Helper()
	n.await(fmt.Sprintf("a packet from port %d", port), func() bool {
		all := n.stack.of(func(s sentSegment) bool { return s.source == port && s.from != n.vip.Addr() })
		if len(all) > 0 {
			last = all[len(all)-1]
		}
		return len(all) > 0
	})
	return last
}

// forge sends a packet without options of the same flow to server 2. Its sequence number is far
// from the window. A packet by steer comes from a balancer that follows a hint.
func (n *cookieNetwork) forge(of sentSegment, function uint16, flags packet.TCPFlags) {
	n.t.Helper()
	_, tcp := findTCP(of.frame)
	sid := srv6.SID{Locator: netip.PrefixFrom(serverSID(2), 64).Masked(), Function: srv6.Function(function)}
	sid.Argument = srv6.Offer{Returns: function == steer, Column: n.column}.Argument()
	forged, err := packet.Encapsulate(
		packet.TCP(netip.AddrPortFrom(of.from, of.source), n.vip, packet.Flags(flags),
			packet.Sequence(binary.BigEndian.Uint32(tcp[4:])+1<<30, 0)),
		packet.Encap{Kind: n.kind, Sender: sender, Segments: []netip.Addr{sid.Addr()}, NextHop: n.gateway})
	if err == nil {
		_, err = unix.Write(n.raw, forged)
	}
	if err != nil {
		n.t.Errorf("send a forged packet: %v", err)
	}
}

// holdBack loses the client's packets that fulfil a condition. It returns the first one.
func (n *cookieNetwork) holdBack(is func(sentSegment) bool) <-chan sentSegment {
	held := make(chan sentSegment, 1)
	n.onPacket(func(s sentSegment) bool {
		if !is(s) {
			return true
		}
		select {
		case held <- s:
		default: // a later one
		}
		return false
	})
	return held
}

// setOption sets an option of a listener's TCP.
func (n *cookieNetwork) setOption(l *net.TCPListener, option, value int) {
	n.t.Helper()
	raw, err := l.SyscallConn()
	testhost.Must(n.t, err)
	controlled := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value) })
	testhost.Must(n.t, errors.Join(controlled, err))
}

// fastOpen makes a connection whose SYN carries data.
func (n *cookieNetwork) fastOpen(data []byte) *net.TCPConn {
	n.t.Helper()
	var client net.Conn
	n.in(n.client, func() (err error) {
		dialer := net.Dialer{Timeout: patience, Control: func(_, _ string, raw syscall.RawConn) error {
			var set error
			err := raw.Control(func(fd uintptr) {
				set = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
			})
			return errors.Join(err, set)
		}}
		client, err = dialer.Dial("tcp", n.vip.String())
		return err
	})
	n.t.Cleanup(func() { _ = client.Close() })
	if _, err := client.Write(data); err != nil {
		n.t.Fatal(err)
	}
	return client.(*net.TCPConn)
}

// setOffloads switches offloads of an interface.
func (n *cookieNetwork) setOffloads(ns *testhost.Namespace, iface string, on bool, offloads ...string) {
	n.t.Helper()
	n.in(ns, func() error { return netdev.SetOffloads(iface, on, offloads...) })
}

// countCookies returns a function that counts the sockets of server 2 with a cookie. It skips the
// test if the kernel permits no iterators.
func (n *cookieNetwork) countCookies() func() int {
	n.t.Helper()
	var objects storagesObjects
	err := loadStoragesObjects(&objects, nil)
	if errors.Is(err, unix.EPERM) {
		n.t.Skipf("this kernel permits no iterators, such as one over the storage of sockets: %v", err)
	}
	testhost.Must(n.t, err)
	n.t.Cleanup(func() { _ = objects.Close() })
	iter, err := link.AttachIter(link.IterOptions{Program: objects.CountStorages, Map: n.agent.kernel.objects.SocketCookies})
	testhost.Must(n.t, err)
	n.t.Cleanup(func() { _ = iter.Close() })
	return func() int {
		n.t.Helper()
		var sockets uint32
		err := objects.Sockets.Set(sockets)
		walk, opened := iter.Open()
		testhost.Must(n.t, errors.Join(err, opened))
		defer walk.Close()
		_, err = io.Copy(io.Discard, walk)
		testhost.Must(n.t, errors.Join(err, objects.Sockets.Get(&sockets)))
		return int(sockets)
	}
}

// limitRate makes an interface drop the packets beyond a rate, after a queue of some bytes.
func (n *cookieNetwork) limitRate(ns *testhost.Namespace, iface string, bytesPerSecond uint64, burst, queue uint32) {
	n.t.Helper()
	n.in(ns, func() error {
		l, err := netlink.LinkByName(iface)
		if err != nil {
			return err
		}
		return netlink.QdiscAdd(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			Rate:       bytesPerSecond, Limit: queue, Buffer: burst,
		})
	})
}

// mergeFor makes an interface hold segments back for a time, to merge them with later ones (GRO).
func (n *cookieNetwork) mergeFor(ns *testhost.Namespace, iface string, hold time.Duration) {
	n.t.Helper()
	n.setOffloads(ns, iface, true, netdev.GRO)
	settings := "/sys/class/net/" + iface
	script := fmt.Sprintf("mount -t sysfs sysfs /sys && echo 1000 >%s/napi_defer_hard_irqs && echo %d >%s/gro_flush_timeout",
		settings, hold.Nanoseconds(), settings)
	n.in(ns, func() error {
		// /sys shows the interfaces of the namespace in which it was mounted.
		output, err := exec.Command("unshare", "--mount", "sh", "-c", script).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", script, err, output)
		}
		return nil
	})
}

// withEchoOff returns the packet's frame with its echo changed by a number of ticks.
func (s sentSegment) withEchoOff(ticks int32) []byte {
	frame := slices.Clone(s.frame)
	_, tcp := findTCP(frame)
	setTimestamp(tcp, findTimestamps(tcp)+4, s.Echo+uint32(ticks))
	return frame
}

// hasValidChecksum tells whether the checksum of TCP is right.
func (s sentSegment) hasValidChecksum() bool {
	_, tcp := findTCP(s.frame)
	addresses := s.frame[14+8 : 14+40]
	if s.from.Is4() {
		addresses = s.frame[14+12 : 14+20]
	}
	sum := uint32(6 + len(tcp)) // protocol and length of the pseudo-header
	even := append(slices.Clone(tcp), 0)[:(len(tcp)+1)&^1]
	for _, part := range [][]byte{addresses, even} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return sum == 0xffff
}
