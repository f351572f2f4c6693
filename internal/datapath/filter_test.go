// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/testhost"
)

// filtersOf returns the names of an interface's filters of both directions, in order.
func filtersOf(t *testing.T, name string) (names []string) {
	t.Helper()
	device, err := netlink.LinkByName(name)
	must(t, err)
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		found, err := netlink.FilterList(device, parent)
		must(t, err)
		for _, f := range found {
			names = append(names, f.(*netlink.BpfFilter).Name)
		}
	}
	slices.Sort(names)
	return names
}

// makeInstances makes the directories of instances for the duration of a test.
func makeInstances(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		_, err := MakeDir(name, RoleBalancer)
		must(t, err)
		t.Cleanup(func() { must(t, RemoveDir(name)) })
	}
}

func addFilter(instance string, place Place) error {
	return inOne(func(t *Takeover) error { return t.attachFilter(instance, place) })
}

// However often an instance starts, it has one filter at each place. Removing them removes neither
// the filters of others nor clsact.
func TestFilters(t *testing.T) {
	prog := pass(t, ebpf.SchedCLS, -1)
	makeInstances(t, "a", "b")
	near, far := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, near, "eth0", nil, far, "eth0", nil)
	testhost.Connect(t, near, "eth1", nil, far, "eth1", nil)
	must(t, near.Do(func() error {
		indexes := map[string]int{}
		for _, name := range []string{"eth0", "eth1"} {
			device, err := netlink.LinkByName(name)
			must(t, err)
			indexes[name] = device.Attrs().Index
			for range 2 {
				for i, instance := range []string{"a", "b"} {
					hook := Hook{At: ebpf.AttachTCXIngress, Priority: uint16(10 + i)}
					must(t, addFilter(instance, Place{hook, prog, indexes[name]}))
				}
				must(t, addFilter("a", Place{Hook{At: ebpf.AttachTCXEgress, Priority: 10}, prog, indexes[name]}))
			}
		}
		want := func(eth0, eth1 []string) {
			t.Helper()
			got := map[string][]string{"eth0": filtersOf(t, "eth0"), "eth1": filtersOf(t, "eth1")}
			if diff := cmp.Diff(map[string][]string{"eth0": eth0, "eth1": eth1}, got); diff != "" {
				t.Errorf("filters (-want +got):\n%s", diff)
			}
		}
		all := []string{"segue/a", "segue/a", "segue/b"}
		want(all, all)
		must(t, RemoveFilters("a", indexes["eth0"], indexes["eth1"]))
		want(all, all)
		must(t, RemoveFilters("a", indexes["eth1"]))
		want([]string{"segue/b"}, all)
		must(t, RemoveFilters("a"))
		want([]string{"segue/b"}, []string{"segue/b"})
		must(t, RemoveFilters("b"))
		want(nil, nil)
		for name, index := range indexes {
			qdiscs, err := netlink.QdiscList(nil)
			must(t, err)
			if !slices.ContainsFunc(qdiscs, func(q netlink.Qdisc) bool { return q.Attrs().LinkIndex == index && q.Type() == "clsact" }) {
				t.Errorf("%s has lost its clsact", name)
			}
		}
		return nil
	}))
}
