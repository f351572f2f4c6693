// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const version = 7

// wire is a network of agents that answer as a test requires.
type wire struct {
	mu        sync.Mutex
	answers   map[uint32]*Answer // by slot; nil: no answer
	tokens    map[uint32]uint64  // tokens of the last probes
	sent      map[uint32][]time.Time
	offers    map[uint32]Offers
	signals   map[uint32]uint64
	forgotten []uint32
	err       error           // error that Send returns
	cutOff    bool            // no server has a next hop
	deaf      map[uint32]bool // servers that do not answer calls
	stuck     map[uint32]bool // servers that pass nothing on
	unable    bool            // the host cannot make calls
	calls     map[uint32]int  // calls by the server that got them first
}

func newWire() *wire {
	return &wire{
		answers: map[uint32]*Answer{}, tokens: map[uint32]uint64{}, sent: map[uint32][]time.Time{},
		offers: map[uint32]Offers{}, signals: map[uint32]uint64{}, deaf: map[uint32]bool{},
		stuck: map[uint32]bool{}, calls: map[uint32]int{},
	}
}

// Call implements Caller.
func (w *wire) Call(ctx context.Context, to, through *Target) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	first := to.Slot
	if through != nil {
		first = through.Slot
	}
	w.calls[first]++
	switch {
	case w.unable:
		return fmt.Errorf("%w: no address", ErrUntried)
	case w.deaf[to.Slot] || through != nil && w.stuck[first]:
		w.mu.Unlock()
		<-ctx.Done()
		w.mu.Lock()
		return ctx.Err()
	}
	return nil
}

// deafen determines whether servers answer calls from now on.
func (w *wire) deafen(deaf bool, slots ...uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, slot := range slots {
		w.deaf[slot] = deaf
	}
}

func (w *wire) Send(requests []Request) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	for _, r := range requests {
		w.sent[r.Target.Slot] = append(w.sent[r.Target.Slot], time.Now())
		w.tokens[r.Target.Slot] = r.Token
	}
	return nil
}

func (w *wire) HasNextHop(uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.cutOff
}

func (w *wire) Answer(slot uint32) (Answer, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a := w.answers[slot]; a != nil && w.tokens[slot] != 0 {
		return *a, true
	}
	return Answer{}, false
}

func (w *wire) Offers(slot uint32) (Offers, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.offers[slot], nil
}

func (w *wire) Signals(slot uint32) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.signals[slot], nil
}

// signal lets a server send a number of signals.
func (w *wire) signal(slot uint32, signals uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signals[slot] += signals
}

// stick determines whether a server passes nothing on from now on.
func (w *wire) stick(slot uint32, stuck bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stuck[slot] = stuck
}

func (w *wire) Forget(slot uint32) { w.forgotten = append(w.forgotten, slot) }

// set determines the answers of an agent from now on. nil means no answers.
func (w *wire) set(slot uint32, answer *Answer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answers[slot] = answer
}

func (w *wire) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// offer offers a number of connections to a server first. Some of them are accepted.
func (w *wire) offer(slot uint32, offered, answered uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.offers[slot]
	w.offers[slot] = Offers{now.Offered + offered, now.Answered + answered, now.Taken}
}

// take lets a server accept some connections.
func (w *wire) take(slot uint32, taken uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.offers[slot]
	now.Taken += taken
	w.offers[slot] = now
}

var well = &Answer{Version: version, Serves: true}

// simulate runs a prober in fake time.
func simulate(t *testing.T, w *wire, test func(t *testing.T, w *wire, p *Prober)) {
	synctest.Test(t, func(t *testing.T) {
		p := New(w, w, version, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Run(ctx) }()
		time.Sleep(Interval / groups / 2) // so that the test and the prober never act at the same time
		test(t, w, p)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// simulateWell runs a prober whose targets answered its first probes.
func simulateWell(t *testing.T, targets []Target, test func(t *testing.T, w *wire, p *Prober)) {
	w := newWire()
	for _, target := range targets {
		w.answers[target.Slot] = well
	}
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), targets)
		pass(p, 2*Interval)
		test(t, w, p)
	})
}

func target(slot uint32) Target {
	return Target{Service: "web", Server: fmt.Sprint("s", slot), Slot: slot, Offered: true}
}

// placed returns servers with consecutive slots, which are offered connections.
func placed(first, servers uint32) (targets []Target) {
	for slot := range servers {
		targets = append(targets, target(first+slot))
	}
	return targets
}

