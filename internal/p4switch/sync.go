// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// Content is everything that a switch is to contain.
type Content struct {
	// Network is the port towards clients and servers, and Host the port to the host that has the
	// network port's address. MAC is the MAC address of both.
	Network, Host uint16
	MAC           [6]byte
	// Source is the balancer's address, as servers see it.
	Source   netip.Addr
	Services []*Service // Sync chooses the Tables of each
	Servers  []*Server
	// Passed are the services that the switch does not balance. It has no entries of them.
	Passed []PassedService
}

// Tables that contain entries of services: they change as a whole, with the service's entry.
var rowTables = []string{"rows", "columns", "histories"}

// Tables by which packets find services.
var serviceTables = []string{"services", "services_of_all_ports"}

// Tables with the server IDs of services of QUIC.
var idTables = []string{"quic_forms", "quic_servers"}

// Switch makes a switch follow a content. It knows all entries of the switch, so it writes only
// differences.
type Switch struct {
	client *Client
	// tables are the values by key, of each shelf.
	tables map[string]map[string]string
	// inForce are the services' rows that are in force, by number. After a start, there are none.
	inForce map[uint16]written
}

// written is what the rows of a service were computed from.
type written struct {
	version
	rows    *dataplane.Rows
	servers map[uint16]Condition
}

// fits tells whether the rows are those of a service.
func (w *written) fits(s *Service) bool {
	return s.Rows != nil && s.Rows == w.rows && s.Digest == w.digest && maps.Equal(s.Servers, w.servers)
}

// shelf returns where a Switch has an entry: in one map for each table, and in one for each set of a
// service's rows. So the rows of a service are found without all others.
func shelf(table, key string) string {
	if !slices.Contains(rowTables, table) {
		return table
	}
	of, _ := split(table, key)
	return table + " " + of
}

// value returns the value of an entry that the switch has.
func (s *Switch) value(table, key string) (value string, isThere bool) {
	value, isThere = s.tables[shelf(table, key)][key]
	return value, isThere
}

// note stores that the switch has an entry.
func (s *Switch) note(e *Entry) {
	key := e.key()
	at := shelf(e.Table, key)
	if s.tables[at] == nil {
		s.tables[at] = map[string]string{}
	}
	s.tables[at][key] = e.value()
}

