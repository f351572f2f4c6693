// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// inFlight is how many checks of a benchmark are under way at a time.
const inFlight = 64

// BenchmarkChecks measures how many checks a core can do in a second, with the work of the servers,
// which are in the same process. Run it with -cpu=1.
func BenchmarkChecks(b *testing.B) {
	b.Run("tcp", func(b *testing.B) {
		measure(b, nil, tcpTarget(serve(b, func(net.Conn) {}).Addr()))
	})
	b.Run("http", func(b *testing.B) {
		listener := serve(b, func(conn net.Conn) {
			if _, err := conn.Read(make([]byte, 4096)); err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
			}
		})
		target := httpTarget(listener.Addr())
		target.Body = "ok"
		measure(b, nil, target)
	})
}

// BenchmarkPacketChecks is BenchmarkChecks for checks that take the path of clients' packets,
// without the encapsulation. They find their source as in operation. The server is behind a veth.
// The benchmark changes the network of its process, so run it with -cpu=1 in a namespace: unshare
// --net.
func BenchmarkPacketChecks(b *testing.B) {
	links, err := netlink.LinkList()
	if err != nil || len(links) > 1 {
		b.Skipf("needs a network namespace of its own: interfaces: %d, %v", len(links), err)
	}
	vip := netip.MustParseAddr("192.0.2.80")
	own, err := os.Open("/proc/thread-self/ns/net")
	testhost.Must(b, err)
	defer own.Close()
	server := testhost.NewNamespace(b)
	var listener net.Listener
	testhost.Must(b, server.Do(func() error {
		attributes := netlink.LinkAttrs{Name: "eth0", HardwareAddr: gatewayMAC}
		err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(own.Fd()),
		})
		testhost.Must(b, errors.Join(err, address("eth0", "10.0.0.2/24"), address("lo", vip.String()+"/32")))
		listener, err = net.Listen("tcp", net.JoinHostPort(vip.String(), "80"))
		return err
	}))
	testhost.Must(b, errors.Join(address("lo", "127.0.0.1/8"), address("eth0", "10.0.0.1/24")))
	eth0, err := netlink.LinkByName("eth0")
	testhost.Must(b, err)
	testhost.Must(b, netlink.RouteAdd(&netlink.Route{
		Dst: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(32, 32)}, Gw: net.IPv4(10, 0, 0, 2),
	}))
	path := NewHostPath(0x5e6c0000, 0xffff0000)
	by := PathInterface{Name: "eth0", Index: eth0.Attrs().Index, MTU: eth0.Attrs().MTU}
	testhost.Must(b, path.Set(by, []netip.Addr{vip}, nil))
	handle(b, listener, func(net.Conn) {})
	target := tcpTarget(listener.Addr())
	target.OnPath, target.Mark = true, 0x5e6c0001
	measure(b, path, target)
}

// address makes an interface have an address, and sets it up.
func address(name, prefix string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(prefix)
	return errors.Join(err, netlink.AddrReplace(link, address), netlink.LinkSetUp(link))
}

// serve handles the connections to a new listener one by one.
func serve(b *testing.B, do func(net.Conn)) net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(b, err)
	handle(b, listener, do)
	return listener
}

// handle handles the connections to a listener one by one.
func handle(b *testing.B, listener net.Listener, do func(net.Conn)) {
	b.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			do(conn)
			conn.Close()
		}
	}()
}

// measure does checks of a target, and reports how many fit into a second of CPU time.
func measure(b *testing.B, path Path, target Target) {
	c := New(path, nil)
	target.Timeout = time.Minute
	var group sync.WaitGroup
	work := make(chan struct{})
	before := processTime(b)
	for range inFlight {
		group.Go(func() {
			for range work {
				if err := c.tryOnce(b.Context(), &target); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for b.Loop() {
		work <- struct{}{}
	}
	close(work)
	group.Wait()
	b.ReportMetric(float64(b.N)/(processTime(b)-before).Seconds(), "checks/cpu-s")
}

// manyTargets is how many targets BenchmarkChecker checks each second.
const manyTargets = 10_000

// BenchmarkChecker lets a checker check 10,000 servers each second over TCP, with the work of the
// servers, and measures how many checks fit into a second of CPU time. Run it with -cpu=1. An
// operation is one check. If the core does not suffice, checks fail by timeouts.
func BenchmarkChecker(b *testing.B) {
	target := tcpTarget(serve(b, func(net.Conn) {}).Addr())
	target.Interval, target.Jitter, target.Timeout = time.Second, time.Second/10, time.Second
	targets := make([]Target, manyTargets)
	for i := range targets {
		targets[i] = target
		targets[i].Server = fmt.Sprint(i)
	}
	c := New(nil, slog.New(slog.DiscardHandler))
	var active, most atomic.Int64
	done := make(chan error, manyTargets)
	c.attempt = func(ctx context.Context, t *Target) error {
		now := active.Add(1)
		err := c.tryOnce(ctx, t)
		most.Store(max(most.Load(), now))
		active.Add(-1)
		if ctx.Err() == nil {
			done <- err
		}
		return err
	}
	ctx, cancel := context.WithCancel(b.Context())
	var group sync.WaitGroup
	group.Go(func() { _ = c.Run(ctx) })
	group.Go(func() { c.SetTargets(ctx, targets) })
	for range targets { // the first checks of all targets are denser than later ones
		<-done
	}
	most.Store(0)
	before, failed := processTime(b), 0
	for b.Loop() {
		if err := <-done; err != nil {
			failed++
		}
	}
	b.ReportMetric(float64(b.N)/(processTime(b)-before).Seconds(), "checks/cpu-s")
	b.ReportMetric(float64(most.Load()), "checks-at-once")
	b.ReportMetric(float64(failed), "failed")
	cancel()
	group.Wait()
}

// processTime returns the CPU time of this process.
func processTime(b *testing.B) time.Duration {
	var usage unix.Rusage
	testhost.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
