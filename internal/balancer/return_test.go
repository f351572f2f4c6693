// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// fabric is a balancer on real interfaces, eth0 to eth2. The router at the other end of each leads
// to all hosts.
type fabric struct {
	t         *testing.T
	near      *testhost.Namespace
	routers   map[string]*router // by the balancer's interface
	own       []nexthop.Link     // the interfaces that the balancer uses
	cfg       *desired.Balancer
	balancer  *Balancer
	attachTCX func(link.TCXOptions) (link.Link, error)
}

// router is the router at the other end of an interface of the balancer.
type router struct {
	ns       *testhost.Namespace
	link     nexthop.Link // the router's interface
	index    int          // the index of the balancer's interface
	gateways []netip.Prefix
}

// tcWays are the ways to attach programs to tc: by tcx, and by filters on kernels before 6.6.
var tcWays = map[string]func(link.TCXOptions) (link.Link, error){
	"tcx":    link.AttachTCX,
	"filter": func(link.TCXOptions) (link.Link, error) { return nil, ebpf.ErrNotSupported },
}

// newFabric starts a balancer whose services hunt, on one or two interfaces.
func newFabric(t *testing.T, way string, interfaces ...string) *fabric {
	t.Helper()
	return newFabricOf(t, hunting(desired.SelectConsistent, 2), way, interfaces...)
}

// newFabricOf starts a balancer on one or two interfaces.
func newFabricOf(t *testing.T, cfg *desired.Balancer, way string, interfaces ...string) *fabric {
	t.Helper()
	testhost.NeedBPF(t)
	n := &fabric{
		t: t, near: testhost.NewNamespace(t), routers: map[string]*router{}, cfg: cfg, attachTCX: tcWays[way],
	}
	for i, name := range []string{"eth0", "eth1", "eth2"} {
		n.connect(name, i)
	}
	n.cfg.Node.Instance = fmt.Sprintf("test-%d-%d", os.Getpid(), instances.Add(1))
	t.Cleanup(func() {
		n.stop()
		n.in(n.near, func() error { return dataplane.Detach(n.cfg.Node.Instance) })
		n.wantPrograms()
	})
	n.use(interfaces...)
	n.start()
	return n
}

func (n *fabric) connect(name string, number int) {
	n.t.Helper()
	r := &router{ns: testhost.NewNamespace(n.t)}
	n.routers[name] = r
	prefixes := func(host int) []netip.Prefix {
		return testhost.Prefixes(fmt.Sprintf("fd00:9:%d::%d/64", number, host), fmt.Sprintf("10.9.%d.%d/24", number, host))
	}
	r.gateways = prefixes(2)
	testhost.Connect(n.t, n.near, name, prefixes(1), r.ns, "eth0", r.gateways)
	r.link = n.linkOf(r.ns, "eth0")
	r.index = n.linkOf(n.near, name).Index
}

func (n *fabric) linkOf(ns *testhost.Namespace, name string) (found nexthop.Link) {
	n.t.Helper()
	n.in(ns, func() error {
		device, err := netlink.LinkByName(name)
		if err == nil {
			a := device.Attrs()
			found = nexthop.Link{Index: a.Index, Name: a.Name, Type: "veth", MAC: packet.MAC(a.HardwareAddr), MTU: a.MTU}
		}
		return err
	})
	return found
}

// use selects the interfaces of the balancer, from the next start on. The first one leads to all
// hosts.
func (n *fabric) use(interfaces ...string) {
	n.t.Helper()
	n.in(n.near, func() error {
		for _, gateway := range n.routers[interfaces[0]].gateways {
			if err := netlink.RouteReplace(&netlink.Route{Gw: gateway.Addr().AsSlice()}); err != nil {
				return err
			}
		}
		return nil
	})
	n.own = nil
	for _, name := range interfaces {
		n.own = append(n.own, n.linkOf(n.near, name))
	}
	n.cfg.Node.Interface, n.cfg.Node.Inside = interfaces[0], ""
	if len(interfaces) > 1 {
		n.cfg.Node.Inside = interfaces[1]
	}
}

