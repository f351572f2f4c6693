// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/testhost"
)

// someSwitches are states of a switch: one that follows, one that does not, and one that cannot be
// reached since the process has started.
func someSwitches() []*p4switch.Status {
	at := time.Unix(950, 0).UTC()
	return []*p4switch.Status{
		{
			Address: "192.0.2.9:9559", ElectionID: 1, Follows: true, Since: at, Entries: 262211,
			Services: []p4switch.ServiceStatus{{Name: "web", Entries: 262144, Generation: new(uint64(3)), Digest: "9c1f7e02"}},
			Passed:   []p4switch.PassedService{{Name: "dns", Reason: "persistence table"}},
			Reasons: []datapath.ReasonCount{
				{Reason: "forward_hunt", Packets: 1200, Bytes: 96000, Rate: &datapath.Rate{Packets: 12, Bits: 7680}},
				{Reason: "pass_too_big"}, {Reason: "pass_no_service", Packets: 2, Bytes: 128},
			},
		},
		{
			Address: "unix:/run/switch", Device: 4, ElectionID: 7, Since: at, Problem: "the switch refuses to add the entry", Entries: 9,
			Services: []p4switch.ServiceStatus{
				{Name: "web", Entries: 8, Generation: new(uint64(2)), Digest: "00000001"}, {Name: "web4", Entries: 1}, {Name: "new"},
			},
			Uncounted: "connection refused",
		},
	}
}

// TestStatusOfSwitch compares the output with the golden files.
func TestStatusOfSwitch(t *testing.T) {
	var text, json bytes.Buffer
	snapshot, _ := someSnapshots()
	for _, s := range someSwitches() {
		testhost.Must(t, printSwitch(&text, &balancerStatus{Snapshot: snapshot, Switch: s}))
		testhost.Must(t, cli.PrintJSON(&json, s))
	}
	clitest.Golden(t, "status-switch.txt", &text)
	clitest.Golden(t, "status-switch.json", &json)
}

// If the switch forwards a packet, the packet does not come to the data path, and only servers of the
// switch's list are asked.
func TestTraceOfSwitch(t *testing.T) {
	match := p4switch.Lookup{
		Table: "services", Key: []p4switch.Field{{Name: "vip", Value: "2001:db8:80::1"}, {Name: "port", Value: "80"}},
	}
	found := match
	found.Action, found.Params = "set_service", []p4switch.Field{{Name: "number", Value: "7"}, {Name: "tables", Value: "1"}}
	for name, s := range map[string]*p4switch.Trace{
		"forwarded": {Lookups: []p4switch.Lookup{found}, Reason: "forward_hunt",
			Course: []inspect.TracedSegment{{Server: "s1", Function: "connect-avail", Column: new(int)},
				{Server: "s2", Function: "connect-avail", Column: new(1)}},
			Segments: []netip.Addr{netip.MustParseAddr("fd00:5:0:1:1::"), netip.MustParseAddr("fd00:5:0:2:1::")}},
		"passed":  {Lookups: []p4switch.Lookup{match}, Reason: "pass_no_service"},
		"unknown": {Problem: "connection refused"},
	} {
		s.Address = "192.0.2.9:9559"
		j := &joinedTrace{Trace: &inspect.Trace{
			Instance: "lb", Flow: someFlow, Length: 60, Opens: true, Service: &inspect.TracedService{Name: "web", Exact: true},
			Reason: "forward_new", Course: []inspect.TracedSegment{{Server: "s9", Function: "connect-force"}},
		}}
		j.passSwitch(s)
		var out bytes.Buffer
		testhost.Must(t, printJoined(&out, j, false))
		clitest.Golden(t, "trace-switch-"+name+".txt", &out)
		if servers := serversOf(j.Trace); (name == "forwarded") != (servers[0] == "s1") {
			t.Errorf("%s: servers %v are asked", name, servers)
		}
		if err := j.unknown(); (name == "unknown") != (err != nil) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// The servers to which the switch sends a packet are asked, although the balancer's trace has no
// placement. Each one but the last is told the SID of the next one.
func TestAskThroughSwitch(t *testing.T) {
	sids := []netip.Addr{netip.MustParseAddr("fd00:5:0:1:1::"), netip.MustParseAddr("fd00:5:0:2:1::")}
	j := &joinedTrace{Trace: huntTrace(true, "pass_not_vip", "")}
	j.passSwitch(&p4switch.Trace{Reason: "forward_hunt", Course: offersCourse, Segments: sids})
	dir := (&askCase{says: map[string]*agent.Trace{
		"s2": traceOf("s2", "refused", false), "s1": traceOf("s1", "refused", false)}}).answers(t)
	ask := filepath.Join(dir, "ask")
	text := fmt.Sprintf("case \"$*\" in \"s2 --next %s --json \"* | \"s1 --json \"*) cat %s/$1 ;; *) exit 1 ;; esac\n", sids[1], dir)
	testhost.Must(t, os.WriteFile(ask, []byte(text), 0o600))
	testhost.Must(t, j.ask(t.Context(), "sh "+ask+" {}"))
	j.follow()
	if err := j.unknown(); err != nil || j.Receiver != "s1" || j.End != "deliver" {
		t.Errorf("goes to %q and ends %q, error %v: %+v", j.Receiver, j.End, err, j.Agents)
	}
}
