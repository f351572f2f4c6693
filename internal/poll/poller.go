// SPDX-License-Identifier: Apache-2.0

package poll

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/config"
)

type sender = netip.AddrPort

// Target is a server to ask about a service.
type Target struct {
	ID      uint32 // identifies the answers, for example a slot
	Address netip.AddrPort
	Service Service
}

// Answer is the last load that a server has told.
type Answer struct {
	Load Load
	At   time.Time
}

// Poller asks agents, and keeps their last answers. All methods may be called by any goroutine.
type Poller struct {
	counters
	conn *net.UDPConn

	mu      sync.Mutex // protects all that follows
	keys    config.SignalKeys
	asked   map[uint64]Target // the last request to each target, by its nonce
	nonces  map[uint32]uint64 // of the same requests, by the ID of the target
	answers map[uint32]Answer
}

// NewPoller opens a socket for requests. It returns an error if there is no free port.
func NewPoller() (*Poller, error) {
	conn, err := net.ListenUDP("udp", nil)
	if err != nil {
		return nil, fmt.Errorf("open a socket to poll servers: %w", err)
	}
	return &Poller{
		conn: conn, asked: map[uint64]Target{}, nonces: map[uint32]uint64{},
		answers: map[uint32]Answer{},
	}, nil
}

// SetKeys replaces the keys. Without keys, Ask fails.
func (p *Poller) SetKeys(keys config.SignalKeys) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = keys
}

// Close closes the socket. It ends Run.
func (p *Poller) Close() error { return p.conn.Close() }

// Run receives answers until the context ends or Close, and then returns nil. It closes the socket.
func (p *Poller) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = p.conn.Close() })()
	return receive(p.conn, func(b []byte, _ sender) { p.take(b, time.Now()) })
}

// Ask sends a request. From now on, answers to earlier requests to the target are refused. Ask
// returns an error if there are no keys, or if the host has no route to the server.
func (p *Poller) Ask(t Target) error {
	b, err := p.request(t)
	if err != nil {
		return err
	}
	if _, err := p.conn.WriteToUDPAddrPort(b, t.Address); err != nil {
		return fmt.Errorf("poll %s: %w", t.Address, err)
	}
	return nil
}

// request returns a request with a new nonce, which nobody can guess, and notes it.
func (p *Poller) request(t Target) ([]byte, error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // it never fails
	nonce := binary.BigEndian.Uint64(random[:])
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.keys) == 0 {
		return nil, fmt.Errorf("poll %s: there is no signal key", t.Address)
	}
	p.forget(t.ID)
	p.asked[nonce], p.nonces[t.ID] = t, nonce
	m := message{kind: request, nonce: nonce, service: t.Service}
	return m.encode(p.keys[0]), nil
}

// take takes a datagram. Each request has one answer at most, so a replayed one is refused.
func (p *Poller) take(b []byte, now time.Time) {
	p.received.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	m, err := decode(b, p.keys)
	t, ok := p.asked[m.nonce]
	if err != nil || !ok || t.Service != m.service || m.kind != known && m.kind != unknown {
		p.refused.Add(1)
		return
	}
	p.forget(t.ID)
	if m.kind == unknown {
		p.unknown.Add(1)
		return
	}
	p.answers[t.ID] = Answer{m.load, now}
}

// forget removes the request to a target.
func (p *Poller) forget(id uint32) {
	if nonce, ok := p.nonces[id]; ok {
		delete(p.asked, nonce)
		delete(p.nonces, id)
	}
}

// Answer returns the last answer of a target. It returns false if there is none.
func (p *Poller) Answer(id uint32) (Answer, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, ok := p.answers[id]
	return a, ok
}

// Forget removes all that is known of a target, because it is asked no more, or is another server.
func (p *Poller) Forget(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(id)
	delete(p.answers, id)
}
