package balancer

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testnet"
)

// patience bounds the wait for the control loop to take on a change. It is no measure of how fast that
// is: the machine may be busy, or stand still for a while.
const patience = 60 * time.Second

// steered is a balancer whose control loop runs, with a server behind "eth0", its node.interface.
type steered struct {
	*fixture
	ended chan error // the control loop's end
}

func steer(t *testing.T) *steered { return steerLate(t, 0) }

// steerLate is steer with a resolver that begins that much later than the control loop.
func steerLate(t *testing.T, late time.Duration) *steered {
	cfg := balancerOf(serviceOf("web", vip6, 80, config.TCP, config.SRv6Encap, srv6Server("s1", 1, 1)))
	s := &steered{fixture: open(t, cfg), ended: make(chan error, 1)}
	s.leaveSharedNetwork()
	s.attached = false
	router := testnet.New(t)
	testnet.Connect(t, s.ns, "eth0", testnet.Prefixes("fd00:a::1/64"),
		router, "eth0", testnet.Prefixes("fd00:a::2/64"))
	s.do(func(eth0 netlink.Link) error {
		_, locator, _ := net.ParseCIDR("fd00:5::/32")
		return netlink.RouteAdd(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Dst: locator, Gw: net.ParseIP("fd00:a::2"),
		})
	})
	// Run itself would leave the namespace: its goroutines are not in it.
	ctx, cancel := context.WithCancel(context.Background())
	loops := make(chan struct{}, 3)
	run := func(loop func() error) {
		defer func() { loops <- struct{}{} }()
		if err := s.ns.Do(loop); err != nil {
			s.ended <- err
		}
	}
	go run(func() error { return s.control(ctx) })
	go run(func() error { return s.checker.Run(ctx) })
	time.AfterFunc(late, func() { run(func() error { return s.resolver.Run(ctx) }) })
	t.Cleanup(func() {
		cancel()
		for range cap(loops) {
			<-loops
		}
	})
	select {
	case <-s.Ready():
	case err := <-s.ended:
		t.Fatal(err)
	case <-time.After(patience):
		t.Fatal("not attached")
	}
	return s
}

// What was not found out in time because the machine stood still is not taken for missing.
func TestStartsAfterStandstill(t *testing.T) {
	t.Parallel()
	steerLate(t, resolveTimeout+100*time.Millisecond)
}

// do changes node.interface.
func (s *steered) do(change func(netlink.Link) error) {
	s.t.Helper()
	s.must(s.ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return change(link)
	}))
}

// await polls the data path's tables.
func (s *steered) await(what string, holds func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatal(what)
		}
	}
}

// port is that of the server's next hop.
func (s *steered) port() (port balancerPort) {
	s.t.Helper()
	number := uint32(atomic.LoadUint64(&s.kernel.servers.servers[s.slot("web", "s1")].NextHop) >> 48)
	return s.kernel.mapped.Ports[number]
}

func (s *steered) hostMAC() (mac uint64) {
	s.t.Helper()
	s.must(s.kernel.objects.HostMac.Get(&mac))
	return mac
}

// The data path takes frames for the interface's new address and sends with it; packets are cut to
// the new MTU.
func TestFollowsInterface(t *testing.T) {
	t.Parallel()
	s := steer(t)
	mac := [6]byte{2, 0, 0, 0, 0, 9}
	s.do(func(eth0 netlink.Link) error { return netlink.LinkSetHardwareAddr(eth0, mac[:]) })
	s.await("the new MAC address is not taken on", func() bool {
		return s.hostMAC() == macWord(mac) && slices.Equal(s.port().mac(), mac[:])
	})
	s.do(func(eth0 netlink.Link) error { return netlink.LinkSetMTU(eth0, 1400) })
	s.await("the new MTU is not taken on", func() bool { return s.port().Mtu == 1400 })
}

// A balancer without its interface ends, whether another comes in its place or not.
func TestInterfaceGoes(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprintf("made anew %v", again), func(t *testing.T) {
			s := steer(t)
			s.do(netlink.LinkDel)
			if again {
				far := testnet.New(t)
				testnet.Connect(t, s.ns, "eth0", nil, far, "eth0", nil)
			}
			select {
			case err := <-s.ended:
				if !strings.Contains(err.Error(), `node.interface "eth0" is gone`) {
					t.Errorf("it ended with: %v", err)
				}
			case <-time.After(patience):
				t.Error("it goes on without its interface")
			}
		})
	}
}

// Native XDP cannot send by a bridge, nor by other interfaces without hardware of their own.
func TestWarnsOfEgress(t *testing.T) {
	t.Parallel()
	f := openStandard(t) // servers behind veths, and one behind a bridge
	var log bytes.Buffer
	f.log = slog.New(slog.NewTextHandler(&log, nil))
	f.mode = datapath.Generic
	f.applyHops()
	if log.Len() != 0 {
		t.Errorf("in generic mode: %s", &log)
	}
	f.mode = datapath.Native
	f.applyHops()
	f.applyHops()
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "interface=bridge type=bridge") {
		t.Errorf("logged:\n%s", got)
	}
}
