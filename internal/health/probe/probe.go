// SPDX-License-Identifier: Apache-2.0

// Package probe tests servers once a second. It sends probes to their agents on the path of
// clients' packets, and compares the connections offered to them with the signals that they send.
// docs/understand/protocol.md describes probes on the wire.
package probe

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

const (
	// Interval is the time from one probe of a server to the next.
	Interval = time.Second
	// groups is the number of groups of servers. Within an interval, the groups are probed in turn,
	// so that probes are spread over time.
	groups = 10
	// Fall is the number of probes in a row without an answer that make a server Silent. A signal
	// of the server begins the count anew. But signals prove only the path from the server. So the
	// server is Silent in any case after fallDespiteSignals probes in a row without an answer. If
	// the network loses a fifth of the probes, ten in a row are lost with a probability of 10^-7.
	Fall, fallDespiteSignals = 3, 10
	// Rise is the number of good answers in a row that end a fault.
	Rise = 2
	// UnansweredOffers is the least score with which a server is suspect. A server reaches it by
	// this many offers in a row without an answer. It is also the least share of the service's
	// connections with which a server is suspect if it has accepted none of them (see share).
	UnansweredOffers = 20
	// answerWorth is how far an answered offer lowers the score. An unanswered one raises it by 1.
	answerWorth = 1. / 3
	// slotMask selects the bits of a token that are the slot.
	slotMask = 0xffff
)

// Fault is the reason why a server gets no new connections.
type Fault uint8

// The faults of servers.
const (
	None         Fault = iota
	Silent             // the agent does not answer
	OtherVersion       // the agent speaks another version of the protocol
	NotServed          // the agent does not have the VIP
	Refusing           // the application has stopped listening, and refuses connections
	Unheard            // it answers neither clients' offers nor calls (placement hunt)
)

// Target is a server of a service.
type Target struct {
	Service, Server string
	Slot            uint32 // its number in the data path
	VIP             netip.Addr
	Protocol        desired.Protocol
	Port            uint16 // 0: all ports
	Encapsulation   desired.Encapsulation
	// Offered tells that offers are compared with signals: the service hunts with consistent
	// candidates, and has a port for calls.
	Offered  bool
	CallPort uint16 // the port that calls connect to; 0: none is known
	// Fault is the last finding of an earlier process.
	Fault Fault
}

// Request is a probe to send.
type Request struct {
	Target *Target
	Token  uint64 // returned in the answer; its low 16 bits are the slot
}

// Answer is an agent's answer to a probe.
type Answer struct {
	Version uint16 // of the protocol
	Serves  bool   // it has the VIP
	Refuses bool   // the application has stopped listening, and refuses connections
}

// Offers are a server's counters of offered connections.
type Offers struct {
	Offered  uint64 // offered to the server first
	Answered uint64 // of these, accepted by any server
	Taken    uint64 // accepted by the server, whether or not they were offered to it first
}

// ErrNotReady is the error while the data path cannot send probes yet.
var ErrNotReady = errors.New("the data path is not attached")

// Wire is the data path that sends probes. Only the goroutine in Run uses it.
type Wire interface {
	// Send sends probes. It returns ErrNotReady while the data path does not work yet.
	Send([]Request) error
	HasNextHop(slot uint32) bool
	// Answer returns the answer to a server's last probe, if it has arrived.
	Answer(slot uint32) (answer Answer, ok bool)
	// Signals returns the number of signals that have arrived from a server.
	Signals(slot uint32) (uint64, error)
	// Offers returns the counters of a server.
	Offers(slot uint32) (Offers, error)
	// Forget makes the data path ignore further answers of a server.
	Forget(slot uint32)
}

// Result is a new finding about a server: its fault, or None.
type Result struct {
	Service, Server string
	Slot            uint32
	Fault           Fault
}

// Prober probes its targets.
type Prober struct {
	log     *slog.Logger
	wire    Wire
	caller  Caller
	version uint16 // the required version of the protocol
	targets chan []Target
	updates chan []Result

	// Only the goroutine in Run uses the fields below.
	servers  map[Target]*server  // by their targets without Fault
	services map[string]*service // the same servers, by the name of their service
	groups   [groups][]*server   // the same servers, by the remainder of slot / groups
	group    int                 // the group that was probed last
	failing  bool                // the last probes could not be sent
	calls    *calls              // nil: the prober does not run, and makes no calls
}

// New returns a prober for agents that speak a version of the protocol. It works while Run runs.
func New(wire Wire, caller Caller, version uint16, log *slog.Logger) *Prober {
	return &Prober{
		log: log, wire: wire, caller: caller, version: version,
		targets: make(chan []Target), updates: make(chan []Result), servers: map[Target]*server{},
	}
}

// SetTargets replaces the servers to probe. It returns when the prober has received them, or the
// context ends.
func (p *Prober) SetTargets(ctx context.Context, targets []Target) {
	select {
	case p.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers new findings. They may include some about former targets.
func (p *Prober) Updates() <-chan []Result {
	return p.updates
}

// Run probes until the context ends, and returns nil.
func (p *Prober) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	p.calls = newCalls(ctx, p.caller)
	defer p.calls.wait()
	defer cancel()
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
		case <-ticker.C:
			pending = append(pending, p.tick()...)
		case out <- pending:
			pending = nil
		}
	}
}

