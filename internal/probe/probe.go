// SPDX-License-Identifier: Apache-2.0

// Package probe finds out, once a second, whether servers can serve: it asks their agents by the
// way that clients' packets take, and compares the connections that they are offered with the
// answers. docs/protocol.md describes probes on the wire.
package probe

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/segue-lb/segue/internal/config"
)

const (
	// Interval is the time from one probe of a server to the next.
	Interval = time.Second
	// groups is how many groups of servers are probed in turn within an interval, so that probes
	// do not leave all at once.
	groups = 10
	// Fall is how many probes in a row without an answer make a server Silent.
	Fall = 3
	// Rise is how many good answers in a row end a fault.
	Rise = 2
	// UnansweredOffers is how many connections are offered to a server first, and taken by no
	// server, before the first one is Unheard; more if others are taken in between.
	UnansweredOffers = 20
	// answerWorth is how many unanswered offers an answered one makes up for, and takenWorth, how many
	// a connection that the server took itself.
	answerWorth, takenWorth = 1. / 3, 3.
	// An Unheard server gets no offers that could show that it is well again. It is given another
	// chance after firstTrial, and each time later, up to lastTrial.
	firstTrial, lastTrial = 10 * time.Second, 160 * time.Second
	// slotMask is the part of a token that is the slot.
	slotMask = 0xffff
)

// Fault is why a server cannot get new connections.
type Fault uint8

// The faults of servers.
const (
	None         Fault = iota
	Silent             // its agent does not answer
	OtherVersion       // its agent speaks another version of the protocol
	NotServed          // its agent does not have the VIP
	Unheard            // connections that it is offered first are not answered (placement hunt)
)

// Target is a server of a service.
type Target struct {
	Service, Server string
	Slot            uint32 // its number in the data path
	VIP             netip.Addr
	Encapsulation   config.Encapsulation
	// Offered says that the service hunts, by candidates that its table names: then offers are
	// compared with answers, too.
	Offered bool
	// Fault is what an earlier process has found.
	Fault Fault
}

// Request is a probe to send.
type Request struct {
	Target *Target
	Token  uint64 // comes back in the answer; its low 16 bits are the slot
}

// Answer is what an agent says of itself.
type Answer struct {
	Version uint16 // of the protocol
	Serves  bool   // it has the VIP
}

// Offers are the connections of a service that hunts, as a server has to do with them.
type Offers struct {
	Offered  uint64 // it was the first to be offered
	Answered uint64 // of these, any server took
	Taken    uint64 // it took, whoever was the first
}

// ErrNotReady says that the data path cannot send probes yet.
var ErrNotReady = errors.New("the data path is not attached")

// Wire is the data path that probes travel by. Only the goroutine in Run uses it.
type Wire interface {
	// Send probes servers. While the data path is not at work yet, it sends nothing: ErrNotReady.
	Send([]Request) error
	// HasWay tells whether there is a next hop to a server, by which a probe could be sent.
	HasWay(slot uint32) bool
	// Answer returns the answer to a server's last probe, if it has come.
	Answer(slot uint32) (answer Answer, ok bool)
	// Offers counts what there was since a server came.
	Offers(slot uint32) (Offers, error)
	// Forget takes no answer from a server any more.
	Forget(slot uint32)
}

// Result is a new finding about a server.
type Result struct {
	Service, Server string
	Slot            uint32
	Fault           Fault
}

// Prober probes its targets.
type Prober struct {
	log     *slog.Logger
	wire    Wire
	version uint16 // of the protocol that answers have to be of
	targets chan []Target
	updates chan []Result

	// Of the goroutine in Run:
	servers map[Target]*server   // by the target, with no Fault
	peers   map[string][]*server // the same by service
	group   int
	failing bool // the last probes could not be sent
}

// New returns a prober that takes agents for well that speak the version; it works while Run does.
func New(wire Wire, version uint16, log *slog.Logger) *Prober {
	return &Prober{
		log: log, wire: wire, version: version,
		targets: make(chan []Target), updates: make(chan []Result), servers: map[Target]*server{},
	}
}