// pass lets time pass, and returns the faults that the prober reported meanwhile, the last one of
// each server.
func pass(p *Prober, d time.Duration) map[string]Fault {
	time.Sleep(d) // in fake time this is exact, and ends when all goroutines wait
	faults := map[string]Fault{}
	for {
		synctest.Wait()
		select {
		case results := <-p.Updates():
			for _, r := range results {
				faults[r.Server] = r.Fault
			}
		default:
			return faults
		}
	}
}

// fault returns the prober's finding about a server. Call it only while the prober waits.
func (p *Prober) fault(name string) Fault {
	for _, s := range p.servers {
		if s.target.Server == name {
			return s.fault
		}
	}
	return None
}

func expect(t *testing.T, when string, got, want map[string]Fault) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", when, got, want)
	}
}

func TestProbes(t *testing.T) {
	w := newWire()
	w.answers[1], w.answers[2] = well, well
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1), target(2), target(3)})
		expect(t, "before three probes are missed", pass(p, 2*Interval), map[string]Fault{})
		expect(t, "no answer from one", pass(p, 2*Interval), map[string]Fault{"s3": Silent})
		w.set(1, nil)
		w.set(3, well)
		expect(t, "one goes, one comes", pass(p, 10*Interval), map[string]Fault{"s1": Silent, "s3": None})
		w.set(2, &Answer{Version: version + 1, Serves: true})
		expect(t, "another version", pass(p, Interval), map[string]Fault{"s2": OtherVersion})
		w.set(2, &Answer{Version: version})
		expect(t, "the VIP is gone", pass(p, Interval), map[string]Fault{"s2": NotServed})
		w.set(2, &Answer{Version: version, Serves: true, Refuses: true})
		expect(t, "the application has ended", pass(p, Interval), map[string]Fault{"s2": Refusing})
		w.set(2, well)
		expect(t, "one good answer", pass(p, Interval), map[string]Fault{})
		expect(t, "two good answers", pass(p, Interval), map[string]Fault{"s2": None})
	})
}

// A server that signals is not silent, also if the network loses some of its probes in a row. If it
// loses ten, the way to the server is broken.
func TestProbesOfServerThatSignals(t *testing.T) {
	simulate(t, newWire(), func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		signals := func(probes int) {
			for range probes {
				w.signal(1, 1)
				expect(t, "signals, but no answers", pass(p, Interval), map[string]Fault{})
			}
		}
		signals(7)
		expect(t, "a probe without signals", pass(p, Interval), map[string]Fault{})
		expect(t, "neither signals nor answers", pass(p, Interval), map[string]Fault{"s1": Silent})
		w.set(1, well)
		expect(t, "answers", pass(p, 3*Interval), map[string]Fault{"s1": None})
		w.set(1, nil)
		signals(9)
		w.signal(1, 1)
		expect(t, "signals, but ten probes without an answer", pass(p, Interval), map[string]Fault{"s1": Silent})
	})
}

// If a server signals, one answer to a probe begins the count of lost probes anew.
func TestProbesOfServerThatSignalsAndAnswers(t *testing.T) {
	simulate(t, newWire(), func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		for i := range 40 {
			w.signal(1, 1)
			w.set(1, nil)
			if i%8 == 0 {
				w.set(1, well)
			}
			expect(t, "an answer to each eighth probe", pass(p, Interval), map[string]Fault{})
		}
	})
}

// Lost probes that are not in a row do not make a server silent.
func TestLostProbes(t *testing.T) {
	simulate(t, newWire(), func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		for i := range 30 {
			w.set(1, nil)
			if i%Fall == 0 {
				w.set(1, well)
			}
			expect(t, fmt.Sprint("probe ", i), pass(p, Interval), map[string]Fault{})
		}
	})
}

// Every server is probed at its interval. The servers take turns.
func TestRhythm(t *testing.T) {
	const servers = 100
	simulate(t, newWire(), func(t *testing.T, w *wire, p *Prober) {
		var targets []Target
		for slot := range uint32(servers) {
			w.answers[slot] = well
			targets = append(targets, target(slot))
		}
		p.SetTargets(t.Context(), targets)
		expect(t, "all are well", pass(p, 10*Interval), map[string]Fault{})
		together := map[time.Time]int{}
		for slot, times := range w.sent {
			if len(times) < 9 {
				t.Errorf("server %d was probed %d times", slot, len(times))
			}
			for i, at := range times {
				together[at]++
				if i > 0 && at.Sub(times[i-1]) != Interval {
					t.Errorf("server %d: probe %d came %v after the one before", slot, i, at.Sub(times[i-1]))
				}
			}
		}
		if most := slices.Max(slices.Collect(maps.Values(together))); most != servers/groups {
			t.Errorf("%d probes at a time, want %d", most, servers/groups)
		}
	})
}

