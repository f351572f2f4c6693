// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// stage is a network namespace with the VIPs, and an application on port 80 of each. The test acts
// as all clients.
type stage struct {
	t   testing.TB
	ns  *testhost.Namespace
	tun *os.File
}

func newStage(t testing.TB) *stage {
	t.Helper()
	testhost.NeedTUN(t)
	s := &stage{t: t, ns: testhost.NewNamespace(t)}
	s.do(func() (err error) {
		if s.tun, err = openTUN("clients"); err != nil {
			return err
		}
		tun, err := netlink.LinkByName("clients")
		if err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(tun), netlink.LinkSetUp(lo))
	})
	t.Cleanup(func() { _ = s.tun.Close() })
	s.actAs(client4.Addr())
	s.actAs(client6.Addr())
	s.have(vip4.Addr())
	s.have(vip6.Addr())
	return s
}

// actAs makes the host send its packets to a client to the test.
func (s *stage) actAs(client netip.Addr) {
	s.t.Helper()
	s.do(func() error {
		tun, err := netlink.LinkByName("clients")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: tun.Attrs().Index, Dst: hostAddress(client).IPNet})
	})
}

// have adds a VIP to the host.
func (s *stage) have(vip netip.Addr) {
	s.t.Helper()
	s.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(lo, hostAddress(vip)), awaitLocal(vip))
	})
}

// do runs f in the namespace. If f ends its goroutine, do ends the test.
func (s *stage) do(f func() error) {
	s.t.Helper()
	ended := make(chan error, 1)
	go func() {
		ended <- s.ns.Do(func() error {
			returned := false
			defer func() {
				if !returned {
					ended <- errors.New("the test ended in the namespace")
				}
			}()
			err := f()
			returned = true
			return err
		})
	}()
	testhost.Must(s.t, <-ended)
}

// listen starts an application. Its connections are sent to the channel. The IPv6 listener is for
// multipath TCP, as in Go programs, which has sockets of another kind.
func (s *stage) listen(vip netip.AddrPort) <-chan net.Conn {
	s.t.Helper()
	var listener net.Listener
	s.do(func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(vip.Addr().Is6())
		listener, err = config.Listen(s.t.Context(), "tcp", vip.String())
		return err
	})
	accepted := make(chan net.Conn, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	s.t.Cleanup(func() {
		_ = listener.Close()
		<-done
		close(accepted)
		for c := range accepted {
			_ = c.Close()
		}
	})
	return accepted
}

// listenOnly starts an application that accepts no connection, with a limit of its accept queue.
func (s *stage) listenOnly(vip netip.AddrPort, limit int) {
	s.t.Helper()
	// This setting bounds the limit that Go asks for.
	const sysctl = "/proc/sys/net/core/somaxconn"
	var listener net.Listener
	s.do(func() (err error) {
		if err := os.WriteFile(sysctl, []byte(strconv.Itoa(limit)), 0); err != nil {
			return err
		}
		var config net.ListenConfig
		config.SetMultipathTCP(vip.Addr().Is6())
		listener, err = config.Listen(s.t.Context(), "tcp", vip.String())
		return err
	})
	s.t.Cleanup(func() { _ = listener.Close() })
}

// backlog returns the backlog of a listening socket, as the agent's programs see it.
func (s *stage) backlog(k *kernel, vip netip.AddrPort) agentBacklog {
	s.t.Helper()
	var queue agentBacklog
	s.do(func() error {
		service := desired.AgentService{
			VIP: vip.Addr(), Port: desired.Port(vip.Port()), Protocol: desired.TCP,
		}
		var listens bool
		var err error
		queue, listens, err = k.view().backlog(serviceKey(service))
		if err == nil && !listens {
			err = fmt.Errorf("nobody listens at %s", vip)
		}
		return err
	})
	return queue
}

// age returns when no half-open connection is young any more.
func (s *stage) age(k *kernel, vips ...netip.AddrPort) {
	s.t.Helper()
	for _, vip := range vips {
		eventually(s.t, "half-open connections age", func() bool {
			return s.backlog(k, vip).Young == 0
		})
	}
}

