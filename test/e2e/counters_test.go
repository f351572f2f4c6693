// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/lab"
)

// counts are numbers of packets by reason, in one data path or several.
type counts map[string]uint64

// packetCounts reads the counters of a balancer or an agent, without what earlier tests of a shared
// lab have counted. The process need not run.
func packetCounts(t *testing.T, n *lab.Node) counts {
	t.Helper()
	all := allPacketCounts(t, n)
	for reason, before := range pool.counted(n.Instance()) {
		all[reason] -= before
	}
	return all
}

// allPacketCounts reads the counters of a balancer or an agent. A balancer's counters come from its
// table, because `segue status` also reads all candidate tables.
func allPacketCounts(t *testing.T, n *lab.Node) counts {
	t.Helper()
	var reasons []datapath.ReasonCount
	if n.Role == lab.RoleBalancer {
		tables, err := dataplane.OpenReader(n.Instance())
		must(t, err)
		defer tables.Close()
		reasons, err = tables.CountReasons()
		must(t, err)
	} else {
		reasons = status(t, n).Reasons
	}
	all := counts{}
	for _, r := range reasons {
		all[r.Reason] = r.Packets
	}
	return all
}

// status reads the state of a balancer or an agent by `segue status`.
func status(t *testing.T, n *lab.Node) *datapath.Snapshot {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var s datapath.Snapshot
	must(t, json.Unmarshal([]byte(out), &s))
	if len(s.Reasons) == 0 || s.Program == nil {
		t.Fatalf("%s has no counters, or no program: %s", n.Name, out)
	}
	return &s
}

// balancerStatus reads the state of a balancer, with its services, by `segue status`.
func balancerStatus(t *testing.T, n *lab.Node) *inspect.Snapshot {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var s inspect.Snapshot
	must(t, json.Unmarshal([]byte(out), &s))
	return &s
}

// since returns the growth of each counter that has grown. It fails the test if a counter has
// shrunk.
func (c counts) since(t *testing.T, before counts) counts {
	t.Helper()
	grown := counts{}
	for label, n := range c {
		if n < before[label] {
			t.Errorf("counter %s went back from %d to %d", label, before[label], n)
		} else if n > before[label] {
			grown[label] = n - before[label]
		}
	}
	return grown
}

// with returns the counters whose names begin with a prefix, without those that are zero.
func (c counts) with(prefix string) counts {
	chosen := maps.Clone(c)
	maps.DeleteFunc(chosen, func(label string, n uint64) bool { return n == 0 || !strings.HasPrefix(label, prefix) })
	return chosen
}

// sum returns the total of all counters.
func (c counts) sum() (total uint64) {
	for _, n := range c {
		total += n
	}
	return total
}

// requireNoDrops fails the test if any data path of the lab has ever dropped packets.
func requireNoDrops(t *testing.T, l *lab.Lab) {
	t.Helper()
	requireNoDropsBut(t, l, "")
}

// requireNoDropsBut is requireNoDrops, except that packets may be dropped for one reason.
func requireNoDropsBut(t *testing.T, l *lab.Lab, reason string) {
	t.Helper()
	for _, n := range l.Nodes {
		if n.Role != lab.RoleBalancer && n.Role != lab.RoleServer {
			continue
		}
		drops := packetCounts(t, n).with("drop_")
		delete(drops, reason)
		if len(drops) > 0 {
			t.Errorf("%s dropped packets: %v", n.Name, drops)
		}
	}
}

// requireAllDelivered fails the test unless the agents deliver exactly as many packets as the
// balancers have forwarded, after the last packets have arrived. A machine that stood still may
// have lost packets between them. Counters show these losses.
func requireAllDelivered(t *testing.T, l *lab.Lab) {
	t.Helper()
	eventually(t, func() error {
		var forwarded, delivered uint64
		for _, name := range nodes(l, lab.RoleBalancer) {
			forwarded += packetCounts(t, l.Node(name)).with("forward_").sum()
		}
		for _, name := range nodes(l, lab.RoleServer) {
			delivered += packetCounts(t, l.Node(name)).with("deliver_").sum()
		}
		if forwarded > 0 && forwarded == delivered {
			return nil
		}
		lost := linkOverflows(t, l).with("")
		if forwarded > delivered && forwarded-delivered <= lost.sum() {
			t.Logf("%d packets were forwarded, and %d delivered; the lab's own queues lost %v", forwarded, delivered, lost)
			return nil
		}
		return fmt.Errorf("%d packets were forwarded, and %d delivered; the lab's own queues lost %v", forwarded, delivered, lost)
	})
}
