// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// These rules hold for the hint table however the steps of two cores and of sweeps interleave:
//
//   - A hint is of a flow that a server has signalled, and names a server that has signalled it.
//   - A flow has at most one hint in a word.
//   - Between two sweeps, a recent hint stays as it is, whatever other flows of its set do, until a
//     server of its own flow signals something else.

// hintStorm is two writers of a hint table, on two cores.
type hintStorm struct {
	*fixture
	// own are flows of which only one of the writers sends signals, and only of one server.
	own     [2][]dataplane.Flow
	pool    []dataplane.Flow
	signals map[dataplane.Flow][]hintSignal
	// hints are the hints that signals can make, without their use, by set.
	hints []map[uint64]dataplane.Flow
}

// hintSignal is a signal of a server, or a packet of the client.
type hintSignal struct {
	frame []byte
	// removes tells whether the hint may be gone after it.
	removes bool
}

func openHintStorm(t testing.TB) *hintStorm {
	cfg := hinting(desired.PlacementHunt, 3)
	cfg.Node.Limits.Hints = 4
	s := &hintStorm{fixture: open(t, cfg), signals: map[dataplane.Flow][]hintSignal{}}
	s.must(dataplane.Detach(s.cfg.Node.Instance))
	s.moving = true
	tags := map[string]bool{}
	s.hints = make([]map[uint64]dataplane.Flow, len(s.plane.Hints.Words())/2)
	for port := range uint16(100) {
		flow := fromPort(web, 1000+port)
		word, tag := s.hintPlace(flow)
		place, servers := fmt.Sprint(word/2, tag), 2
		if tags[place] || len(s.pool) == 12 {
			continue
		}
		tags[place] = true
		if n := port % 3; n < 2 {
			s.own[n] = append(s.own[n], flow)
			servers = 1
		} else {
			s.pool = append(s.pool, flow)
		}
		s.addSignals(flow, servers)
	}
	return s
}

// addSignals makes the signals of the first servers of a flow's row.
func (s *hintStorm) addSignals(flow dataplane.Flow, servers int) {
	word, tag := s.hintPlace(flow)
	set := word / 2
	if s.hints[set] == nil {
		s.hints[set] = map[uint64]dataplane.Flow{}
	}
	all := []hintSignal{{frame: ackOf(flow)}}
	for column, name := range s.row(flow, "web")[:servers] {
		s.hints[set][tag<<6|uint64(column)<<3|markOf(s.slot("web", name))] = flow
		of := func(function srv6.Function, flags packet.TCPFlags) hintSignal {
			frame := s.signal(flow, "web", name, function, packet.Flags(flags))
			return hintSignal{frame, function == srv6.RemoveStickiness}
		}
		ack := of(srv6.CreateStickiness, packet.ACK)
		all = append(all, of(srv6.CreateStickiness, packet.SYN|packet.ACK), ack, ack,
			of(srv6.RemoveStickiness, packet.FIN|packet.ACK))
	}
	s.signals[flow] = all
}

// hintOf returns the hint of a flow, or 0 if there is none.
func (s *hintStorm) hintOf(flow dataplane.Flow) uint64 {
	first, tag := s.hintPlace(flow)
	for _, number := range []int{first, first ^ 1} {
		for word := atomic.LoadUint64(&s.plane.Hints.Words()[number]); word != 0; word >>= 16 {
			if hint := word & 0xffff; hint>>8 == tag {
				return hint
			}
		}
	}
	return 0
}

// rage makes both writers send signals, while the hints are checked, and swept if wanted.
func (s *hintStorm) rage(seed uint64, packets int, sweeps bool) {
	s.t.Helper()
	clear(s.plane.Hints.Words())
	var writers sync.WaitGroup
	var running atomic.Int32
	for core := range s.own {
		running.Add(1)
		writers.Go(func() {
			defer running.Add(-1)
			pin(s.t, core)
			random := rand.New(rand.NewPCG(seed, uint64(core)))
			s.write(s.own[core], random, packets, !sweeps)
		})
	}
	for running.Load() > 0 && !s.t.Failed() {
		s.checkHints()
		if sweeps {
			s.plane.Hints.Sweep()
		}
	}
	writers.Wait()
	s.checkHints()
}

