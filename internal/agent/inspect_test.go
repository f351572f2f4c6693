package agent

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// Another process finds a pinned agent, and reads what its program counts.
func TestInspect(t *testing.T) {
	k := testKernel(t)
	if err := k.pin(); err != nil {
		t.Fatal(err)
	}
	instances, err := datapath.Instances()
	if err != nil {
		t.Fatal(err)
	}
	if want := (datapath.Instance{Name: k.instance, Role: datapath.RoleAgent}); !slices.Contains(instances, want) {
		t.Errorf("%v, want %v among them", instances, want)
	}
	want := map[string]uint64{}
	for _, c := range append(deliveries(), drops()...) {
		run(t, k.objects.XdpAgent, c.frame)
		want[c.reason]++
	}
	s, err := Inspect(k.instance)
	if err != nil {
		t.Fatal(err)
	}
	for _, reason := range s.Reasons {
		if reason.Packets != want[reason.Reason] {
			t.Errorf("%s: %d packets, want %d", reason.Reason, reason.Packets, want[reason.Reason])
		}
		delete(want, reason.Reason)
	}
	if len(want) > 0 {
		t.Errorf("not among the reasons: %v", want)
	}
	info, err := k.objects.XdpAgent.Info()
	if err != nil {
		t.Fatal(err)
	}
	if s.Program == nil || s.Program.Tag != info.Tag || s.Attachment != nil {
		t.Errorf("program %+v, want tag %s; attachment %+v, want none", s.Program, info.Tag, s.Attachment)
	}
}

// Counters of a build that counts as many reasons in another order are nobody's to read, and start anew.
func TestOtherReasons(t *testing.T) {
	k := testKernel(t)
	spec, reasons, err := loadSpec()
	if err != nil {
		t.Fatal(err)
	}
	other := spec.Maps[agentMapReasons].Copy()
	other.Name = agentMapReasons
	slices.Reverse(reasons)
	datapath.NameAfter(other, reasons)
	m, err := newPinned(filepath.Join(k.dir, agentMapReasons), other)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	cpus := make([]agentCounter, ebpf.MustPossibleCPU())
	cpus[0].Packets = 7
	if err := m.Put(uint32(1), cpus); err != nil {
		t.Fatal(err)
	}
	if _, err := Inspect(k.instance); !errors.Is(err, ebpf.ErrMapIncompatible) {
		t.Errorf("read by another build: error %v", err)
	}
	next, err := openKernel(&config.AgentNode{Instance: k.instance}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer next.close()
	if counted := counters(t, next); len(counted) != 0 {
		t.Errorf("the next process begins with %v", counted)
	}
	if _, err := Inspect(k.instance); err != nil {
		t.Error(err)
	}
}

// The manual has a line for every reason.
func TestReasonsAreDocumented(t *testing.T) {
	manual, err := os.ReadFile("../../docs/agent.md")
	if err != nil {
		t.Fatal(err)
	}
	spec, err := loadAgent()
	if err != nil {
		t.Fatal(err)
	}
	names, err := datapath.Reasons(spec.Types)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names[1:] {
		if !strings.Contains(string(manual), "`"+name+"`") {
			t.Errorf("reason %s is not in the manual", name)
		}
	}
}
