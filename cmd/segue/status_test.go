// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

// someSnapshots are snapshots of a balancer at two moments, two seconds apart.
func someSnapshots() (before, after *inspect.Snapshot) {
	snapshot := func(at int64, packets uint64) *inspect.Snapshot {
		return &inspect.Snapshot{
			Snapshot: datapath.Snapshot{
				Instance: datapath.Instance{Name: "lb", Role: datapath.RoleBalancer},
				Process:  &rundir.Process{PID: 4711, Since: time.Unix(900, 0).UTC()},
				Configuration: &rundir.Configuration{
					File: "/etc/segue/lb.yaml", Read: time.Unix(910, 0).UTC(),
					Overrides: []desired.Override{
						{Service: "dns", Server: "d1", Set: desired.Fields{"drained": true}},
						{Service: "web", Server: "s1", Set: desired.Fields{"drained": false, "weight": 10}},
					},
					InvalidOverrides: []rundir.InvalidOverride{
						{
							Override: desired.Override{Service: "web", Server: "s2", Set: desired.Fields{"weight": 5000}},
							Problems: []string{`/state/lb.overrides.yaml:4: web/s2.weight "5000": must be a whole number from 0 to 1000`},
						},
						{Problems: []string{"/state/lb.overrides.yaml:4: overrides[2]: must have add, set or remove"}},
					},
					Refused: &rundir.Refusal{Time: time.Unix(920, 0).UTC(), Problems: []string{
						`node.interface "eth1": a change from "eth0" needs a restart`,
						`node.seed: a change needs a restart`,
					}},
					Unchecked: &rundir.Unchecked{Time: time.Unix(996, 0).UTC(), Reason: "too many open files"},
				},
				Time:       time.Unix(at, 0).UTC(),
				Program:    &datapath.Program{ID: 12, Tag: "0123456789abcdef"},
				Attachment: &datapath.Attachment{Ifindex: 2, Interface: "eth0", Mode: datapath.Native},
				Reasons: []datapath.ReasonCount{
					{Reason: "pass_not_vip", Packets: 7, Bytes: 420},
					{Reason: "forward_known", Packets: packets, Bytes: 1000 * packets},
					{Reason: "drop_fragment"},
				},
			},
			Inside: &datapath.Attachment{Ifindex: 3, Interface: "eth1", Mode: datapath.Generic},
			FlowTable: inspect.FlowTable{
				Capacity: 1024, Age: new(3.2), HalfOpen: new(uint64(3)),
				Flows: &dataplane.FlowCounts{New: 1, Established: 41, Silent: 7, Closing: 2},
			},
			RemovedVIPs: []inspect.RemovedVIP{
				{VIP: netip.MustParseAddr("198.51.100.7"), Age: 75.5, Packets: 63, Bytes: 2520},
			},
			Services: append(troubledServices(), []*inspect.ServiceState{
				{
					Name: "dns", VIP: netip.MustParseAddr("198.51.100.53"), Protocol: desired.UDP, Placement: desired.PlacementHash,
					Persistence: desired.PersistenceTable, Encapsulation: desired.GRE, Ignored: none,
					Servers: []*inspect.ServerState{
						{Name: "d1", Slot: 3, Address: "192.0.2.53", Condition: inspect.ServerDrained, Causes: unresolved, Flows: &dataplane.FlowCounts{}},
					},
				},
				{
					Name: "h3", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 443, Protocol: desired.UDP,
					Placement: desired.PlacementHash, Persistence: desired.PersistenceQUIC, Encapsulation: desired.SRv6Insert,
					QUIC: someForm, FormerQUIC: formerForm,
					Buckets: 65537, Candidates: 3, Generation: 1, Sets: 1, Digest: "12345678", TakesFlows: true, Ignored: none,
					Servers: []*inspect.ServerState{},
				},
				{
					Name: "hunt", VIP: netip.MustParseAddr("2001:db8:80::2"), Port: 80, Protocol: desired.TCP,
					Placement: desired.PlacementHunt, Selection: desired.SelectConsistent, Persistence: desired.PersistenceTable,
					Affinity:      &desired.ClientAffinity{Prefix: 24, Shared: true},
					Encapsulation: desired.SRv6Encap, Buckets: 65537, Candidates: 2, Generation: 3, Sets: 3, Digest: "00c0ffee", TakesFlows: true, Ignored: none,
					Servers: []*inspect.ServerState{{
						Name: "h1", Slot: 4, Address: "fd00:5:0:3::/64", Condition: inspect.ServerUnchecked, Causes: none, Share: 1,
						NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:03", Ifindex: 2, Interface: "eth0", MTU: 1500},
						Flows:   &dataplane.FlowCounts{},
						Hunt:    &inspect.HuntCounts{HalfOpen: new(uint64(3)), Offered: 70, Created: 51, Removed: 40, Resets: 1},
					}, { // newer than the last sweep
						Name: "h2", Slot: 7, Address: "fd00:5:0:7::/64", Condition: inspect.ServerUnchecked, Causes: none,
						Hunt: &inspect.HuntCounts{Offered: 2},
					}},
				},
				inferredService(packets), polledService(packets),
				{
					Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: desired.TCP,
					Placement: desired.PlacementHash, Persistence: desired.PersistenceTable, Encapsulation: desired.SRv6Insert,
					Buckets: 65537, Candidates: 3, Generation: 1, Sets: 1, Digest: "12345678", TakesFlows: true, Ignored: none,
					Servers: []*inspect.ServerState{
						{
							Name: "s1", Address: "fd00:5:0:1::/64", Condition: inspect.ServerUp, Checked: true, Probed: true, Causes: none, Share: 0.3333,
							NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:01", Ifindex: 2, Interface: "eth0", MTU: 1500},
							Flows:   &dataplane.FlowCounts{New: 1, Established: 41, Silent: 7, Closing: 2},
							Packets: packets, Bytes: 1000 * packets, Placed: packets / 100,
						},
						{
							Name: "server-with-a-long-name", Slot: 1, Address: "fd00:5:0:2::/64", Condition: inspect.ServerUp, Checked: true, Probed: true, Causes: none,
							Share: 0.6667, NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:02", Ifindex: 7, MTU: 1500},
						},
						{
							Name: "slow", Slot: 2, Address: "fd00:5:0:4::/64", Condition: inspect.ServerFailing, Checked: true, Probed: true,
							Causes:  failing,
							Flows:   &dataplane.FlowCounts{},
							NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:04", Ifindex: 7, MTU: 1500},
						},
					},
				},
			}...),
		}
	}
	return snapshot(1000, 1000), snapshot(1002, 2500)
}

