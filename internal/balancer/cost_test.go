// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// A drain writes the line of its server, whatever other services there are. It writes no candidate
// table and no label, and does not wait until packets have left.
func TestDrainWritesOneLine(t *testing.T) {
	t.Parallel()
	cfg := manyServices(3)
	f := open(t, cfg)
	next := withChangedServer(cfg, 1, func(s *desired.Server) { s.Drained = true })
	servers, entries := slices.Clone(f.plane.Directory.Servers[:]), f.plane.Services.All()

	objects := &f.plane.Objects
	for name, m := range map[string]**ebpf.Map{
		dataplane.TablesMap: &objects.Tables, "columns": &objects.Columns,
		"service_labels": &objects.ServiceLabels, "server_labels": &objects.ServerLabels,
	} {
		pin := filepath.Join(datapath.Dir(f.cfg.Node.Instance), name)
		readOnly, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
		f.must(err)
		defer readOnly.Close()
		writable := *m
		*m = readOnly
		defer func() { *m = writable }()
	}
	f.mustApply(next)

	written := 0
	for slot := range servers {
		if servers[slot] != f.plane.Directory.Servers[slot] {
			written++
		}
	}
	if written != 1 {
		t.Errorf("the drain has written the lines of %d servers", written)
	}
	if flags := f.plane.Servers.Flags(f.slot("web0", "s7")); flags&dataplane.FlagDrained == 0 {
		t.Errorf("the server has flags %b: it is not drained", flags)
	}
	if !slices.Equal(entries, f.plane.Services.All()) {
		t.Error("the drain has written the entry of a service")
	}
}

// If a server is drained or gets another weight, the resolver, the checker and the prober watch the
// same as before. If its address changes, they do not.
func TestDrainWatchesTheSame(t *testing.T) {
	t.Parallel()
	cfg := manyServices(2)
	cfg.Services[1].Probe = new(true)
	f := open(t, cfg)
	for what, test := range map[string]struct {
		change func(*desired.Server)
		same   bool
	}{
		"drain":   {func(s *desired.Server) { s.Drained = true }, true},
		"weight":  {func(s *desired.Server) { s.Weight = new(uint32(2)) }, true},
		"address": {func(s *desired.Server) { s.Locator = srv6Server("other", 99, 1).Locator }, false},
	} {
		next := withChangedServer(cfg, 2, test.change)
		diff := diffOf(cfg.Services, next.Services)
		before := f.services.watchedOf(diff)
		f.mustApply(next)
		if same := before.equals(f.services.watchedOf(diff)); same != test.same {
			t.Errorf("%s: the same is watched: %t, want %t", what, same, test.same)
		}
		if diff.addsTargets() == test.same {
			t.Errorf("%s: addsTargets is %t", what, !test.same)
		}
		f.mustApply(cfg)
	}
}

// A drain or a weight prepares only its service, and does not look for entries that no service
// needs any more. The other services have changed in fact, but not their revisions: if the balancer
// compared these services, it would prepare them, too.
func TestChangePreparesOneService(t *testing.T) {
	t.Parallel()
	cfg := manyServices(4)
	for i := range cfg.Services {
		cfg.Services[i].Revision = new(desired.Revision)
	}
	f := open(t, cfg)
	for what, test := range map[string]struct {
		change func(*desired.Server)
		tables int // that are built
		isWide bool
	}{
		"drain":   {func(s *desired.Server) { s.Drained = true }, 0, false},
		"weight":  {func(s *desired.Server) { s.Weight = new(uint32(2)) }, 1, false},
		"address": {func(s *desired.Server) { s.Locator = srv6Server("other", 99, 1).Locator }, 1, true},
	} {
		next := withChangedServer(f.cfg, 1, test.change)
		next.Services[0].Revision = new(desired.Revision)
		for i := range next.Services[1:] {
			next.Services[1+i].Timeouts.New++
		}
		diff := diffOf(f.cfg.Services, next.Services)
		if len(diff.before) != 1 || len(diff.after) != 1 {
			t.Errorf("%s: %d services differ, want 1", what, len(diff.after))
		}
		steps := f.Steps()
		to, err := f.services.prepare(next, f.generations.NextOf(next.Services, diff.has))
		f.must(err)
		f.must(f.services.enforce(to))
		tables := 0
		for _, p := range to.changed {
			if p.isNew {
				tables++
			}
		}
		if len(to.changed) != 1 || tables != test.tables || to.isWide != test.isWide {
			t.Errorf("%s: %d services prepared, %d tables built, wide: %t", what, len(to.changed), tables, to.isWide)
		}
		if more := f.Steps() - steps; !test.isWide && more != 3 {
			t.Errorf("%s: %d steps, want those of one service: prepare, install, place", what, more)
		}
		f.must(f.reconcile(f.cfg, nil, f.generations))
	}
}