// Open reads all entries of a switch. It returns an error if the switch cannot be read, or if it
// runs another program and this controller is not the primary one.
func Open(ctx context.Context, client *Client) (*Switch, error) {
	if client.IsPrimary() {
		if _, err := client.Configure(ctx); err != nil {
			return nil, err
		}
	}
	s := &Switch{client: client, tables: map[string]map[string]string{}, inForce: map[uint16]written{}}
	for name := range client.program.tables {
		if err := client.Read(ctx, name, func(e Entry) { s.note(&e) }); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Sync makes the switch contain c. A change of a service's rows takes effect as a whole: Sync writes
// the entries of the new rows beside those in force, then replaces the service's entry, and then
// removes the former rows. After an error, the switch has the rows before or the new ones of each
// service, and another Sync continues. A service whose numbers now belong to others has no entry
// meanwhile, so its packets pass to the host.
func (s *Switch) Sync(ctx context.Context, c *Content) error {
	w := &writer{s: s, ctx: ctx}
	w.withdraw(c)
	w.put(c.common())
	for _, server := range c.Servers {
		w.put(server.Entries())
	}
	w.flush() // the servers must be there before other entries name them
	for _, service := range c.Services {
		w.put(service.IDEntries())
	}
	for _, table := range idTables { // a server may have the slot of one whose ID is removed
		w.removeOthersOf(table, table)
	}
	w.flush()
	for _, service := range c.Services {
		w.syncService(service)
	}
	w.removeOthers(c)
	w.flush()
	return w.err
}

// withdraw removes the entries of services that the content does not have, and of those that would
// find the rows or the servers of others: the balancer gives the number of a removed service to
// another one, and the slot of a removed server. Until such a service has its new entry, the host
// balances it.
func (w *writer) withdraw(c *Content) {
	slotsMove := w.movesSlots(c)
	isWanted, owner := map[string]bool{}, map[string]string{} // by entry, and by number
	for _, service := range c.Services {
		match := service.Match()
		entry := match.Table + match.key()
		isWanted[entry], owner[pack(match.Params[0])] = true, entry
	}
	for _, table := range serviceTables {
		for key, value := range w.s.tables[table] {
			_, params := unpack(value)
			owner, isOwned := owner[pack(params[0])]
			if entry := table + key; slotsMove || !isWanted[entry] || isOwned && owner != entry {
				w.update(p4v1.Update_DELETE, Entry{Table: table, Key: unpackValues(key)})
			}
		}
	}
	w.flush()
}

// movesSlots tells whether a slot of the switch has another server in the content. A server keeps its
// slot, and its locator with it.
func (w *writer) movesSlots(c *Content) bool {
	return slices.ContainsFunc(c.Servers, func(server *Server) bool {
		e := server.locatorEntry(0)
		before, isThere := w.s.tables[e.Table][e.key()]
		return isThere && before != e.value()
	})
}

// PassAll makes a switch that has no ports yet pass all packets between the network and the host.
// Without it, the switch would drop them, and the host could not find its next hops.
func (s *Switch) PassAll(ctx context.Context, network, host uint16) error {
	if len(s.tables["ports"]) > 0 {
		return nil
	}
	w := &writer{s: s, ctx: ctx}
	w.put(slices.Values(portsOf(network, host, [6]byte{}))) // no packet is for this MAC address
	w.flush()
	return w.err
}

// common yields the entries that belong to no server and no service.
func (c *Content) common() iter.Seq[Entry] {
	source := c.Source.As16()
	all := append(portsOf(c.Network, c.Host, c.MAC), Entry{"source", nil, "set_source", []Value{source[:]}})
	return slices.Values(all)
}

// portsOf returns the entries of the ports.
func portsOf(network, host uint16, mac [6]byte) []Entry {
	return []Entry{
		{"ports", []Value{Number(uint64(network))}, "from_network", []Value{Number(uint64(host)), mac[:]}},
		{"ports", []Value{Number(uint64(host))}, "from_host", []Value{Number(uint64(network))}},
	}
}

// writer collects updates. After an error it does nothing more.
type writer struct {
	s       *Switch
	ctx     context.Context
	updates []Update
	err     error
	// kept are the keys that the content has, by shelf.
	kept map[string]map[string]bool
}

// put adds entries that the switch does not have, and changes those that are different.
func (w *writer) put(entries iter.Seq[Entry]) {
	for e := range entries {
		key, value := e.key(), e.value()
		w.keep(shelf(e.Table, key), key)
		before, isThere := w.s.value(e.Table, key)
		switch {
		case isThere && before == value:
			continue
		case isThere || len(e.Key) == 0:
			w.update(p4v1.Update_MODIFY, e)
		default:
			w.update(p4v1.Update_INSERT, e)
		}
	}
}

func (w *writer) keep(at, key string) {
	if w.kept == nil {
		w.kept = map[string]map[string]bool{}
	}
	if w.kept[at] == nil {
		w.kept[at] = map[string]bool{}
	}
	w.kept[at][key] = true
}

func (w *writer) update(kind p4v1.Update_Type, e Entry) {
	w.updates = append(w.updates, Update{kind, e})
	if len(w.updates) == mostUpdates {
		w.flush()
	}
}

// flush writes the updates, and notes what the switch has now. After an error of the switch, some of
// the updates may have been made: only another Open finds out which.
func (w *writer) flush() {
	updates := w.updates
	w.updates = nil
	if w.err != nil || len(updates) == 0 {
		return
	}
	if w.err = w.s.client.Write(w.ctx, updates); w.err != nil {
		return
	}
	for _, u := range updates {
		if u.Kind == p4v1.Update_DELETE {
			delete(w.s.tables[shelf(u.Table, u.key())], u.key())
			continue
		}
		w.s.note(&u.Entry)
	}
}

// syncService makes the switch follow a service. If only the condition of servers has changed, the
// rows in force change entry by entry: each entry is right by itself.
func (w *writer) syncService(service *Service) {
	match := service.Match()
	inForce, isThere := w.tablesInForce(&match)
	service.Tables = inForce
	before, isKnown := w.s.inForce[service.Number]
	if !isThere || !isKnown || before.digest != service.Digest {
		if service.Tables = 1 - inForce; w.hasRows(service, inForce) {
			service.Tables = inForce // as after a restart of the controller
		}
	}
	now := written{version{service.Generation, service.Digest, before.sum}, service.Rows, maps.Clone(service.Servers)}
	if !isThere || !before.fits(service) {
		now.sum = w.replaceRows(service)
		for range summed(service.IDEntries(), &now.sum) { // they are written already
		}
	}
	w.flush() // the rows must be there before the service's entry names them
	match = service.Match()
	w.put(func(yield func(Entry) bool) { yield(match) })
	w.flush()
	if w.err == nil {
		w.s.inForce[service.Number] = now
	}
}

// tablesInForce returns which of its two sets of tables a service uses, and whether the switch has
// the service.
func (w *writer) tablesInForce(match *Entry) (tables uint8, isThere bool) {
	value, isThere := w.s.tables[match.Table][match.key()]
	if !isThere {
		return 1, false // so that the first set is 0
	}
	_, params := unpack(value)
	return uint8(params[1].number()), true
}

// hasRows tells whether a set of a service's tables has the service's rows already.
func (w *writer) hasRows(service *Service, tables uint8) bool {
	copied := *service
	copied.Tables = tables
	for e := range copied.Entries() {
		if value, isThere := w.s.value(e.Table, e.key()); !isThere || value != e.value() {
			return false
		}
	}
	return true
}

// replaceRows makes a set of a service's tables contain the service's rows, and nothing else. It
// returns the sum of these rows.
func (w *writer) replaceRows(service *Service) (all sum) {
	w.put(summed(service.Entries(), &all))
	for _, table := range rowTables {
		w.removeOthersOf(table, shelf(table, service.set()))
	}
	return all
}

// set returns the beginning of the keys of the service's rows.
func (s *Service) set() string { return pack(Number(uint64(s.Number)), Number(uint64(s.Tables))) }

// removeOthersOf removes the entries of a table that are in a shelf, and that the content does not
// have.
func (w *writer) removeOthersOf(table, at string) {
	for key := range w.s.tables[at] {
		if !w.kept[at][key] {
			w.update(p4v1.Update_DELETE, Entry{Table: table, Key: unpackValues(key)})
		}
	}
	delete(w.kept, at)
}

// removeOthers removes what the content does not have, and no packet finds any more: rows before the
// servers that they name.
func (w *writer) removeOthers(c *Content) {
	w.removeOthersOf("ports", "ports")
	inForce := map[string]bool{}
	for _, service := range c.Services {
		inForce[service.set()] = true
	}
	for at := range w.s.tables {
		if table, set, isOfRows := strings.Cut(at, " "); isOfRows && !inForce[set] {
			w.removeOthersOf(table, at)
		}
	}
	w.flush()
	for place := range mostVisited {
		w.removeOthersOf(locatorTable(place), locatorTable(place))
	}
	w.removeOthersOf("next_hops", "next_hops")
}

// Close ends the connection.
func (s *Switch) Close() error { return s.client.Close() }

// Size returns how many entries the switch has.
func (s *Switch) Size() (entries int) {
	for _, table := range s.tables {
		entries += len(table)
	}
	return entries
}

// key returns the key of an entry in a short form.
func (e *Entry) key() string { return pack(e.Key...) }

// value returns the action and its parameters in a short form.
func (e *Entry) value() string {
	return pack(append([]Value{Value(e.Action)}, e.Params...)...)
}

// pack packs values: each is preceded by its length. So the packed form of some values is
// the beginning of that of these values and more.
func pack(values ...Value) string {
	var b []byte
	for _, v := range values {
		v = v.canonical()
		b = append(append(b, byte(len(v))), v...)
	}
	return string(b)
}

// unpackValues is the inverse of pack.
func unpackValues(packed string) (values []Value) {
	for len(packed) > 0 {
		n := int(packed[0])
		values = append(values, Value(packed[1:1+n]))
		packed = packed[1+n:]
	}
	return values
}

// unpack is the inverse of value.
func unpack(packed string) (action string, params []Value) {
	values := unpackValues(packed)
	return string(values[0]), slices.Clip(values[1:])
}

// number returns a value of at most eight bytes as a number.
func (v Value) number() (n uint64) {
	for _, b := range v {
		n = n<<8 | uint64(b)
	}
	return n
}
