// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
)

// sourceTest is a table of loads and the watches that write to it.
type sourceTest struct {
	*testing.T
	loadTables
	watches watches
}

func newSourceTest(t *testing.T) *sourceTest { return newSourceTestOf(t, desired.MaxServices) }

// newSourceTestOf returns a test whose table has room for a number of services.
func newSourceTestOf(t *testing.T, most uint32) *sourceTest {
	testhost.NeedAgent(t)
	spec, err := loadAgent()
	testhost.Must(t, err)
	spec.Maps[agentMapLoads].MaxEntries = most
	loads, err := ebpf.NewMap(spec.Maps[agentMapLoads])
	testhost.Must(t, err)
	maps, err := ebpf.NewMap(spec.Maps[agentMapLoadMaps])
	testhost.Must(t, err)
	s := &sourceTest{t, loadTables{loads, maps}, watches{}}
	t.Cleanup(func() {
		s.watches.stopAll()
		loads.Close()
		maps.Close()
	})
	return s
}

// source is a shared-memory source.
func (s *sourceTest) source(path string, interval time.Duration) desired.Source {
	return desired.Source{Kind: desired.LoadSharedMemory, Path: path, Interval: interval}
}

// follow applies a configuration in which the service at each port has the given source.
func (s *sourceTest) follow(sources map[desired.Port]desired.Source) {
	cfg := &desired.Agent{}
	for port, source := range sources {
		cfg.Services = append(cfg.Services, desired.AgentService{
			VIP: vip6.Addr(), Port: port, Protocol: desired.TCP, Load: source,
		})
	}
	s.watches.follow(s.loadTables, cfg, slog.New(slog.DiscardHandler))
}

func portKey(port desired.Port) agentServiceKey {
	return serviceKey(desired.AgentService{VIP: vip6.Addr(), Port: port, Protocol: desired.TCP})
}

// load returns the load of the service at a port, if there is one.
func (s *sourceTest) load(port desired.Port) (l agentLoad, known bool) {
	s.Helper()
	err := s.loads.Lookup(portKey(port), &l)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		s.Fatal(err)
	}
	return l, err == nil
}

// expect checks that services have a load now.
func (s *sourceTest) expect(busy, capacity uint32, ports ...desired.Port) {
	s.Helper()
	for _, port := range ports {
		if l, known := s.load(port); !known || l.Busy != busy || l.Capacity != capacity {
			s.Errorf("port %v: the load is %d of %d (known: %v), want %d of %d", port, l.Busy, l.Capacity, known, busy, capacity)
		}
	}
}

// await waits until a service has a load.
func (s *sourceTest) await(port desired.Port, busy uint32) {
	s.Helper()
	eventually(s.T, "the load is read", func() bool {
		l, known := s.load(port)
		return known && l.Busy == busy
	})
}

func openLoad(t *testing.T, capacity uint32) (path string, r *loadshm.Reporter) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "load")
	r, err := loadshm.Open(path, capacity)
	testhost.Must(t, err)
	t.Cleanup(func() { r.Close() })
	return path, r
}

// Services with the same source share one reader, while services come and go.
func TestServicesShareASource(t *testing.T) {
	s := newSourceTest(t)
	path, application := openLoad(t, 4)
	shared := s.source(path, time.Millisecond)
	limited := shared
	limited.Capacity = 3
	other := s.source(filepath.Join(t.TempDir(), "none"), time.Millisecond)
	connections := desired.Source{Kind: desired.LoadConnections}
	s.follow(map[desired.Port]desired.Source{1: shared, 2: limited, 3: other, 4: connections})
	if len(s.watches) != 2 {
		t.Errorf("%d sources are read, want 2", len(s.watches))
	}
	s.await(1, 0)
	s.await(2, 0)
	application.Begin()
	s.await(1, 1)
	s.await(2, 1)
	if l, known := s.load(3); known {
		t.Errorf("a source without a file has the load %+v", l)
	}

	// A service that joins has the load at once, and nothing else is interrupted.
	before := s.watches[shared]
	s.follow(map[desired.Port]desired.Source{1: limited, 2: shared, 3: shared, 4: shared})
	s.expect(1, 4, 1, 2, 3, 4)
	if len(s.watches) != 1 || s.watches[shared] != before {
		t.Errorf("%d sources are read, want the one before", len(s.watches))
	}

	// Services that leave have no load, also when the load changes.
	s.follow(map[desired.Port]desired.Source{1: shared, 2: other, 3: connections})
	application.Begin()
	s.await(1, 2)
	for port := desired.Port(2); port <= 4; port++ {
		if l, known := s.load(port); known {
			t.Errorf("port %v has left the source, and has the load %+v", port, l)
		}
	}
	s.follow(nil)
	if l, known := s.load(1); known || len(s.watches) != 0 {
		t.Errorf("without services: load %+v, known: %v; %d sources are read", l, known, len(s.watches))
	}
}

