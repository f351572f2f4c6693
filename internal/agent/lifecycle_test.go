// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
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

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestRestart replaces a running agent several times while datagrams are sent. No datagram is lost.
func TestRestart(t *testing.T) {
	t.Parallel()
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			cfg := n.config(1, desired.SRv6Insert, vip6.Addr())
			a := n.run(1, cfg, attachTCX)
			n.serve(1, vip6.Addr())
			n.use(srv6Encap(desired.SRv6Insert, serverSID(1)))
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
						n.echo(udp, 100) // each is answered before the next
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

// host is the state that an agent could leave behind on a host.
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
		}
		slices.Sort(h.Qdiscs)
		h.Filters, err = filters(eth0)
		return err
	})
	_, err := os.Stat(datapath.Dir(instance))
	h.Pins = err == nil
	return h
}

// filters returns the names of the filters on an interface.
func filters(device netlink.Link) (names []string, err error) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		found, err := netlink.FilterList(device, parent)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			names = append(names, f.(*netlink.BpfFilter).Name)
		}
	}
	return names, nil
}

// TestDetach checks that detaching restores the host, also if the host had a VIP before the agent.
// Only clsact stays.
func TestDetach(t *testing.T) {
	t.Parallel()
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/VIP before: %v", name, before), func(t *testing.T) {
				n := newNetwork(t, 1)
				cfg := n.config(1, desired.GRE, vip4.Addr(), vip6.Addr())
				if before {
					n.in(n.servers[0], func() error {
						lo, err := netlink.LinkByName("lo")
						if err != nil {
							return err
						}
						return netlink.AddrAdd(lo, hostAddress(vip4.Addr()))
					})
				}
				was := n.inspect(1, cfg.Node.Instance)
				for range 2 { // the second process did not see the host's previous state
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
				if name == "clsact" {
					was.Qdiscs = slices.Sorted(slices.Values(append(was.Qdiscs, "clsact")))
				}
				if diff := cmp.Diff(was, n.inspect(1, cfg.Node.Instance)); diff != "" {
					t.Errorf("before and after (-before +after):\n%s", diff)
				}
			})
		}
	}
}

// TestOtherNamespace checks that an agent refuses to start in another network namespace, where the
// interface with the same index is not the instance's.
func TestOtherNamespace(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 2)
	cfg := n.config(1, desired.GRE, vip4.Addr())
	n.run(1, cfg, link.AttachTCX).stop()
	at1, at2 := n.inspect(1, cfg.Node.Instance), n.inspect(2, cfg.Node.Instance)
	a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
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

// TestOtherInterface restarts an agent on another interface. Nothing of the agent remains on the
// previous one.
func TestOtherInterface(t *testing.T) {
	t.Parallel()
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			testhost.Connect(t, n.servers[0], "eth1", nil, n.router, "second", nil)
			cfg := n.config(1, desired.GRE, vip4.Addr())
			n.run(1, cfg, attachTCX).stop()
			other := *cfg
			other.Node.Interface = "eth1"
			n.run(1, &other, attachTCX).stop()
			if now := n.inspect(1, cfg.Node.Instance); now.XDP || len(now.Filters) != 0 {
				t.Errorf("left on eth0: %+v", now)
			}
			n.in(n.servers[0], func() error { return datapath.CheckRole(cfg.Node.Instance, datapath.RoleAgent) })
			n.detach(1, cfg.Node.Instance)
			n.in(n.servers[0], func() error {
				eth1, err := netlink.LinkByName("eth1")
				if err != nil {
					return err
				}
				left, err := filters(eth1)
				if len(left) != 0 {
					t.Errorf("left on eth1: %v", left)
				}
				return err
			})
		})
	}
}

// TestFailedMove restarts an agent on another interface, which already has a program. Everything on
// the previous interface stays unchanged.
func TestFailedMove(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	testhost.Connect(t, n.servers[0], "eth1", nil, n.router, "second", nil)
	cfg := n.config(1, desired.GRE, vip4.Addr())
	n.run(1, cfg, link.AttachTCX).stop()
	other := *cfg
	other.Node.Interface = "eth1"
	a, err := New(&other, desired.Secrets{}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	defer a.Close()
	n.in(n.servers[0], func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		eth1, err := netlink.LinkByName("eth1")
		if err != nil {
			return err
		}
		blocker, err := link.AttachXDP(link.XDPOptions{Program: a.kernel.objects.XdpAgent, Interface: eth1.Attrs().Index})
		if err != nil {
			return err
		}
		defer blocker.Close()
		if err := a.Run(t.Context()); !errors.Is(err, unix.EBUSY) {
			t.Errorf("error %v, want %v", err, unix.EBUSY)
		}
		for _, pin := range []string{datapath.LinkPin, ingress.Pin, egress.Pin} {
			at, err := datapath.AttachedTo(filepath.Join(a.kernel.loader.Dir, pin))
			if at != eth0.Attrs().Index || err != nil {
				t.Errorf("%s is attached to interface %d, error %v; want %d", pin, at, err, eth0.Attrs().Index)
			}
		}
		return nil
	})
}

