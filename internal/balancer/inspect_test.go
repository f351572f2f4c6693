// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// send sends a TCP segment to the service insert, and requires that it is counted under a reason.
func (f *fixture) send(port uint16, flags packet.TCPFlags, want string) {
	f.t.Helper()
	frame := frameOf(fromPort(flowTo(vip6, 80, desired.TCP), port), packet.Flags(flags))
	if got := f.run(frame).Reasons; got[want].Packets != 1 || len(got) != 1 {
		f.t.Fatalf("port %d, flags %v: %v, want %s", port, flags, got, want)
	}
}

func mustSnapshot(t testing.TB, view *inspect.View) *inspect.Snapshot {
	t.Helper()
	s, err := view.Snapshot()
	testhost.Must(t, err)
	return s
}

func TestSnapshot(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	f.via["s3"] = "narrow"
	f.route()
	view := f.view()
	before := mustSnapshot(t, view)
	if diff := cmp.Diff(inspect.FlowTable{Capacity: 1024}, before.FlowTable); diff != "" {
		t.Errorf("flow table before the first sweep, -want +got:\n%s", diff)
	}
	if server := before.Services[2].Servers[0]; server.Flows != nil {
		t.Errorf("flows before the first sweep: %+v", server.Flows)
	}
	if one, two := before.Services[2].Servers[0].Share, before.Services[2].Servers[1].Share; one+two != 1 || math.Abs(two-2./3) > 0.005 {
		t.Errorf("shares %v and %v, for weights 1 and 2", one, two)
	}
	if before.Attachment != nil || before.Program != nil {
		t.Errorf("not attached yet: %+v, %+v", before.Attachment, before.Program)
	}
	flow := flowTo(vip6, 80, desired.TCP)
	placed := map[string]uint64{}
	for port := range uint16(100) {
		placed[f.placed(fromPort(flow, port), "insert")]++
		f.send(port, packet.SYN, "forward_new")
	}
	f.via["s2"] = "" // known flows stay on s2, and their packets are dropped
	f.route()
	for port := range uint16(100) {
		if f.placed(fromPort(flow, port), "insert") == "s2" {
			f.send(port, packet.ACK, "drop_no_next_hop")
		}
	}
	if placed["s1"] == 0 || placed["s2"] == 0 || placed["s3"] != 0 {
		t.Fatalf("placed %v", placed)
	}
	f.must(f.sweep())
	s := mustSnapshot(t, view)
	if got, want := serviceNamesOf(s), []string{"encap", "gre", "insert", "rest"}; !slices.Equal(got, want) {
		t.Fatalf("services %v, want %v", got, want)
	}
	table := inspect.FlowTable{
		Capacity: 1024, Age: s.FlowTable.Age, HalfOpen: new(uint64(0)),
		Flows: &dataplane.FlowCounts{New: placed["s1"], Established: placed["s2"]},
	}
	if diff := cmp.Diff(table, s.FlowTable); diff != "" {
		t.Errorf("flow table, -want +got:\n%s", diff)
	}
	hop := func(locator, link string) *inspect.NextHop {
		return &inspect.NextHop{MAC: hopMAC(netip.MustParseAddr(locator)).String(), Ifindex: f.ifindex[link], MTU: links[link]}
	}
	none := []inspect.Condition{}
	want := &inspect.ServiceState{
		Name: "insert", VIP: vip6, Port: 80, Protocol: desired.TCP, Placement: desired.PlacementHash,
		Persistence: desired.PersistenceTable, Encapsulation: desired.SRv6Insert, Buckets: 251, Candidates: 2,
		Generation: 1, Sets: 1, Digest: s.Services[2].Digest, TakesFlows: true, Ignored: none,
		Servers: []*inspect.ServerState{
			{Name: "s1", Slot: 0, Address: "fd00:5:0:1::/64", Condition: inspect.ServerUnchecked, Causes: none, TakesFlows: true, Share: 1, NextHop: hop("fd00:5:0:1:5::", "out"),
				Flows: &dataplane.FlowCounts{New: placed["s1"]}, Packets: placed["s1"], Bytes: 60 * placed["s1"], Placed: placed["s1"]},
			{Name: "s2", Slot: 1, Address: "fd00:5:0:2::/64", Condition: inspect.ServerUnresolved, Causes: []inspect.Condition{inspect.ServerUnresolved},
				Flows: &dataplane.FlowCounts{Established: placed["s2"]}, Packets: placed["s2"], Bytes: 60 * placed["s2"], Placed: placed["s2"]},
			{Name: "s3", Slot: 2, Address: "fd00:5:0:3::/64", Condition: inspect.ServerDrained, Causes: none, NextHop: hop("fd00:5:0:3:5::", "narrow"),
				Flows: &dataplane.FlowCounts{}},
		},
	}
	if diff := cmp.Diff(want, s.Services[2], cmpopts.IgnoreUnexported(inspect.ServiceState{}), cmp.Comparer(sameAddr)); diff != "" {
		t.Errorf("service insert, -want +got:\n%s", diff)
	}
	s.RatesSince(before)
	if rate, want := *s.Services[2].Servers[0].PlacedRate, float64(placed["s1"])/s.Interval; rate != want {
		t.Errorf("%v flows/s in %v s, want %v", rate, s.Interval, want)
	}
	for _, reason := range s.Reasons {
		want := map[string]uint64{"forward_new": 100, "drop_no_next_hop": placed["s2"]}[reason.Reason]
		if reason.Packets != want || reason.Bytes != 60*want || reason.Rate.Bits != 480*float64(want)/s.Interval {
			t.Errorf("%+v in %v s, want %d packets of 60 bytes", reason, s.Interval, want)
		}
	}
}

