// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/lab"
)

// placesOf returns the place of each connection's server in the candidate table of a balancer's
// present generation: bucket times candidates plus column. It fails the test if a server is not
// in the row of the bucket.
func placesOf(t *testing.T, l *lab.Lab, balancer string, live *load) []int {
	t.Helper()
	all, keys := generationsOf(t, l, balancer), bucketKeys(t, l, balancer)
	rows := map[string][]uint16{}
	places := make([]int, len(live.connections))
	for i, c := range live.connections {
		set := all[c.service.Name].Sets[0]
		if rows[c.service.Name] == nil {
			rows[c.service.Name] = rowsOf(t, l, set)
		}
		first := set.Candidates * flowOf(c).Bucket(desired.BucketHashMultilinear, &keys, set.Buckets)
		row := rows[c.service.Name][first : first+set.Candidates]
		column := slices.Index(row, numberOf(l, c.server))
		if column < 0 {
			t.Fatalf("%s: %s has a connection, and is not in the row %v", c.service.Name, c.server, row)
		}
		places[i] = first + column
	}
	return places
}

// beyondHistory tells for each connection of a service whether any generation since the opening of
// the connection lacked the server in the history of the connection's place. The first of the sets
// is the present one.
func beyondHistory(
	t *testing.T, l *lab.Lab, s lab.Service, sets []serversets.Set, live *load, places []int,
) []bool {
	t.Helper()
	beyond, opened := make([]bool, len(places)), make([]bool, len(places))
	rows := make([][]uint16, len(sets))
	for i := len(sets) - 1; i >= 0; i-- {
		rows[i] = rowsOf(t, l, sets[i])
		history := historyOf(t, rows[i:], cmp.Or(s.History, desired.DefaultHistory))
		for j, c := range live.connections {
			if c.service.Name == s.Name {
				held := slices.Contains(history.ServersOf(places[j]), numberOf(l, c.server))
				opened[j] = opened[j] || held
				beyond[j] = beyond[j] || opened[j] && !held
			}
		}
	}
	return beyond
}

// historyOf returns the history that a balancer has after these candidate tables. The first table
// is the present one. The history has none of the servers that are not in it.
func historyOf(t *testing.T, tablesBack [][]uint16, depth int) *tables.History {
	t.Helper()
	history, err := tables.NewHistory(tablesBack[0], depth)
	must(t, err)
	present := map[uint16]bool{}
	for _, server := range tablesBack[0] {
		present[server] = true
	}
	for _, rows := range slices.Backward(tablesBack) {
		places := slices.Clone(rows)
		for i, server := range places {
			if !present[server] {
				places[i] = tables.NoServer
			}
		}
		must(t, history.Push(places))
	}
	return history
}

// generationsOf reads the generations that a balancer has saved.
func generationsOf(t *testing.T, l *lab.Lab, balancer string) serversets.Generations {
	t.Helper()
	all, err := serversets.Load(generationsFile(l, balancer))
	must(t, err)
	return all
}

// bucketKeys reads the keys of the hash that selects a flow's bucket.
func bucketKeys(t *testing.T, l *lab.Lab, balancer string) dataplane.TupleKeys {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(datapath.Dir(l.Node(balancer).Instance()), "identity"), nil)
	must(t, err)
	defer m.Close()
	var identity dataplane.Identity
	must(t, m.Lookup(uint32(0), &identity))
	return identity.BucketKeys
}

// rowsOf builds the candidate table of a set. It returns the numbers of all places' servers.
func rowsOf(t *testing.T, l *lab.Lab, set serversets.Set) []uint16 {
	t.Helper()
	table, err := set.Table()
	must(t, err)
	rows := make([]uint16, 0, set.Buckets*set.Candidates)
	for bucket := range set.Buckets {
		for _, server := range table.Row(bucket) {
			rows = append(rows, numberOf(l, table.Servers[server].Name))
		}
	}
	return rows
}

// numberOf returns the number by which tables name a server of the lab.
func numberOf(l *lab.Lab, server string) uint16 {
	return uint16(slices.Index(nodes(l, lab.RoleServer), server))
}

// flowOf returns the flow of a connection.
func flowOf(c *connection) dataplane.Flow {
	source := c.conn.LocalAddr().(*net.TCPAddr).AddrPort()
	return dataplane.Flow{
		Protocol:    desired.TCP,
		Source:      netip.AddrPortFrom(source.Addr().Unmap(), source.Port()),
		Destination: c.service.Address(),
	}
}