// Replace does the work of SetTargets. While the prober runs, only Run may call it. A target that
// equals a former one in all but Fault keeps its state. The data path forgets the slots that no
// target has any more. Replace returns the findings that differ from the targets' Fault.
func (p *Prober) Replace(targets []Target) (news []Result) {
	before := p.servers
	p.servers, p.services = make(map[Target]*server, len(targets)), map[string]*service{}
	p.groups = [groups][]*server{}
	kept := make(map[uint32]bool, len(targets))
	for _, t := range targets {
		key := t
		key.Fault = None
		s := before[key]
		if s == nil {
			s = newServer(t)
		}
		p.servers[key] = s
		p.groups[t.Slot%groups] = append(p.groups[t.Slot%groups], s)
		p.addTo(t.Service, s)
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

// addTo adds a server to the service of this name. Replace makes all services anew, so their
// outcomes begin at 0. The outcomes that the server has seen must begin at 0, too.
func (p *Prober) addTo(name string, s *server) {
	svc := p.services[name]
	if svc == nil {
		svc = new(service)
		p.services[name] = svc
	}
	svc.servers = append(svc.servers, s)
	s.share.seen = outcomes{}
}

// Round does the work of one interval: it judges all servers, and probes them again. Call it only
// for a prober that does not run.
func (p *Prober) Round() (changes []Result) {
	for range groups {
		changes = append(changes, p.tick()...)
	}
	return changes
}

// tick judges the servers of the next group by their last probes, and probes them again.
func (p *Prober) tick() (changes []Result) {
	p.group = (p.group + 1) % groups
	var requests []Request
	for _, s := range p.groups[p.group] {
		if p.judge(s) {
			changes = append(changes, Result{s.target.Service, s.target.Server, s.target.Slot, s.fault})
		}
		if s.asked = p.wire.HasNextHop(s.target.Slot); !s.asked {
			continue // a missing next hop proves nothing about the agent
		}
		requests = append(requests, Request{&s.target, rand.Uint64()&^slotMask | uint64(s.target.Slot)})
	}
	if len(requests) > 0 {
		p.send(requests)
	}
	return changes
}

// send sends probes. It logs only the first of successive failures. If the probes were not sent,
// their missing answers prove nothing.
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

// unask notes that the probe of a target was not sent.
func (p *Prober) unask(t *Target) {
	key := *t
	key.Fault = None
	p.servers[key].asked = false
}

// judge updates the finding about a server by its last probe, its offers and its calls. It tells
// whether the finding has changed. A fault that probes have found takes precedence over Unheard.
func (p *Prober) judge(s *server) (changed bool) {
	before := s.fault
	if s.asked {
		answer, ok := p.wire.Answer(s.target.Slot)
		if !ok {
			p.readSignals(s)
		}
		if s.noteProbe(p.faultOf(answer, ok)) {
			p.forgetOffers(s)
		}
	}
	if s.target.Offered {
		p.readOffers(s)
		p.followCalls(s)
	}
	s.fault = s.probed
	if s.fault == None && s.unheard {
		s.fault = Unheard
	}
	return s.fault != before
}

// readOffers reads how many offers of a server were answered by signals.
func (p *Prober) readOffers(s *server) {
	offers, err := p.wire.Offers(s.target.Slot)
	if err != nil {
		p.log.Error("compare offers with signals", "service", s.target.Service, "server",
			s.target.Server, "error", err)
		return
	}
	s.noteOffers(offers, p.services[s.target.Service])
}

// followCalls notes the result of the last call to a server, if it has ended. It begins another
// call if that is needed.
func (p *Prober) followCalls(s *server) {
	if s.call != nil {
		select {
		case err := <-s.call.result:
			s.call = nil
			p.complain(s.target.Service, err)
			s.noteCall(err, p.services[s.target.Service])
		default:
		}
	}
	if p.calls != nil && s.needsCall() && p.wire.HasNextHop(s.target.Slot) {
		p.begin(s)
	}
}

// begin begins a call to a server, or through it to a peer. If it is the turn of a call through the
// server, but there is no peer, it cannot be tested whether the server passes offers on. Then a
// server that is only suspect is acquitted, and a server that is Unheard is called itself.
func (p *Prober) begin(s *server) {
	s.peer = nil
	if s.nextThrough {
		s.peer = p.services[s.target.Service].peerOf(s)
	}
	switch {
	case s.peer != nil:
		s.call = p.calls.begin(s.peer.target, &s.target)
	case s.nextThrough && !s.unheard:
		s.acquit() // it has answered the call before this one
	default:
		s.call = p.calls.begin(s.target, nil)
	}
}

// complain logs that this host cannot make calls to the servers of a service. It logs only the
// first of successive failures.
func (p *Prober) complain(name string, err error) {
	service := p.services[name]
	before := service.cannotCall
	service.cannotCall = errors.Is(err, ErrUntried)
	if service.cannotCall && !before {
		p.log.Error("cannot connect to servers that leave offers unanswered: none is found unheard",
			"service", name, "error", err)
	}
}

// readSignals looks for signals of a server when a probe has no answer. If there are any, the
// network has probably lost the probe. Such a server should not be found silent: a repeated SYN
// could then open its connection on another server, too, and one of the two connections would be
// reset.
func (p *Prober) readSignals(s *server) {
	signals, err := p.wire.Signals(s.target.Slot)
	if err != nil {
		p.log.Error("read the number of signals", "service", s.target.Service, "server",
			s.target.Server, "error", err)
		return
	}
	s.noteSignals(signals)
}

// forgetOffers forgets the unanswered offers of all servers of a service when probes find a fault
// of server s. The fault explains them: s accepted neither its own offers nor those that others
// passed on to it.
func (p *Prober) forgetOffers(s *server) {
	for _, peer := range p.services[s.target.Service].servers {
		peer.forget()
	}
}

// faultOf returns the fault that an answer shows.
func (p *Prober) faultOf(answer Answer, ok bool) Fault {
	switch {
	case !ok:
		return Silent
	case answer.Version != p.version:
		return OtherVersion
	case !answer.Serves:
		return NotServed
	case answer.Refuses:
		return Refusing
	}
	return None
}
