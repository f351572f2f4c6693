// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// pins returns the objects that the instance has pinned, by name.
func (f *fixture) pins() map[string]string {
	f.t.Helper()
	pins := map[string]string{}
	f.must(filepath.WalkDir(datapath.Dir(f.cfg.Node.Instance), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
			info, err := m.Info()
			f.must(err)
			id, _ := info.ID()
			pins[path] = fmt.Sprint("map ", id)
			return m.Close()
		}
		program, err := ebpf.LoadPinnedProgram(path, nil)
		f.must(err)
		info, err := program.Info()
		f.must(err)
		id, _ := info.ID()
		pins[path] = fmt.Sprint("program ", id)
		return program.Close()
	}))
	return pins
}

// everything is the state that a refused start must not change.
type everything struct {
	Pins          map[string]string
	Identity      dataplane.Identity
	Configuration map[string]string
	Reasons       map[string]tally
	Servers       map[string]tally
	Flows         []uint64
}

func (f *fixture) everything() everything {
	f.t.Helper()
	e := everything{Pins: f.pins(), Configuration: f.configuration(), Flows: append([]uint64(nil), f.plane.Flows.Entries...)}
	f.must(f.plane.Objects.Identity.Lookup(uint32(0), &e.Identity))
	counted := f.counters()
	e.Reasons, e.Servers = counted.reasons, counted.servers
	return e
}

// refusesStart starts a process on tables that another build has made. It requires that the start
// fails with the wanted errors, and changes neither the tables nor the pins nor the attached
// program.
func (f *fixture) refusesStart(want ...string) {
	f.t.Helper()
	before := f.everything()
	cfg := webOf(srv6Server("other", 9, 1))
	cfg.Node = f.cfg.Node
	cfg.Node.Seed++
	b, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err == nil {
		_ = b.Close()
		f.t.Fatal("no error")
	}
	for _, text := range append(want, "segue lb detach "+cfg.Node.Instance) {
		if !strings.Contains(err.Error(), text) {
			f.t.Errorf("error %q does not tell %q", err, text)
		}
	}
	if diff := cmp.Diff(before, f.everything()); diff != "" {
		f.t.Errorf("(-before +after):\n%s", diff)
	}
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.forwarded(ack, web, "web", "s", "forward_known"), f.run(ack))
}

// repin replaces the pin of a table by that of another build's map. The program still uses the
// table.
func (f *fixture) repin(name string, spec *ebpf.MapSpec) {
	f.t.Helper()
	m, err := ebpf.NewMap(spec)
	f.must(err)
	defer m.Close()
	f.must(datapath.Pin(m, filepath.Join(datapath.Dir(f.cfg.Node.Instance), name)))
}

// openSteering returns a balancer with one flow and a pinned program.
func openSteering(t *testing.T) *fixture {
	f := open(t, webOf(srv6Server("s", 1, 1)))
	f.run(frameOf(web))
	f.must(datapath.Pin(f.plane.Objects.XdpLb, filepath.Join(datapath.Dir(f.cfg.Node.Instance), datapath.BalancerProgram)))
	return f
}

// changes are differences that the tables of another build may have.
var changes = map[string]func(*ebpf.MapSpec){
	"value size":  func(s *ebpf.MapSpec) { s.ValueSize += 8 },
	"key size":    func(s *ebpf.MapSpec) { s.KeySize += 4 },
	"max entries": func(s *ebpf.MapSpec) { s.MaxEntries *= 2 },
	"flags":       func(s *ebpf.MapSpec) { s.Flags ^= unix.BPF_F_RDONLY_PROG },
	"type":        changeType,
}

func changeType(s *ebpf.MapSpec) {
	s.Flags, s.ValueSize = 0, min(s.ValueSize, 64) // elements of hash tables cannot have megabytes
	if s.Type == ebpf.LRUHash {
		s.Type = ebpf.Hash
	} else {
		s.Type = ebpf.LRUHash
	}
}

// fixed contains the changes that the kernel does not permit, by type of map.
var fixed = map[ebpf.MapType]map[string]bool{
	ebpf.Array:       {"key size": true},
	ebpf.PerCPUArray: {"key size": true},
	ebpf.ArrayOfMaps: {"key size": true, "value size": true, "flags": true},
}

// TestOtherLayoutsAreRefused has one case for each table and each change of it.
func TestOtherLayoutsAreRefused(t *testing.T) {
	t.Parallel()
	f := openSteering(t)
	spec, _, err := dataplane.LoadSpec()
	f.must(err)
	for name, table := range f.plane.Objects.Maps.Pinned() {
		for what, change := range changes {
			if slices.Contains(dataplane.CountersByReason, name) {
				continue // in TestUpgradeWithOtherReasons
			}
			other := spec.Maps[name].Copy()
			other.MaxEntries = (*table).MaxEntries()
			change(other)
			if fixed[other.Type][what] {
				continue
			}
			t.Run(name+" "+what, func(t *testing.T) {
				f := *f
				f.t = t
				f.repin(name, other)
				defer func() {
					f.must(datapath.Pin(reopen(t, *table), filepath.Join(datapath.Dir(f.cfg.Node.Instance), name)))
				}()
				f.refusesStart("table "+name, "by another build")
			})
		}
	}
}

