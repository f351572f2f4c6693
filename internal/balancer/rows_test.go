// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/testhost"
)

// rowsMachine is a service whose servers change, as two balancers see it.
type rowsMachine struct {
	service desired.Service
	built   builtRows
	early   rowsBalancer
	late    *rowsBalancer // nil before it starts
	// past has the servers of each place, of all changes one by one: the last one first.
	past [][]string
}

// rowsBalancer is what a balancer knows of the service.
type rowsBalancer struct {
	generations serversets.Generations
	slots       map[string]uint32 // of the configured servers
	next        uint32            // the slot of the next server that is added
}

// A balancer that starts late with the generations of another one has the same rows, whatever slots
// its servers have. A place has its present server and the last different ones before it that are
// still configured, or again.
func TestLateBalancerHasSameRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rowsMachine{service: drawRowsService(t)}
		for range rapid.IntRange(1, 14).Draw(t, "changes") {
			m.change(t)
			m.early.follow(&m.service)
			if m.late != nil {
				m.late.follow(&m.service)
			} else if rapid.IntRange(0, 3).Draw(t, "starts") == 0 {
				m.late = &rowsBalancer{generations: m.early.generations, next: 100}
				m.late.follow(&m.service)
			}
			m.compare(t)
		}
	})
}

// Services with equal sets of servers share a candidate table, whatever slots their servers have.
// The last tables are kept, and no others.
func TestEqualSetsAreBuiltOnce(t *testing.T) {
	var built builtRows
	services := func(n, servers int) {
		for i := range n {
			web := serviceOf(fmt.Sprint("web", i), vip6, 80, desired.TCP, desired.SRv6Encap)
			svc := &service{Service: &web}
			for server := range servers {
				m := &member{Server: srv6Server(fmt.Sprint("s", server), 1, 1), slot: uint32(100*i + server)}
				svc.members, svc.Servers = append(svc.members, m), append(svc.Servers, m.Server)
			}
			g := serversets.Generations{}.Next([]desired.Service{web})
			rows, err := built.build(inputOf(svc, g[svc.Name]))
			testhost.Must(t, err)
			for bucket := range int(rows.Buckets) {
				for _, slot := range rows.Candidates(bucket, 0) {
					if slot < uint16(100*i) || slot >= uint16(100*i+servers) {
						t.Fatalf("service %d has slot %d", i, slot)
					}
				}
			}
		}
	}
	if services(100, 3); len(built.keys) != 1 {
		t.Errorf("%d tables for 100 services with equal sets", len(built.keys))
	}
	for servers := range 2 * mostBuiltRows {
		services(2, 3+servers)
	}
	if len(built.keys) != mostBuiltRows || len(built.rows) != mostBuiltRows {
		t.Errorf("%d keys and %d tables are kept, want %d", len(built.keys), len(built.rows), mostBuiltRows)
	}
}

func drawRowsService(t *rapid.T) desired.Service {
	placement := rapid.SampledFrom([]desired.Placement{desired.PlacementHash, desired.PlacementHunt})
	svc := serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap)
	svc.Placement = placement.Draw(t, "placement")
	svc.Candidates = rapid.IntRange(1, 8).Draw(t, "candidates")
	svc.Generations = rapid.IntRange(1, 4).Draw(t, "generations")
	svc.Buckets = 11
	if rapid.Bool().Draw(t, "is stateless") {
		svc.Persistence, svc.History = desired.PersistenceStateless, svc.Generations
		svc.Generations = rapid.SampledFrom([]int{svc.History, 32}).Draw(t, "generations")
	}
	return svc
}

// change gives a server another weight, or removes it, or adds it. It rarely changes the placement.
func (m *rowsMachine) change(t *rapid.T) {
	name := fmt.Sprintf("s%d", rapid.IntRange(0, 7).Draw(t, "server"))
	before := serverOfName(&m.service, name)
	isThis := func(s desired.Server) bool { return s.Name == name }
	servers := slices.DeleteFunc(slices.Clone(m.service.Servers), isThis)
	if before == nil || rapid.Bool().Draw(t, "stays") {
		servers = append(servers, srv6Server(name, 1, rapid.Uint32Range(0, 3).Draw(t, "weight")))
	}
	m.service.Servers = servers
	if rapid.IntRange(0, 5).Draw(t, "changes placement") == 0 {
		m.service.Placement = rapid.SampledFrom([]desired.Placement{
			desired.PlacementHash, desired.PlacementHunt}).Draw(t, "placement")
	}
}