func (n *fabric) in(ns *testhost.Namespace, f func() error) {
	n.t.Helper()
	testhost.Must(n.t, ns.Do(f))
}

// start starts a process, which attaches the data path.
func (n *fabric) start() {
	n.t.Helper()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(n.t, err)
	n.in(n.near, func() (err error) {
		if n.balancer, err = newBalancer(n.cfg, desired.Secrets{}, clock, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
		n.balancer.plane.Loader.AttachTCX = n.attachTCX
		inside := n.own[len(n.own)-1]
		hop := nexthop.Hop{MAC: n.routers[inside.Name].link.MAC, Link: inside}
		return (&Rehearsal{n.balancer}).Attach(n.own, hop)
	})
}

// stop ends the process. The data path stays attached.
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

// wantPrograms requires that one XDP program and one tc program at ingress run on each of these
// interfaces, and none on others.
func (n *fabric) wantPrograms(interfaces ...string) {
	n.t.Helper()
	n.in(n.near, func() error {
		for name, r := range n.routers {
			found, err := link.QueryPrograms(link.QueryOptions{Target: r.index, Attach: ebpf.AttachTCXIngress})
			if err != nil {
				return err
			}
			device, err := netlink.LinkByIndex(r.index)
			if err != nil {
				return err
			}
			filters, err := netlink.FilterList(device, netlink.HANDLE_MIN_INGRESS)
			if err != nil {
				return err
			}
			want := 0
			if slices.Contains(interfaces, name) {
				want = 1
			}
			xdp := device.Attrs().Xdp
			if tc := len(found.Programs) + len(filters); tc != want || (xdp != nil && xdp.Attached) != (want == 1) {
				n.t.Errorf("%s has %d programs at tc ingress, and XDP %+v; want %d of both", name, tc, xdp, want)
			}
		}
		return nil
	})
}

// xdpLinks returns the XDP links, by the indexes of their interfaces.
func (n *fabric) xdpLinks() map[uint32]link.ID {
	n.t.Helper()
	links := map[uint32]link.ID{}
	n.eachXDPLink(func(info *link.Info) { links[info.XDP().Ifindex] = info.ID })
	return links
}

// xdpPrograms returns the programs of the XDP links, by the indexes of their interfaces.
func (n *fabric) xdpPrograms() map[uint32]ebpf.ProgramID {
	n.t.Helper()
	programs := map[uint32]ebpf.ProgramID{}
	n.eachXDPLink(func(info *link.Info) { programs[info.XDP().Ifindex] = info.Program })
	return programs
}

func (n *fabric) eachXDPLink(f func(*link.Info)) {
	n.t.Helper()
	for _, pin := range []string{datapath.LinkPin, datapath.InsidePin} {
		l, err := link.LoadPinnedLink(filepath.Join(datapath.Dir(n.cfg.Node.Instance), pin), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		testhost.Must(n.t, err)
		info, err := l.Info()
		_ = l.Close()
		testhost.Must(n.t, err)
		f(info)
	}
}

// socket returns a socket that receives all frames of a router and can send any frame.
func (n *fabric) socket(r *router) int {
	n.t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
	var fd int
	n.in(r.ns, func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: r.link.Index, Protocol: all}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}))
	})
	return fd
}

// exchange sends a frame from one router. It waits until another router receives a frame of the
// same kind and to the same address as the wanted one, and compares the two.
func (n *fabric) exchange(from *router, frame []byte, to *router, want []byte) {
	n.t.Helper()
	in := n.socket(to)
	defer unix.Close(in)
	n.sendUntil(from, frame, in, func(got []byte) bool {
		if destination(got) == destination(want) && !bytes.Equal(got, frame) && !bytes.Equal(got, want) {
			n.t.Fatalf("-want +got:\n%s", cmp.Diff(want, got))
		}
		return bytes.Equal(got, want)
	})
}