func sameAddr(a, b netip.Addr) bool { return a == b }

func serviceNamesOf(s *inspect.Snapshot) (names []string) {
	for _, service := range s.Services {
		names = append(names, service.Name)
	}
	return names
}

// Brief reads the wanted services and no candidate table. What it reads equals that of Snapshot.
func TestBrief(t *testing.T) {
	t.Parallel()
	f := open(t, standard())
	view := f.view()
	want := mustSnapshot(t, view).Services
	for _, service := range want {
		for _, server := range service.Servers {
			server.Share = 0
		}
	}
	// Without their candidate tables, services have no shares.
	for _, entry := range f.plane.Services.All() {
		if entry.IsService() {
			testhost.Must(t, f.plane.Uninstall(entry.Table()))
		}
	}
	if _, err := view.Snapshot(); err == nil {
		t.Error("a snapshot without candidate tables has no error")
	}
	for _, wanted := range []func(string) bool{
		func(string) bool { return true },
		func(service string) bool { return service == "web" },
		func(string) bool { return false },
	} {
		s, err := view.Brief(wanted)
		testhost.Must(t, err)
		expected := slices.DeleteFunc(slices.Clone(want), func(s *inspect.ServiceState) bool { return !wanted(s.Name) })
		if diff := cmp.Diff(expected, s.Services, cmpopts.IgnoreUnexported(inspect.ServiceState{}),
			cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// Flows are counted by state, also the flows of removed servers until the next sweep frees them.
func TestSnapshotFlowStates(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	view := f.view()
	f.send(1, packet.SYN, "forward_new")
	f.send(2, packet.ACK, "forward_recover")
	f.send(2, packet.ACK, "forward_known")
	f.send(3, packet.ACK, "forward_recover")
	f.send(3, packet.FIN|packet.ACK, "forward_known")
	f.must(f.sweep())
	want := &dataplane.FlowCounts{New: 1, Established: 1, Closing: 1}
	if diff := cmp.Diff(want, mustSnapshot(t, view).FlowTable.Flows); diff != "" {
		t.Errorf("flows, -want +got:\n%s", diff)
	}
	cfg := varied()
	cfg.Services[0].Servers = cfg.Services[0].Servers[2:]
	f.mustApply(cfg)
	s := mustSnapshot(t, view)
	if diff := cmp.Diff(want, s.FlowTable.Flows); diff != "" {
		t.Errorf("with their servers removed, -want +got:\n%s", diff)
	}
	for _, server := range s.Services[2].Servers {
		if removed := server.Condition == inspect.ServerRemoved; removed != (server.Name != "s3") || removed && server.NextHop != nil {
			t.Errorf("after all but s3 were removed: %+v", server)
		}
	}
	f.must(f.sweep())
	if flows := mustSnapshot(t, view).FlowTable.Flows; *flows != (dataplane.FlowCounts{}) {
		t.Errorf("after a sweep without their servers: %+v", flows)
	}
}

func TestSnapshotOfAttachedProgram(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	f.leaveSharedNetwork()
	view := f.view()
	f.cfg.Node.Interface = "out"
	f.attached, f.own = false, []nexthop.Link{f.link("out")}
	f.must(f.ns.Do(f.attach))
	outside := mustSnapshot(t, view)
	if outside.FlowTable.Age == nil {
		t.Error("the start has not counted the flows")
	}
	if diff := cmp.Diff(&datapath.Attachment{Ifindex: f.ifindex["out"]}, outside.Attachment); diff != "" {
		t.Errorf("from another namespace, -want +got:\n%s", diff)
	}
	inside := f.snapshotInside(view)
	want := &datapath.Attachment{Ifindex: f.ifindex["out"], Interface: "out", Mode: datapath.Native}
	if diff := cmp.Diff(want, inside.Attachment); diff != "" || inside.Inside != nil {
		t.Errorf("from its own namespace, -want +got:\n%s; node.inside: %+v", diff, inside.Inside)
	}
	if hop := inside.Services[0].Servers[0].NextHop; hop.Interface != "out" {
		t.Errorf("next hop %+v, want it on out", hop)
	}
	info, err := f.plane.Objects.XdpLb.Info()
	testhost.Must(t, err)
	if outside.Program == nil || outside.Program.Tag != info.Tag {
		t.Errorf("program %+v, want tag %s", outside.Program, info.Tag)
	}
}

func TestInstances(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	instances, err := datapath.Instances()
	testhost.Must(t, err)
	if want := (datapath.Instance{Name: f.cfg.Node.Instance, Role: datapath.RoleBalancer}); !slices.Contains(instances, want) {
		t.Errorf("%v, want %v among them", instances, want)
	}
}

// Tables of another build are refused, and none of them is misread.
func TestOpenViewOfAnotherBuild(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 12, MaxEntries: 256})
	testhost.Must(t, err)
	defer other.Close()
	testhost.Must(t, datapath.Pin(other, filepath.Join(datapath.Dir(f.cfg.Node.Instance), dataplane.DirectoryMap)))
	_, err = inspect.OpenView(f.cfg.Node.Instance)
	if !errors.Is(err, ebpf.ErrMapIncompatible) || !strings.Contains(err.Error(), "table directory: of another build") {
		t.Errorf("error: %v", err)
	}
}

// A server of a service that hunts has counters of its own, in snapshots and metrics. The counters
// of the next server in its slot begin at zero.
func TestHuntCounts(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	registry := newRegistry(f)
	row := f.row(web, "web")
	f.run(frameOf(web))
	f.run(f.signal(web, "web", row[1], srv6.CreateStickiness, synAck))
	f.run(f.signal(web, "web", row[0], srv6.CreateStickiness, synAck)) // too late
	f.must(f.sweep())
	halfOpen := fmt.Sprintf(`segue_lb_half_open_flows{server="%s",service="web"} 1`, row[1])
	if got := expose(t, registry); !strings.Contains(got, halfOpen+"\n") {
		t.Errorf("no line %q in\n%s", halfOpen, got)
	}
	f.run(frameOf(web, packet.Flags(packet.ACK)))
	f.run(f.signal(web, "web", row[1], srv6.RemoveStickiness, packet.Flags(packet.FIN|packet.ACK)))
	counts := func() map[string]inspect.HuntCounts {
		counts := map[string]inspect.HuntCounts{}
		for _, service := range mustSnapshot(t, f.view()).Services {
			for _, server := range service.Servers {
				if server.Hunt == nil {
					t.Errorf("%s of %s has no counts", server.Name, service.Name)
					continue
				}
				hunt := *server.Hunt
				if hunt.HalfOpen != nil && *hunt.HalfOpen == 0 {
					hunt.HalfOpen = nil
				}
				if hunt != (inspect.HuntCounts{}) {
					counts[service.Name+" "+server.Name] = hunt
				}
			}
		}
		return counts
	}
	want := map[string]inspect.HuntCounts{
		"web " + row[0]: {Offered: 1, Created: 1, Resets: 1},
		"web " + row[1]: {HalfOpen: new(uint64(1)), Created: 1, Removed: 1}, // at the last sweep
	}
	if diff := cmp.Diff(want, counts()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	got := expose(t, registry)
	for _, line := range []string{
		fmt.Sprintf(`segue_lb_server_offers_total{server="%s",service="web"} 1`, row[0]),
		fmt.Sprintf(`segue_lb_server_signals_total{server="%s",service="web",signal="create"} 1`, row[0]),
		fmt.Sprintf(`segue_lb_server_signals_total{server="%s",service="web",signal="remove"} 1`, row[1]),
		fmt.Sprintf(`segue_lb_server_resets_total{server="%s",service="web"} 1`, row[0]),
		// The number of half-open flows is that of the last sweep.
		fmt.Sprintf(`segue_lb_half_open_flows{server="%s",service="web"} 1`, row[1]),
	} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("no line %q", line)
		}
	}
	for _, name := range row {
		f.must(f.plane.RetireCounters(f.slot("web", name)))
	}
	if got := counts(); len(got) != 0 {
		t.Errorf("in slots that are given anew: %v", got)
	}
}