// follow makes a balancer follow the configuration. A server that comes back has another slot.
func (b *rowsBalancer) follow(svc *desired.Service) {
	b.generations = b.generations.Next([]desired.Service{*svc})
	slots := map[string]uint32{}
	for _, server := range svc.Servers {
		slot, ok := b.slots[server.Name]
		if !ok {
			slot = b.next
			b.next++
		}
		slots[server.Name] = slot
	}
	b.slots = slots
}

// rows returns the servers of each place, with empty names where there is none. The rows are the
// same if those of an equal set were built before.
func (b *rowsBalancer) rows(t *rapid.T, svc *desired.Service, built *builtRows) (places [][]string) {
	running := &service{Service: svc}
	names := map[uint16]string{dataplane.NoServer: ""}
	for name, slot := range b.slots {
		running.members = append(running.members, &member{Server: desired.Server{Name: name}, slot: slot})
		names[uint16(slot)] = name
	}
	p := inputOf(running, b.generations[svc.Name])
	rows, err := new(builtRows).buildRows(p)
	if err != nil {
		t.Fatal(err)
	}
	reused, err := built.build(p)
	if err != nil || reused.Row() != rows.Row() || reused.Buckets != rows.Buckets {
		t.Fatalf("error %v, with rows that were built before: %v, want %v", err, reused, rows)
	}
	rule := dataplane.ServiceRule{Row: rows.Row()}
	for bucket := range int(rows.Buckets) {
		for place := range int(rule.Candidates()) {
			var servers []string
			for age := range int(rule.Generations()) {
				if !slices.Equal(reused.Candidates(bucket, age), rows.Candidates(bucket, age)) {
					t.Fatalf("bucket %d has other servers in rows that were built before", bucket)
				}
				name, ok := names[rows.Candidates(bucket, age)[place]]
				if !ok {
					t.Fatalf("bucket %d has a slot of no server", bucket)
				}
				servers = append(servers, name)
			}
			places = append(places, servers)
		}
	}
	return places
}

// compare compares the rows of the balancers with each other. If they know the sets of all changes,
// it also compares them with the rows that follow from these changes.
func (m *rowsMachine) compare(t *rapid.T) {
	got := m.early.rows(t, &m.service, &m.built)
	if m.late != nil {
		if diff := cmp.Diff(got, m.late.rows(t, &m.service, &m.built)); diff != "" {
			t.Fatalf("-early +late:\n%s", diff)
		}
	}
	present := m.note(t)
	if m.service.Generations < 32 {
		return
	}
	for place, servers := range got {
		bucket, column := place/m.service.Candidates, place%m.service.Candidates
		want := []string{""}
		if row := present[bucket]; column < len(row) {
			want[0] = row[column]
		}
		for _, name := range m.past[place] {
			if name != want[0] && serverOfName(&m.service, name) != nil {
				want = append(want, name)
			}
		}
		for len(want) < len(servers) {
			want = append(want, "")
		}
		if !slices.Equal(servers, want[:len(servers)]) {
			t.Fatalf("place %d of bucket %d: %q, want %q", column, bucket, servers, want)
		}
	}
}

// note adds the present servers to the past, and returns the present rows.
func (m *rowsMachine) note(t *rapid.T) (rows [][]string) {
	table, err := serversets.SetOf(&m.service).Table()
	if err != nil {
		t.Fatal(err)
	}
	if m.past == nil {
		m.past = make([][]string, m.service.Buckets*m.service.Candidates)
	}
	for bucket := range m.service.Buckets {
		row := serversIn(&m.service, table, bucket)
		for column, name := range row {
			past := &m.past[bucket*m.service.Candidates+column]
			*past = slices.Insert(without(*past, name), 0, name)
		}
		rows = append(rows, row)
	}
	return rows
}