// reopen returns a clone of the map, which does not know the paths of the pins.
func reopen(t *testing.T, m *ebpf.Map) *ebpf.Map {
	t.Helper()
	again, err := m.Clone()
	testhost.Must(t, err)
	t.Cleanup(func() { _ = again.Close() })
	return again
}

// A table of the same size may have another meaning, so the version must be the same.
func TestOtherVersionIsRefused(t *testing.T) {
	t.Parallel()
	f := openSteering(t)
	identity := f.identity
	identity.Version++
	f.must(f.plane.Objects.Identity.Put(uint32(0), &identity))
	f.refusesStart(fmt.Sprintf("version %d", identity.Version))
	// Another version may lack some of the tables.
	f.must(os.Remove(filepath.Join(datapath.Dir(f.cfg.Node.Instance), "half_open")))
	view, err := inspect.OpenView(f.cfg.Node.Instance)
	if !errors.Is(err, ebpf.ErrMapIncompatible) {
		t.Errorf("segue status reads them all the same: %v", err)
		_ = view.Close()
	}
	want := fmt.Sprintf("made by another build of segue (table version %d; this build: %d)",
		identity.Version, identity.Version-1)
	if err != nil && !strings.Contains(err.Error(), want) {
		t.Errorf("segue status says %q, not %q", err, want)
	}
}

// TestOtherRoleIsRefused checks that the pins of an agent stay unchanged and that no table is
// added.
func TestOtherRoleIsRefused(t *testing.T) {
	t.Parallel()
	f := openSteering(t)
	dir := datapath.Dir(f.cfg.Node.Instance)
	cfg := *f.cfg
	f.stop()
	f.must(os.RemoveAll(dir))
	_, err := datapath.MakeDir(cfg.Node.Instance, datapath.RoleAgent)
	f.must(err)
	marker, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	f.must(err)
	defer marker.Close()
	f.must(marker.Pin(filepath.Join(dir, "belongings")))
	b, err := New(&cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err == nil {
		_ = b.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "has the role "+string(datapath.RoleAgent)) {
		t.Errorf("error %v", err)
	}
	entries, err := os.ReadDir(dir)
	f.must(err)
	if len(entries) != 1 {
		t.Errorf("there are %d pins, of which the agent has made one", len(entries))
	}
}

// Candidate tables and column tables have no pins, and are checked nevertheless.
func TestOtherInnerTablesAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pin, want string
		change    func(inner *ebpf.MapSpec)
	}{
		{dataplane.TablesMap, "candidate table", func(inner *ebpf.MapSpec) { inner.ValueSize *= 2 }},
		{"columns", "column table", func(inner *ebpf.MapSpec) { inner.MaxEntries *= 2 }},
	} {
		t.Run(c.want, func(t *testing.T) {
			t.Parallel()
			f := openSteering(t)
			spec, _, err := dataplane.LoadSpec()
			f.must(err)
			tables := spec.Maps[c.pin].Copy()
			c.change(tables.InnerMap)
			outer, err := ebpf.NewMap(tables)
			f.must(err)
			defer outer.Close()
			inner, err := ebpf.NewMap(tables.InnerMap)
			f.must(err)
			defer inner.Close()
			web := f.services.byName["web"]
			f.must(outer.Put(2*web.id+uint32(web.rule.Table()), inner))
			f.must(datapath.Pin(outer, filepath.Join(datapath.Dir(f.cfg.Node.Instance), c.pin)))
			f.refusesStart(c.want)
		})
	}
}

// A refused start does not pin tables that the other build did not have, and does not replace its
// counters.
func TestRefusedStartMakesNothing(t *testing.T) {
	t.Parallel()
	f := openSteering(t)
	dir := datapath.Dir(f.cfg.Node.Instance)
	f.must(os.Remove(filepath.Join(dir, dataplane.FragmentsMap)))
	f.repin(dataplane.ReasonsMap, &ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: 3})
	f.repin(dataplane.FlowsMap, &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 128, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	f.refusesStart("table flows")
}

// Until the program is replaced, the pinned counters stay those in which the old program counts.
func TestOtherReasonsStayUntilAttached(t *testing.T) {
	t.Parallel()
	f := openSteering(t)
	f.leaveSharedNetwork()
	for _, name := range dataplane.CountersByReason {
		f.repin(name, &ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: 3})
	}
	before := f.pins()
	b, err := New(f.cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	f.must(err)
	defer b.Close()
	if diff := cmp.Diff(before, f.pins()); diff != "" {
		t.Errorf("pins (-before +after):\n%s", diff)
	}
	f.must(f.ns.Do(func() error {
		b.own = []nexthop.Link{f.link("out")}
		_, err := b.takeOver()
		return err
	}))
	view, err := inspect.OpenView(f.cfg.Node.Instance) // which refuses counters of another build
	f.must(err)
	f.must(view.Close())
}
