// SPDX-License-Identifier: Apache-2.0

package application

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/loadshm"
)

// workers serve one connection each, from its acceptance to its end, as the processes of Apache's
// MPM prefork do. Connections that arrive while all workers are busy wait in the kernel's accept
// queue.
type workers struct {
	free        chan struct{}       // has an element for each idle worker
	loads       []*loadshm.Reporter // report the number of busy workers
	connections atomic.Uint64       // accepted so far
	busy        sync.WaitGroup      // counts the busy workers
}

// newWorkers returns the given number of idle workers.
func newWorkers(count int, loads []*loadshm.Reporter) *workers {
	w := &workers{free: make(chan struct{}, count), loads: loads}
	for range count {
		w.free <- struct{}{}
	}
	return w
}

// begin counts a new connection, and its worker as busy. The caller has taken the worker from free.
func (w *workers) begin() {
	w.busy.Add(1)
	w.connections.Add(1)
	for _, load := range w.loads {
		load.Begin()
	}
}

// end makes the worker of a closed connection idle again.
func (w *workers) end() {
	for _, load := range w.loads {
		load.End()
	}
	w.free <- struct{}{}
	w.busy.Done()
}

// listener accepts a connection only when a worker is idle. Until then the connection waits in the
// kernel's accept queue, whose length is the backlog. If the queue is full, the kernel decides what
// happens to further connections.
type listener struct {
	*net.TCPListener
	queue   *os.File // a copy of the socket, to wait for connections without accepting them
	workers *workers
	closed  chan struct{} // closed when the listener is closed
	close   func() error  // closes the listener when it is called for the first time
}

// listen opens a listening socket. The kernel limits the backlog to net.core.somaxconn of the
// network namespace.
func listen(ctx context.Context, address string, backlog int, w *workers) (*listener, error) {
	config := net.ListenConfig{KeepAlive: -1}
	config.SetMultipathTCP(false) // which Go's listeners use by default
	general, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	l := &listener{TCPListener: general.(*net.TCPListener), workers: w, closed: make(chan struct{})}
	if l.queue, err = l.File(); err == nil {
		// Go has called listen(2) with the largest backlog. A second call changes the backlog.
		err = withDescriptor(l.queue, func(fd int) error { return unix.Listen(fd, backlog) })
	}
	l.close = sync.OnceValue(func() error {
		close(l.closed)
		return errors.Join(l.queue.Close(), l.TCPListener.Close())
	})
	if err != nil {
		err = fmt.Errorf("%s: set the backlog to %d: %w", address, backlog, err)
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// withDescriptor calls f with the descriptor of a file.
func withDescriptor(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var errF error
	errControl := raw.Control(func(fd uintptr) { errF = f(int(fd)) })
	return errors.Join(errControl, errF)
}

// Accept waits for a connection, then for an idle worker, and then accepts the connection. In this
// order, a listener without connections occupies no worker, so several listeners can share workers.
func (l *listener) Accept() (net.Conn, error) {
	if err := l.await(); err != nil {
		return nil, err
	}
	select {
	case <-l.workers.free:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	conn, err := l.TCPListener.Accept()
	if err != nil {
		l.workers.free <- struct{}{}
		return nil, err
	}
	l.workers.begin()
	return conn, nil
}

// await returns nil when a connection is in the accept queue. It returns an error when the listener
// is closed.
func (l *listener) await() error {
	raw, err := l.queue.SyscallConn()
	if err != nil {
		return err
	}
	var errPoll error
	done := func(fd uintptr) bool { // a connection waits, or the poll has failed
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		if err != nil && !errors.Is(err, syscall.EINTR) {
			errPoll = fmt.Errorf("wait for a connection: %w", err)
			return true
		}
		return n > 0
	}
	errRead := raw.Read(done) // calls done again whenever the socket becomes readable
	return errors.Join(errRead, errPoll)
}

// Close stops the listener. The kernel resets the connections in the accept queue.
func (l *listener) Close() error { return l.close() }
