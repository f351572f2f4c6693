// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// countTest is a server whose open connections are counted. Its clients may use TCP Fast Open
// without a cookie.
type countTest struct {
	*stage
	k       *kernel
	service desired.AgentService
	flow    // of the next connection
}

func newCountTest(t *testing.T, client, vip netip.AddrPort) *countTest {
	t.Helper()
	testhost.NeedCgroup2(t)
	cfg := huntingConfig(desired.SRv6Encap, desired.Accept{Policy: desired.AcceptAlways}, desired.NotLocalDrop)
	c := &countTest{stage: newStage(t), k: testKernelOf(t, cfg), flow: flow{client, vip}}
	for _, s := range cfg.Services {
		if s.VIP == vip.Addr() && s.Port.Number() == vip.Port() {
			c.service = s
		}
	}
	testhost.Must(t, pinAll(c.k))
	c.attach()
	t.Cleanup(c.detach)
	// Servers accept data in a SYN without a cookie, on all listening sockets.
	const enabled, withoutCookie, forAll = 0x2, 0x200, 0x400
	c.do(func() error {
		setting := fmt.Sprint(enabled | withoutCookie | forAll)
		return os.WriteFile("/proc/sys/net/ipv4/tcp_fastopen", []byte(setting), 0)
	})
	return c
}

// attach attaches the program that counts.
func (c *countTest) attach() {
	c.t.Helper()
	c.do(func() error {
		return datapath.TakeOver(c.k.log, func(t *datapath.Takeover) error { return c.k.startCounting(t) })
	})
}

// detach detaches the program that counts.
func (c *countTest) detach() {
	c.t.Helper()
	if err := datapath.DetachLink(c.k.loader.PathOf(connectionCountPin)); err != nil {
		c.t.Error(err)
	}
}

// next returns a flow from a port of its own.
func (c *countTest) next() flow {
	c.client = netip.AddrPortFrom(c.client.Addr(), c.client.Port()+1)
	return c.flow
}

// expect awaits a number of counted connections.
func (c *countTest) expect(when string, want int64) {
	c.t.Helper()
	what := fmt.Sprintf("%s: the number of connections is %d", when, want)
	eventually(c.t, what, func() bool { return connections(c.t, c.k, c.service) == want })
}

// fastOpen sends a SYN with data. The server has a connection, and the client has yet to
// acknowledge the SYN-ACK.
func (c *countTest) fastOpen(f flow) dialogue {
	c.t.Helper()
	data := []byte("request")
	d := dialogue{flow: f, seq: 1000}
	frame := packet.TCP(d.client, d.vip, packet.Flags(packet.SYN), packet.Sequence(d.seq, 0), packet.Payload(data))
	if _, err := c.tun.Write(frame[14:]); err != nil {
		c.t.Fatal(err)
	}
	answer := c.await(d, packet.SYN|packet.ACK)
	if answer.Ack != d.seq+1+uint32(len(data)) {
		c.t.Fatalf("the SYN-ACK acknowledges %d, so the server does not take the data", answer.Ack)
	}
	d.seq, d.ack = answer.Ack, answer.Seq+1
	return d
}

// openBy makes a connection, and returns both ends.
func (c *countTest) openBy(handshake func(flow) dialogue, accepted <-chan net.Conn) (dialogue, *net.TCPConn) {
	c.t.Helper()
	d := handshake(c.next())
	server := (<-accepted).(*net.TCPConn)
	c.t.Cleanup(func() { _ = server.Close() })
	data := make([]byte, d.seq-1001)                     // behind the SYN
	if _, err := io.ReadFull(server, data); err != nil { // a socket with unread data would be reset
		c.t.Fatal(err)
	}
	return d, server
}

// ordinary makes a connection by the handshake of three segments.
func (c *countTest) ordinary(f flow) dialogue {
	c.t.Helper()
	d := c.request(f)
	c.send(d, packet.ACK)
	return d
}

// finish sends the end of a client's data.
func (c *countTest) finish(d dialogue) dialogue {
	c.t.Helper()
	c.send(d, packet.FIN|packet.ACK)
	d.seq++
	return d
}

func closeOf(c *net.TCPConn) error { return c.Close() }

func abort(c *net.TCPConn) error { return errors.Join(c.SetLinger(0), c.Close()) }

