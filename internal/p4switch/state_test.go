// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
)

// awaitState waits until the state of a follower is as wanted.
func awaitState(t *testing.T, f *Follower, what string, isWanted func(*Status) bool) (s *Status) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if s = f.Status(t.Context()); isWanted(s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: the state is %+v", what, s)
		}
	}
}

func follows(s *Status) bool { return s.Follows }

// hasProblem returns a function that tells whether the switch does not follow because of a problem.
func hasProblem(text string) func(*Status) bool {
	return func(s *Status) bool { return !s.Follows && strings.Contains(s.Problem, text) }
}

// checkGeneration checks the generation in force on the switch; no content: another one than is known.
func checkGeneration(t *testing.T, what string, s *Status, c *Content) {
	t.Helper()
	if len(s.Services) != 1 {
		t.Fatalf("%s: services %v", what, s.Services)
	}
	got := s.Services[0]
	if c == nil {
		if got.Generation != nil {
			t.Errorf("%s: generation %d", what, *got.Generation)
		}
		return
	}
	want, digest := c.Services[0].Generation, fmt.Sprintf("%08x", c.Services[0].Digest)
	if got.Generation == nil || *got.Generation != want || got.Digest != digest || got.Entries == 0 {
		t.Errorf("%s: %+v, want generation %d and digest %s", what, got, want, digest)
	}
}

// The state says what the switch has, also if that is not what the balancer wants.
func TestState(t *testing.T) {
	f := startFake(t)
	follower, contents, _ := startFollower(t, f, 5)
	first, second := contentOf(t, []uint16{1, 2, 3}), contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	first.Passed = []PassedService{{"old", "persistence table"}}
	contents <- first
	s := awaitState(t, follower, "a new switch", follows)
	checkGeneration(t, "a new switch", s, first)
	if s.Address != f.address || s.ElectionID != 5 || s.Entries != len(f.tables) || len(s.Passed) != 1 || s.Passed[0].Name != "old" {
		t.Errorf("state %+v", s)
	}
	f.mu.Lock()
	f.most = f.writes + 20
	f.mu.Unlock()
	contents <- second
	s = awaitState(t, follower, "a full switch", hasProblem("ResourceExhausted"))
	checkGeneration(t, "a full switch", s, first)
	f.mu.Lock()
	f.most = -1
	f.mu.Unlock()
	checkGeneration(t, "a switch with room again", awaitState(t, follower, "room", follows), second)
	f.stop()
	s = awaitState(t, follower, "no switch", hasProblem("connect"))
	checkGeneration(t, "no switch", s, second)
	if s.Uncounted == "" || len(s.Reasons) > 0 {
		t.Errorf("no switch: counters %v, problem %q", s.Reasons, s.Uncounted)
	}
	f.start()
	awaitState(t, follower, "the switch is back", follows)
	f.open(6)
	awaitState(t, follower, "another controller", hasProblem(ErrNotPrimary.Error()))
}

// The generation follows from the entries that the switch has: with another entry, it is unknown.
func TestStateOfForeignEntries(t *testing.T) {
	f := startFake(t)
	follower, contents, _ := startFollower(t, f, 1)
	c := contentOf(t, []uint16{1, 2, 3})
	contents <- c
	awaitState(t, follower, "a new switch", follows)
	f.stop()
	awaitState(t, follower, "no switch", hasProblem("connect"))
	for name, value := range f.tables {
		if strings.HasPrefix(name, "rows ") { // the switch has another row, and takes no other
			action, params := unpack(value)
			params[2] = Number(4000)
			f.tables[name] = (&Entry{Action: action, Params: params}).value()
			break
		}
	}
	f.most = f.writes
	f.start()
	s := awaitState(t, follower, "a foreign entry", hasProblem("ResourceExhausted"))
	checkGeneration(t, "a foreign entry", s, nil)
}

// The counters of the switch are in its state and in the metrics.
func TestCounters(t *testing.T) {
	f := startFake(t)
	follower, contents, _ := startFollower(t, f, 1)
	f.set(countedReasons, 3, 7, 700)
	f.set(countedReasons, 13, 1, 64)
	f.set(countedServers, 2, 5, 500)
	f.set(countedServers, 4, 9, 900) // no server
	contents <- contentOf(t, []uint16{1, 2})
	before := awaitState(t, follower, "a new switch", follows)
	f.set(countedReasons, 3, 9, 1000)
	s := follower.Status(t.Context())
	s.RatesSince(before, 2*time.Second)
	for reason, want := range map[string]datapath.ReasonCount{
		"forward_hunt":   {Packets: 9, Bytes: 1000, Rate: &datapath.Rate{Packets: 1, Bits: 1200}},
		"pass_no_server": {Packets: 1, Bytes: 64, Rate: &datapath.Rate{}},
		"forward_known":  {Rate: &datapath.Rate{}},
	} {
		found := false
		for _, got := range s.Reasons {
			if got.Reason == reason {
				found = got.Packets == want.Packets && got.Bytes == want.Bytes && *got.Rate == *want.Rate
			}
		}
		if !found {
			t.Errorf("%s: want %+v in %+v", reason, want, s.Reasons)
		}
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(follower)
	testhost.Must(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP segue_lb_switch_server_packets_total Packets that the switch sent to the server.
# TYPE segue_lb_switch_server_packets_total counter
segue_lb_switch_server_packets_total{server="s01",service="web"} 0
segue_lb_switch_server_packets_total{server="s02",service="web"} 5
# HELP segue_lb_switch_service_generation Number of the service's generation whose rows are in force on the switch. It is missing if the switch has other rows.
# TYPE segue_lb_switch_service_generation gauge
segue_lb_switch_service_generation{digest="`+s.Services[0].Digest+`",service="web"} 1
`), "segue_lb_switch_server_packets_total", "segue_lb_switch_service_generation"))
	problems, err := testutil.GatherAndLint(registry)
	testhost.Must(t, err)
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
	f.stop()
	if n, err := testutil.GatherAndCount(registry, "segue_lb_switch_packets_total"); n != 0 || err != nil {
		t.Errorf("without the switch: %d counters, error %v", n, err)
	}
}

// The program counts the packets of servers in all slots that the balancer can give out. The software
// switch does not check the index of a counter. And histories have room for all rows and columns,
// because after enough changes, each column has had several servers.
func TestSizes(t *testing.T) {
	t.Parallel()
	program, err := ours()
	testhost.Must(t, err)
	if size := program.counters[countedServers].Size; size < math.MaxUint16+1 {
		t.Errorf("counters of %d servers", size)
	}
	rows, columns, histories := program.tables["rows"].Size, program.tables["columns"].Size, program.tables["histories"].Size
	if histories < rows+columns {
		t.Errorf("%d histories for %d rows and %d columns", histories, rows, columns)
	}
}