// Unchanged targets continue, and removed ones are forgotten. The finding of an earlier process
// stays until the server's answers disprove it.
func TestTargetsChange(t *testing.T) {
	w := newWire()
	w.answers[2] = well
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		expect(t, "two misses", pass(p, 3*Interval-Interval/2), map[string]Fault{})
		second := target(2)
		second.Fault = Silent
		p.SetTargets(t.Context(), []Target{target(1), second})
		expect(t, "the third miss", pass(p, Interval+Interval/2), map[string]Fault{"s1": Silent})
		expect(t, "the other's second answer", pass(p, 2*Interval), map[string]Fault{"s2": None})
		second.Fault = None
		p.SetTargets(t.Context(), []Target{second})
		expect(t, "one target less", pass(p, 5*Interval), map[string]Fault{})
		if !slices.Equal(w.forgotten, []uint32{1}) {
			t.Errorf("forgotten: %v", w.forgotten)
		}
	})
}

// A probe that could not be sent proves nothing about its server.
func TestSendFails(t *testing.T) {
	w := newWire()
	w.err = errors.New("no such device")
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		expect(t, "nothing is sent", pass(p, 10*Interval), map[string]Fault{})
		w.fail(nil)
		expect(t, "sent, and no answer", pass(p, 5*Interval), map[string]Fault{"s1": Silent})
	})
}

// A server is Unheard if its offers and the balancer's own calls have no answer, until it answers
// calls again. It gets no offers meanwhile.
func TestOffersWithoutAnswers(t *testing.T) {
	simulateWell(t, placed(0, 3), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 1)
		w.offer(0, 1000, 1000)
		w.offer(1, UnansweredOffers, 0)
		expect(t, "answers may be under way", pass(p, Interval), map[string]Fault{})
		expect(t, "they did not come, and two calls", pass(p, 3*Interval), map[string]Fault{})
		expect(t, "the third call", pass(p, Interval), map[string]Fault{"s1": Unheard})
		expect(t, "the calls go on", pass(p, 60*Interval), map[string]Fault{})
		w.deafen(false, 1)
		expect(t, "an answer", pass(p, 2*Interval), map[string]Fault{})
		expect(t, "it also passes offers on", pass(p, Interval), map[string]Fault{"s1": None})
		calls := w.calls[1]
		expect(t, "no suspicion, no calls", pass(p, 10*Interval), map[string]Fault{})
		if w.calls[1] != calls || w.calls[0]+w.calls[2] > 0 {
			t.Errorf("calls: %v", w.calls)
		}
	})
}

// A server that does not reach its peers is Unheard, though it answers: the connections that it
// refuses are lost. Most offers of the others are lost, too, because they visit that server.
func TestServerThatPassesNothingOn(t *testing.T) {
	for _, servers := range []uint32{2, 4} {
		simulateWell(t, placed(0, servers), func(t *testing.T, w *wire, p *Prober) {
			w.stick(1, true)
			for range 12 {
				for slot := range servers {
					w.offer(slot, 40, 1)
				}
				pass(p, Interval)
			}
			for slot := range servers {
				name := target(slot).Server
				if got := p.fault(name); (got == Unheard) != (slot == 1) {
					t.Errorf("%d servers: %s: %v", servers, name, got)
				}
			}
			w.stick(1, false)
			expect(t, "it passes offers on again", pass(p, 3*Interval), map[string]Fault{"s1": None})
		})
	}
}

// If a server passes offers on to a peer that does not answer, only the peer is Unheard.
func TestPeerThatDoesNotAnswer(t *testing.T) {
	simulateWell(t, placed(0, 2), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 1)
		for range 12 {
			w.offer(0, 40, 0) // the peer gets only what s0 passes on
			for server, fault := range pass(p, Interval) {
				if server != "s1" || fault != Unheard {
					t.Errorf("%s: %v", server, fault)
				}
			}
		}
		if p.fault("s1") != Unheard {
			t.Error("s1 is not found")
		}
	})
}