// TestOtherRole checks that an agent does not start with the pins of a balancer, and does not
// change them.
func TestOtherRole(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	cfg := n.config(1, desired.GRE, vip4.Addr())
	dir, err := datapath.MakeDir(cfg.Node.Instance, datapath.RoleBalancer)
	testhost.Must(t, err)
	t.Cleanup(func() {
		if err := datapath.RemoveDir(cfg.Node.Instance); err != nil {
			t.Error(err)
		}
	})
	identity, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	testhost.Must(t, err)
	defer identity.Close()
	testhost.Must(t, identity.Pin(filepath.Join(dir, "identity")))
	a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err == nil {
		a.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "has the role "+string(datapath.RoleBalancer)) {
		t.Errorf("error %v", err)
	}
	if pins, err := os.ReadDir(dir); len(pins) != 1 || err != nil {
		t.Errorf("there are %d pins, error %v; the balancer has made one", len(pins), err)
	}
}

// leaveFirstStart leaves the state of a first start that was killed after it had attached one
// program.
func leaveFirstStart(t *testing.T, n *network, cfg *desired.Agent) {
	t.Helper()
	a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	k := a.kernel
	testhost.Must(t, n.servers[0].Do(func() error {
		return errors.Join(a.check(), datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
			_, err := k.loader.Attach(t, []datapath.Place{{Hook: egress, Program: k.objects.TcAgent, Ifindex: a.link.index}})
			return errors.Join(a.fill(t, a.cfg, a.keys), k.loader.Publish(t), err)
		}))
	}))
	testhost.Must(t, k.objects.Close())
}

// TestFailedStart checks that a failed start leaves nothing behind, also if a first start was killed
// before.
func TestFailedStart(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		spoil  func(*desired.Agent, *Agent)
		err    string
		killed bool
	}{
		"refused by the kernel": {func(_ *desired.Agent, a *Agent) {
			a.kernel.loader.AttachTCX = func(link.TCXOptions) (link.Link, error) { return nil, errors.New("refused") }
		}, "refused", false},
		"no such interface": {func(cfg *desired.Agent, _ *Agent) { cfg.Node.Interface = "nope" },
			`node.interface "nope": there is no such interface`, false},
		"no such interface, after a killed start": {func(cfg *desired.Agent, _ *Agent) { cfg.Node.Interface = "nope" },
			`node.interface "nope": there is no such interface`, true},
		"no Ethernet": {func(cfg *desired.Agent, _ *Agent) { cfg.Node.Interface = "lo" }, "no Ethernet", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			cfg := n.config(1, desired.GRE, vip4.Addr())
			was := n.inspect(1, cfg.Node.Instance)
			if test.killed {
				leaveFirstStart(t, n, cfg)
			}
			a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
			testhost.Must(t, err)
			test.spoil(cfg, a)
			err = n.servers[0].Do(func() error { return a.Run(t.Context()) })
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %s", err, test.err)
			}
			if err := a.Close(); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(was, n.inspect(1, cfg.Node.Instance)); diff != "" {
				t.Errorf("before and after (-before +after):\n%s", diff)
			}
		})
	}
}

// TestLosses checks that a change affects the connections of services whose VIP it removes, and not
// those of a VIP that another service keeps.
func TestLosses(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	n := newNetwork(t, 1)
	cfg := n.config(1, desired.SRv6Encap, vip4.Addr(), vip6.Addr())
	cfg.Services[2].Accept, cfg.Services[2].Load.Kind = desired.Accept{Policy: desired.AcceptAlways}, desired.LoadConnections
	a := n.run(1, cfg, link.AttachTCX)
	n.serve(1, vip6.Addr())
	n.use(srv6Encap(desired.SRv6Encap, serverSID(1)))
	c := n.dial(vip6.Addr())
	n.echo(c, 1000)
	without := func(services ...desired.AgentService) *desired.Agent {
		next := *cfg
		next.Services = services
		return &next
	}
	requireLosses := func(next *desired.Agent, want ...desired.Loss) {
		t.Helper()
		losses, err := a.Losses(t.Context(), next)
		testhost.Must(t, err)
		if diff := cmp.Diff(want, losses); diff != "" {
			t.Errorf("losses (-want +got):\n%s", diff)
		}
	}
	requireLosses(cfg)
	requireLosses(without(cfg.Services[:2]...),
		desired.Loss{Service: cfg.Services[2].Name, Cause: desired.LossRemoved, Flows: new(uint64(1))},
		desired.Loss{Service: cfg.Services[3].Name, Cause: desired.LossRemoved})
	keepsVIP := without(cfg.Services[0], cfg.Services[1], cfg.Services[3])
	requireLosses(keepsVIP)
	testhost.Must(t, a.Reload(t.Context(), keepsVIP, desired.Secrets{}))
	n.echo(c, 1000)
}

