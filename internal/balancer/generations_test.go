// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
)

// labels returns the label of each service, by name.
func (f *fixture) labels() map[string]dataplane.ServiceLabel {
	f.t.Helper()
	all, err := f.plane.ServiceLabels()
	f.must(err)
	byName := map[string]dataplane.ServiceLabel{}
	for _, label := range all {
		byName[label.Name] = label
	}
	return byName
}

// A balancer that starts late with the file of another balancer has the same generations. Without
// the file it has only the present sets.
func TestLateBalancerHasFormerGenerations(t *testing.T) {
	t.Parallel()
	first := open(t, hunting(desired.SelectConsistent, 2))
	for _, removed := range [][]string{{"s3"}, {"s3", "s4"}, {"s5"}} {
		first.mustApply(huntingWithout(2, removed...))
	}
	first.cfg.Node.State = t.TempDir()
	first.saveGenerations()
	late := huntingWithout(2, "s5")
	late.Node.State = t.TempDir()
	without := open(t, late)
	for name, label := range without.labels() {
		if label.Generation != 1 || label.Digest == first.labels()[name].Digest {
			t.Errorf("%s: without the file: %+v", name, label)
		}
	}

	text, err := os.ReadFile(first.generationsFile())
	first.must(err)
	copied := huntingWithout(2, "s5")
	copied.Node.State = t.TempDir()
	with := open(t, webOf())
	copied.Node.Instance = with.cfg.Node.Instance
	with.stop()
	with.must(os.WriteFile(serversets.File(copied.Node.State, copied.Node.Instance), text, 0o600))
	with.start(copied)
	if diff := cmp.Diff(first.labels(), with.labels()); diff != "" {
		t.Errorf("-first +late:\n%s", diff)
	}
}

// The sets of generations can have different placements. After changes of the placement and of
// servers, a packet of an unknown flow still visits the first server of the flow's row in each set,
// except for servers that are no longer configured. A server that was removed and added again is
// visited as well.
func TestGenerationsOfBothPlacements(t *testing.T) {
	t.Parallel()
	probed := func(cfg *desired.Balancer) *desired.Balancer {
		for i := range cfg.Services {
			cfg.Services[i].Placement, cfg.Services[i].Selection = desired.PlacementHash, ""
			cfg.Services[i].Probe = new(true)
		}
		return cfg
	}
	f := open(t, probed(huntingWithout(2, "s3")))
	r := newReference(f)
	had := map[dataplane.Flow][]string{} // the first server of the row in each set so far
	for _, step := range []struct {
		name string
		cfg  *desired.Balancer
	}{
		{"hash", f.cfg},
		{"hunt without two", huntingWithout(2, "s3", "s4")},
		{"hash with all", probed(hunting(desired.SelectConsistent, 2))},
	} {
		f.mustApply(step.cfg)
		f.cfg = step.cfg
		r.changed()
		for port := range uint16(100) {
			flow := fromPort(web, 30000+port)
			had[flow] = append(had[flow], f.row(flow, "web")[0])
			visited := r.possible(flow, f.service("web"))
			for _, server := range had[flow] {
				if serverOfName(f.service("web"), server) != nil && !slices.Contains(visited, server) {
					t.Errorf("%s: %v visits %v, and not %s", step.name, flow, visited, server)
				}
			}
			f.forgetFlows()
			frame := frameOf(flow, packet.Flags(packet.ACK))
			f.check(r.receive(frame), f.run(frame))
		}
	}
}

// A file of generations that cannot be read is set aside, and the balancer starts.
func TestBadFileOfGenerations(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	cfg := f.cfg
	cfg.Node.State = t.TempDir()
	path := f.generationsFile()
	f.must(os.WriteFile(path, []byte("{"), 0o600))
	f.stop()
	f.start(cfg)
	if label := f.labels()["web"]; label.Generation != 1 {
		t.Errorf("%+v", label)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "{" {
		t.Errorf("before the first save: %q, %v", text, err)
	}
	f.saveGenerations()
	if text, err := os.ReadFile(path + ".invalid"); err != nil || string(text) != "{" {
		t.Errorf("set aside: %q, %v", text, err)
	}
	if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), `"s1"`) {
		t.Errorf("saved: %q, %v", text, err)
	}
}

// A state directory that cannot be written is reported once, and so is its recovery. Another reason
// is reported too, but makes no event.
func TestUnsavedGenerations(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	f.cfg.Node.State = filepath.Join(t.TempDir(), "state")
	f.must(os.WriteFile(f.cfg.Node.State, nil, 0o600)) // a file in the place of the directory
	var told []string
	f.ReportUnsaved(func(problem string) { told = append(told, problem) })
	stream := events.NewStream()
	f.PublishTo(stream)
	var log bytes.Buffer
	f.log = slog.New(slog.NewTextHandler(&log, nil))
	f.saveGenerations()
	f.saveGenerations()
	f.must(os.Remove(f.cfg.Node.State))
	f.must(os.Symlink("absent", f.cfg.Node.State))
	f.saveGenerations()
	f.must(os.Remove(f.cfg.Node.State))
	f.saveGenerations()
	f.saveGenerations()
	if len(told) != 3 || !strings.Contains(told[0], "not a directory") || told[1] == told[0] || told[1] == "" || told[2] != "" {
		t.Errorf("told %q", told)
	}
	list, err := stream.After(t.Context(), stream.Last()-2)
	if err != nil || len(list) != 2 || list[0].Kind != events.NotSaved || list[0].Reason != told[0] ||
		list[1].Kind != events.Saved {
		t.Errorf("events %+v, %v", list, err)
	}
	if n := strings.Count(log.String(), "are not saved"); n != 2 {
		t.Errorf("logged %d times:\n%s", n, &log)
	}
}
