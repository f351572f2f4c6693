// SPDX-License-Identifier: Apache-2.0

package poll

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/segue-lb/segue/internal/desired"
)

// Responder answers requests of balancers. It answers one at a time, reads one load for each, and
// keeps nothing, so a flood of requests with right tags costs one core at most.
type Responder struct {
	counters
	conn *net.UDPConn
	load func(Service) (load Load, ok bool)
	keys atomic.Pointer[desired.SignalKeys]
}

// NewResponder returns a responder. The function load returns the load of a service, or false if it
// is not known; only the goroutine in Run calls it. Until SetKeys the responder refuses all
// requests.
func NewResponder(load func(Service) (load Load, ok bool)) *Responder {
	return &Responder{load: load}
}

// Listen opens a UDP address. It returns an error if the address is not valid or not free.
func (r *Responder) Listen(address string) error {
	at, err := net.ResolveUDPAddr("udp", address)
	if err == nil {
		r.conn, err = net.ListenUDP("udp", at)
	}
	if err != nil {
		return fmt.Errorf("poll.listen %q: %w", address, err)
	}
	return nil
}

// SetKeys replaces the keys. Any goroutine may call it.
func (r *Responder) SetKeys(keys desired.SignalKeys) { r.keys.Store(&keys) }

// Address returns the address at which the responder listens.
func (r *Responder) Address() string { return r.conn.LocalAddr().String() }

// Close closes the socket, if there is one. It ends Run.
func (r *Responder) Close() error {
	if r.conn == nil {
		return nil
	}
	return r.conn.Close()
}

// Run answers requests until Close, or until the context ends. Then Run closes the socket. Listen
// must have succeeded.
func (r *Responder) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, func() { _ = r.conn.Close() })()
	receive(r.conn, func(b []byte, from sender) {
		if answer := r.answer(b); answer != nil {
			// An error is ignored, because the balancer asks again.
			_, _ = r.conn.WriteToUDPAddrPort(answer, from)
		}
	})
}

// answer returns the answer to a datagram. If the load of the service is not known, the answer says
// so. The result is nil if the datagram is no request with a right tag, or if there are no keys.
func (r *Responder) answer(b []byte) []byte {
	r.received.Add(1)
	keys := r.keys.Load()
	if keys == nil || len(*keys) == 0 {
		r.refused.Add(1)
		return nil
	}
	m, err := decode(b, *keys)
	if err != nil || m.kind != request {
		r.refused.Add(1)
		return nil
	}
	m.kind = unknown
	m.load = Load{}
	if load, ok := r.load(m.service); ok {
		m.kind, m.load = known, load
	} else {
		r.unknown.Add(1)
	}
	return m.encode((*keys)[0])
}

// receive passes each datagram to handle until the socket is closed. It ignores other errors.
func receive(conn *net.UDPConn, handle func(b []byte, from sender)) {
	b := make([]byte, size+1) // longer than a message, so that a longer datagram is not cut to one
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil:
			handle(b[:n], from)
		}
	}
}