// snapshotInside returns a snapshot of a reader in the balancer's network namespace.
func (f *fixture) snapshotInside(view *inspect.View) (s *inspect.Snapshot) {
	f.t.Helper()
	f.must(f.ns.Do(func() (err error) {
		s, err = view.Snapshot()
		return err
	}))
	return s
}

// A snapshot shows the second interface, even if the interface no longer exists.
func TestSnapshotOfInside(t *testing.T) {
	t.Parallel()
	cfg := insideOf(varied())
	cfg.Node.Interface, cfg.Node.Inside = "out", "narrow"
	f := open(t, cfg)
	f.leaveSharedNetwork()
	view := f.view()
	if s := f.snapshotInside(view); s.Attachment != nil || s.Inside != nil {
		t.Errorf("not attached yet: %+v, %+v", s.Attachment, s.Inside)
	}
	f.attached, f.own = false, []nexthop.Link{f.link("out"), f.link("narrow")}
	f.must(f.ns.Do(f.attach))
	for _, c := range []struct {
		when string
		want *datapath.Attachment
	}{
		{"attached", &datapath.Attachment{Ifindex: f.ifindex["narrow"], Interface: "narrow", Mode: datapath.Native}},
		{"gone", &datapath.Attachment{}},
	} {
		s := f.snapshotInside(view)
		if diff := cmp.Diff(c.want, s.Inside); diff != "" || s.Attachment == nil || s.Attachment.Interface != "out" {
			t.Errorf("%s, -want +got:\n%s; node.interface: %+v", c.when, diff, s.Attachment)
		}
		if s := mustSnapshot(t, view); c.when == "attached" && cmp.Diff(&datapath.Attachment{Ifindex: f.ifindex["narrow"]}, s.Inside) != "" {
			t.Errorf("from another namespace: %+v", s.Inside)
		}
		_ = f.ns.Do(func() error {
			link, err := netlink.LinkByName("narrow")
			if err != nil {
				return err
			}
			return netlink.LinkDel(link)
		})
	}
}