// inferredService is a service that infers, with three servers. The second one seems slow for
// several reasons. The third one has no estimate yet.
func inferredService(packets uint64) *inspect.ServiceState {
	s := &inspect.ServiceState{
		Name: "inferred", VIP: netip.MustParseAddr("2001:db8:80::4"), Port: 80, Protocol: desired.TCP,
		Placement: desired.PlacementInfer, Persistence: desired.PersistenceTable,
		Encapsulation: desired.IPIP, Buckets: 65537, Candidates: 8, Generation: 1, Sets: 1,
		Digest: "0badcafe", TakesFlows: true, Ignored: none,
		Inference: &inspect.InferenceState{
			Estimator: "territory-learned", Among: desired.AmongAll, Age: new(0.214),
		},
	}
	placed := []uint64{3 * packets / 100, packets / 100, 0}
	for i, inferred := range []inspect.InferredServer{
		{New: 1, Established: 3, Placed: 120, Answered: 119, Delay: 1.25, Estimate: &inspect.EstimateState{
			Capacity: new(4.0), Wait: new(0.0), Duration: new(0.1), SlowStart: 1, NoAnswers: 1, SilentFlows: 1,
		}},
		{Placed: 7, Answered: 5, Delay: 4, Away: true, Estimate: &inspect.EstimateState{
			Capacity: new(4.0), Wait: new(0.5), SlowStart: 16, NoAnswers: 2.4, SilentFlows: 1.5,
		}},
		{Delay: 1},
	} {
		s.Servers = append(s.Servers, &inspect.ServerState{
			Name: fmt.Sprint("i", i+1), Slot: uint32(10 + i), Address: fmt.Sprint("192.0.2.", 10+i),
			Condition: inspect.ServerUp, Causes: none, Inferred: &inferred, Placed: placed[i],
		})
	}
	return s
}