// write sends random signals. Recent hints of its own flows must stay.
func (s *hintStorm) write(own []dataplane.Flow, random *rand.Rand, packets int, stay bool) {
	settled := map[dataplane.Flow]uint64{}
	for range packets {
		flow := s.pool[random.IntN(len(s.pool))]
		owned := random.IntN(2) == 0
		if owned {
			flow = own[random.IntN(len(own))]
		}
		all := s.signals[flow]
		signal := all[random.IntN(len(all))]
		if before := settled[flow]; stay && before != 0 && s.hintOf(flow) != before {
			s.t.Errorf("the hint of %v was %#x, and is %#x", flow, before, s.hintOf(flow))
			return
		}
		s.exec(signal.frame, nil)
		if !owned {
			continue
		}
		settled[flow] = 0
		if hint := s.hintOf(flow); !signal.removes && hint&3 == uint64(hintRecent) {
			settled[flow] = hint
		}
	}
}

// checkHints checks the first two rules.
func (s *hintStorm) checkHints() {
	s.t.Helper()
	for number := range s.plane.Hints.Words() {
		all := atomic.LoadUint64(&s.plane.Hints.Words()[number])
		seen := map[dataplane.Flow]bool{}
		for word := all; word != 0; word >>= 16 {
			hint := word & 0xffff
			if hint == 0 {
				continue
			}
			flow, ok := s.hints[number/2][hint>>2]
			switch {
			case hint&3 == uint64(hintFree):
				s.t.Errorf("word %d is %016x: %#x is no hint", number, all, hint)
			case !ok:
				s.t.Errorf("word %d is %016x: no signal makes the hint %#x", number, all, hint)
			case seen[flow]:
				s.t.Errorf("word %d is %016x: %v has two hints", number, all, flow)
			}
			seen[flow] = true
		}
	}
}

// Two writers send for some seconds, with sweeps and without.
func TestTwoWritersOfHints(t *testing.T) {
	s := openHintStorm(t)
	for _, sweeps := range []bool{false, true} {
		storms := 0
		for start := time.Now(); time.Since(start) < 200*time.Millisecond*time.Duration(*collisions) && !t.Failed(); storms++ {
			seed := rand.Uint64()
			if s.rage(seed, packetsPerStorm, sweeps); t.Failed() {
				t.Logf("seed %d, sweeps: %v", seed, sweeps)
			}
		}
		t.Logf("%d storms, sweeps: %v", storms, sweeps)
	}
}

// Two cores take the SYN-ACKs of two servers for a flow at the same moment. Only one of them enters
// a hint.
func TestTwoAnswersAtOnce(t *testing.T) {
	s := openHintStorm(t)
	var ready atomic.Int64
	var writers sync.WaitGroup
	done := make(chan struct{}, len(s.own))
	var flows [len(s.own)]chan dataplane.Flow
	for core, signal := range []int{1, 5} { // the SYN-ACKs of addSignals
		flows[core] = make(chan dataplane.Flow, 1)
		writers.Go(func() {
			pin(t, core)
			for flow := range flows[core] {
				meet(t, &ready, len(s.own))
				s.exec(s.signals[flow][signal].frame, nil)
				done <- struct{}{}
			}
		})
	}
	rounds := 0
	deadline := time.After(patience)
	for start := time.Now(); time.Since(start) < 400*time.Millisecond*time.Duration(*collisions) && !t.Failed(); rounds++ {
		clear(s.plane.Hints.Words())
		flow := s.pool[rand.IntN(len(s.pool))]
		for core := range flows {
			flows[core] <- flow
		}
		for core := range flows {
			select {
			case <-done:
			case <-deadline:
				t.Fatalf("round %d: after %v, %d of %d cores have taken a SYN-ACK",
					rounds, patience, core, len(flows))
			}
		}
		s.checkHints()
	}
	for core := range flows {
		close(flows[core])
	}
	writers.Wait()
	t.Logf("%d rounds", rounds)
}

// meet waits until all goroutines have called it as often as this one, or until the test has
// failed. It does not sleep, so that all go on at the same moment.
func meet(t *testing.T, arrived *atomic.Int64, all int) {
	before := arrived.Add(1) - 1
	for round := before / int64(all); arrived.Load() < (round+1)*int64(all) && !t.Failed(); {
	}
}

// FuzzTwoWritersOfHints is TestTwoWritersOfHints without a limit of time. Failures depend on timing
// as well: an input that fails once may pass the next time.
func FuzzTwoWritersOfHints(f *testing.F) {
	s := openHintStorm(f)
	f.Add(uint64(0))
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) {
		s.t = t
		s.rage(seed, packetsPerStorm, seed%2 == 1)
	})
}
