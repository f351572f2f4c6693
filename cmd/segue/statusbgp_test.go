// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

func someBGP(now time.Time) *bgp.State {
	drained := now.Add(-time.Minute)
	return &bgp.State{
		ASN: 64600, RouterID: "192.0.2.2", Drained: &drained,
		Peers: []bgp.Peer{
			{Address: "192.0.2.1", ASN: 64512, State: "established", Since: now.Add(-90 * time.Second),
				Sessions: 2, Reason: "read-failed", LocalAddress: "192.0.2.2", HoldTime: 9, KeepsRoutes: true, Prefixes: 3},
			{Address: "192.0.2.3", ASN: 64512, State: "established", Since: now, HoldTime: 180},
			{Address: "2001:db8::1", ASN: 4200000000, State: "down", Since: now.Add(-time.Hour)},
			{Address: "eth1", Neighbor: "fe80::1", ASN: 64512, State: "down", Since: now},
		},
		Routes: []bgp.Route{
			{Prefix: "2001:db8:80::1/128", Since: now, Reason: bgp.NotServed, Services: []string{"web", "dns"}},
			{Prefix: "2001:db8:80::2/128", Since: now, Reason: bgp.NoPeer, Services: []string{"six"}},
			{Prefix: "203.0.113.1/32", Since: now, Reason: bgp.HeldDown, Services: []string{"web4"}},
			{Prefix: "203.0.113.2/32", Since: now, Reason: bgp.Drained, Services: []string{"mail"}},
			{Prefix: "203.0.113.4/32", Since: now, Reason: bgp.Unchecked, Services: []string{"new"}},
			{Prefix: "203.0.113.3/32", Announced: true, Since: now, Services: []string{"ntp"},
				Communities: []string{"64600:1", "no-export"}, Peers: 2, Established: 2},
			{Prefix: "203.0.113.0/24", Announced: true, Since: now, Services: []string{"ntp", "mail"}, Prepend: 2,
				MED: new(uint32(0)), LocalPref: new(uint32(90)), Communities: []string{"64600:1"}, Peers: 2, Established: 2},
			{Prefix: "2001:db8:80::3/128", Announced: true, Since: now, Services: []string{"six"}, Peers: 1},
		},
	}
}

// TestStatusOfBGP compares the output with the golden file.
func TestStatusOfBGP(t *testing.T) {
	var out bytes.Buffer
	now := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	testhost.Must(t, printBGP(&out, someBGP(now), now))
	clitest.Golden(t, "status-bgp.txt", &out)
	shifted := someBGP(now)
	shifted.DrainShifts = true
	testhost.Must(t, printBGP(&out, shifted, now))
	if want := "BALANCER IS DRAINED since 2026-05-04T11:59:00Z: its routes are less preferred"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in %s", want, &out)
	}
}

// TestJSONOfBGP checks that JSON has the field bgp beside the fields of the snapshot.
func TestJSONOfBGP(t *testing.T) {
	snapshot, _ := someSnapshots()
	var out bytes.Buffer
	testhost.Must(t, cli.PrintJSON(&out, &balancerStatus{Snapshot: snapshot, BGP: someBGP(time.Now())}))
	var s struct {
		Instance string
		BGP      struct{ Routes []struct{ Reason string } }
	}
	if err := json.Unmarshal(out.Bytes(), &s); err != nil || s.Instance != "lb" || s.BGP.Routes[0].Reason != "not_served" {
		t.Errorf("error %v: %s", err, &out)
	}
	if strings.Contains(out.String(), "Snapshot") {
		t.Error("the snapshot is an object of its own")
	}
}
