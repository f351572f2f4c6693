// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// flowsOf returns the numbers of flows that a snapshot shows, by server of the service web.
func flowsOf(t testing.TB, s *inspect.Snapshot) map[string]*dataplane.FlowCounts {
	t.Helper()
	flows := map[string]*dataplane.FlowCounts{}
	for _, server := range s.Services[0].Servers {
		flows[server.Name] = server.Flows
	}
	return flows
}

// A snapshot shows the flows of the last sweep, and neither maps nor reads the flow tables.
func TestSnapshotReadsNoFlowTable(t *testing.T) {
	cfg := webOf(srv6Server("s1", 1, 1))
	// No other test has a table of this size: 64 bytes for each of 2^18 buckets.
	cfg.Node.Limits.Flows = 1 << 20
	const size = 64 << 18
	f := open(t, cfg)
	f.enter(web, "web", "s1", stateEstablished)
	f.must(f.sweep())
	mapped := mappingsOf(t, size)
	if mapped == 0 {
		t.Fatal("the balancer does not map its flow table: nothing is tested")
	}
	view := f.view()
	f.forgetFlows()
	s := mustSnapshot(t, view)
	want := map[string]*dataplane.FlowCounts{"s1": {Established: 1}}
	if diff := cmp.Diff(want, flowsOf(t, s)); diff != "" {
		t.Errorf("flows of servers, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(want["s1"], s.FlowTable.Flows); diff != "" {
		t.Errorf("flows of the table, -want +got:\n%s", diff)
	}
	if n := mappingsOf(t, size); n != mapped {
		t.Errorf("the view maps the flow table: %d mappings, %d before", n, mapped)
	}
}

// mappingsOf returns how many mappings of BPF maps with the given number of bytes this process has.
func mappingsOf(t *testing.T, bytes uint64) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	testhost.Must(t, err)
	for line := range strings.Lines(string(text)) {
		from, rest, _ := strings.Cut(line, "-")
		to, rest, _ := strings.Cut(rest, " ")
		first, err := strconv.ParseUint(from, 16, 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		end, err := strconv.ParseUint(to, 16, 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if end-first == bytes && strings.Contains(rest, "bpf-map") {
			n++
		}
	}
	return n
}

// The age of the counts grows until the next sweep, also without a process.
func TestAgeOfFlowCounts(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	view := f.view()
	f.must(f.sweep())
	first := *mustSnapshot(t, view).FlowTable.Age
	f.must(f.sweep())
	f.stop()
	second := *mustSnapshot(t, view).FlowTable.Age
	third := *mustSnapshot(t, view).FlowTable.Age
	if first <= 0 || second <= 0 || third <= second {
		t.Errorf("ages %v s, then %v s and %v s after another sweep", first, second, third)
	}
}

// A server that is newer than the last sweep has no counts, and the table has those of the others.
func TestNewServerIsNotCounted(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	view := f.view()
	f.run(frameOf(web))
	f.must(f.sweep())
	f.mustApply(webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1)))
	s := mustSnapshot(t, view)
	want := map[string]*dataplane.FlowCounts{"s1": {New: 1}, "s2": nil}
	if diff := cmp.Diff(want, flowsOf(t, s)); diff != "" {
		t.Errorf("after a reload, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(want["s1"], s.FlowTable.Flows); diff != "" {
		t.Errorf("flows of the table, -want +got:\n%s", diff)
	}
	f.must(f.sweep())
	want["s2"] = &dataplane.FlowCounts{}
	if diff := cmp.Diff(want, flowsOf(t, mustSnapshot(t, view))); diff != "" {
		t.Errorf("after a sweep, -want +got:\n%s", diff)
	}
}

// A slot that is given to another server does not show the flows of the server before. The process
// that has removed that server ends before it sweeps.
func TestSlotOfAnotherServerIsNotCounted(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1))
	f := open(t, cfg)
	f.run(frameOf(web))
	f.must(f.sweep())
	slot := f.slot("web", "s1")
	restart := func(server desired.Server) {
		cfg.Services = webOf(server).Services
		f.stop()
		f.start(cfg)
	}
	restart(srv6Server("s2", 2, 1)) // retires s1
	restart(srv6Server("s3", 3, 1)) // reclaims its slot
	if got := f.slot("web", "s3"); got != slot {
		t.Fatalf("s3 has slot %d, not %d: nothing is tested", got, slot)
	}
	s := mustSnapshot(t, f.view())
	want := map[string]*dataplane.FlowCounts{"s2": nil, "s3": nil} // s2 is removed
	if diff := cmp.Diff(want, flowsOf(t, s)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if s.FlowTable.Flows.Total() != 0 {
		t.Errorf("flows of the table: %+v", s.FlowTable.Flows)
	}
}

// A start over the tables of an earlier build, which stored no counts, keeps the flows.
func TestStartWithoutFlowCounts(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1))
	f := open(t, cfg)
	f.run(frameOf(web))
	f.stop()
	f.must(os.Remove(filepath.Join(datapath.Dir(cfg.Node.Instance), "flow_counts")))
	f.start(cfg)
	f.route()
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.forwarded(ack, web, "web", "s1", "forward_known"), f.run(ack))
	view := f.view()
	if table := mustSnapshot(t, view).FlowTable; table.Age != nil {
		t.Errorf("before a sweep: %+v", table)
	}
	f.must(f.sweep())
	want := map[string]*dataplane.FlowCounts{"s1": {Established: 1}}
	if diff := cmp.Diff(want, flowsOf(t, mustSnapshot(t, view))); diff != "" {
		t.Errorf("after a sweep, -want +got:\n%s", diff)
	}
}
