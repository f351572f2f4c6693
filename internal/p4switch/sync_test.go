// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/testhost"
)

var vip = netip.MustParseAddr("2001:db8:80::1")

func nameOf(slot uint16) string { return fmt.Sprintf("s%02d", slot) }

// contentOf returns the content for a service with two candidates, whose sets of servers have been
// these, the present one first. Slots are the numbers of servers.
func contentOf(t testing.TB, sets ...[]uint16) *Content {
	t.Helper()
	svc := &desired.Service{
		Name: "web", VIP: vip, Port: 80, Protocol: desired.TCP, Placement: desired.PlacementHunt,
		Persistence: desired.PersistenceStateless, Encapsulation: desired.SRv6Encap,
		Candidates: 2, Buckets: 16, BucketHash: desired.BucketHashCRC32,
	}
	s := &Service{Service: svc, Number: 7, Sets: len(sets), Servers: map[uint16]Condition{}}
	s.Rows = dataplane.NewRows(svc.Buckets, len(sets), svc.Candidates, svc.BucketHash)
	var stored []serversets.Set
	for i, servers := range sets {
		set := serversets.Set{Placement: svc.Placement, Buckets: svc.Buckets, Candidates: svc.Candidates}
		for _, number := range servers {
			set.Servers = append(set.Servers, serversets.Server{Name: nameOf(number), Weight: 1})
		}
		stored = append(stored, set)
		table, err := set.Table()
		testhost.Must(t, err)
		for bucket := range svc.Buckets {
			for column, server := range table.Row(bucket) {
				if i == 0 {
					s.Rows.SetPresent(bucket, column, servers[server])
				} else {
					s.Rows.AddFormer(bucket, column, servers[server])
				}
			}
		}
	}
	s.Generation, s.Digest = uint64(len(sets)), serversets.Digest(stored, len(sets))
	c := &Content{
		Network: 1, Host: 2, MAC: [6]byte{2, 0, 0, 0, 0, 2}, Source: netip.MustParseAddr("fd00:6c:0:1::"),
		Services: []*Service{s},
	}
	for _, number := range sets[0] {
		s.Servers[number] = Condition{Takes: true, Reachable: true}
		c.Servers = append(c.Servers, &Server{
			Service: svc.Name, Name: nameOf(number), Slot: number, Locator: netip.MustParseAddr(fmt.Sprintf("fd00:5:0:%x::", number)),
			Hop: NextHop{Port: 1, MAC: [6]byte{2, 1, 0, 0, 0, byte(number)}, MTU: 1500},
		})
	}
	return c
}

// view returns the entries of the service's rows that packets find, without the number of the set
// of tables. It is nil if the switch does not have the service.
func (f *fake) view() map[string]string {
	match := (&Service{Service: &desired.Service{VIP: vip, Port: 80, Buckets: 2}}).Match()
	value, ok := f.tables["services "+match.key()]
	if !ok {
		return nil
	}
	_, params := unpack(value)
	seen := map[string]string{}
	for _, table := range rowTables {
		prefix := table + " " + pack(params[0], params[1])
		for name, value := range f.tables {
			if strings.HasPrefix(name, prefix) {
				seen[table+" "+name[len(prefix):]] = value
			}
		}
	}
	return seen
}

// viewOf is the view of a switch that has the content.
func viewOf(c *Content) map[string]string {
	seen := map[string]string{}
	for e := range c.Services[0].Entries() {
		seen[e.Table+" "+pack(e.Key[2:]...)] = e.value()
	}
	return seen
}

// A content that the switch has already is not written again, also by another controller.
func TestSyncWritesDifferences(t *testing.T) {
	f := startFake(t)
	s := f.open(1)
	testhost.Must(t, s.Sync(t.Context(), contentOf(t, []uint16{1, 2, 3})))
	if got, want := f.view(), viewOf(contentOf(t, []uint16{1, 2, 3})); !maps.Equal(got, want) {
		t.Fatalf("rows %v, want %v", got, want)
	}
	before, size := f.writes, s.Size()
	testhost.Must(t, s.Sync(t.Context(), contentOf(t, []uint16{1, 2, 3})))
	again := f.open(2)
	testhost.Must(t, again.Sync(t.Context(), contentOf(t, []uint16{1, 2, 3})))
	if f.writes != before {
		t.Errorf("%d entries were written again", f.writes-before)
	}
	if again.Size() != size || size != len(f.tables) {
		t.Errorf("%d and %d entries, and the switch has %d", size, again.Size(), len(f.tables))
	}
}

