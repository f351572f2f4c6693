// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

const (
	liveConnections = 40
	// The intervals between round trips of a connection, between new connections, and between
	// datagrams. TCP repeats a lost packet, so only datagrams show a short loss.
	roundEvery    = 100 * time.Millisecond
	newEvery      = 20 * time.Millisecond
	datagramEvery = time.Millisecond
)

// echoServers answers what clients send, by TCP and UDP, until the test ends.
func echoServers(t *testing.T, n *testhost.Namespace, tcp []string, udp string) {
	t.Helper()
	for _, address := range tcp {
		var listener net.Listener
		must(t, n.Do(func() (err error) { listener, err = net.Listen("tcp", address); return err }))
		t.Cleanup(func() { _ = listener.Close() })
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				go func() {
					_, _ = io.Copy(conn, conn)
					_ = conn.Close()
				}()
			}
		}()
	}
	var socket net.PacketConn
	must(t, n.Do(func() (err error) { socket, err = net.ListenPacket("udp", udp); return err }))
	t.Cleanup(func() { _ = socket.Close() })
	go func() {
		buffer := make([]byte, 1500)
		for {
			size, from, err := socket.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = socket.WriteTo(buffer[:size], from)
		}
	}()
}

// load is traffic of a client: connections that stay, new ones, and datagrams.
type load struct {
	rounds, opened atomic.Int64 // round trips of the connections that stay; new connections
	sent, received atomic.Int64 // datagrams

	stopping context.CancelFunc
	group    sync.WaitGroup
	mu       sync.Mutex
	failures []error
}

// startLoad sends traffic from the namespace to the addresses until stop is called.
func startLoad(t *testing.T, n *testhost.Namespace, tcp []string, udp string) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{stopping: cancel}
	t.Cleanup(func() { l.stop() })
	for i := range liveConnections {
		conn, err := dial(n, tcp[i%len(tcp)])
		must(t, err)
		l.group.Go(func() { l.stay(ctx, conn) })
	}
	l.group.Go(func() { l.openMore(ctx, n, tcp) })
	var socket net.Conn
	must(t, n.Do(func() (err error) { socket, err = net.Dial("udp", udp); return err }))
	l.group.Go(func() { l.sendDatagrams(ctx, socket) })
	return l
}

func dial(n *testhost.Namespace, address string) (conn net.Conn, err error) {
	err = n.Do(func() error {
		conn, err = net.DialTimeout("tcp", address, patience)
		return err
	})
	return conn, err
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, err)
}

func roundTrip(conn net.Conn, reader *bufio.Reader, text string) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, text); err != nil {
		return err
	}
	if line, err := reader.ReadString('\n'); err != nil || line != text {
		return fmt.Errorf("got %q, want %q: %w", line, text, err)
	}
	return nil
}

// stay uses a connection all the time.
func (l *load) stay(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	reader := bufio.NewReader(conn)
	for i := 0; ctx.Err() == nil; i++ {
		if err := roundTrip(conn, reader, fmt.Sprintf("round %d\n", i)); err != nil {
			l.fail(fmt.Errorf("a connection that stayed, round %d: %w", i, err))
			return
		}
		l.rounds.Add(1)
		time.Sleep(roundEvery)
	}
}

// openMore opens connections, uses each once, and closes it.
func (l *load) openMore(ctx context.Context, n *testhost.Namespace, addresses []string) {
	tick := time.NewTicker(newEvery)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		conn, err := dial(n, addresses[i%len(addresses)])
		if err == nil {
			err = errors.Join(roundTrip(conn, bufio.NewReader(conn), "hello\n"), conn.Close())
		}
		if err != nil {
			l.fail(fmt.Errorf("new connection %d: %w", i, err))
			continue
		}
		l.opened.Add(1)
	}
}

// sendDatagrams sends numbered datagrams and counts their answers. After the end it waits for the
// last ones.
func (l *load) sendDatagrams(ctx context.Context, socket net.Conn) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		seen := map[uint64]bool{}
		buffer := make([]byte, 64)
		for {
			size, err := socket.Read(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil || size != 8 {
				l.fail(fmt.Errorf("read a datagram of %d bytes: %w", size, err))
				continue
			}
			if number := binary.BigEndian.Uint64(buffer); !seen[number] {
				seen[number] = true
				l.received.Add(1)
			}
		}
	}()
	tick := time.NewTicker(datagramEvery)
	defer tick.Stop()
	for number := uint64(0); ctx.Err() == nil; number++ {
		<-tick.C
		if _, err := socket.Write(binary.BigEndian.AppendUint64(nil, number)); err != nil {
			l.fail(fmt.Errorf("send a datagram: %w", err))
			continue
		}
		l.sent.Add(1)
	}
	for deadline := time.Now().Add(10 * time.Second); l.received.Load() < l.sent.Load() && time.Now().Before(deadline); {
		<-tick.C
	}
	_ = socket.Close()
	<-answered
}

// more waits until every kind of traffic has got answers since the call, and reports failures.
func (l *load) more(t *testing.T) {
	t.Helper()
	rounds, opened, received := l.rounds.Load(), l.opened.Load(), l.received.Load()
	eventually(t, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.failures) > 0 {
			t.Fatalf("%d failures, the first: %v", len(l.failures), l.failures[0])
		}
		if l.rounds.Load() < rounds+3*liveConnections || l.opened.Load() < opened+20 || l.received.Load() < received+200 {
			return fmt.Errorf("no traffic: %s", l)
		}
		return nil
	})
}

func (l *load) String() string {
	return fmt.Sprintf("%d round trips of %d connections, %d new connections, %d of %d datagrams answered",
		l.rounds.Load(), liveConnections, l.opened.Load(), l.received.Load(), l.sent.Load())
}

// stop ends the traffic, and waits for the last answers.
func (l *load) stop() {
	l.stopping()
	l.group.Wait()
}

// requireNoLoss ends the traffic and requires that nothing was lost.
func (l *load) requireNoLoss(t *testing.T) {
	t.Helper()
	l.stop()
	t.Logf("%s; %d failures", l, len(l.failures))
	for _, err := range l.failures {
		t.Error(err)
	}
	if lost := l.sent.Load() - l.received.Load(); lost != 0 {
		t.Errorf("%d datagrams were lost", lost)
	}
}