// sendUntil sends a frame from a router, again and again, until a socket receives an awaited
// packet.
func (n *fabric) sendUntil(from *router, frame []byte, in int, awaited func([]byte) bool) {
	n.t.Helper()
	out := n.socket(from)
	defer unix.Close(out)
	buffer := make([]byte, 4096)
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if _, err := unix.Write(out, frame); err != nil {
			n.t.Fatal(err)
		}
		for {
			size, _, err := unix.Recvfrom(in, buffer, 0)
			if err != nil {
				break // nothing for a second: the neighbour may not have been resolved
			}
			if awaited(buffer[:size]) {
				return
			}
		}
	}
	n.t.Fatalf("the awaited packet does not come for %x", frame)
}

func (n *fabric) must(err error) {
	n.t.Helper()
	testhost.Must(n.t, err)
}

// destination returns the destination of a frame's packet by its header, or an empty text.
func destination(frame []byte) string {
	switch {
	case len(frame) >= 34 && frame[12] == 0x08:
		return string(frame[30:34])
	case len(frame) >= 54 && frame[12] == 0x86:
		return string(frame[38:54])
	}
	return ""
}

// A server's packet leaves for the client by the route and the neighbour of the kernel, on a host
// that does not forward. This holds for both SRv6 encapsulations, both families and after a
// restart. A packet that arrives on node.inside leaves through node.interface.
func TestReturn(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		for _, interfaces := range [][]string{{"eth0"}, {"eth0", "eth1"}} {
			t.Run(fmt.Sprint(way, interfaces), func(t *testing.T) {
				t.Parallel()
				n := newFabric(t, way, interfaces...)
				for range 2 {
					for service := range hunted {
						n.requireReturn(service)
					}
					before := n.xdpLinks()
					n.stop()
					n.start()
					n.wantPrograms(interfaces...)
					if diff := cmp.Diff(before, n.xdpLinks()); diff != "" {
						t.Errorf("links of XDP (-before +after):\n%s", diff)
					}
				}
			})
		}
	}
}

// requireReturn makes a server of the service send a signal, and requires that it reaches the
// client.
func (n *fabric) requireReturn(service string) {
	n.t.Helper()
	kind := desired.SRv6Encap
	if service == "insert" {
		kind = desired.SRv6Insert
	}
	outside, inside := n.own[0], n.own[len(n.own)-1]
	clients := n.routers[outside.Name]
	frame, out := n.signalOf(kind, hunted[service])
	n.exchange(n.routers[inside.Name], frame, clients, packet.SetMACs(out, outside.MAC, clients.link.MAC))
}

// signalOf returns a server's signal, as it reaches the balancer's interface towards the servers,
// and the packet that the balancer sends on.
func (n *fabric) signalOf(kind desired.Encapsulation, flow dataplane.Flow) (frame, out []byte) {
	n.t.Helper()
	inside := n.own[len(n.own)-1]
	frame = signal(kind, srv6Server("", 1, 1).Locator, flow, srv6.CreateStickiness, synAck)
	frame = packet.SetMACs(frame, n.routers[inside.Name].link.MAC, inside.MAC)
	out, err := packet.Return(frame, inside.MAC)
	n.must(err)
	return frame, out
}

// A start on other interfaces leaves no program on the former ones. If an interface stays in use,
// its program is replaced in one step, even if the interface changes its role.
func TestReturnMoves(t *testing.T) {
	t.Parallel()
	moves := [][]string{
		{"eth0"}, {"eth1"}, {"eth1", "eth0"}, {"eth0", "eth1"}, {"eth0"}, {"eth1", "eth0"}, {"eth0", "eth2"},
		{"eth2"}, {"eth0", "eth1"}, {"eth1", "eth2"}, {"eth2", "eth0"},
	}
	for way := range tcWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			n := newFabric(t, way, moves[0]...)
			for _, interfaces := range moves[1:] {
				n.stop()
				before := n.xdpLinks()
				n.use(interfaces...)
				n.start()
				n.wantPrograms(interfaces...)
				for ifindex, id := range n.xdpLinks() {
					if was, ok := before[ifindex]; ok && was != id {
						t.Errorf("%v: interface %d has link %d in the place of %d", interfaces, ifindex, id, was)
					}
				}
				n.requireReturn("web")
			}
		})
	}
}