// A switch may answer with a table of any size in one message.
func TestOpenReadsLargeTables(t *testing.T) {
	f := startFake(t)
	testhost.Must(t, f.open(1).Sync(t.Context(), contentOf(t, []uint16{1, 2, 3})))
	const rows = 40_000 // more than 4 MB, which gRPC takes by default
	for bucket := range rows {
		e := Entry{"rows", rowKey(9, 0, bucket, 16), "offer", offered{slots: []uint16{1, 2}, columns: []int{0, 1}}.params()}
		f.tables["rows "+e.key()] = e.value()
	}
	if s := f.open(2); s.Size() < rows {
		t.Errorf("%d entries were read", s.Size())
	}
}

// A program with the same tables that is not the one of this build is replaced.
func TestOpenReplacesAnotherProgram(t *testing.T) {
	f := startFake(t)
	c := contentOf(t, []uint16{1, 2, 3})
	testhost.Must(t, f.open(1).Sync(t.Context(), c))
	f.config.Cookie.Cookie++
	s := f.open(2)
	if s.Size() != 0 || f.config.Cookie.Cookie != cookie() {
		t.Errorf("the switch still has %d entries and the program %#x", s.Size(), f.config.Cookie.Cookie)
	}
}

// A change of the servers takes effect as a whole: after each update, packets find the rows before or
// the new ones.
func TestSyncSwapsWholeGenerations(t *testing.T) {
	f := startFake(t)
	s := f.open(1)
	old, next := contentOf(t, []uint16{1, 2, 3}), contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	testhost.Must(t, s.Sync(t.Context(), old))
	wantOld, wantNew, first, mixed := viewOf(old), viewOf(next), 0, 0
	f.changed = func() {
		switch got := f.view(); {
		case maps.Equal(got, wantNew):
			first = max(first, f.writes)
		case !maps.Equal(got, wantOld) || first > 0:
			mixed = max(mixed, f.writes)
		}
	}
	testhost.Must(t, s.Sync(t.Context(), next))
	if first == 0 || mixed > 0 {
		t.Errorf("the new rows are in force after %d updates; after %d, packets find neither them nor the rows before",
			first, mixed)
	}
	if want := s.Size(); want != len(f.tables) {
		t.Errorf("the switch has %d entries, not %d", len(f.tables), want)
	}
	for name := range f.tables {
		if strings.HasPrefix(name, "rows ") && !strings.HasPrefix(name, "rows "+pack(Number(7), Number(uint64(next.Services[0].Tables)))) {
			t.Fatalf("an entry of the former rows is left: %q", name)
		}
	}
}

// A switch that refuses an update, or a controller that ends, leaves the rows before or the new ones.
// The next controller continues.
func TestSyncContinues(t *testing.T) {
	old, next := contentOf(t, []uint16{1, 2, 3}), contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	for refused := 0; ; refused += 7 {
		f := startFake(t)
		s := f.open(1)
		testhost.Must(t, s.Sync(t.Context(), old))
		f.most = f.writes + refused
		err := s.Sync(t.Context(), next)
		if err == nil {
			return
		}
		if !strings.Contains(err.Error(), "ResourceExhausted") || !strings.Contains(err.Error(), "of table ") {
			t.Fatalf("error %v", err)
		}
		if got := f.view(); !maps.Equal(got, viewOf(old)) && !maps.Equal(got, viewOf(next)) {
			t.Fatalf("after %d updates, packets find neither the rows before nor the new ones", refused)
		}
		f.most = -1
		again := f.open(2)
		testhost.Must(t, again.Sync(t.Context(), next))
		if got := f.view(); !maps.Equal(got, viewOf(next)) || again.Size() != len(f.tables) {
			t.Fatalf("after %d updates and a further controller, the switch does not have the new rows", refused)
		}
	}
}

