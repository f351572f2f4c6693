// SPDX-License-Identifier: Apache-2.0

package pktgen

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// cable is a veth pair. A generator sends packets on its interface near, and they arrive at far.
type cable struct {
	t         testing.TB
	near, far *testhost.Namespace
	nearIndex int
	nearMAC   packet.MAC
	farMAC    packet.MAC
}

func newCable(t testing.TB) *cable {
	t.Helper()
	testhost.NeedBPF(t)
	c := &cable{t: t, near: testhost.NewNamespace(t), far: testhost.NewNamespace(t)}
	testhost.Connect(t, c.near, "near", nil, c.far, "far", nil)
	c.nearIndex, c.nearMAC = c.describe(c.near, "near")
	_, c.farMAC = c.describe(c.far, "far")
	c.must(c.far.Do(c.pass))
	return c
}

func (c *cable) must(err error) {
	c.t.Helper()
	testhost.Must(c.t, err)
}

func (c *cable) describe(ns *testhost.Namespace, name string) (index int, mac packet.MAC) {
	c.must(ns.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			index, mac = l.Attrs().Index, packet.MAC(l.Attrs().HardwareAddr)
		}
		return err
	}))
	return index, mac
}

// pass makes the far end accept XDP frames, by a program that passes them.
func (c *cable) pass() error {
	const xdpPass = 2 // enum xdp_action
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer program.Close()
	far, err := netlink.LinkByName("far")
	if err != nil {
		return err
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: far.Attrs().Index, Flags: link.XDPDriverMode})
	if err == nil {
		c.t.Cleanup(func() { _ = l.Close() })
	}
	return err
}

// run sends packets with a generator of the configuration.
func (c *cable) run(ctx context.Context, cfg Config) Result {
	c.t.Helper()
	cfg.Interface = c.nearIndex
	g, err := New(cfg)
	c.must(err)
	defer g.Close()
	var result Result
	c.must(c.near.Do(func() (err error) {
		result, err = g.Run(ctx)
		return err
	}))
	return result
}

// capture opens a socket that receives every frame that arrives at an interface.
func (c *cable) capture(ns *testhost.Namespace, name string) (fd int) {
	c.t.Helper()
	index, _ := c.describe(ns, name)
	c.must(ns.Do(func() (err error) {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		c.t.Cleanup(func() { unix.Close(fd) })
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<24),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}),
		)
	}))
	return fd
}

// next returns the next captured TCP or UDP packet.
func (c *cable) next(fd int) *packet.Packet {
	c.t.Helper()
	buffer := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if err != nil {
			c.t.Fatalf("the next packet: %v", err)
		}
		p, err := packet.Decode(buffer[:n])
		if err != nil || p.DestinationPort == 0 { // the kernel's neighbour discovery
			continue
		}
		if err := packet.Verify(buffer[:n]); err != nil {
			c.t.Fatalf("%v: %v", p, err)
		}
		return p
	}
}

var (
	sources6 = netip.MustParsePrefix("2001:db8:f::/64")
	sources4 = netip.MustParsePrefix("198.18.0.0/15")
	target6  = netip.MustParseAddrPort("[2001:db8:80::1]:80")
	target4  = netip.MustParseAddrPort("203.0.113.1:80")
)

func (c *cable) config(kind Kind, destination netip.AddrPort) Config {
	cfg := Config{
		Kind: kind, Sources: sources6, Destination: destination, SourceMAC: c.nearMAC, DestinationMAC: c.farMAC, CPU: -1,
	}
	if destination.Addr().Is4() {
		cfg.Sources = sources4
	}
	return cfg
}

// Every packet is complete, of the requested kind and flows, and has correct checksums. The number
// of packets is as requested. This holds for sent and for received packets.
func TestPackets(t *testing.T) {
	c := newCable(t)
	const flows, count = 100, 500 // more packets than a batch, so the kernel reuses their pages
	for _, kind := range []Kind{SYN, ACK, UDP} {
		for _, destination := range []netip.AddrPort{target6, target4} {
			for _, receive := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d/%v/receive=%v", kind, destination.Addr(), receive), func(t *testing.T) {
					c.t = t
					cfg := c.config(kind, destination)
					cfg.Flows, cfg.Order, cfg.Count, cfg.Receive = flows, InTurn, count, receive
					at, name := c.far, "far"
					if receive {
						at, name = c.near, "near"
					}
					fd := c.capture(at, name)
					if result := c.run(t.Context(), cfg); result.Sent != count {
						t.Errorf("%d packets were sent", result.Sent)
					}
					seen := map[netip.AddrPort]int{}
					for range count {
						seen[c.source(cfg, c.next(fd))]++
					}
					for source, n := range seen {
						if n != count/flows {
							t.Errorf("%v: %d packets", source, n)
						}
					}
				})
			}
		}
	}
}

