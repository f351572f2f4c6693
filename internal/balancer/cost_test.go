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

// What others watch changes only with servers, and not when one is drained or gets another weight.
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