// Each connection counts once, until the server has closed its side or the connection is reset,
// whatever states its socket goes through.
func TestEachConnectionIsCountedOnce(t *testing.T) {
	for _, way := range []flow{{client4, vip4}, {client6, vip6}} {
		c := newCountTest(t, way.client, way.vip)
		accepted := c.listen(way.vip)
		other, kept := c.openBy(c.ordinary, accepted) // so that no wrong count hides at 0
		const others = 1
		c.expect("one connection", others)

		for name, handshake := range map[string]func(flow) dialogue{"ordinary": c.ordinary, "Fast Open": c.fastOpen} {
			for how, end := range map[string]func(*net.TCPConn) error{"the server closes": closeOf, "the server aborts": abort} {
				_, server := c.openBy(handshake, accepted)
				c.expect(name, others+1)
				testhost.Must(t, end(server))
				c.expect(name+": "+how, others)
			}

			d, _ := c.openBy(handshake, accepted)
			c.expect(name, others+1)
			c.send(d, packet.RST|packet.ACK)
			c.expect(name+": the client resets", others)

			d, server := c.openBy(handshake, accepted)
			d = c.finish(d)
			c.await(d, packet.ACK)
			c.expect(name+": the client closes", others+1)
			testhost.Must(t, server.Close())
			c.expect(name+": the server closes after the client", others)

			d, _ = c.openBy(handshake, accepted)
			d = c.finish(d)
			c.await(d, packet.ACK)
			c.send(d, packet.RST|packet.ACK)
			c.expect(name+": the client closes and resets", others)

			d, server = c.openBy(handshake, accepted)
			c.send(d, packet.ACK)
			c.close(d, server)
			c.expect(name+": time wait", others)
		}
		half := c.request(c.next())
		c.expect("half-open", others)
		c.send(half, packet.RST)
		c.expect("half-open, and reset", others)

		c.send(other, packet.RST|packet.ACK)
		c.expect("the last connection is reset", 0)
		_ = kept.Close()
	}
}

// The connections to all VIPs and ports of a service count as its load.
func TestConnectionsOfSeveralPorts(t *testing.T) {
	c := newCountTest(t, client4, vip4)
	other := netip.AddrPortFrom(vip4.Addr(), 8443)
	s := c.service
	s.Ports = []desired.Port{s.Port, desired.Port(other.Port())}
	keys := map[agentServiceKey]agentServiceKey{serviceKeys(s)[1]: serviceKey(s)}
	testhost.Must(t, c.k.writeFirstKeys(keys))
	c.openBy(c.ordinary, c.listen(vip4))
	c.expect("the first port", 1)
	accepted := c.listen(other)
	c.flow.vip = other
	_, server := c.openBy(c.ordinary, accepted)
	c.expect("both ports", 2)
	testhost.Must(t, server.Close())
	c.expect("one is closed", 1)
	testhost.Must(t, c.k.writeFirstKeys(nil))
	c.openBy(c.ordinary, accepted)
	c.expect("the second port is of no service", 1)
}

// Connections that the application never accepts end with the listening socket.
func TestConnectionsOfAClosedListener(t *testing.T) {
	c := newCountTest(t, client4, vip4)
	listener := c.stage.open(vip4)
	c.ordinary(c.next())
	c.fastOpen(c.next())
	c.expect("not accepted", 2)
	_ = listener.Close()
	c.expect("the listener is closed", 0)
}

// A socket that was counted, and then connects to another host, does not count again.
func TestSocketThatConnectsAgain(t *testing.T) {
	c := newCountTest(t, client4, vip4)
	others := desired.AgentService{VIP: vip4.Addr(), Port: desired.AllPorts, Protocol: desired.TCP}
	testhost.Must(t, c.k.objects.Connections.Put(serviceKey(others), agentConnectionCount{}))
	_, server := c.openBy(c.ordinary, c.listen(vip4))
	c.expect("the connection", 1)
	raw, err := server.SyscallConn()
	testhost.Must(t, err)
	peer := c.next()
	var failed error
	err = raw.Control(func(fd uintptr) {
		if failed = disconnect(int(fd)); failed == nil {
			failed = unix.Connect(int(fd), &unix.SockaddrInet4{Addr: peer.client.Addr().As4(), Port: int(peer.client.Port())})
		}
	})
	if failed = errors.Join(err, failed); !errors.Is(failed, unix.EINPROGRESS) {
		t.Fatal(failed)
	}
	syn := c.await(dialogue{flow: peer}, packet.SYN)
	c.expect("it is disconnected", 0)
	d := dialogue{flow: flow{peer.client, netip.AddrPortFrom(vip4.Addr(), uint16(syn.SrcPort))}, seq: 5000, ack: syn.Seq + 1}
	c.send(d, packet.SYN|packet.ACK)
	c.await(d, packet.ACK)
	testhost.Must(t, server.Close())
	c.await(d, packet.FIN)
	if n := connections(t, c.k, others); n != 0 {
		t.Errorf("the second connection, of a port that is a client's, leaves the count %d", n)
	}
	c.expect("the second connection ends", 0)
}

// disconnect ends the connection of a socket: connect(2) with AF_UNSPEC.
func disconnect(fd int) error {
	address := unix.RawSockaddrInet4{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address))
	if errno != 0 {
		return errno
	}
	return nil
}
