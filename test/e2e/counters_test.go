package e2e

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/lab"
)

// counts are numbers of packets by what became of them in a data path.
type counts map[string]uint64

// packetCounts reads the counters of a balancer or an agent from the kernel, whether its process runs
// or not.
func packetCounts(t *testing.T, n *lab.Node) counts {
	t.Helper()
	object := "../../internal/balancer/balancer_bpfel.o"
	if n.Role == lab.RoleServer {
		object = "../../internal/agent/agent_bpfel.o"
	}
	spec, err := ebpf.LoadCollectionSpec(object)
	must(t, err)
	labels, err := datapath.EnumLabels(spec.Types, "reason", "REASON_")
	must(t, err)
	m, err := ebpf.LoadPinnedMap(filepath.Join(datapath.Dir(n.Instance()), "reasons"), nil)
	must(t, err)
	defer m.Close()
	all := counts{}
	for i, label := range labels {
		var perCPU []struct{ Packets, Bytes uint64 }
		must(t, m.Lookup(uint32(i), &perCPU))
		for _, c := range perCPU {
			all[label] += c.Packets
		}
	}
	return all
}

// since returns how much each counter has grown, without those that have not.
func (c counts) since(before counts) counts {
	grown := maps.Clone(c)
	for label := range grown {
		grown[label] -= before[label]
	}
	maps.DeleteFunc(grown, func(_ string, n uint64) bool { return n == 0 })
	return grown
}

// with returns the counters whose names begin with a prefix, without those that are zero.
func (c counts) with(prefix string) counts {
	chosen := maps.Clone(c)
	maps.DeleteFunc(chosen, func(label string, n uint64) bool { return n == 0 || !strings.HasPrefix(label, prefix) })
	return chosen
}

// sum is the total of all counters.
func (c counts) sum() (total uint64) {
	for _, n := range c {
		total += n
	}
	return total
}

// requireNoDrops fails the test if a data path of the lab has dropped packets, ever.
func requireNoDrops(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, n := range l.Nodes {
		if n.Role != lab.RoleBalancer && n.Role != lab.RoleServer {
			continue
		}
		if drops := packetCounts(t, n).with("drop_"); len(drops) > 0 {
			t.Errorf("%s dropped packets: %v", n.Name, drops)
		}
	}
}
