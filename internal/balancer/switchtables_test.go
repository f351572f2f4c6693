// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"context"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
)

// switchTables are the entries of a switch: values by table and key. They do not contain which of
// its two sets of tables a service uses.
type switchTables map[string]string

// add adds an entry. Numbers are hexadecimal.
func (s switchTables) add(table string, key []uint64, action string, params ...uint64) {
	s[fmt.Sprintf("%s %x", table, key)] = fmt.Sprintf("%s %x", action, params)
}

// addEntry adds an entry of package p4switch.
func (s switchTables) addEntry(e p4switch.Entry) {
	if slices.Contains([]string{"rows", "columns", "histories"}, e.Table) {
		e.Key = slices.Delete(slices.Clone(e.Key), 1, 2)
	}
	if strings.HasPrefix(e.Table, "services") {
		e.Params = slices.Delete(slices.Clone(e.Params), 1, 2)
	}
	s[fmt.Sprintf("%s %x", e.Table, numbersOf(e.Key))] = fmt.Sprintf("%s %x", e.Action, numbersOf(e.Params))
}

func numbersOf(values []p4switch.Value) (numbers []*big.Int) {
	for _, v := range values {
		numbers = append(numbers, new(big.Int).SetBytes(v))
	}
	return numbers
}

// tablesOf returns the entries of services and servers that a content leads to.
func tablesOf(c *p4switch.Content) switchTables {
	s := switchTables{}
	for _, svc := range c.Services {
		s.addEntry(svc.Match())
		for e := range svc.Entries() {
			s.addEntry(e)
		}
	}
	for _, server := range c.Servers {
		for e := range server.Entries() {
			s.addEntry(e)
		}
	}
	return s
}

