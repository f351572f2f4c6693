// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

var someFlow = dataplane.Flow{
	Protocol:    desired.TCP,
	Source:      netip.MustParseAddrPort("[2001:db8:c::2]:40000"),
	Destination: netip.MustParseAddrPort("[2001:db8:80::1]:80"),
}

// reported is a load report of an age in seconds.
func reported(load, age float64) inspect.ReportState {
	return inspect.ReportState{Load: &load, Age: &age}
}

func TestPrintTrace(t *testing.T) {
	insert := &inspect.TracedEncapsulation{
		Kind: desired.SRv6Insert, Added: 56, MaxLength: 1444, Source: someFlow.Source.Addr(),
		Destination: netip.MustParseAddr("fd00:5:0:2:5::"),
		Segments: []netip.Addr{netip.MustParseAddr("fd00:6c:0:1::"), netip.MustParseAddr("fd00:5:0:2:5::"),
			someFlow.Destination.Addr()},
	}
	server := &inspect.TracedServer{Name: "s2", Slot: 1, Address: "fd00:5:0:2::/64", Causes: []inspect.Condition{}}
	service := &inspect.TracedService{Name: "web", Exact: true}
	hop := &inspect.NextHop{MAC: "02:00:00:00:00:02", Ifindex: 2, Interface: "eth0", MTU: 1500}
	placement := &inspect.TracedPlacement{Bucket: new(uint32(4711)), Buckets: 65537, Candidates: []string{"s2", "s1"}}
	for name, trace := range map[string]*inspect.Trace{
		"new": {Opens: true, Service: service, Placement: placement, Server: server, Encapsulation: insert, NextHop: hop,
			Reason: "forward_new"},
		"affine": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Bucket: new(uint32(4711)), Buckets: 65537, Candidates: []string{"s2", "s1"},
			Client: new(netip.MustParsePrefix("2001:db8:1::/56")),
		}},
		"known": {Service: &inspect.TracedService{Name: "web"}, Server: server, Encapsulation: insert, NextHop: hop,
			Known: &inspect.TracedEntry{Server: "s2", State: "established", Idle: 12.88}, Reason: "forward_known"},
		"known-silent": {Service: service, Encapsulation: insert, NextHop: hop,
			Server: &inspect.TracedServer{Name: "s2", Slot: 1, Address: "fd00:5:0:2::/64",
				Causes: []inspect.Condition{inspect.ServerFailing, inspect.ServerSilent}},
			Known: &inspect.TracedEntry{Server: "s2", State: "established", Idle: 12.88}, Reason: "forward_known"},
		"left": {Opens: true, Service: service, Placement: placement, Server: server,
			Encapsulation: &inspect.TracedEncapsulation{Kind: desired.GRE, Added: 24,
				Source: netip.MustParseAddr("192.0.2.10"), Destination: netip.MustParseAddr("192.0.2.53")},
			Known:  &inspect.TracedEntry{Server: "s1", State: "closing", Idle: 8.192, Left: "a new connection takes the place of one that is over"},
			Reason: "drop_no_next_hop"},
		"in-turn": {Opens: true, Service: service, Placement: &inspect.TracedPlacement{Buckets: 4, Candidates: []string{"s2"}, InTurn: true},
			Server: server, Encapsulation: insert, NextHop: hop, Reason: "forward_new"},
		"inferred": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Buckets: 65537, Candidates: []string{"s2"},
			Scores: &inspect.TracedScores{Among: desired.AmongAll, Others: 40, Equal: 3, Servers: []inspect.ScoredServer{
				{Server: "s2", InferredServer: &inspect.InferredServer{New: 1, Established: 2, Delay: 1}},
				{Server: "s7", InferredServer: &inspect.InferredServer{Delay: 0.25, Away: true}},
			}}}},
		"inferred-row": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Bucket: new(uint32(4711)), Buckets: 65537, Candidates: []string{"s2"},
			Scores: &inspect.TracedScores{Among: desired.AmongCandidates, Servers: []inspect.ScoredServer{
				{Server: "s2", InferredServer: &inspect.InferredServer{Delay: 1.5}},
			}}}},
		"sampled": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Buckets: 65537, Candidates: []string{"s2"},
			Scores: &inspect.TracedScores{Among: desired.AmongTwo, Others: 41, Servers: []inspect.ScoredServer{
				{Server: "s2", InferredServer: &inspect.InferredServer{Established: 2, Delay: 3}},
			}}}},
		"weighted-turn": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Buckets: 65537, Candidates: []string{"s2"},
			Scores: &inspect.TracedScores{Among: desired.AmongTurns, Others: 41, Servers: []inspect.ScoredServer{
				{Server: "s2", InferredServer: &inspect.InferredServer{New: 1, Delay: 3}},
			}}}},
		"weighted-draw": {Opens: true, Service: service, Reason: "forward_new", Placement: &inspect.TracedPlacement{
			Buckets: 65537, Candidates: []string{"s2"},
			Scores: &inspect.TracedScores{Among: desired.AmongWeighted, Others: 41, Servers: []inspect.ScoredServer{
				{Server: "s2", InferredServer: &inspect.InferredServer{New: 1, Delay: 3}},
			}}}},
		"random": {Opens: true, Service: service, Placement: &inspect.TracedPlacement{Buckets: 65537, Random: true}, Reason: "forward_hunt"},
		"random-after-drained": {Opens: true, Service: service, Placement: &inspect.TracedPlacement{Buckets: 65537, Random: true},
			Course: []inspect.TracedSegment{{Server: "s2", Function: "steer"}}, Server: server, NextHop: hop,
			Known: &inspect.TracedEntry{Server: "s2", State: "established", Idle: 4, Left: "the server is drained"}, Reason: "forward_hunt"},
		"offered": {Opens: true, Service: service, Placement: placement, Reason: "forward_hunt",
			Course: []inspect.TracedSegment{{Server: "s9", Function: "steer"},
				{Server: "s2", Function: "connect-avail", Column: new(int)}, {Server: "s7", Function: "connect-avail"}}},
		"ordered": {Opens: true, Service: service, Reason: "forward_hunt",
			Placement: &inspect.TracedPlacement{Bucket: new(uint32(4711)), Buckets: 65537, Candidates: []string{"s2", "s9"},
				Order: &inspect.TracedOrder{Mean: 1.25, Servers: []inspect.OrderedServer{
					{Server: "s2", Report: reported(0.5, 0.048), Estimate: new(0.66), Offered: true},
					{Server: "s1", Report: reported(1.5, 0.2), Estimate: new(1.31)},
					{Server: "s3"},
					{Server: "s9", Report: reported(0.5, 0.012), Offered: true, Spare: true},
				}}},
			Course: []inspect.TracedSegment{{Server: "s2", Function: "connect-avail", Column: new(1)},
				{Server: "s9", Function: "connect-avail"}}},
		"cookie": {Service: service, Server: server, Encapsulation: insert, NextHop: hop, Reason: "forward_known",
			Cookie: &inspect.TracedCookie{Column: new(uint8(2))}},
		"hint": {Service: service, Server: server, Encapsulation: insert, NextHop: hop, Reason: "forward_known",
			Cookie: &inspect.TracedCookie{}, Hint: &inspect.TracedHint{Use: "recent", Column: 1}},
		"no-hint": {Opens: true, Service: service, Placement: placement, Reason: "forward_hunt",
			Hint: &inspect.TracedHint{Use: "none"}},
		"not-vip": {Reason: "pass_not_vip"},
	} {
		trace.Instance, trace.Flow, trace.Length = "lb", someFlow, 60
		var output bytes.Buffer
		testhost.Must(t, printTrace(&output, trace))
		clitest.Golden(t, "trace-"+name+".txt", &output)
		if name == "new" {
			output.Reset()
			testhost.Must(t, cli.PrintJSON(&output, trace))
			clitest.Golden(t, "trace.json", &output)
		}
	}
}
