// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// pinAll pins the objects of an agent that other processes read.
func pinAll(k *kernel) error {
	return datapath.TakeOver(k.log, k.loader.Publish)
}

// Another process finds a pinned agent and reads its counters.
func TestInspect(t *testing.T) {
	k := testKernel(t)
	testhost.Must(t, pinAll(k))
	instances, err := datapath.Instances()
	testhost.Must(t, err)
	if want := (datapath.Instance{Name: k.loader.Instance, Role: datapath.RoleAgent}); !slices.Contains(instances, want) {
		t.Errorf("%v, want %v among them", instances, want)
	}
	want := map[string]uint64{}
	for _, c := range append(deliveries(), drops()...) {
		runAgent(t, k, c.frame)
		want[c.reason]++
	}
	s, err := inspect(k.loader.Instance)
	testhost.Must(t, err)
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
	testhost.Must(t, err)
	if s.Program == nil || s.Program.Tag != info.Tag || s.Attachment != nil {
		t.Errorf("program %+v, want tag %s; attachment %+v, want none", s.Program, info.Tag, s.Attachment)
	}
}

func inspect(instance string) (*Snapshot, error) {
	view, err := OpenView(instance)
	if err != nil {
		return nil, err
	}
	defer view.Close()
	return view.Snapshot()
}

