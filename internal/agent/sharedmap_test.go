// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
)

// pinPath returns the path of a pin in a folder of its own.
func pinPath(t testing.TB) string {
	t.Helper()
	testhost.NeedBPF(t)
	dir, err := os.MkdirTemp("/sys/fs/bpf", "agent")
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, os.RemoveAll(dir)) })
	return filepath.Join(dir, "load")
}

// mapLoad makes the data path read a map that shows a load.
func mapLoad(t testing.TB, k *kernel, key agentServiceKey, shown accept.Load) {
	t.Helper()
	path := pinPath(t)
	r, err := loadshm.Open(path, shown.Capacity)
	testhost.Must(t, err)
	t.Cleanup(func() { r.Close() })
	r.Set(shown.Busy, shown.Capacity)
	m, err := loadshm.OpenMap(path)
	testhost.Must(t, err)
	defer m.Close()
	testhost.Must(t, k.objects.LoadMaps.Put(key, uint32(m.FD())))
}

// The data path decides by what the application has in its map when a connection is offered. The
// map has three processes, of which one ends.
func TestLoadOfNow(t *testing.T) {
	l := newLoadTest(t, client6, vip6, 4096)
	path := pinPath(t)
	two := uint32(2)
	rule := desired.Accept{Policy: desired.AcceptStatic, Threshold: &two}
	source := desired.Source{Kind: desired.LoadSharedMap, Path: path}
	s := l.configure(rule, source)
	key := serviceKey(s)
	expect := func(want string, busy uint32) {
		t.Helper()
		l.do(func() error {
			if got := l.offer(); got != want {
				t.Errorf("%s, want %s", got, want)
			}
			load, known, err := l.k.view().loadNow(key, &agentAcceptance{
				Source: uint8(agentLoadSourceLOAD_SHARED_MAP), Capacity: accept.NoCapacity,
			})
			if want == "accepted_stale" {
				if known {
					t.Errorf("the status has load %+v", load)
				}
			} else if !known || load.Busy != busy || load.Capacity != 6 {
				t.Errorf("the status has load %d of %d (known: %v), want %d of 6", load.Busy, load.Capacity, known, busy)
			}
			return err
		})
	}
	expect("accepted_stale", 0) // no map
	m, err := loadshm.OpenMap(path)
	testhost.Must(t, err)
	defer m.Close()
	testhost.Must(t, l.k.objects.LoadMaps.Put(key, uint32(m.FD())))
	expect("accepted_stale", 0) // no process
	var processes []*loadshm.Reporter
	for range 3 {
		r, err := loadshm.Open(path, 2)
		testhost.Must(t, err)
		processes = append(processes, r)
	}
	for range 100 { // each change counts at once
		expect("accepted", 0)
		processes[0].Begin()
		expect("accepted", 1)
		processes[2].Begin()
		expect("refused", 2)
		processes[0].End()
		expect("accepted", 1)
		processes[2].End()
	}
	for _, r := range processes {
		testhost.Must(t, r.Close())
	}
	expect("accepted_stale", 0)
}

// All slots count.
func TestAllSlotsOfAMapCount(t *testing.T) {
	l := newLoadTest(t, client6, vip6, 4096)
	one := uint32(1)
	s := l.configure(desired.Accept{Policy: desired.AcceptStatic, Threshold: &one}, desired.Source{Kind: desired.LoadSharedMap})
	path := pinPath(t)
	m, err := loadshm.OpenMap(path)
	testhost.Must(t, err)
	defer m.Close()
	testhost.Must(t, l.k.objects.LoadMaps.Put(serviceKey(s), uint32(m.FD())))
	for n := uint32(1); n <= 504; n++ {
		r, err := loadshm.Open(path, 2)
		testhost.Must(t, err)
		defer r.Close()
		r.Set(n, 2)
		if got, known, err := l.k.view().mappedLoad(serviceKey(s)); err != nil || !known || got.Busy != n*(n+1)/2 || got.Capacity != 2*n {
			t.Fatalf("%d slots: %+v, known: %v, error %v", n, got, known, err)
		}
	}
}

// expectMapped waits until the data path reads maps for some ports, and no others.
func (s *sourceTest) expectMapped(ports ...desired.Port) {
	s.Helper()
	eventually(s.T, "the maps of services", func() bool {
		var got []desired.Port
		for port := desired.Port(1); port <= 4; port++ {
			var number uint32
			if s.maps.Lookup(portKey(port), &number) == nil {
				got = append(got, port)
			}
		}
		return cmp.Equal(got, ports)
	})
}

// Services with one map share its watch. A service that leaves has no map.
func TestServicesShareAMap(t *testing.T) {
	s := newSourceTest(t)
	path := pinPath(t)
	shared := desired.Source{Kind: desired.LoadSharedMap, Path: path}
	limited := shared
	limited.Capacity = 3
	s.follow(map[desired.Port]desired.Source{1: shared, 2: limited})
	s.expectMapped(1, 2)
	s.follow(map[desired.Port]desired.Source{1: shared, 3: limited, 4: shared})
	s.expectMapped(1, 3, 4)
	if len(s.watches) != 1 {
		t.Errorf("%d sources are read, want 1", len(s.watches))
	}
	s.follow(map[desired.Port]desired.Source{3: shared})
	s.expectMapped(3)
	s.follow(nil)
	s.expectMapped()
}

// The agent creates the map again if its pin was removed. If it cannot, the load becomes unknown,
// and the data path forgets the map.
func TestMapIsReplaced(t *testing.T) {
	s := newSourceTest(t)
	path := pinPath(t)
	var log bytes.Buffer
	w := &watch{
		loadTables: s.loadTables, log: slog.New(slog.NewTextHandler(&log, nil)),
		services: map[agentServiceKey]bool{portKey(1): true},
	}
	number := func() (n uint32) {
		t.Helper()
		testhost.Must(t, s.maps.Lookup(portKey(1), &n))
		return n
	}
	source := w.newSource(desired.Source{Kind: desired.LoadSharedMap, Path: path})
	reads := func(want string) {
		t.Helper()
		if _, err := source.Read(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	reads(loadshm.ErrNobody.Error())
	first := number()
	reads(loadshm.ErrNobody.Error())
	if number() != first {
		t.Error("the map was replaced without need")
	}
	testhost.Must(t, os.Remove(path))
	reads(loadshm.ErrNobody.Error())
	if number() == first {
		t.Error("the map of the removed pin is still in use")
	}
	testhost.Must(t, os.RemoveAll(filepath.Dir(path)))
	reads("is not a folder of a BPF file system")
	testhost.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	_, err := source.Read()
	w.reportMap(load.State{Stale: true, Err: err})
	second := number() // nobody reports; the data path finds that itself
	testhost.Must(t, os.RemoveAll(filepath.Dir(path)))
	_, err = source.Read()
	w.reportMap(load.State{Stale: true, Err: err})
	s.expectMapped()
	testhost.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	reads(loadshm.ErrNobody.Error())
	if number() == second {
		t.Error("the data path reads the former map")
	}
	w.closeMap()
}

// A configured agent follows an application that begins before it and outlasts it.
func TestAgentReadsTheMap(t *testing.T) {
	s := newSourceTest(t)
	path := pinPath(t)
	r, err := loadshm.Open(path, 4)
	testhost.Must(t, err)
	defer r.Close()
	s.follow(map[desired.Port]desired.Source{1: {Kind: desired.LoadSharedMap, Path: path}})
	s.expectMapped(1)
	s.watches.stopAll()
	s.expectMapped(1)
	if _, known := s.load(1); known {
		t.Error("user space has written a load, too")
	}
}