// fill adds connections to the accept queue of an application that accepts none.
func (s *stage) fill(client netip.Addr, vip netip.AddrPort, n int) {
	s.t.Helper()
	for i := range n {
		d := s.request(flow{netip.AddrPortFrom(client, uint16(20000+i)), vip})
		s.send(d, packet.ACK|packet.PSH)
		s.probe(d)
	}
}

// dialogue is a connection whose client is the test, with the numbers of the next segment.
type dialogue struct {
	flow
	seq, ack uint32
}

func (s *stage) send(d dialogue, flags packet.TCPFlags) {
	s.t.Helper()
	frame := packet.TCP(d.client, d.vip, packet.Flags(flags), packet.Sequence(d.seq, d.ack))
	if _, err := s.tun.Write(frame[14:]); err != nil {
		s.t.Fatal(err)
	}
}

// await returns the next TCP segment to the client's port that has all of the flags.
func (s *stage) await(d dialogue, flags packet.TCPFlags) *layers.TCP {
	s.t.Helper()
	buffer := make([]byte, 2048)
	for {
		testhost.Must(s.t, s.tun.SetReadDeadline(time.Now().Add(patience)))
		n, err := s.tun.Read(buffer)
		if err != nil {
			s.t.Fatalf("wait for %v to %v: %v", flags, d.client, err)
		}
		kind := gopacket.LayerType(layers.LayerTypeIPv6)
		if buffer[0]>>4 == 4 {
			kind = layers.LayerTypeIPv4
		}
		decoded := gopacket.NewPacket(buffer[:n], kind, gopacket.Default)
		tcp, ok := decoded.Layer(layers.LayerTypeTCP).(*layers.TCP)
		if ok && uint16(tcp.DstPort) == d.client.Port() && packet.TCPFlags(tcp.Contents[13])&flags == flags {
			return tcp
		}
	}
}

// request sends a SYN and receives the SYN-ACK. The server then waits for the client's ACK.
func (s *stage) request(f flow) dialogue {
	s.t.Helper()
	d := dialogue{flow: f, seq: 1000}
	s.send(d, packet.SYN)
	answer := s.await(d, packet.SYN|packet.ACK)
	d.seq, d.ack = 1001, answer.Seq+1
	return d
}

// connect completes the handshake.
func (s *stage) connect(f flow, accepted <-chan net.Conn) (dialogue, net.Conn) {
	s.t.Helper()
	d := s.request(f)
	s.send(d, packet.ACK)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	select {
	case c := <-accepted:
		s.t.Cleanup(func() { _ = c.Close() })
		return d, c
	case <-ctx.Done():
		s.t.Fatalf("the connection of %v is not accepted", f)
	}
	return d, nil
}

// closeServer closes the server's side of a connection. Its application has no socket any more, and
// the client can still send.
func (s *stage) closeServer(d dialogue, c net.Conn) dialogue {
	s.t.Helper()
	testhost.Must(s.t, c.Close())
	s.await(d, packet.FIN)
	d.ack++
	s.send(d, packet.ACK)
	return d
}

// close ends a connection. The server closes first, so its socket is in TIME_WAIT.
func (s *stage) close(d dialogue, c net.Conn) dialogue {
	s.t.Helper()
	d = s.closeServer(d, c)
	s.send(d, packet.FIN|packet.ACK)
	d.seq++
	s.await(d, packet.ACK)
	return d
}

// cookie returns a connection whose client returns a SYN cookie. The server has no state of it.
func (s *stage) cookie(f flow) dialogue {
	s.t.Helper()
	const sysctl = "/proc/sys/net/ipv4/tcp_syncookies"
	s.do(func() error { return os.WriteFile(sysctl, []byte("2"), 0) })
	d := s.request(f)
	s.do(func() error { return os.WriteFile(sysctl, []byte("1"), 0) })
	return d
}