// Peers that do not answer are no evidence against the server through which they are called, even
// if they are its first three peers, and were not suspect before.
func TestPeersInARowThatDoNotAnswer(t *testing.T) {
	simulateWell(t, placed(0, 12), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 1, 2, 3)
		found := map[string]Fault{}
		for range 20 {
			w.offer(0, 40, 0)
			maps.Copy(found, pass(p, Interval))
		}
		expect(t, "three of twelve", found, map[string]Fault{"s1": Unheard, "s2": Unheard, "s3": Unheard})
		w.stick(0, true)
		for range 12 {
			w.offer(0, 40, 0)
			maps.Copy(found, pass(p, Interval))
		}
		if found["s0"] != Unheard {
			t.Errorf("s0 passes nothing on: %v", found)
		}
	})
}

// Clients can cause any number of offers that servers leave unanswered. A server that answers the
// balancer's own calls is not Unheard, whether clients aim at one server or at all.
func TestClientsCannotMakeServersUnheard(t *testing.T) {
	for name, aims := range map[string][]uint32{"one server": {2}, "all servers": {0, 1, 2, 3, 4, 5}} {
		t.Run(name, func(t *testing.T) {
			simulateWell(t, placed(0, 6), func(t *testing.T, w *wire, p *Prober) {
				for range 60 {
					for _, slot := range aims {
						w.offer(slot, 1000, 0)
					}
					for slot := range uint32(6) { // and a few clients whose connections open
						w.offer(slot, 1, 1)
						w.take(slot, 1)
					}
					expect(t, "the attack", pass(p, Interval), map[string]Fault{})
				}
				for slot, calls := range w.calls {
					if calls > 60 {
						t.Errorf("%d calls to server %d in 60 s", calls, slot)
					}
				}
			})
		})
	}
}

// A host that cannot make calls finds no server Unheard. It says so once.
func TestCallsThatCannotBeMade(t *testing.T) {
	simulateWell(t, placed(0, 3), func(t *testing.T, w *wire, p *Prober) {
		var log bytes.Buffer
		p.log = slog.New(slog.NewTextHandler(&log, nil))
		w.deafen(true, 1)
		for range 10 {
			w.offer(1, UnansweredOffers, 0)
			pass(p, Interval)
		}
		if p.fault("s1") != Unheard {
			t.Fatalf("s1: %v", p.fault("s1"))
		}
		w.mu.Lock()
		w.unable = true
		w.mu.Unlock()
		expect(t, "nothing is known any more", pass(p, 3*Interval), map[string]Fault{"s1": None})
		for range 10 {
			w.offer(1, UnansweredOffers, 0)
			expect(t, "suspect, and calls cannot be made", pass(p, Interval), map[string]Fault{})
		}
		if n := strings.Count(log.String(), "cannot connect to servers"); n != 1 {
			t.Errorf("said %d times:\n%s", n, &log)
		}
	})
}

// A lost SYN or SYN-ACK of a call proves nothing.
func TestLostCalls(t *testing.T) {
	simulateWell(t, placed(0, 3), func(t *testing.T, w *wire, p *Prober) {
		for i := range 60 {
			w.deafen(i%Fall != 0, 1)
			w.offer(1, 1000, 0)
			expect(t, "two of three calls are lost", pass(p, Interval), map[string]Fault{})
		}
	})
}

// A silent server also leaves offers unanswered. When it answers probes again, it is offered
// connections again.
func TestSilenceExplainsUnansweredOffers(t *testing.T) {
	simulateWell(t, placed(1, 2), func(t *testing.T, w *wire, p *Prober) {
		w.set(1, nil)
		w.offer(1, 10, 0) // too few before the server counts as silent
		pass(p, 3*Interval)
		if p.fault("s1") != Silent {
			t.Fatalf("s1: %v", p.fault("s1"))
		}
		w.offer(1, 10*UnansweredOffers, 0) // many, because clients repeat their SYNs
		pass(p, 3*Interval)
		w.set(1, well)
		expect(t, "few offers", pass(p, 3*Interval), map[string]Fault{"s1": None})

		w.deafen(true, 2)
		w.offer(2, 10*UnansweredOffers, 0)
		expect(t, "before silence shows", pass(p, 5*Interval), map[string]Fault{"s2": Unheard})
		w.set(2, nil)
		expect(t, "silence shows", pass(p, 4*Interval), map[string]Fault{"s2": Silent})
		w.set(2, well)
		w.deafen(false, 2)
		expect(t, "many offers", pass(p, 3*Interval), map[string]Fault{"s2": None})
	})
}

