// SPDX-License-Identifier: Apache-2.0

package etcdtest

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy forwards connections to a server, and can delay or stop what they carry.
type Proxy struct {
	listener net.Listener
	wait     sync.WaitGroup

	mu      sync.Mutex
	to      *Server
	delay   time.Duration
	uncut   chan struct{} // closed while data passes
	muted   bool          // answers are dropped
	refuses bool          // connections end at once
	closed  bool
	sockets map[net.Conn]bool
}

// NewProxy starts a proxy to a server, and ends it with the test.
func NewProxy(t testing.TB, to *Server) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return Serve(t, listener, to)
}

// Serve starts a proxy on a listener, which may be of another network namespace.
func Serve(t testing.TB, listener net.Listener, to *Server) *Proxy {
	t.Helper()
	p := &Proxy{listener: listener, to: to, uncut: make(chan struct{}), sockets: map[net.Conn]bool{}}
	close(p.uncut)
	p.wait.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Endpoint returns the URL of the proxy.
func (p *Proxy) Endpoint() string { return "http://" + p.listener.Addr().String() }

// Delay sets the time by which each piece of data is delayed, in each direction.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Cut stops all data without an error, as a partition of the network does. Heal ends that.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.uncut:
		p.uncut = make(chan struct{})
	default: // cut already
	}
}

// Mute drops the answers of the server, which still gets its requests. Heal ends that.
func (p *Proxy) Mute() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.muted = true
}

// Refuse ends all connections, and new ones at once. Heal ends that.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuses = true
	for c := range p.sockets {
		_ = c.Close()
	}
}

// Heal ends Cut, Mute and Refuse. The connections from before are gone, as after a long partition.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.sockets {
		_ = c.Close()
	}
	p.muted, p.refuses = false, false
	select {
	case <-p.uncut:
	default:
		close(p.uncut)
	}
}

// Redirect makes the proxy lead to another server, and ends the connections to the former server.
func (p *Proxy) Redirect(to *Server) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
	for c := range p.sockets {
		_ = c.Close()
	}
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wait.Go(func() { p.serve(client) })
	}
}

// serve connects a client with the server.
func (p *Proxy) serve(client net.Conn) {
	if !p.note(client) {
		return
	}
	p.mu.Lock()
	to := p.to
	p.mu.Unlock()
	server, err := to.Dial(context.Background())
	if err != nil || !p.note(server) {
		p.forget(client)
		return
	}
	var both sync.WaitGroup
	both.Go(func() { p.forward(server, client, false) })
	both.Go(func() { p.forward(client, server, true) })
	both.Wait()
}

// forward passes data on in one direction until a connection ends, and then ends both. isAnswer
// tells that from is the server.
func (p *Proxy) forward(to, from net.Conn, isAnswer bool) {
	defer p.forget(to)
	defer p.forget(from)
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		p.mu.Lock()
		delay, uncut, drops := p.delay, p.uncut, p.muted && isAnswer
		p.mu.Unlock()
		time.Sleep(delay)
		<-uncut // waits while the proxy is cut
		if drops {
			continue
		}
		if _, err := to.Write(buffer[:n]); err != nil && err != io.ErrShortWrite {
			return
		}
	}
}

// note notes a connection that close has to end. If the proxy is closed or refuses connections,
// note ends the connection and returns false.
func (p *Proxy) note(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refuses {
		_ = c.Close()
		return false
	}
	p.sockets[c] = true
	return true
}

func (p *Proxy) forget(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sockets, c)
	_ = c.Close()
}

// close ends the listener and all connections, and waits for their goroutines. It also ends a Cut,
// so that these goroutines end.
func (p *Proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	select {
	case <-p.uncut:
	default:
		close(p.uncut)
	}
	for c := range p.sockets {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wait.Wait()
}