// source returns the source of a packet. It fails the test if the packet does not match the
// configuration.
func (c *cable) source(cfg Config, p *packet.Packet) netip.AddrPort {
	c.t.Helper()
	protocol, flags := layers.IPProtocolTCP, map[Kind]packet.TCPFlags{SYN: packet.SYN, ACK: packet.ACK}[cfg.Kind]
	if cfg.Kind == UDP {
		protocol = layers.IPProtocolUDP
	}
	header := p.Headers[0]
	if header.Protocol != protocol || p.Flags != flags {
		c.t.Fatalf("another kind of packet: %v", p)
	}
	if !cfg.Sources.Contains(header.Source) || netip.AddrPortFrom(header.Destination, p.DestinationPort) != cfg.Destination {
		c.t.Fatalf("other addresses: %v", p)
	}
	return netip.AddrPortFrom(header.Source, p.SourcePort)
}

// Without a number of flows, sources repeat only by chance. Two of a thousand sources out of 2^47
// are equal in less than one run of 10^8. For IPv4, with 2^31, it is one run of 4000, so IPv4 is
// left to other tests.
func TestSpoofedSources(t *testing.T) {
	c := newCable(t)
	cfg := c.config(SYN, target6)
	cfg.Count = 1000
	fd := c.capture(c.far, "far")
	c.run(t.Context(), cfg)
	seen := map[netip.AddrPort]bool{}
	for range cfg.Count {
		source := c.source(cfg, c.next(fd))
		if seen[source] {
			t.Errorf("%v again", source)
		}
		seen[source] = true
	}
}

// Random flows are among the requested flows.
func TestRandomFlows(t *testing.T) {
	c := newCable(t)
	cfg := c.config(ACK, target4)
	cfg.Count, cfg.Flows = 1000, 10
	fd := c.capture(c.far, "far")
	c.run(t.Context(), cfg)
	seen := map[netip.AddrPort]int{}
	for range cfg.Count {
		seen[c.source(cfg, c.next(fd))]++
	}
	if len(seen) != 10 { // in one run of 10^44 one of them is missing
		t.Errorf("%d flows: %v", len(seen), seen)
	}
}

// The generator keeps the rate. The context ends a run without a count.
func TestRate(t *testing.T) {
	c := newCable(t)
	cfg := c.config(UDP, target6)
	cfg.Rate, cfg.Count, cfg.Batch = 10_000, 2000, 10
	if took := c.run(t.Context(), cfg).Elapsed; took < 190*time.Millisecond {
		t.Errorf("2000 packets at 10000 a second took %v", took)
	}
	cfg.Count = 0
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	result := c.run(ctx, cfg)
	if most := cfg.Rate*result.Elapsed.Seconds() + 20; result.Sent == 0 || float64(result.Sent) > most {
		t.Errorf("%d packets in %v", result.Sent, result.Elapsed)
	}
}

func TestBadConfigurations(t *testing.T) {
	good := Config{Sources: sources6, Destination: target6, Interface: 1}
	testhost.Must(t, good.check())
	for name, change := range map[string]func(*Config){
		"families":   func(c *Config) { c.Destination = target4 },
		"no sources": func(c *Config) { c.Sources = netip.Prefix{} },
		"flows":      func(c *Config) { c.Sources, c.Flows = netip.MustParsePrefix("2001:db8::/128"), 1<<15+1 },
		"batch":      func(c *Config) { c.Batch = MaxBatch + 1 },
		"interface":  func(c *Config) { c.Interface = 0 },
		"rate":       func(c *Config) { c.Rate = -1 },
	} {
		cfg := good
		change(&cfg)
		if err := cfg.check(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