// polledService is a service that polls its servers. The first server has told its load and its
// capacity, the second one only its load, and the third one has not answered.
func polledService(packets uint64) *inspect.ServiceState {
	s := inferredService(packets)
	s.Name, s.Port, s.Placement = "polled", 81, desired.PlacementAWCMP
	s.Inference = &inspect.InferenceState{
		Estimator: "awcmp", Among: desired.AmongWeighted, Age: new(0.02),
	}
	for i, estimate := range []inspect.EstimateState{
		{Weight: new(1.0), Polled: &inspect.PolledLoad{
			Busy: 7, Capacity: new(uint32(64)), Age: 0.213,
		}},
		{Weight: new(0.25), Polled: &inspect.PolledLoad{Busy: 9, Age: 2.2}},
		{Weight: new(0.625)},
	} {
		estimate.SlowStart, estimate.NoAnswers, estimate.SilentFlows = 1, 1, 1
		s.Servers[i].Name = fmt.Sprint("p", i+1)
		s.Servers[i].Inferred = &inspect.InferredServer{Delay: 1, Estimate: &estimate}
	}
	return s
}

// TestDescribeInference checks how status shows a placement that infers.
func TestDescribeInference(t *testing.T) {
	for want, c := range map[string]struct {
		placement desired.Placement
		state     inspect.InferenceState
	}{
		"infer hlb, estimated 500ms ago": {desired.PlacementInfer,
			inspect.InferenceState{Estimator: "hlb", Among: desired.AmongAll, Age: new(0.4999)}},
		"infer territory among candidates, not estimated yet": {desired.PlacementInfer,
			inspect.InferenceState{Estimator: "territory", Among: desired.AmongCandidates}},
		"least-queue among two, not estimated yet": {desired.PlacementLeastQueue,
			inspect.InferenceState{Estimator: "least-queue", Among: desired.AmongTwo}},
		"gsq2, not estimated yet": {desired.PlacementGSQ2,
			inspect.InferenceState{Estimator: "gsq2", Among: desired.AmongTwo}},
		"sed, ESTIMATES ARE 1M40S OLD": {desired.PlacementSED,
			inspect.InferenceState{Estimator: "sed", Among: desired.AmongAll, Age: new(100.0)}},
	} {
		got := describeInference(&inspect.ServiceState{Placement: c.placement, Inference: &c.state})
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The forms of connection IDs in the snapshots.
var (
	someForm = &desired.QUIC{
		Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 3, NonceLength: 8, EncodeLength: true,
	}
	formerForm = &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 1, NonceLength: 4}
)

// The causes of the servers in the snapshots.
var (
	none       = []inspect.Condition{}
	unresolved = []inspect.Condition{inspect.ServerUnresolved}
	failing    = []inspect.Condition{inspect.ServerFailing}
)

// troubledServices are services without a server that is fit for new flows.
func troubledServices() []*inspect.ServiceState {
	service := func(name string, port uint16, ignored []inspect.Condition, server inspect.ServerState) *inspect.ServiceState {
		server.Share, server.TakesFlows, server.Causes, server.Flows = 1, true, ignored, &dataplane.FlowCounts{}
		return &inspect.ServiceState{
			Name: name, VIP: netip.MustParseAddr("2001:db8:80::3"), Port: port, Protocol: desired.TCP, Placement: desired.PlacementHash,
			Persistence: desired.PersistenceTable, Encapsulation: desired.SRv6Encap, Buckets: 65537, Candidates: 3,
			Generation: 2, Sets: 2, Digest: "87654321", TakesFlows: true, Ignored: ignored, Servers: []*inspect.ServerState{&server},
		}
	}
	return []*inspect.ServiceState{
		service("checks-ignored", 80, failing, inspect.ServerState{
			Name: "c1", Slot: 5, Address: "fd00:5:0:5::/64", Condition: inspect.ServerFailing, Checked: true,
			NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:05", Ifindex: 2, Interface: "eth0", MTU: 1500},
		}),
		service("cut-off", 81, unresolved, inspect.ServerState{
			Name: "c2", Slot: 6, Address: "fd00:5:0:6::/64", Condition: inspect.ServerUnresolved,
		}),
		service("no-answer", 82, []inspect.Condition{inspect.ServerUnreachable, inspect.ServerSilent}, inspect.ServerState{
			Name: "c3", Slot: 8, Address: "fd00:5:0:8::/64", Condition: inspect.ServerUnreachable, Probed: true,
			NextHop: &inspect.NextHop{MAC: "02:00:00:00:00:08", Ifindex: 2, Interface: "eth0", MTU: 1500},
		}),
	}
}

func TestPrintBalancer(t *testing.T) {
	before, after := someSnapshots()
	var output bytes.Buffer
	testhost.Must(t, printBalancer(&output, &balancerStatus{Snapshot: before}))
	clitest.Golden(t, "status-without-rates.txt", &output)

	after.RatesSince(before)
	output.Reset()
	testhost.Must(t, printBalancer(&output, &balancerStatus{Snapshot: after}))
	clitest.Golden(t, "status.txt", &output)

	output.Reset()
	testhost.Must(t, cli.PrintJSON(&output, after))
	clitest.Golden(t, "status.json", &output)
}

// TestDescribeFlows checks the line about flows, before and after the first sweep.
func TestDescribeFlows(t *testing.T) {
	for _, c := range []struct {
		table inspect.FlowTable
		want  string
	}{
		{inspect.FlowTable{Capacity: 2048}, "- of 2048, not counted yet"},
		{
			inspect.FlowTable{
				Capacity: 2048, Age: new(0.2), HalfOpen: new(uint64(0)),
				Flows: &dataplane.FlowCounts{New: 412, Silent: 100},
			},
			"512 of 2048 (25.0%): 412 new, 0 established, 100 silent, 0 closing; 0 half-open; counted 0s ago",
		},
		{
			inspect.FlowTable{
				Capacity: 2048, Age: new(7509.6), HalfOpen: new(uint64(7)), Flows: &dataplane.FlowCounts{},
			},
			"0 of 2048 (0.0%): 0 new, 0 established, 0 silent, 0 closing; 7 half-open; counted 2h5m10s ago",
		},
	} {
		if got := describeFlows(&c.table); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// someAgent are snapshots of an agent at two moments, two seconds apart.
func someAgent() (before, after *agent.Snapshot) {
	snapshot := func(at int64, accepted uint64) *agent.Snapshot {
		two, three, four := uint32(2), uint32(3), uint32(4)
		offers := func(accepted, stale, refused, down, forced uint64) map[string]uint64 {
			return map[string]uint64{"accepted": accepted, "accepted_stale": stale, "refused": refused, "refused_down": down, "forced": forced}
		}
		up := agent.Presence{VIPPresent: true, Listening: agent.ListeningYes, Condition: agent.ConditionUp}
		allPorts, elsewhere, refusing, gone := up, up, up, up
		allPorts.Listening, elsewhere.Listening = "", agent.ListeningElsewhere
		refusing.Listening, refusing.Condition = agent.ListeningNo, agent.ConditionRefusing
		gone.VIPPresent, gone.Condition = false, agent.ConditionNotServed
		return &agent.Snapshot{
			Snapshot: datapath.Snapshot{
				Instance: datapath.Instance{Name: "agent", Role: datapath.RoleAgent},
				Time:     time.Unix(at, 0).UTC(),
				Program:  &datapath.Program{ID: 12, Tag: "0123456789abcdef"},
				Reasons:  []datapath.ReasonCount{{Reason: "deliver_srv6_insert", Packets: accepted, Bytes: 1000 * accepted}},
			},
			Services: []*agent.ServiceState{
				{Name: "dns", VIP: netip.MustParseAddr("198.51.100.53"), Protocol: desired.UDP, Presence: allPorts},
				{Name: "dynamic", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: desired.TCP, Presence: up, Connections: &two, Corrected: 5, Accept: &agent.AcceptState{
					Policy: desired.AcceptDynamic, Source: "shared-memory", Load: &agent.Load{Busy: 2, Capacity: &four}, Threshold: &three,
					Offered: accepted + 8, Accepted: accepted + 1, Offers: offers(accepted, 1, 4, 0, 3)}},
				{Name: "h3", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 443, Protocol: desired.UDP, Presence: up, QUIC: &agent.QUICState{
					QUIC: someForm, QUICID: "c4605e", FormerQUIC: formerForm, FormerQUICID: "07",
					IDs: map[string]agent.IDCount{
						"issued_own": {}, "issued_other": {Packets: 7, Last: "4bc4605f0011223344556677"}, "delivered_other": {Packets: 1},
					}}},
				{Name: "h3-new", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 444, Protocol: desired.UDP, Presence: up, QUIC: &agent.QUICState{
					QUIC: someForm, QUICID: "c4605e", IDs: map[string]agent.IDCount{"issued_own": {}, "issued_other": {}, "delivered_other": {}}}},
				{Name: "never", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 81, Protocol: desired.TCP, Presence: refusing, Accept: &agent.AcceptState{
					Policy: desired.AcceptNever, Offered: 6, Offers: offers(0, 0, 2, 3, 1)}},
				{Name: "stale", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 82, Protocol: desired.TCP, Presence: gone, Accept: &agent.AcceptState{
					Policy: desired.AcceptStatic, Source: "connections", Stale: true, Threshold: &two, Offers: offers(0, 0, 0, 0, 0)}},
				{Name: "unbounded", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 83, Protocol: desired.TCP, Presence: elsewhere, Accept: &agent.AcceptState{
					Policy: desired.AcceptStatic, Source: "connections", Load: &agent.Load{Busy: 7}, Threshold: &two,
					Offers: offers(0, 0, 0, 0, 0)}},
			},
			Signals: map[string]uint64{"create": 5, "remove": 4, "too_long": 1, "failed": 0},
			SYNACKs: map[string]uint64{"clamped": 5, "fits": 0, "no_option": 0, "malformed": 0},
		}
	}
	return snapshot(1000, 1000), snapshot(1002, 2500)
}

func TestPrintAgent(t *testing.T) {
	before, after := someAgent()
	var output bytes.Buffer
	testhost.Must(t, printAgent(&output, before))
	clitest.Golden(t, "status-agent-without-rates.txt", &output)

	after.RatesSince(before)
	output.Reset()
	testhost.Must(t, printAgent(&output, after))
	clitest.Golden(t, "status-agent.txt", &output)

	output.Reset()
	testhost.Must(t, cli.PrintJSON(&output, after))
	clitest.Golden(t, "status-agent.json", &output)
}

func TestDescribeAttachment(t *testing.T) {
	const not = "NOT ATTACHED, no packets are processed"
	for _, c := range []struct {
		attachment *datapath.Attachment
		want       string
	}{
		{nil, not},
		{&datapath.Attachment{}, not},
		{&datapath.Attachment{Ifindex: 7}, "attached to #7 in another network namespace"},
		{&datapath.Attachment{Ifindex: 7, Interface: "eth1", Mode: datapath.Generic}, "generic XDP on eth1"},
	} {
		if got := describeAttachment(c.attachment); got != c.want {
			t.Errorf("%+v: %q, want %q", c.attachment, got, c.want)
		}
	}
}

// TestStatusOfStopped checks the status without a process, with and without an attached data path.
func TestStatusOfStopped(t *testing.T) {
	kept := &datapath.Attachment{Ifindex: 3, Interface: "eth1", Mode: datapath.Native}
	gone := &datapath.Attachment{}
	const goesOn = "process: NOT RUNNING, the data path keeps working with its last configuration\n"
	const ended = "process: NOT RUNNING\n"
	for _, c := range []struct {
		outside, inside *datapath.Attachment
		want            string
	}{
		{kept, nil, goesOn}, {nil, nil, ended}, {gone, nil, ended}, {nil, kept, goesOn},
	} {
		_, s := someSnapshots()
		s.Process, s.Attachment, s.Inside = nil, c.outside, c.inside
		var output bytes.Buffer
		testhost.Must(t, printBalancer(&output, &balancerStatus{Snapshot: s}))
		if !strings.Contains(output.String(), c.want) {
			t.Errorf("attached %+v and %+v: no %q in\n%s", c.outside, c.inside, c.want, &output)
		}
	}
}

func TestShort(t *testing.T) {
	for n, want := range map[float64]string{
		0: "0", 0.5: "0.50", 9.994: "9.99", 9.996: "10.0", 12.34: "12.3", 99.96: "100", 999.4: "999", 999.5: "1.00k",
		12345: "12.3k", 999600: "1.00M", 1.5e9: "1.50G", 2e13: "20.0T",
	} {
		if got := short(n); got != want {
			t.Errorf("%v: %q, want %q", n, got, want)
		}
	}
}

// TestOnly checks which services --service selects.
func TestOnly(t *testing.T) {
	services := []string{"web", "dns"}
	same := func(name string) string { return name }
	for _, test := range []struct{ name, want, err string }{
		{"", "web dns", ""},
		{"dns", "dns", ""},
		{"wbe", "", `--service "wbe": the instance has no such service; did you mean web?`},
		{"mail", "", `--service "mail": the instance has no such service; segue service list shows all`},
	} {
		got, err := only(services, test.name, same)
		if strings.Join(got, " ") != test.want || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
			t.Errorf("%q: %q, error %v, want %q, error %q", test.name, got, err, test.want, test.err)
		}
	}
}

func TestStatusErrors(t *testing.T) {
	for _, test := range []struct{ args, err string }{
		{"status --interval -1s", "--interval -1s: must not be negative"},
		{"status --watch --interval 0s", "--interval 0: --watch needs an interval"},
		{"status extra",
			`unexpected argument "extra"; to name the instance, write: segue status -i extra`},
		{"trace tcp 192.0.2.1:1", "trace: missing DST:PORT"},
		{"trace --connection-id c46 udp 192.0.2.1:1 192.0.2.2:2",
			`--connection-id "c46": must be an even number of hexadecimal digits, at most 20 octets`},
		{"trace --connection-id c460 tcp 192.0.2.1:1 192.0.2.2:2",
			"--connection-id c460: not possible for a tcp flow"},
		{"trace --connection-id c460 --length 30 udp 192.0.2.1:1 192.0.2.2:2",
			"--length 30: must be from 31 to 65535"},
		{"trace --packet initial tcp 192.0.2.1:1 192.0.2.2:2", "--packet initial: not possible for a tcp flow"},
		{"trace --packet initial --length 42 udp 192.0.2.1:1 192.0.2.2:2", "--length 42: must be from 43 to 65535"},
		{"trace sctp 192.0.2.1:1 192.0.2.2:2", `protocol "sctp": must be tcp or udp`},
		{"trace tcp 192.0.2.1 192.0.2.2:2", `source "192.0.2.1": must be ADDRESS:PORT`},
		{"trace tcp 192.0.2.1:1 2001:db8::1:80", `destination "2001:db8::1:80": must be ADDRESS:PORT, with an IPv6 address in brackets`},
		{"trace tcp 192.0.2.1:99999 192.0.2.2:80",
			`source "192.0.2.1:99999": port "99999": must be a number from 1 to 65535`},
		{"trace tcp [2001:db8::1]:1 [2001:db8::2]:99999",
			`destination "[2001:db8::2]:99999": port "99999": must be a number from 1 to 65535`},
		{"trace tcp 192.0.2.1:1 192.0.2.2:http",
			`destination "192.0.2.2:http": port "http": must be a number from 1 to 65535`},
		{"trace tcp [fe80::1%eth0]:1 [2001:db8::1]:80", `source "[fe80::1%eth0]:1": must be a plain IPv4 or IPv6 address`},
		{"trace tcp 192.0.2.1:1 [2001:db8::1]:80", "must be of the same IP version"},
		{"trace --length 39 tcp 192.0.2.1:1 192.0.2.2:2", "--length 39: must be from 40 to 65535"},
		{"trace --length 47 udp [2001:db8::1]:1 [2001:db8::2]:2", "--length 47: must be from 48 to 65535"},
		{"trace --packet fin tcp 192.0.2.1:1 192.0.2.2:2", `--packet "fin": must be auto, syn, later or initial`},
		{"trace --packet syn udp 192.0.2.1:1 192.0.2.2:2", "--packet syn: not possible for a udp flow"},
	} {
		_, err := runSegue(t.Context(), strings.Fields(test.args)...)
		if err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("segue %s: error %v, want %s", test.args, err, test.err)
		}
	}
}

// TestDescribeReport checks how status shows the last report of a server.
func TestDescribeReport(t *testing.T) {
	for want, report := range map[string]inspect.ReportState{
		"none":                    {},
		"2.50, 48ms ago":          {Load: new(2.5), Age: new(0.048)},
		"2.50, 1s ago":            {Load: new(2.5), Age: new(1.4)},
		"2.50, 2s ago, no weight": {Load: new(2.5), Age: new(1.6)},
		"unknown, 40ms ago":       {Age: new(0.04)},
		"unknown, 1m40s ago":      {Age: new(100.0)},
	} {
		if got := describeReport(&report); got != want {
			t.Errorf("%+v: got %q, want %q", report, got, want)
		}
	}
}

// TestConditionWithReasons checks the condition for several causes, reasons and ignored causes.
func TestConditionWithReasons(t *testing.T) {
	failing, refusing := inspect.ServerFailing, inspect.ServerRefusing
	for want, s := range map[string]inspect.ServerState{
		"up": {Condition: inspect.ServerUp, TakesFlows: true},
		"failing: connection refused; refusing": {
			Condition: failing, Causes: []inspect.Condition{failing, refusing},
			Reasons: map[inspect.Condition]string{failing: "connection refused"},
		},
		"failing: status 500 (ignored)": {
			Condition: failing, Causes: []inspect.Condition{failing}, TakesFlows: true,
			Reasons: map[inspect.Condition]string{failing: "status 500"},
		},
		"drained; failing": {Condition: inspect.ServerDrained, Causes: []inspect.Condition{failing}},
		"failing: " + strings.Repeat("x", 59) + "…": {
			Condition: failing, Causes: []inspect.Condition{failing},
			Reasons: map[inspect.Condition]string{failing: strings.Repeat("x", 61)},
		},
	} {
		if got := describeCondition(&s); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestStatusOfHiddenTags checks that status warns of interfaces that hide VLAN tags.
func TestStatusOfHiddenTags(t *testing.T) {
	var out bytes.Buffer
	printHiddenTags(&out, nil, &datapath.Attachment{})
	printHiddenTags(&out, &datapath.Attachment{HiddenVLANTags: "a"}, &datapath.Attachment{HiddenVLANTags: "b"})
	const begins = "PACKETS IN VLANS MAY BE TAKEN FOR PACKETS IN NONE: "
	if want := begins + "a\n" + begins + "b\n"; out.String() != want {
		t.Errorf("%q", &out)
	}
	out.Reset()
	server, _ := someAgent()
	server.Attachment = &datapath.Attachment{HiddenVLANTags: "c"}
	if err := printAgent(&out, server); err != nil || !strings.Contains(out.String(), begins+"c\n") {
		t.Errorf("error %v, output %s", err, &out)
	}
}

// TestStatusOfUnsavedState checks that status warns if the state directory cannot be written.
func TestStatusOfUnsavedState(t *testing.T) {
	var out bytes.Buffer
	printUnsaved(&out, &rundir.Configuration{Unsaved: "no space left on device"})
	printUnsaved(&out, &rundir.Configuration{})
	printUnsaved(&out, nil)
	want := "NOT SAVED: a restart forgets the former servers of services: no space left on device\n"
	if out.String() != want {
		t.Errorf("%q", &out)
	}
}