// The balancer gives the numbers of removed services and the slots of removed servers to others. After
// each update, a packet finds rows and servers of its service, or passes to the host.
func TestSyncWhileNumbersChange(t *testing.T) {
	isOld := viewOf(contentOf(t, []uint16{1, 2, 3}))
	otherVIP, otherServer := contentOf(t, []uint16{4, 5}), contentOf(t, []uint16{1, 2, 3, 4})
	otherVIP.Services[0].VIP = vip.Next()
	otherServer.Servers[2].Locator = netip.MustParseAddr("fd00:5:0:99::")
	twoServices := contentOf(t, []uint16{4, 5})
	second := *twoServices.Services[0] // gets the VIP, and the first one keeps the number
	second.Service, second.Number = new(*second.Service), 8
	twoServices.Services[0].VIP = vip.Next()
	twoServices.Services = append(twoServices.Services, &second)
	for what, next := range map[string]*Content{
		"another VIP has the number": otherVIP, "another server has a slot": otherServer, "the VIP has another number": twoServices,
	} {
		f := startFake(t)
		s := f.open(1)
		testhost.Must(t, s.Sync(t.Context(), contentOf(t, []uint16{1, 2, 3})))
		slot := "server0.locators " + pack(Number(3))
		locator, isNew, mixed := f.tables[slot], viewOf(next), 0
		f.changed = func() {
			got := f.view()
			isWhole := got == nil || maps.Equal(got, isOld) && f.tables[slot] == locator || maps.Equal(got, isNew)
			if !isWhole {
				mixed = max(mixed, f.writes)
			}
		}
		testhost.Must(t, s.Sync(t.Context(), next))
		if mixed > 0 {
			t.Errorf("%s: after %d updates, packets find rows or servers of others", what, mixed)
		}
		if s.Size() != len(f.tables) {
			t.Errorf("%s: the switch has %d entries, not %d", what, len(f.tables), s.Size())
		}
	}
}

// If only the condition of servers changes, rows change in place, and only those of these servers.
func TestSyncChangesRowsInPlace(t *testing.T) {
	f := startFake(t)
	s := f.open(1)
	c := contentOf(t, []uint16{1, 2, 3})
	testhost.Must(t, s.Sync(t.Context(), c))
	tables, before := c.Services[0].Tables, f.writes
	c.Services[0].Servers[2] = Condition{Reachable: true} // drained
	testhost.Must(t, s.Sync(t.Context(), c))
	if c.Services[0].Tables != tables {
		t.Error("the rows were swapped")
	}
	if got := f.view(); !maps.Equal(got, viewOf(c)) {
		t.Error("the switch does not have the new rows")
	}
	if n := f.writes - before; n == 0 || n > 16 {
		t.Errorf("%d updates for the drain of one of three servers in 16 rows", n)
	}
}

// Only the controller with the highest election ID can write.
func TestSyncOfTwoControllers(t *testing.T) {
	f := startFake(t)
	first := f.open(5)
	c := contentOf(t, []uint16{1, 2, 3})
	testhost.Must(t, first.Sync(t.Context(), c))
	second := f.open(6)
	c.Services[0].Servers[2] = Condition{}
	if err := first.Sync(t.Context(), c); !errors.Is(err, ErrNotPrimary) {
		t.Errorf("the former primary controller: error %v", err)
	}
	testhost.Must(t, second.Sync(t.Context(), c))
	if third := f.open(4); third.client.IsPrimary() {
		t.Error("a controller with a lower ID is the primary one")
	}
}

// The IDs of servers of QUIC follow the content, in both forms.
func TestSyncOfServerIDs(t *testing.T) {
	f := startFake(t)
	s := f.open(1)
	sync := func(form, former *desired.QUIC, ids ...string) {
		t.Helper()
		svc := &desired.Service{
			Name: "h3", VIP: vip, Port: 443, Protocol: desired.UDP, Placement: desired.PlacementHash,
			Persistence: desired.PersistenceQUIC, Encapsulation: desired.SRv6Encap, Candidates: 4, Buckets: 251,
			QUIC: form, FormerQUIC: former,
		}
		c := contentOf(t, []uint16{1, 2, 3})
		c.Services = []*Service{{Service: svc, Number: 9, IDs: map[dataplane.QUICPrefix]uint32{}}}
		want := map[string]string{}
		for slot, id := range ids {
			from := form
			if len(id) != form.ServerIDLength {
				from = former
			}
			prefix, err := dataplane.QUICPrefixOf(9, from, []byte(id))
			testhost.Must(t, err)
			c.Services[0].IDs[prefix] = uint32(slot)
		}
		testhost.Must(t, s.Sync(t.Context(), c))
		for e := range c.Services[0].IDEntries() {
			want[e.Table+" "+e.key()] = e.value()
		}
		got := maps.Clone(f.tables)
		maps.DeleteFunc(got, func(name, _ string) bool { return !strings.HasPrefix(name, "quic_") })
		if !maps.Equal(got, want) {
			t.Errorf("the switch has %q, not %q", got, want)
		}
	}
	short := &desired.QUIC{Form: desired.QUICLB21, Rotation: 1, ServerIDLength: 1, NonceLength: 4}
	long := &desired.QUIC{Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 3, NonceLength: 8}
	sync(short, nil, "a", "b")
	sync(long, short, "abc", "a", "b")
	sync(long, nil, "abc")
}