// SetTargets says which servers to probe from now on. It returns when the prober has taken note, or
// the context ends.
func (p *Prober) SetTargets(ctx context.Context, targets []Target) {
	select {
	case p.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers what changed. Results of servers that are no targets any more may be among it.
func (p *Prober) Updates() <-chan []Result {
	return p.updates
}

// Run probes until the context ends, and returns nil.
func (p *Prober) Run(ctx context.Context) error {
	ticker := time.NewTicker(Interval / groups)
	defer ticker.Stop()
	var pending []Result
	for {
		var out chan []Result
		if len(pending) > 0 {
			out = p.updates
		}
		select {
		case <-ctx.Done():
			return nil
		case targets := <-p.targets:
			pending = p.Replace(targets)
		case now := <-ticker.C:
			pending = append(pending, p.tick(now)...)
		case out <- pending:
			pending = nil
		}
	}
}

// Replace does what SetTargets does, of a prober that does not run. It returns what its owner does not
// know: the findings that differ from the targets' Fault.
func (p *Prober) Replace(targets []Target) (news []Result) {
	before := p.servers
	p.servers, p.peers = make(map[Target]*server, len(targets)), map[string][]*server{}
	kept := make(map[uint32]bool, len(targets))
	for _, t := range targets {
		key := t
		key.Fault = None
		s := before[key]
		if s == nil {
			s = newServer(t)
		}
		p.servers[key] = s
		p.peers[t.Service] = append(p.peers[t.Service], s)
		kept[t.Slot] = true
		if s.fault != t.Fault {
			news = append(news, Result{t.Service, t.Server, t.Slot, s.fault})
		}
	}
	for key := range before {
		if !kept[key.Slot] {
			p.wire.Forget(key.Slot)
		}
	}
	return news
}

// Round is what a prober that does not run would do within an interval: it judges all servers, and
// probes them again.
func (p *Prober) Round(now time.Time) (changes []Result) {
	for range groups {
		changes = append(changes, p.tick(now)...)
	}
	return changes
}

// tick judges the servers of the next group, and probes them again.
func (p *Prober) tick(now time.Time) (changes []Result) {
	p.group = (p.group + 1) % groups
	var requests []Request
	for _, s := range p.servers {
		if int(s.target.Slot)%groups != p.group {
			continue
		}
		if p.judge(s, now) {
			changes = append(changes, Result{s.target.Service, s.target.Server, s.target.Slot, s.fault})
		}
		if s.asked = p.wire.HasWay(s.target.Slot); !s.asked {
			continue // the missing next hop is known, and proves nothing about the agent
		}
		requests = append(requests, Request{&s.target, rand.Uint64()&^slotMask | uint64(s.target.Slot)})
	}
	if len(requests) > 0 {
		p.send(requests)
	}
	return changes
}

// send complains once of what is likely to fail each time. A probe that was not sent proves nothing.
func (p *Prober) send(requests []Request) {
	err := p.wire.Send(requests)
	if err != nil {
		for _, r := range requests {
			p.unask(r.Target)
		}
	}
	if errors.Is(err, ErrNotReady) {
		return
	}
	if err != nil && !p.failing {
		p.log.Error("cannot probe servers", "error", err)
	}
	p.failing = err != nil
}

func (p *Prober) unask(t *Target) {
	key := *t
	key.Fault = None
	p.servers[key].asked = false
}

// judge tells whether what is known of a server has changed.
func (p *Prober) judge(s *server, now time.Time) (changed bool) {
	before := s.fault
	if s.asked {
		answer, ok := p.wire.Answer(s.target.Slot)
		if s.noteProbe(p.faultOf(answer, ok)) {
			p.explain(s)
		}
	}
	if s.target.Offered {
		offers, err := p.wire.Offers(s.target.Slot)
		if err != nil {
			p.log.Error("compare offers with answers", "service", s.target.Service, "server", s.target.Server, "error", err)
		} else {
			s.noteOffers(offers, now)
			if s.mayGiveUp() && !p.isOverloaded(s.target.Service) {
				s.giveUp(now)
			}
		}
	}
	s.fault = s.probed
	if s.fault == None && s.unheard {
		s.fault = Unheard
	}
	return s.fault != before
}

// explain forgets which offers were not answered, when probes find the reason: the server did not take
// its own, nor those that its peers passed on to it.
func (p *Prober) explain(s *server) {
	for _, peer := range p.peers[s.target.Service] {
		peer.forget()
	}
}

// isOverloaded tells whether more than a third of a service's servers leave offers unanswered: they
// are overloaded, or the clients do not wait for answers. To place connections on fewer servers would
// make it worse.
func (p *Prober) isOverloaded(service string) bool {
	suspects := 0
	for _, s := range p.peers[service] {
		if s.suspect() {
			suspects++
		}
	}
	return suspects > max(1, len(p.peers[service])/3)
}

// faultOf is what a probe shows.
func (p *Prober) faultOf(answer Answer, ok bool) Fault {
	switch {
	case !ok:
		return Silent
	case answer.Version != p.version:
		return OtherVersion
	case !answer.Serves:
		return NotServed
	}
	return None
}