// A build with the same number of reasons in another order does not read these counters. It starts
// new ones.
func TestOtherReasons(t *testing.T) {
	k := testKernel(t)
	testhost.Must(t, pinAll(k))
	spec, labels, err := loadSpec()
	testhost.Must(t, err)
	other := spec.Maps[agentMapReasons].Copy()
	other.Name = agentMapReasons
	slices.Reverse(labels.reasons)
	datapath.NameAfter(other, labels.reasons)
	m, err := ebpf.NewMap(other)
	testhost.Must(t, err)
	defer m.Close()
	testhost.Must(t, datapath.Pin(m, k.loader.PathOf(agentMapReasons)))
	cpus := make([]agentCounter, ebpf.MustPossibleCPU())
	cpus[0].Packets = 7
	testhost.Must(t, m.Put(uint32(1), cpus))
	if _, err := inspect(k.loader.Instance); !errors.Is(err, ebpf.ErrMapIncompatible) {
		t.Errorf("read by another build: error %v", err)
	}
	next, err := openKernel(&desired.AgentNode{Instance: k.loader.Instance}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	defer next.close()
	if counted := counters(t, next); len(counted) != 0 {
		t.Errorf("the next process begins with %v", counted)
	}
	if _, err := inspect(k.loader.Instance); !errors.Is(err, ebpf.ErrMapIncompatible) {
		t.Errorf("before the next process has taken over: error %v", err)
	}
	testhost.Must(t, pinAll(next))
	if _, err := inspect(k.loader.Instance); err != nil {
		t.Error(err)
	}
}

// The manual has a line for every reason.
func TestReasonsAreDocumented(t *testing.T) {
	manual, err := os.ReadFile("../../docs/understand/agent.md")
	testhost.Must(t, err)
	spec, err := loadAgent()
	testhost.Must(t, err)
	names, err := datapath.EnumLabels(spec.Types, "agent_reason", "AGENT_")
	testhost.Must(t, err)
	for _, name := range names[1:] {
		if !strings.Contains(string(manual), "`"+name+"`") {
			t.Errorf("reason %s is not in the manual", name)
		}
	}
}

// A snapshot has each service's policy, load, threshold and offers. The metrics have the same
// values.
func TestServicesOfSnapshot(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	accepted := s.listen(vip6)
	three, seven := uint32(3), uint32(7)
	cfg := testConfig()
	cfg.Services[0].Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: &three}
	cfg.Services[0].Load = desired.Source{Kind: desired.LoadSharedMemory}
	cfg.Services[2].Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: &seven}
	cfg.Services[2].Load = desired.Source{Kind: desired.LoadConnections, Workers: 9}
	cfg.Services = append(cfg.Services, desired.AgentService{
		Name: "queue", VIP: vip6.Addr(), Port: 80, Protocol: desired.TCP, Encapsulation: desired.SRv6Encap,
	})
	cfg.Services[4].Accept = cfg.Services[0].Accept
	cfg.Services[4].Load = desired.Source{Kind: desired.LoadAcceptQueue}
	cfg.Services[0].Port = 81
	testhost.Must(t, errors.Join(k.write(newTableContent(cfg, mtu)), pinAll(k)))
	fresh := lasting(t)
	report := func(when int64) {
		load := agentLoad{Busy: 2, Capacity: 4, When: uint64(when)}
		testhost.Must(t, k.objects.Loads.Put(serviceKey(cfg.Services[0]), load))
	}
	s.connect(flow{client6, vip6}, accepted)
	sid := handshakeEvents()[1].frame(dialogue{flow: flow{client6, netip.AddrPortFrom(vip6.Addr(), 81)}}, desired.SRv6Encap)
	s.do(func() error { runAgent(t, k, sid); return nil }) // connect-avail at the last server
	counted := fillOffers(t, k, cfg.Services[2])
	for _, when := range []int64{fresh, fresh - int64(2*time.Hour)} {
		report(when)
		var got []*ServiceState
		s.do(func() (err error) {
			view, err := OpenView(k.loader.Instance)
			if err != nil {
				return err
			}
			view.here = true // the programs are not attached
			defer view.Close()
			snapshot, err := view.Snapshot()
			if err == nil {
				got = snapshot.Services
			}
			return err
		})
		none := map[string]uint64{
			"accepted": 0, "accepted_stale": 0, "accepted_least": 0, "refused": 0, "refused_down": 0,
			"returned": 0, "taken_back": 0, "forced": 0,
		}
		forced := maps.Clone(none)
		forced["forced"] = 1
		four := uint32(4)
		reported := &AcceptState{Policy: desired.AcceptStatic, Source: "shared-memory", Load: &Load{Busy: 2, Capacity: &four},
			Threshold: &three, Offered: 1, Offers: forced}
		if when != fresh {
			reported.Load, reported.Stale = nil, true
		}
		up := func(listening Listening) Presence {
			return Presence{VIPPresent: true, Listening: listening, Condition: ConditionUp}
		}
		want := []*ServiceState{
			{Name: "all", VIP: vip4.Addr(), Protocol: desired.TCP, Presence: up(""), Accept: &AcceptState{Policy: desired.AcceptStatic,
				Source: "connections", Stale: true, Threshold: &seven, Offers: counted, Offered: 255,
				Accepted: counted["accepted"] + counted["accepted_stale"] + counted["accepted_least"]}},
			{Name: "gre", VIP: vip4.Addr(), Port: 80, Protocol: desired.TCP, Presence: up(ListeningNo)},
			{Name: "insert", VIP: vip6.Addr(), Port: 81, Protocol: desired.TCP, Presence: up(ListeningNo), Accept: reported},
			{Name: "queue", VIP: vip6.Addr(), Port: 80, Protocol: desired.TCP, Presence: up(ListeningYes), Accept: &AcceptState{Policy: desired.AcceptStatic,
				Source: "accept-queue", Load: &Load{}, Threshold: &three, Offers: none}},
			{Name: "udp", VIP: vip6.Addr(), Port: 53, Protocol: desired.UDP, Presence: up(ListeningNo)},
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// fillOffers gives each counter of a service's offers another bit, and returns the counters.
func fillOffers(t *testing.T, k *kernel, s desired.AgentService) map[string]uint64 {
	t.Helper()
	acceptance, err := k.view().acceptance(serviceKey(s))
	testhost.Must(t, err)
	var offers agentOffers
	counters := map[string]uint64{}
	for i, label := range k.view().labels.offers {
		offers.Count[i] = 1 << i
		counters[label] = 1 << i
	}
	testhost.Must(t, k.objects.Offers.Put(acceptance.Number, offers))
	return counters
}