// Servers also pass refused connections on to a silent server. So unanswered offers of these
// servers count for nothing.
func TestSilenceExplainsOffersOfPeers(t *testing.T) {
	simulateWell(t, placed(1, 3), func(t *testing.T, w *wire, p *Prober) {
		w.set(1, nil)
		w.deafen(true, 1, 2)
		w.offer(2, 4*UnansweredOffers, 2*UnansweredOffers)
		expect(t, "what is passed on is lost", pass(p, 2*Interval), map[string]Fault{})
		w.deafen(false, 2)
		expect(t, "the reason shows", pass(p, 3*Interval), map[string]Fault{"s1": Silent})
		if s := p.servers[target(2)]; s.isSuspect() {
			t.Error("s2 is still suspect")
		}
	})
}

// A server that accepts half of its offers and drops them is detected, because it accepts
// connections that get no answer.
func TestOffersThatAreRefusedHideNothing(t *testing.T) {
	simulateWell(t, placed(1, 2), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 2)
		for range 10 {
			w.offer(1, 20, 18) // a tenth of the SYNs or of their answers is lost
			w.offer(2, 20, 10)
			w.take(1, 28)
			pass(p, Interval)
		}
		if p.fault("s1") != None || p.fault("s2") != Unheard {
			t.Errorf("s1: %v, s2: %v", p.fault("s1"), p.fault("s2"))
		}
	})
}

// One of two servers drops the connections that it accepts. Connections that the other server
// refuses are lost with it, and clients try again. So three of four offers of the good server are
// unanswered, as are those of the bad one.
func TestServersThatAreHeardAreNotUnheard(t *testing.T) {
	simulateWell(t, placed(1, 2), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 2)
		for range 7 {
			w.offer(1, 40, 10)
			w.offer(2, 40, 10)
			w.take(1, 20)
			pass(p, Interval)
		}
		if p.fault("s1") != None || p.fault("s2") != Unheard {
			t.Errorf("s1: %v, s2: %v", p.fault("s1"), p.fault("s2"))
		}
	})
}

// Under policy least, the last candidate accepts most connections. A server that drops the
// connections it accepts loses as many first offers of each other server as of its own. Only this
// server sends no signals.
func TestServerThatIsNeverHeard(t *testing.T) {
	for _, servers := range []uint32{3, 12} {
		bad := servers - 1
		simulateWell(t, placed(0, servers), func(t *testing.T, w *wire, p *Prober) {
			w.deafen(true, bad)
			for range 10 {
				for slot := range servers {
					w.offer(slot, 12, 12-12/uint64(servers))
					if slot != bad {
						w.take(slot, 12)
					}
				}
				pass(p, Interval)
			}
			for slot := range servers {
				name := target(slot).Server
				if got := p.fault(name); (got == Unheard) != (slot == bad) {
					t.Errorf("%d servers: %s: %v", servers, name, got)
				}
			}
		})
	}
}

// A server that refuses all offers is not unheard, although some connections of others are lost.
func TestServerThatRefusesAll(t *testing.T) {
	simulateWell(t, placed(0, 4), func(t *testing.T, w *wire, p *Prober) {
		for range 50 {
			for slot := range uint32(4) {
				w.offer(slot, 20, 18)
				if slot > 0 {
					w.take(slot, 24)
				}
			}
			expect(t, "a tenth is lost", pass(p, Interval), map[string]Fault{})
		}
	})
}

// One server of four drops the connections that it accepts. While it gets offers, every connection
// goes to it. So all connections are lost, and all servers are suspect. Only the bad one does not
// answer calls.
func TestServerThatTakesAll(t *testing.T) {
	const bad, offered = 3, 9
	simulateWell(t, placed(0, 4), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, bad)
		for range 12 {
			lost := p.fault("s3") != Unheard
			for slot := range uint32(4) {
				switch {
				case lost:
					w.offer(slot, offered, 0)
				case slot != bad:
					w.offer(slot, offered, offered)
					w.take(slot, offered)
				}
			}
			for server, fault := range pass(p, Interval) {
				if server != "s3" || fault != Unheard {
					t.Errorf("%s: %v", server, fault)
				}
			}
		}
		if p.fault("s3") != Unheard {
			t.Error("s3 is not found")
		}
	})
}

