// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
)

// A server with trials gets the next flows, however idle the other servers are. Each flow takes a
// trial, and the dry run before it takes none.
func TestTrialsAreTaken(t *testing.T) {
	t.Parallel()
	for _, among := range []desired.Among{desired.AmongAll, desired.AmongCandidates} {
		cfg := inferring(manyServers(4)...)
		cfg.Services[0].Infer.Among = among
		f := open(t, cfg)
		slot := f.slot("web", "s3")
		f.plane.Loads.SetPrice(slot, infer.NewPrice(64, 0, 0, false))
		f.plane.Loads.Try(slot, 3)
		f.must(f.plane.Rankings.Rank([]uint32{slot}))
		var to []string
		for port := range uint16(8) {
			to = append(to, serverOf(f.run(frameOf(fromPort(web, 1000+port)))))
		}
		if got := occurrences(to[:3])["web/s3"]; got != 3 || occurrences(to)["web/s3"] != 3 {
			t.Errorf("%s: with three trials, flows go to %v", among, to)
		}
	}
}

// New flows that do not count any more are not shown.
func TestStaleFlowsAreNotShown(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(1)...))
	for port := range uint16(3) {
		f.run(frameOf(fromPort(web, 1000+port)))
	}
	f.plane.Loads.SetPrice(f.slot("web", "s1"), infer.Price{Unit: infer.PriceOne, Stale: 2})
	if got := mustSnapshot(t, f.view()).Services[0].Servers[0].Inferred; got.New != 1 || got.Placed != 3 {
		t.Errorf("%+v", got)
	}
}

// The log says when a server begins to seem ill, and when it seems well again.
func TestLogOfSuspects(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(2)...))
	var log bytes.Buffer
	f.inference.log = slog.New(slog.NewTextHandler(&log, nil))
	in := f.inference.byName["web"]
	for _, r := range []infer.Report{
		{NoAnswers: 1, SilentFlows: 1}, {NoAnswers: 2, SilentFlows: 1}, {NoAnswers: 3, SilentFlows: 5},
		{NoAnswers: 1, SilentFlows: 1}, {NoAnswers: 1, SilentFlows: 2},
	} {
		f.inference.logConduct(in, "s2", &r)
	}
	for i, want := range []string{"a second packet", "seems well again", "fall silent", ""} {
		line, _, _ := strings.Cut(log.String(), "\n")
		if !strings.Contains(line, want) || want != "" && !strings.Contains(line, "service=web server=s2") {
			t.Errorf("line %d is %q, want %q", i, line, want)
		}
		log.Next(min(log.Len(), len(line)+1))
	}
}

// A server loses the trials that its estimator does not give it any more.
func TestTrialsEnd(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(4)...))
	slot := f.slot("web", "s3")
	f.plane.Loads.Try(slot, 100)
	f.run(frameOf(web)) // otherwise the service has had no flow, so no server is idle
	f.infers(time.Second)
	for port := range uint16(40) {
		f.run(frameOf(fromPort(web, 1000+port)))
	}
	if fresh, _ := f.plane.Loads.Flows(slot); fresh > 20 {
		t.Errorf("s3 has %d of 40 flows", fresh)
	}
}

// A server that begins to take flows seems slow at first, for whatever reason it took none. A
// service that begins has no slow start, and neither has a restart.
func TestSlowStart(t *testing.T) {
	t.Parallel()
	servers := manyServers(5)
	cfg := func(servers ...desired.Server) *desired.Balancer {
		cfg := placingBy(desired.PlacementLeastQueue, servers...)
		cfg.Services[0].Infer.SlowStart = new(10 * time.Second)
		return cfg
	}
	drained, weightless := servers[4], servers[4]
	drained.Drained, weightless.Weight = true, new(uint32(0))
	for name, c := range map[string]struct{ before, after func(f *fixture) }{
		"added":   {func(f *fixture) { f.mustApply(cfg(servers[:4]...)) }, nil},
		"drained": {func(f *fixture) { f.mustApply(cfg(append(servers[:4:4], drained)...)) }, nil},
		"weight":  {func(f *fixture) { f.mustApply(cfg(append(servers[:4:4], weightless)...)) }, nil},
		"failing": {
			func(f *fixture) { f.setHealth("web", "s5", false) },
			func(f *fixture) { f.setHealth("web", "s5", true) },
		},
		"no next hop": {
			func(f *fixture) { f.via["s5"] = ""; f.route() },
			func(f *fixture) { delete(f.via, "s5"); f.route() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := open(t, cfg(servers...))
			f.infers(time.Second)
			if a, b := f.priceOf("s1"), f.priceOf("s5"); a.Unit != b.Unit {
				t.Errorf("a new service has the prices %+v and %+v", a, b)
			}
			c.before(f)
			f.infers(time.Second)
			if c.after == nil {
				f.mustApply(cfg(servers...))
			} else {
				c.after(f)
			}
			if a, b := f.priceOf("s1"), f.priceOf("s5"); b.Unit < 8*a.Unit {
				t.Errorf("s5 begins with the price %+v, others have %+v", b, a)
			}
			f.goesToLowest(1000, 8)
			f.infers(11 * time.Second)
			if a, b := f.priceOf("s1"), f.priceOf("s5"); a.Unit != b.Unit {
				t.Errorf("after the slow start s5 has the price %+v, others have %+v", b, a)
			}
			f.checkPlaces()
			f.restart()
			if a, b := f.priceOf("s1"), f.priceOf("s5"); a.Unit != b.Unit {
				t.Errorf("after a restart s5 has the price %+v, others have %+v", b, a)
			}
		})
	}
}

