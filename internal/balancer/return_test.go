package balancer

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testnet"
)

// fabric is a balancer on a real interface, and a router at its other end that is the way to everybody.
type fabric struct {
	t            *testing.T
	near, router *testnet.Namespace
	own          nexthop.Link
	routerMAC    packet.MAC
	routerIndex  int
	cfg          *config.Balancer
	balancer     *Balancer
	attachTCX    func(link.TCXOptions) (link.Link, error)
}

// tcWays are how tc runs programs: by tcx, and on kernels before 6.6 by filters.
var tcWays = map[string]func(link.TCXOptions) (link.Link, error){
	"tcx":    link.AttachTCX,
	"filter": func(link.TCXOptions) (link.Link, error) { return nil, ebpf.ErrNotSupported },
}

func newFabric(t *testing.T, way string) *fabric {
	t.Helper()
	n := &fabric{
		t: t, near: testnet.New(t), router: testnet.New(t), cfg: hunting(config.SelectConsistent, 2), attachTCX: tcWays[way],
	}
	testnet.Connect(t, n.near, "eth0", testnet.Prefixes("fd00:9::1/64", "10.9.0.1/24"),
		n.router, "eth0", testnet.Prefixes("fd00:9::2/64", "10.9.0.2/24"))
	n.in(n.near, func() error {
		if err := n.use("eth0"); err != nil {
			return err
		}
		for _, gateway := range []string{"fd00:9::2", "10.9.0.2"} {
			if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}); err != nil {
				return err
			}
		}
		return nil
	})
	n.in(n.router, func() error {
		device, err := net.InterfaceByName("eth0")
		if err == nil {
			n.routerMAC, n.routerIndex = packet.MAC(device.HardwareAddr), device.Index
		}
		return err
	})
	n.cfg.Node.Instance = fmt.Sprintf("test-%d-%d", os.Getpid(), instances.Add(1))
	t.Cleanup(func() {
		n.stop()
		n.in(n.near, func() error { return Detach(n.cfg.Node.Instance) })
		if programs := n.programs(); programs != 0 {
			t.Errorf("%d programs are left at tc ingress", programs)
		}
	})
	n.start()
	return n
}

// use makes an interface of the namespace the balancer's own.
func (n *fabric) use(name string) error {
	device, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a := device.Attrs()
	n.own = nexthop.Link{Index: a.Index, Name: a.Name, Type: "veth", MAC: packet.MAC(a.HardwareAddr), MTU: a.MTU}
	return nil
}

func (n *fabric) in(ns *testnet.Namespace, f func() error) {
	n.t.Helper()
	if err := ns.Do(f); err != nil {
		n.t.Fatal(err)
	}
}

// start makes a process, which attaches the data path.
func (n *fabric) start() {
	n.t.Helper()
	clock, err := newFlowClock()
	if err != nil {
		n.t.Fatal(err)
	}
	n.in(n.near, func() (err error) {
		if n.balancer, err = newBalancer(n.cfg, clock, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
		n.balancer.kernel.attachTCX = n.attachTCX
		return n.balancer.Steer(n.own, nexthop.Hop{MAC: n.routerMAC, Link: n.own})
	})
}

// stop ends the process; the data path goes on.
func (n *fabric) stop() {
	n.t.Helper()
	if n.balancer == nil {
		return
	}
	if err := n.balancer.Close(); err != nil {
		n.t.Error(err)
	}
	n.balancer = nil
}

// programs is how many run at tc ingress of the balancer's interface.
func (n *fabric) programs() (count int) {
	n.t.Helper()
	n.in(n.near, func() error {
		found, err := link.QueryPrograms(link.QueryOptions{Target: n.own.Index, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return err
		}
		device, err := netlink.LinkByIndex(n.own.Index)
		if err != nil {
			return err
		}
		filters, err := netlink.FilterList(device, netlink.HANDLE_MIN_INGRESS)
		count = len(found.Programs) + len(filters)
		return err
	})
	return count
}

// exchange sends a frame from the router and waits for the one that comes back, of the same kind and to the
// same address as wanted.
func (n *fabric) exchange(frame, want []byte) {
	n.t.Helper()
	n.in(n.router, func() error {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		address := &unix.SockaddrLinklayer{Ifindex: n.routerIndex, Protocol: all}
		if err := unix.Bind(fd, address); err != nil {
			return err
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
			return err
		}
		buffer := make([]byte, 4096)
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
			if err := unix.Sendto(fd, frame, 0, address); err != nil {
				return err
			}
			for {
				size, _, err := unix.Recvfrom(fd, buffer, 0)
				if err != nil {
					break // nothing for a second: the neighbour may not have been ready
				}
				if bytes.Equal(buffer[:size], want) {
					return nil
				}
				if destination(buffer[:size]) == destination(want) && !bytes.Equal(buffer[:size], frame) {
					return fmt.Errorf("-want +got:\n%s", cmp.Diff(want, buffer[:size]))
				}
			}
		}
		return fmt.Errorf("nothing comes back for %x", frame)
	})
}

// destination is where a frame's packet goes, as its header says it; empty without one.
func destination(frame []byte) string {
	switch {
	case len(frame) >= 34 && frame[12] == 0x08:
		return string(frame[30:34])
	case len(frame) >= 54 && frame[12] == 0x86:
		return string(frame[38:54])
	}
	return ""
}

// A server's packet leaves for the client by the kernel's own route and neighbour, on a host that is no
// router, in both encapsulations and of both families; also after a restart.
func TestReturn(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		t.Run(way, func(t *testing.T) { testReturn(t, newFabric(t, way)) })
	}
}

func testReturn(t *testing.T, n *fabric) {
	for range 2 {
		for service, flow := range hunted {
			kind := config.SRv6Encap
			if service == "insert" {
				kind = config.SRv6Insert
			}
			frame := signal(kind, srv6Server("", 1, 1).Locator, flow, srv6.CreateStickiness, synAck)
			frame = packet.SetMACs(frame, n.routerMAC, n.own.MAC)
			out, err := packet.Return(frame, n.own.MAC)
			if err != nil {
				t.Fatal(err)
			}
			n.exchange(frame, packet.SetMACs(out, n.own.MAC, n.routerMAC))
		}
		n.stop()
		n.start()
		if programs := n.programs(); programs != 1 {
			t.Fatalf("%d programs at tc ingress after a restart", programs)
		}
	}
}

// A start on another interface leaves nothing on the one before.
func TestReturnMoves(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		t.Run(way, func(t *testing.T) {
			n := newFabric(t, way)
			testnet.Connect(t, n.near, "eth1", nil, n.router, "eth1", nil)
			before := n.own
			n.stop()
			n.in(n.near, func() error { return n.use("eth1") })
			n.start()
			if programs := n.programs(); programs != 1 {
				t.Errorf("%d programs at tc ingress of the interface", programs)
			}
			now := n.own
			n.own = before
			if programs := n.programs(); programs != 0 {
				t.Errorf("%d programs are left on the interface before", programs)
			}
			n.own = now
		})
	}
}
