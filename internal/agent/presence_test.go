// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// onLoopback adds a VIP to the loopback interface of a server, or removes it.
func (n *network) onLoopback(server int, vip netip.Addr, change func(netlink.Link, *netlink.Addr) error) {
	n.t.Helper()
	n.in(n.servers[server-1], func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return change(lo, hostAddress(vip))
	})
}

// awaitPresent waits until the data path regards a VIP as present on the host, or as absent.
func (n *network) awaitPresent(a *running, vip netip.Addr, want bool) {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		var present uint32
		testhost.Must(n.t, a.kernel.objects.Vips.Lookup(vip.As16(), &present))
		if (present != 0) == want {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("VIP %s: present is %d", vip, present)
		}
		time.Sleep(time.Millisecond)
	}
}

// The agent restores the VIPs that it has put on the host.
func TestRemovedVIPComesBack(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	a := n.run(1, n.config(1, desired.SRv6Insert, vip6.Addr(), vip4.Addr()), link.AttachTCX)
	for _, vip := range []netip.Addr{vip6.Addr(), vip4.Addr()} {
		n.awaitPresent(a, vip, true)
		n.onLoopback(1, vip, netlink.AddrDel)
		deadline := time.Now().Add(patience)
		for back := false; !back; {
			n.in(n.servers[0], func() error {
				back = isLocal(vip)
				return nil
			})
			if time.Now().After(deadline) {
				t.Fatalf("VIP %s is not back", vip)
			}
		}
		n.awaitPresent(a, vip, true)
	}
}

// If the host does not accept a VIP, here because the rule of the local table is missing, the agent
// does not try again at once. Each attempt changes addresses, which would cause the next attempt.
func TestRefusedVIPIsLeftAlone(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	vip := vip4.Addr()
	a, err := New(n.config(1, desired.SRv6Insert, vip), desired.Secrets{}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		n.detach(1, a.cfg.Node.Instance)
	})
	n.in(n.servers[0], a.start)
	n.onLoopback(1, vip, netlink.AddrDel)
	n.in(n.servers[0], func() error {
		local := netlink.NewRule()
		local.Family, local.Priority, local.Table = netlink.FAMILY_V4, 0, unix.RT_TABLE_LOCAL
		return netlink.RuleDel(local)
	})
	changes := make(chan netlink.AddrUpdate, 100)
	done := make(chan struct{})
	n.in(n.servers[0], func() error { return netlink.AddrSubscribe(changes, done) })
	for range 3 {
		n.in(n.servers[0], a.followVIPs)
	}
	if !a.absent[vip] {
		t.Error("the VIP is not missing")
	}
	// This is the last change.
	n.onLoopback(1, vip6.Addr(), netlink.AddrAdd)
	attempts := 0
	for change := range changes {
		if change.LinkAddress.IP.Equal(vip6.Addr().AsSlice()) {
			break
		}
		if change.NewAddr && change.LinkAddress.IP.Equal(vip.AsSlice()) {
			attempts++
		}
	}
	close(done)
	if attempts != 1 {
		t.Errorf("%d attempts", attempts)
	}
}

// If somebody else assigns the VIPs, the agent tells balancers which VIPs are missing.
func TestMissingVIPIsTold(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	cfg := n.config(1, desired.SRv6Insert, vip6.Addr(), vip4.Addr())
	no := false
	cfg.Node.AssignVIPs = &no
	n.onLoopback(1, vip6.Addr(), netlink.AddrAdd)
	a := n.run(1, cfg, link.AttachTCX)
	n.awaitPresent(a, vip6.Addr(), true)
	n.awaitPresent(a, vip4.Addr(), false)
	n.onLoopback(1, vip4.Addr(), netlink.AddrAdd)
	n.awaitPresent(a, vip4.Addr(), true)
	n.onLoopback(1, vip6.Addr(), netlink.AddrDel)
	n.awaitPresent(a, vip6.Addr(), false)
}

// A change of the interface's MTU does not make a missing VIP served.
func TestMissingVIPStaysMissing(t *testing.T) {
	cfg := testConfig()
	a := &Agent{cfg: cfg, link: iface{mtu: mtu}, absent: map[netip.Addr]bool{vip6.Addr(): true}}
	content := a.tableContent(cfg)
	if content.vips[vip6.Addr().As16()] != 0 || content.vips[vip4.Addr().As16()] != 1 {
		t.Errorf("VIPs: %v", content.vips)
	}
}