// A server that was added while no process ran begins slowly. The others do not.
func TestSlowStartAfterRestart(t *testing.T) {
	t.Parallel()
	cfg := placingBy(desired.PlacementSED, manyServers(3)...)
	f := open(t, cfg)
	f.infers(time.Second)
	f.stop()
	next := placingBy(desired.PlacementSED, manyServers(4)...)
	next.Services[0].Infer.SlowStart = new(10 * time.Second)
	next.Node = cfg.Node
	f.start(next)
	f.route()
	for i := range 4 {
		isSlow := f.estimatorOf("web").Report(i).SlowStart > 1
		if isNew := i == 3; isSlow != isNew {
			t.Errorf("server %d has a slow start: %t", i+1, isSlow)
		}
	}
}

// A server that is removed and added again before its slot is free begins anew: with no durations,
// no trials and no estimate.
func TestServerThatIsBackBeginsAnew(t *testing.T) {
	t.Parallel()
	cfg := func(servers ...desired.Server) *desired.Balancer {
		cfg := inferring(servers...)
		cfg.Services[0].Infer.Estimator = desired.EstimateDurations
		return cfg
	}
	servers := manyServers(2)
	f := open(t, cfg(servers...))
	slot := f.slot("web", "s1")
	for server, microseconds := range map[string]uint32{"s1": 1000, "s2": 9000} {
		sample := [reservoirSize + 2]uint32{1, 0, microseconds}
		f.must(f.plane.Objects.Reservoirs.Put(f.slot("web", server), sample))
	}
	f.infers(time.Second)
	if got := f.estimatorOf("web").Report(0); got.Duration != 1e-3 || got.Weight < 1.1 {
		t.Fatalf("nothing is learned, so nothing is tested: %+v", got)
	}
	f.mustApply(cfg(servers[1]))
	f.plane.Loads.Try(slot, 100)
	f.mustApply(cfg(servers...))
	if got := f.slot("web", "s1"); got != slot {
		t.Fatalf("s1 has slot %d, not %d: nothing is tested", got, slot)
	}
	durations := f.plane.Loads.Durations(slot, nil)
	if score := f.plane.Loads.Score(slot); len(durations) > 0 || score>>rankScoreShift == 0 {
		t.Errorf("durations %v, score %#x", durations, score)
	}
	if got := f.estimatorOf("web").Report(0); got.Duration != 0 || got.Weight != 1 {
		t.Errorf("%+v", got)
	}
}

// If all servers of a service are replaced by others of the same names, these begin slowly. If they
// stay, they do not.
func TestAllServersAreReplaced(t *testing.T) {
	t.Parallel()
	cfg := func(host byte) *desired.Balancer {
		cfg := placingBy(desired.PlacementSED, srv6Server("s1", host, 1))
		cfg.Services[0].Infer.SlowStart = new(10 * time.Second)
		return cfg
	}
	f := open(t, cfg(1))
	for _, c := range []struct {
		host   byte
		isAnew bool
	}{{1, false}, {7, true}} {
		f.mustApply(cfg(c.host))
		if got := f.estimatorOf("web").Report(0).SlowStart > 1; got != c.isAnew {
			t.Errorf("host %d begins slowly: %t", c.host, got)
		}
	}
}