// tablesIn reads the entries of a switch, except those that belong to no service and no server.
func tablesIn(t testing.TB, sw *switchtest.Switch) switchTables {
	t.Helper()
	s := switchTables{}
	names := []string{"services", "services_of_all_ports", "rows", "columns", "histories", "next_hops"}
	for place := range desired.MaxVisited {
		names = append(names, fmt.Sprintf("server%d.locators", place))
	}
	for _, name := range names {
		if err := sw.Read(context.Background(), name, s.addEntry); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// kernelRows reads the candidate table of a service from the kernel.
type kernelRows struct {
	dataplane.ServiceEntry
	servers *dataplane.ServerTable
	slots   []uint32 // of the service
	table   dataplane.Candidates
	hints   bool // the host has hints
}

// tablesOfKernel returns the entries that follow from the tables in the kernel, as
// docs/understand/tables.md says which servers packets visit.
func tablesOfKernel(f *fixture) switchTables {
	f.t.Helper()
	reader, err := dataplane.OpenReader(f.cfg.Node.Instance)
	f.must(err)
	defer reader.Close()
	s := switchTables{}
	for _, entry := range reader.Services.All() {
		if !entry.IsService() {
			continue
		}
		k := kernelRows{
			ServiceEntry: entry, servers: reader.Servers, slots: reader.Servers.Of(entry.Id), hints: reader.HasHints(),
		}
		k.table, err = reader.Candidates(entry.Table())
		f.must(err)
		k.addService(s)
		for bucket := range entry.Rule.Buckets() {
			k.addRow(s, bucket)
		}
		for _, slot := range k.slots {
			f.addServer(s, reader.Servers, slot)
		}
	}
	return s
}

// shift returns the number of bits of the CRC behind those of the bucket.
func (k *kernelRows) shift() (bits uint32) {
	for bits = 32; 1<<(32-bits) < k.Rule.Buckets(); bits-- {
	}
	return bits
}

func (k *kernelRows) addService(s switchTables) {
	vip, port, _ := k.Matches()
	placement, _ := k.Rule.PlacementName()
	width := uint64(1)
	for 1<<width < k.Rule.Candidates() {
		width++
	}
	flags, address := map[bool]uint64{true: 1}, vip.As16()
	key := []*big.Int{new(big.Int).SetBytes(address[:]), big.NewInt(6), big.NewInt(int64(port.Number()))}
	s[fmt.Sprintf("services %x", key)] = fmt.Sprintf("set_service %x", []uint64{
		uint64(k.Id), uint64(^uint32(0) << k.shift()), uint64(k.Rule.Candidates()), width,
		flags[placement == desired.PlacementHunt], flags[k.hints], flags[k.Rule.EncapsulationName() == desired.SRv6Encap],
	})
}

// at returns the slot of a place in the row of a bucket.
func (k *kernelRows) at(bucket, generation, column uint32) uint32 {
	slot, _ := k.table.At((bucket*k.Rule.Generations()+generation)*k.Rule.Candidates() + column)
	return slot
}

// addRow adds the entries of a bucket.
func (k *kernelRows) addRow(s switchTables, bucket uint32) {
	key := []uint64{uint64(k.Id), uint64(bucket) << k.shift()}
	if slots, columns := k.offered(bucket); len(slots) > 0 {
		s.add("rows", key, "offer", append([]uint64{uint64(len(slots)), columns}, padded(slots, 8)...)...)
	}
	for column := range k.Rule.Candidates() {
		key := append(slices.Clone(key), uint64(column))
		past := k.past(bucket, column)
		if present := k.at(bucket, 0, column); len(past) == 1 && present == past[0] && k.class(present) < gone {
			s.add("columns", key, "go_to", uint64(present))
			continue
		}
		visited := k.ordered(past)
		if len(visited) == 0 || len(visited) > 1 && k.hints {
			visited = k.ofRow(bucket, column)
		}
		k.addHistory(s, key, visited)
	}
	if k.Rule.Candidates() > 1 && !k.hints {
		k.addHistory(s, append(slices.Clone(key), 8), k.ofRow(bucket, 0))
	}
}

func (k *kernelRows) addHistory(s switchTables, key []uint64, visited []uint32) {
	if len(visited) > 0 {
		s.add("histories", key, "visit", append([]uint64{uint64(len(visited))}, padded(visited, desired.MaxVisited)...)...)
	}
}

func padded(slots []uint32, places int) []uint64 {
	out := make([]uint64, places)
	for i, slot := range slots {
		out[i] = uint64(slot)
	}
	return out
}

// The classes of servers, in the order in which a packet visits them.
const (
	fit = iota
	unfit
	unreachable
	gone // not of the service any more
)

func (k *kernelRows) class(slot uint32) int {
	flags := k.servers.Flags(slot)
	switch {
	case !slices.Contains(k.slots, slot):
		return gone
	case !k.servers.HasNextHop(slot) || flags&dataplane.FlagUnreachable != 0:
		return unreachable
	case flags&dataplane.FlagFailing != 0:
		return unfit
	}
	return fit
}

// past lists the different slots that a column has and had.
func (k *kernelRows) past(bucket, column uint32) (slots []uint32) {
	for generation := range k.Rule.Generations() {
		slot := k.at(bucket, generation, column)
		if slot != dataplane.NoServer && !slices.Contains(slots, slot) {
			slots = append(slots, slot)
		}
	}
	return slots
}

// ordered lists the servers among slots: fit ones first, and those that cannot be reached last.
func (k *kernelRows) ordered(slots []uint32) (all []uint32) {
	for _, slot := range slots {
		if k.class(slot) < gone && !slices.Contains(all, slot) {
			all = append(all, slot)
		}
	}
	slices.SortStableFunc(all, func(a, b uint32) int { return cmp.Compare(k.class(a), k.class(b)) })
	return all[:min(len(all), desired.MaxVisited)]
}

// ofRow lists the servers that a packet visits that may be on any server of its row: those of a
// column first. Of the former servers, it visits those that can be reached.
func (k *kernelRows) ofRow(bucket, column uint32) []uint32 {
	slots := k.past(bucket, column)
	for generation := range k.Rule.Generations() {
		for other := range k.Rule.Candidates() {
			slot := k.at(bucket, generation, other)
			if slot != dataplane.NoServer && (generation == 0 || k.class(slot) < unreachable) {
				slots = append(slots, slot)
			}
		}
	}
	return k.ordered(slots)
}

// offered lists the servers to which a SYN is offered, with their columns, of four bits each.
func (k *kernelRows) offered(bucket uint32) (slots []uint32, columns uint64) {
	for _, takes := range []func(uint32) bool{
		func(slot uint32) bool { return k.class(slot) < gone && k.servers.TakesFlows(slot) },
		func(slot uint32) bool { return k.class(slot) < unreachable },
	} {
		for column := range k.Rule.Candidates() {
			slot := k.at(bucket, 0, column)
			if slot != dataplane.NoServer && takes(slot) && !slices.Contains(slots, slot) {
				columns |= uint64(column) << 1 << (4 * len(slots))
				slots = append(slots, slot)
			}
		}
		if len(slots) > 0 || k.Rule.Flags&dataplane.RuleTakesFlows == 0 {
			break
		}
	}
	return slots, columns
}

// addServer adds the entries of a server.
func (f *fixture) addServer(s switchTables, servers *dataplane.ServerTable, slot uint32) {
	number := func(b []byte) uint64 { return new(big.Int).SetBytes(b).Uint64() }
	key, locator := []uint64{uint64(slot)}, servers.Address(slot).AsSlice()[:8]
	for place := range desired.MaxVisited {
		s.add(fmt.Sprintf("server%d.locators", place), key, "set_locator", number(locator))
	}
	mac, _, ok := servers.NextHop(slot)
	if name := f.nameOf(slot); ok && f.linkOf(name[strings.IndexByte(name, '/')+1:]) == "out" {
		own := f.macs["out"]
		s.add("next_hops", key, "set_next_hop", switchtest.Network, number(mac[:]), number(own[:]), uint64(links["out"]))
	}
}

// The tables of a switch are those of the data path, generation by generation, and whatever the
// condition of servers is. So are the digests of services.
func TestSwitchTables(t *testing.T) {
	t.Parallel()
	withAndWithoutHints(t, testSwitchTables)
}

func testSwitchTables(t *testing.T, capacity uint32) {
	services := crcServices()
	cfg := balancerOf(columnConfig(services, 0)...)
	cfg.Node.Limits.Hints = capacity
	f := open(t, cfg)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	compare := func(what string) {
		t.Helper()
		want := tablesOfKernel(f)
		var content *p4switch.Content
		f.withSwitch(newOffload(&desired.Switch{}), func() {
			var err error
			content, err = f.content()
			f.must(err)
		})
		if diff := gocmp.Diff(want, tablesOf(content)); diff != "" {
			t.Fatalf("%s: the content (-want +got):\n%s", what, diff)
		}
		labels := f.labels()
		for _, svc := range content.Services {
			if label := labels[svc.Name]; svc.Generation != label.Generation || svc.Digest != label.Digest {
				t.Errorf("%s: service %s has generation %d, %08x, not %d, %08x",
					what, svc.Name, svc.Generation, svc.Digest, label.Generation, label.Digest)
			}
		}
		if !switchtest.IsInstalled() {
			return
		}
		f.openMirror()
		f.mirror.follow()
		if diff := gocmp.Diff(want, tablesIn(t, f.mirror.sw)); diff != "" {
			t.Fatalf("%s: the switch (-want +got):\n%s", what, diff)
		}
	}
	for step := range cookieSteps {
		cfg.Services = columnConfig(services, step)
		f.mustApply(cfg)
		compare(fmt.Sprintf("generation %d", step))
		f.via["m4"], f.via["m5"], f.silent["m1"] = "narrow", "", true
		f.route()
		compare(fmt.Sprintf("generation %d, with servers out of reach", step))
		for _, svc := range cfg.Services {
			f.setHealth(svc.Name, "m3", false)
			f.setHealth(svc.Name, "m7", false)
		}
		compare(fmt.Sprintf("generation %d, with failing servers", step))
		for _, svc := range cfg.Services {
			f.setHealth(svc.Name, "m3", true)
		}
		f.via, f.silent = map[string]string{}, map[string]bool{}
		f.route()
	}
}