// If more than a third of the servers do not answer calls, none of them is Unheard.
func TestManyServersWithoutAnswers(t *testing.T) {
	simulateWell(t, placed(0, 6), func(t *testing.T, w *wire, p *Prober) {
		w.deafen(true, 0, 1, 2)
		for range 20 {
			for slot := range uint32(6) {
				w.offer(slot, 20, 5)
			}
			expect(t, "three of six", pass(p, Interval), map[string]Fault{})
		}
		w.deafen(false, 0)
		expect(t, "two of six", pass(p, 4*Interval), map[string]Fault{"s1": Unheard, "s2": Unheard})
	})
}

// If most servers leave offers unanswered, no server is unheard. When offers are answered again,
// nothing counts against a server, however long its offers were unanswered, and even if it recovers
// last.
func TestOverload(t *testing.T) {
	simulateWell(t, placed(0, 6), func(t *testing.T, w *wire, p *Prober) {
		for range 100 {
			for slot := range uint32(6) {
				w.offer(slot, 7, 2)
				w.take(slot, 2)
			}
			expect(t, "overload", pass(p, Interval), map[string]Fault{})
		}
		for range 20 {
			for slot := range uint32(6) {
				w.offer(slot, 6, 6)
				w.take(slot, 3+100*uint64(slot))
			}
			expect(t, "it is over", pass(p, Interval), map[string]Fault{})
		}
	})
}

// Answers in the next interval, and bursts of offers, prove nothing.
func TestLateAnswers(t *testing.T) {
	simulateWell(t, placed(1, 1), func(t *testing.T, w *wire, p *Prober) {
		for range 20 {
			w.offer(1, 1000, 0)
			expect(t, "a burst", pass(p, Interval), map[string]Fault{})
			w.offer(1, 0, 1000)
			expect(t, "its answers", pass(p, Interval), map[string]Fault{})
			w.offer(1, 1000, 1000)
			expect(t, "both", pass(p, Interval), map[string]Fault{})
		}
	})
}

// A server that was unheard, and whose service does not hunt any more, has no fault as soon as it
// answers.
func TestUnheardEndsWithHunting(t *testing.T) {
	w := newWire()
	w.answers[1] = well
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		unheard := target(1)
		unheard.Offered, unheard.Fault = false, Unheard
		p.SetTargets(t.Context(), []Target{unheard})
		expect(t, "its service places connections itself", pass(p, 3*Interval), map[string]Fault{"s1": None})
	})
}

// Findings that the owner did not read before it set other targets are reported again, if they
// still hold. Findings that do not hold any more are not reported.
func TestFindingsBeforeNewTargets(t *testing.T) {
	w := newWire()
	w.answers[2] = well
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1), target(2), target(3)})
		time.Sleep(5 * Interval) // s1 and s3 are silent, and nothing reads the updates
		synctest.Wait()
		other := target(1)
		other.VIP = netip.MustParseAddr("2001:db8::1")
		p.SetTargets(t.Context(), []Target{other, target(2), target(3)})
		expect(t, "a new target, one that is well, one that is silent", pass(p, 0), map[string]Fault{"s3": Silent})
	})
}

// A server without a next hop is not probed, and so does not become silent.
func TestServerWithoutWay(t *testing.T) {
	w := newWire()
	w.answers[1] = well
	cut := func(off bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cutOff = off
	}
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		p.SetTargets(t.Context(), []Target{target(1)})
		pass(p, 2*Interval)
		w.set(1, nil)
		cut(true)
		expect(t, "there is no way", pass(p, 10*Interval), map[string]Fault{})
		cut(false)
		expect(t, "there is a way, and no answer", pass(p, 5*Interval), map[string]Fault{"s1": Silent})
	})
}

// If the data path does not count first offers to the servers of a service, its offers and signals
// are not compared.
func TestOffersAreNotCompared(t *testing.T) {
	w := newWire()
	w.answers[1] = well
	simulate(t, w, func(t *testing.T, w *wire, p *Prober) {
		unlisted := target(1)
		unlisted.Offered = false
		p.SetTargets(t.Context(), []Target{unlisted})
		pass(p, 2*Interval)
		w.offer(1, 1000, 0)
		expect(t, "random candidates", pass(p, 5*Interval), map[string]Fault{})
	})
}
