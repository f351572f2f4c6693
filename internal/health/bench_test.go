// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inFlight is how many checks of a benchmark are under way at a time.
const inFlight = 64

// BenchmarkChecks measures how many checks a core can do in a second, with the work of the servers,
// which are in the same process. Run it with -cpu=1.
func BenchmarkChecks(b *testing.B) {
	b.Run("tcp", func(b *testing.B) {
		measure(b, tcpTarget(serve(b, func(net.Conn) {}).Addr()))
	})
	b.Run("http", func(b *testing.B) {
		listener := serve(b, func(conn net.Conn) {
			if _, err := conn.Read(make([]byte, 4096)); err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
			}
		})
		target := httpTarget(listener.Addr())
		target.Body = "ok"
		measure(b, target)
	})
}

// serve handles the connections to a new listener one by one.
func serve(b *testing.B, handle func(net.Conn)) net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			handle(conn)
			conn.Close()
		}
	}()
	return listener
}

// measure does checks of a target, and reports how many fit into a second of CPU time.
func measure(b *testing.B, target Target) {
	c := New(nil, nil)
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
	for range targets { // these are denser than the others
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
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