// A change of the interval keeps the load, and the source is read at the new interval.
func TestIntervalChanges(t *testing.T) {
	s := newSourceTest(t)
	path, application := openLoad(t, 4)
	s.follow(map[desired.Port]desired.Source{1: s.source(path, 10*time.Second), 2: s.source(path, 10*time.Second)})
	s.await(1, 0)
	testhost.Must(t, s.loads.Put(portKey(2), agentLoad{Busy: 3, Capacity: 4, When: 1}))
	// Without a report, nothing can hide that a load was lost.
	application.Set(0, 0)
	s.follow(map[desired.Port]desired.Source{1: s.source(path, 10*time.Second), 2: s.source(path, time.Millisecond)})
	s.expect(3, 4, 2)
	application.Set(5, 8)
	s.await(2, 5)
	application.Set(6, 8)
	s.await(2, 6)
	s.expect(0, 4, 1)
}

// An unchanged load is written again when a quarter of the time after which it is stale would
// otherwise pass. A changed load is written at once.
func TestUnchangedLoadIsRenewed(t *testing.T) {
	for _, c := range []struct {
		name     string
		interval time.Duration
		after    time.Duration
		changed  bool
		written  bool
	}{
		{"unchanged", 10 * time.Millisecond, 240 * time.Millisecond, false, false},
		{"unchanged for long", 10 * time.Millisecond, 241 * time.Millisecond, false, true},
		{"changed", 10 * time.Millisecond, 10 * time.Millisecond, true, true},
		{"unchanged, long interval", 10 * time.Second, 9999 * time.Millisecond, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSourceTest(t)
			key, begin := portKey(1), time.Now()
			w := &watch{
				loadTables: s.loadTables, interval: c.interval, log: slog.New(slog.DiscardHandler),
				services: map[agentServiceKey]bool{key: true},
			}
			state := load.State{Load: load.Load{Busy: 1, Capacity: 4}, At: begin}
			w.report(state)
			s.expect(1, 4, 1)
			first, _ := s.load(1)
			state.At = begin.Add(c.after)
			if c.changed {
				state.Load.Busy = 2
			}
			w.report(state)
			s.expect(state.Load.Busy, 4, 1)
			if second, _ := s.load(1); (second.When != first.When) != c.written {
				t.Errorf("written: %v, want %v", second.When != first.When, c.written)
			}
		})
	}
}

// A load that could not be written is written with the next read.
func TestFailedWriteIsRepeated(t *testing.T) {
	s := newSourceTestOf(t, 1)
	var log bytes.Buffer
	w := &watch{
		loadTables: s.loadTables, interval: 10 * time.Millisecond, log: slog.New(slog.NewTextHandler(&log, nil)),
		services: map[agentServiceKey]bool{portKey(1): true},
	}
	state := load.State{Load: load.Load{Busy: 1, Capacity: 4}, At: time.Now()}
	testhost.Must(t, s.loads.Put(portKey(2), agentLoad{}))
	w.report(state)
	if _, known := s.load(1); known || !strings.Contains(log.String(), "report the load") {
		t.Errorf("in a full table: known: %v, log: %s", known, log.String())
	}
	testhost.Must(t, s.loads.Delete(portKey(2)))
	w.report(state)
	s.expect(1, 4, 1)
}
