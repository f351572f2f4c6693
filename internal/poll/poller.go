// SPDX-License-Identifier: Apache-2.0

package poll

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

// sender is the address from which a datagram came.
type sender = netip.AddrPort

// Target is a server to ask about a service.
type Target struct {
	ID      uint32 // by which the caller finds the answers, for example the server's slot
	Address netip.AddrPort
	Service Service
}

// Answer is the last load that a server has told.
type Answer struct {
	Load Load
	At   time.Time
}

// Poller asks agents, and keeps their last answers. It has no socket before the first Ask. All
// methods may be called by any goroutine.
type Poller struct {
	counters
	mu      sync.Mutex // protects all that follows
	conn    *net.UDPConn
	keys    desired.SignalKeys
	asked   map[uint64]Target // the last request to each target, by its nonce
	nonces  map[uint32]uint64 // of the same requests, by the ID of the target
	answers map[uint32]Answer
}

// NewPoller returns a poller without keys.
func NewPoller() *Poller {
	return &Poller{
		asked: map[uint64]Target{}, nonces: map[uint32]uint64{}, answers: map[uint32]Answer{},
	}
}

// SetKeys replaces the keys. Without keys, Ask fails.
func (p *Poller) SetKeys(keys desired.SignalKeys) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = keys
}

// Close closes the socket, if there is one. The poller then receives no further answers.
func (p *Poller) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	return p.conn.Close()
}

// Ask sends a request. From now on, answers to earlier requests to the target are refused. Ask
// returns an error if there are no keys, no free port, or no route to the server.
func (p *Poller) Ask(t Target) error {
	b, err := p.request(t)
	if err == nil {
		err = p.send(b, t.Address)
	}
	if err != nil {
		return fmt.Errorf("poll %s: %w", t.Address, err)
	}
	return nil
}

// send sends a request. The first one opens the socket, which receives until Close.
func (p *Poller) send(request []byte, to netip.AddrPort) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		if p.conn, err = net.ListenUDP("udp", nil); err != nil {
			return err
		}
		go receive(p.conn, func(b []byte, _ sender) { p.take(b, time.Now()) })
	}
	_, err = p.conn.WriteToUDPAddrPort(request, to)
	return err
}

// request returns a request with a new nonce, which nobody can guess, and notes it.
func (p *Poller) request(t Target) ([]byte, error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // it never fails
	nonce := binary.BigEndian.Uint64(random[:])
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.keys) == 0 {
		return nil, errors.New("there is no signal key")
	}
	p.endRequest(t.ID)
	p.asked[nonce], p.nonces[t.ID] = t, nonce
	m := message{kind: request, nonce: nonce, service: t.Service}
	return m.encode(p.keys[0]), nil
}

// take handles a datagram. It refuses all but the first answer to the last request to a target, so
// a replay has no effect. An answer without a load ends the request, and the target keeps its last
// answer with a load.
func (p *Poller) take(b []byte, now time.Time) {
	p.received.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	m, err := decode(b, p.keys)
	t, asked := p.asked[m.nonce]
	isAnswer := m.kind == known || m.kind == unknown
	if err != nil || !isAnswer || !asked || t.Service != m.service {
		p.refused.Add(1)
		return
	}
	p.endRequest(t.ID)
	if m.kind == unknown {
		p.unknown.Add(1)
		return
	}
	p.answers[t.ID] = Answer{m.load, now}
}

// endRequest removes the last request to a target, so that answers to it are refused.
func (p *Poller) endRequest(id uint32) {
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

// Forget removes the last answer of a target, and the last request to it. The caller calls Forget
// when it no longer polls the target, or when the ID is to stand for another server.
func (p *Poller) Forget(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endRequest(id)
	delete(p.answers, id)
}