// TestReload checks that a reload adds and removes services, and refuses changes that need a
// restart.
func TestReload(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	cfg := n.config(1, desired.SRv6Encap, vip4.Addr())
	a := n.run(1, cfg, link.AttachTCX)
	n.serve(1, vip4.Addr())
	n.use(srv6Encap(desired.SRv6Encap, serverSID(1)))
	n.echo(n.dial(vip4.Addr()), 1000)

	testhost.Must(t, a.Reload(t.Context(), n.config(1, desired.SRv6Encap, vip4.Addr(), vip6.Addr()), desired.Secrets{}))
	n.serve(1, vip6.Addr())
	n.echo(n.dial(vip6.Addr()), 1000)

	bad := n.config(1, desired.SRv6Encap)
	bad.Node.Interface = "eth1"
	if err := a.Reload(t.Context(), bad, desired.Secrets{}); err == nil {
		t.Error("another interface: no error")
	}
	n.echo(n.dial(vip4.Addr()), 1000)

	testhost.Must(t, a.Reload(t.Context(), n.config(1, desired.SRv6Encap, vip6.Addr()), desired.Secrets{}))
	want := []string{"10.0.1.2/24", "127.0.0.1/8", "2001:db8:80::1/128", "::1/128", "fd00:5:1::2/64"}
	if diff := cmp.Diff(want, n.inspect(1, cfg.Node.Instance).Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	before := counters(t, a.kernel)
	if _, err := n.dialUDP(vip4.Addr()).Write([]byte("gone")); err != nil {
		t.Fatal(err)
	}
	n.await("a drop of the VIP that is gone", func() bool {
		return changed(before, counters(t, a.kernel))["drop_not_served"].Packets > 0
	})
}

// TestFollowsInterface changes the MAC address and the MTU of the interface of a running agent.
func TestFollowsInterface(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	a := n.run(1, n.config(1, desired.SRv6Insert, vip6.Addr()), link.AttachTCX)
	n.serve(1, vip6.Addr())
	n.use(srv6Encap(desired.SRv6Insert, serverSID(1)))
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
		key := serviceKey(desired.AgentService{VIP: vip6.Addr(), Port: 80})
		return a.kernel.objects.SegmentSizes.Lookup(key, &size) == nil && size == 1284
	})
	c := n.dial(vip6.Addr())
	n.echo(c, 10_000)
	if got := mss(t, c); got != 1284-12 {
		t.Errorf("MSS %d, want 1272", got)
	}
}

// await polls until a condition holds.
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

// The loop makes steps also when nothing happens. A request that does not return makes none.
func TestStepsOfRun(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	a := n.run(1, n.config(1, desired.SRv6Encap, vip4.Addr()), link.AttachTCX)
	await := func(before uint64) {
		t.Helper()
		for deadline := time.Now().Add(patience); a.Steps() == before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no step without an event")
			}
		}
	}
	await(a.Steps())
	stuck, release := make(chan uint64), make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- a.do(t.Context(), func() error {
			stuck <- a.Steps()
			<-release
			return nil
		})
	}()
	at := <-stuck
	time.Sleep(10 * time.Millisecond) // a step now would be wrong
	if got := a.Steps(); got != at {
		t.Errorf("%d steps of a loop that is stuck", got-at)
	}
	close(release)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	await(a.Steps())
}

// The agent lets XDP see VLAN tags: it switches off the offloads that hide them, at its start and
// again when somebody has switched them on.
func TestAgentSeesVLANTags(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	server := n.servers[0]
	testhost.Connect(t, server, "card", nil, server, "far", nil)
	cfg := n.config(1, desired.SRv6Insert, vip6.Addr())
	cfg.Node.Interface = "card"
	n.run(1, cfg, link.AttachTCX)
	hiding := []string{"tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"}
	areOff := func() (off bool) {
		n.in(server, func() error {
			on, err := netdev.ActiveOffloads("far", hiding...)
			off = len(on) == 0
			return err
		})
		return off
	}
	if !areOff() {
		t.Error("the tags are hidden after the start")
	}
	n.in(server, func() error { return netdev.SetOffloads("far", true, hiding...) })
	n.in(server, func() error { // a change of addresses makes the agent look again
		card, err := netlink.LinkByName("card")
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("192.0.2.1/32")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(card, address)
	})
	n.await("the offloads to be off again", areOff)
}
