// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/store/etcdtest"
)

const prefix = "/segue/test"

// patience bounds every wait of the tests.
const patience = time.Minute

// fleet is a number of balancers that follow a store.
type fleet struct {
	t         *testing.T
	store     *Store // for changes
	balancers []*simulated
	interval  time.Duration // between generations

	mu sync.Mutex
	// tables has a digest of the candidate tables and one of the content for each generation of a
	// service, as the first balancer that had it computed them.
	tables map[string]string
}

// simulated is a balancer without a data path.
type simulated struct {
	*Follower
	fleet   *fleet
	name    string
	dir     string
	file    *config.BalancerFiles
	cancel  context.CancelFunc
	ended   chan struct{}
	opened  *Store
	history generation.Generations

	mu         sync.Mutex
	refuses    error
	cannotRead error // for any content
	desired    *desired.Balancer
	followed   []string // the versions
}

// newFleet returns a fleet without balancers.
func newFleet(t *testing.T, endpoint string) *fleet {
	t.Helper()
	return &fleet{
		t: t, store: open(t, endpoint, "operator"), interval: 100 * time.Millisecond,
		tables: map[string]string{},
	}
}

func open(t *testing.T, endpoint, name string) *Store {
	t.Helper()
	s, err := Open(&desired.Etcd{Endpoints: []string{endpoint}, Prefix: prefix}, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// add starts a balancer that reaches the store at an endpoint.
func (f *fleet) add(endpoint string) *simulated {
	f.t.Helper()
	return f.addWith(desired.Etcd{Endpoints: []string{endpoint}, Prefix: prefix})
}

// addWith starts a balancer with a connection to the store.
func (f *fleet) addWith(etcd desired.Etcd) *simulated {
	f.t.Helper()
	b := f.member(etcd)
	b.start()
	f.balancers = append(f.balancers, b)
	return b
}

// member returns a balancer that is not started.
func (f *fleet) member(etcd desired.Etcd) *simulated {
	f.t.Helper()
	b := &simulated{fleet: f, name: fmt.Sprint("lb", len(f.balancers)), dir: f.t.TempDir()}
	text := fmt.Sprintf(`
node: {instance: lb, name: %s, interface: eth0, addresses: ["2001:db8::1"], state: %q,
  limits: {servers: 20000}}
store: {etcd: {endpoints: [%q], prefix: %s}}
`, b.name, b.dir, etcd.Endpoints[0], etcd.Prefix)
	var err error
	if b.file, _, err = config.ParseBalancerFiles([]byte(text)); err != nil {
		f.t.Fatal(err)
	}
	b.file.File.Store.Etcd = etcd
	return b
}

// start starts the process of a balancer.
func (b *simulated) start() {
	var err error
	if b.opened, err = Open(&b.file.File.Store.Etcd, b.name); err != nil {
		b.fleet.t.Fatal(err)
	}
	b.Follower = NewFollower(b.opened, b, b.file.File, b.history, slog.New(slog.DiscardHandler))
	b.interval = b.fleet.interval
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel, b.ended = cancel, make(chan struct{})
	ended := b.ended
	go func() {
		defer close(ended)
		_ = b.Run(ctx)
	}()
	b.fleet.t.Cleanup(b.stop)
}

// stop ends the process of a balancer.
func (b *simulated) stop() {
	b.cancel()
	<-b.ended
	_ = b.opened.Close()
}

func (b *simulated) Interpret(d *Document) (*desired.Balancer, error) {
	b.mu.Lock()
	err := b.cannotRead
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	files, _, err := config.WithStored(b.file, d.Services, d.Overrides)
	if err != nil {
		return nil, err
	}
	return files.Desired, nil
}

func (b *simulated) Follow(_ context.Context, state *State) error {
	document, err := state.Content.Document()
	if err != nil {
		return err
	}
	wanted, err := b.Interpret(document)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refuses != nil {
		return b.refuses
	}
	if err := b.fleet.compare(b.name, wanted, state); err != nil {
		return err
	}
	b.desired = wanted
	b.followed = append(b.followed, state.Version.String())
	return nil
}

// compare computes the candidate tables of all generations, and requires that they are those of the
// other balancers with the same generations.
func (f *fleet) compare(balancer string, wanted *desired.Balancer, state *State) error {
	for i := range wanted.Services {
		service := &wanted.Services[i]
		g, ok := state.Generations[service.Name]
		if !ok || g.Number == 0 {
			f.t.Errorf("%s at %s: service %s has no generation", balancer, state.Version, service.Name)
			continue
		}
		sum := sha256.New()
		for _, set := range g.Sets {
			table, err := set.Table()
			if err != nil {
				return err
			}
			for row := range table.Buckets {
				fmt.Fprintln(sum, table.Row(row))
			}
			text, _ := json.Marshal(set)
			sum.Write(text)
		}
		key := fmt.Sprintf("%s %s %d", state.Version.Epoch, service.Name, g.Number)
		digest := hex.EncodeToString(sum.Sum(nil))
		f.mu.Lock()
		if first, ok := f.tables[key]; ok && first != digest {
			f.t.Errorf("%s has other tables in generation %s", balancer, key)
		}
		f.tables[key] = digest
		f.mu.Unlock()
	}
	return nil
}

// apply changes the store, and returns the version after it.
func (f *fleet) apply(c Change) Version {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	version, err := f.store.Apply(ctx, c)
	if err != nil {
		f.t.Fatal(err)
	}
	return version
}

// fill makes services the content of an empty store.
func (f *fleet) fill(services ...desired.Fields) Version {
	f.t.Helper()
	return f.apply(Change{Fills: true, Edit: replace(services...)})
}

// replace returns an edit that replaces all content.
func replace(services ...desired.Fields) func(Tree) (Tree, error) {
	return func(Tree) (Tree, error) { return (&Document{Services: services}).Tree() }
}

// edit changes the store by a function that changes the tree.
func (f *fleet) edit(change func(Tree)) Version {
	f.t.Helper()
	return f.apply(Change{Edit: func(t Tree) (Tree, error) {
		change(t)
		return t, nil
	}})
}

// service returns a service with numbered servers.
func service(name string, servers int) desired.Fields {
	list := make([]any, servers)
	for i := range list {
		list[i] = map[string]any{
			"name": fmt.Sprintf("s%d", i), "address": fmt.Sprintf("2001:db8:1::%x", i+2),
		}
	}
	port := 1
	for _, c := range name {
		port = port*31%60000 + int(c)
	}
	return desired.Fields{
		"name": name, "vip": "2001:db8:80::1", "port": port, "protocol": "tcp", "encapsulation": "gre",
		"buckets": 1021, "servers": list,
	}
}

// bulk is service with enough buckets for many servers.
func bulk(name string, servers int) desired.Fields {
	fields := service(name, servers)
	fields["buckets"] = 16381
	return fields
}

// await waits until all balancers follow a version, and returns how long that took since a time.
func (f *fleet) await(version Version, since time.Time, balancers ...*simulated) time.Duration {
	f.t.Helper()
	if balancers == nil {
		balancers = f.balancers
	}
	for _, b := range balancers {
		b.await(func(s Status) bool { return s.Follows == version && !s.FromCache && s.Held == "" },
			"follow "+version.String())
	}
	return time.Since(since).Round(time.Millisecond)
}

func (b *simulated) await(condition func(Status) bool, what string) {
	b.fleet.t.Helper()
	ctx, cancel := context.WithTimeout(b.fleet.t.Context(), patience)
	defer cancel()
	if err := b.Await(ctx, condition); err != nil {
		b.fleet.t.Fatalf("%s does not %s: %v; status %+v", b.name, what, err, b.Status())
	}
}

// servers returns the names of the servers of a service that a balancer has, in their order.
func (b *simulated) servers(service string) (names []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.desired == nil || b.desired.Service(service) == nil {
		return nil
	}
	for _, s := range b.desired.Service(service).Servers {
		names = append(names, s.Name)
	}
	return names
}

func (b *simulated) isDrained(service, server string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.desired.Server(service, server).Drained
}

// put returns an edit that sets the value of a key.
func put(key string, value any) func(Tree) {
	return func(t Tree) {
		delete(t, key)
		if err := t.put(key, value); err != nil {
			panic(err)
		}
	}
}

func drain(service, server string) func(Tree) {
	return put(keyOf(overridesKey, service, server), bareOverride{Set: desired.Fields{"drained": true}})
}

// All balancers have the tables of all changes, also those that start late.
func TestFollow(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	for range 3 {
		f.add(server.Endpoint())
	}
	f.await(f.fill(service("web", 4), service("dns", 2)), time.Now())
	version := f.edit(put(keyOf(serversKey, "web", "s9"), map[string]any{"address": "2001:db8:1::99"}))
	f.await(version, time.Now())
	f.edit(func(t Tree) { delete(t, keyOf(serversKey, "web", "s1")) })
	version = f.edit(put(keyOf(servicesKey, "a/b"), without(service("a/b", 0), "name", "servers")))
	f.await(version, time.Now())
	late := f.add(server.Endpoint())
	f.await(version, time.Now())
	for _, b := range f.balancers {
		if got, want := b.servers("web"), []string{"s0", "s2", "s3", "s9"}; !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", b.name, got, want)
		}
	}
	// The latecomer knows the former servers.
	g := late.State().Generations["web"]
	if g.Number < 2 || len(g.Sets) < 2 || len(g.Sets[1].Servers) < 4 {
		t.Errorf("generation %+v", g)
	}
	if number := late.State().Generations["dns"].Number; number != 1 {
		t.Errorf("generation %d of a service that has not changed", number)
	}
}

// A drain takes effect at once, while a change of servers waits for its generation.
func TestDrainDoesNotWait(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = time.Hour
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
	first := b.State().Version
	f.edit(func(t Tree) { delete(t, keyOf(serversKey, "web", "s3")) })
	version := f.edit(drain("web", "s1"))
	b.await(func(s Status) bool { return s.Newest == version && b.isDrained("web", "s1") }, "drain")
	if got := b.servers("web"); len(got) != 4 || b.State().Version != first {
		t.Errorf("the servers are %v at %s, before their generation", got, b.State().Version)
	}
	version = f.edit(func(t Tree) { delete(t, keyOf(overridesKey, "web", "s1")) })
	b.await(func(s Status) bool { return s.Newest == version && !b.isDrained("web", "s1") }, "end the drain")
}

// Two changes within the interval become one generation, after the interval.
func TestInterval(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 2 * time.Second
	b := f.add(server.Endpoint())
	began := time.Now()
	f.await(f.fill(service("web", 4)), began)
	for i := range 3 {
		key := keyOf(serversKey, "web", fmt.Sprint("new", i))
		f.edit(put(key, map[string]any{"address": fmt.Sprintf("2001:db8:1::9%d", i)}))
	}
	f.await(f.edit(drain("web", "s1")), time.Now())
	if since := time.Since(began); since < f.interval {
		t.Errorf("a second generation after %s", since)
	}
	if g := b.State().Generations["web"]; g.Number != 2 || len(g.Sets[0].Servers) != 7 {
		t.Errorf("generation %d with %d servers, want 2 with 7", g.Number, len(g.Sets[0].Servers))
	}
}

// A change of many servers takes effect as a whole, even if its writer dies.
func TestBulk(t *testing.T) {
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	for range 3 {
		f.add(server.Endpoint())
	}
	const many = 10000
	began := time.Now()
	first := f.fill(bulk("web", many))
	written := time.Since(began)
	t.Logf("%d servers: written in %s, all balancers agree after %s", many, written, f.await(first, began))
	began = time.Now()
	version := f.edit(func(t Tree) {
		for i := range many {
			key := keyOf(serversKey, "web", fmt.Sprint("s", i))
			delete(t, key)
			address := fmt.Sprintf("2001:db8:1::%x", i+2)
			if err := t.put(key, map[string]any{"address": address, "weight": 2 + i%3}); err != nil {
				panic(err)
			}
		}
	})
	written = time.Since(began)
	t.Logf("%d servers changed: written in %s, all balancers agree after %s",
		many, written, f.await(version, began))
	for _, b := range f.balancers {
		b.mu.Lock()
		for i, s := range b.desired.Services[0].Servers {
			if *s.Weight < 2 {
				t.Fatalf("%s: server %d has weight %d", b.name, i, *s.Weight)
			}
		}
		if len(b.followed) != 2 {
			t.Errorf("%s followed %v, want two versions", b.name, b.followed)
		}
		b.mu.Unlock()
	}
}

// A writer that dies in a change of many keys has changed nothing, and the next one can go on.
func TestWriterDies(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	first := f.fill(service("web", 500))
	f.await(first, time.Now())
	before := b.State()

	w := &writer{Store: f.store, by: "dead"}
	n, err := f.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	after := Tree{keyOf(servicesKey, "web"): n.Tree()[keyOf(servicesKey, "web")]}
	for i := range 300 {
		key := keyOf(serversKey, "web", fmt.Sprint("s", i+400))
		if err := after.put(key, map[string]any{"weight": 7}); err != nil {
			t.Fatal(err)
		}
	}
	changes := n.Tree().changesTo(after)
	all := w.batches(n, changes, n.head.Change+1)
	if len(all) < 5 {
		t.Fatalf("%d transactions", len(all))
	}
	reserved := *n.head
	reserved.Writing, reserved.By = n.head.Change+1, w.by
	at, err := w.finish(t.Context(), n.headAt, nil, &reserved)
	if err != nil {
		t.Fatal(err)
	}
	for _, batch := range all[:len(all)-1] {
		if err := w.writeBatch(t.Context(), at, batch); err != nil {
			t.Fatal(err)
		}
	}
	late := f.add(server.Endpoint())
	f.await(first, time.Now())
	if !late.State().equal(before) {
		t.Error("a balancer that starts meanwhile has another state")
	}
	version := f.edit(drain("web", "s1"))
	f.await(version, time.Now())
	if got := len(b.servers("web")); got != 500 || b.isDrained("web", "s1") == false {
		t.Errorf("%d servers after the next change, want 500", got)
	}
	// Should the writer live after all, it can write no more.
	if err := w.writeBatch(t.Context(), at, all[len(all)-1]); !errors.Is(err, errConflict) {
		t.Errorf("the dead writer writes: %v", err)
	}
	n, err = f.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for key, it := range n.items {
		if it[0].Change > n.head.Change {
			t.Errorf("key %s is left with a version of change %d", key, it[0].Change)
		}
	}
}

// Changes by several writers at once are made one after the other.
func TestConcurrentWriters(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.fill(service("web", 4))
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			s := open(t, server.Endpoint(), fmt.Sprint("writer", i))
			for j := range 5 {
				_, err := s.Apply(t.Context(), Change{Edit: func(tree Tree) (Tree, error) {
					return tree, tree.put(keyOf(serversKey, "web", fmt.Sprintf("w%d-%d", i, j)),
						map[string]any{"address": fmt.Sprintf("2001:db8:2::%x", i*16+j+1)})
				}})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	n, err := f.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n.head.Change != 41 {
		t.Errorf("change %d, want 41", n.head.Change)
	}
	f.await(n.Version(), time.Now())
	if got := len(b.servers("web")); got != 44 {
		t.Errorf("%d servers, want 44", got)
	}
}

// A change for another version than that of the store is refused.
func TestExpectedVersion(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	first := f.fill(service("web", 4))
	f.edit(drain("web", "s1"))
	_, err := f.store.Apply(t.Context(), Change{Expected: first, Edit: func(t Tree) (Tree, error) {
		drain("web", "s2")(t)
		return t, nil
	}})
	if !errors.Is(err, ErrVersion) {
		t.Errorf("error %v", err)
	}
	_, err = f.store.Apply(t.Context(), Change{Fills: true, Edit: replace(service("web", 1))})
	if !errors.Is(err, ErrNotEmpty) {
		t.Errorf("error %v", err)
	}
}

// Nothing is left in the store of what was removed.
func TestClean(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 0
	f.add(server.Endpoint())
	f.await(f.fill(service("web", 4), service("old", 2)), time.Now())
	f.await(f.apply(Change{PermitsRemovals: true, Edit: replace(service("web", 4))}), time.Now())
	for i := range 6 {
		f.await(f.edit(put(keyOf(serversKey, "web", "s0"),
			map[string]any{"address": "2001:db8:1::2", "weight": i + 2})), time.Now())
	}
	deadline := time.Now().Add(patience)
	for {
		n, err := f.store.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		// One service with three sets, four servers, a service, a record.
		if len(n.items) == 6 && len(n.pieces) <= 4 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d items and %d pieces of sets are left", len(n.items), len(n.pieces))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// The cache is whole, and not that of another fleet.
func TestCache(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "deep", "lb.store.json")
	tree, err := (&Document{Services: []desired.Fields{service("web", 2)}}).Tree()
	if err != nil {
		t.Fatal(err)
	}
	state := &State{Version: Version{"e", 7}, Content: tree}
	if got, err := LoadCache(path, "/a/"); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	if err := state.save(path, "/a/"); err != nil {
		t.Fatal(err)
	}
	got, err := LoadCache(path, "/a/")
	if err != nil || !got.equal(state) {
		t.Errorf("got %+v, error %v", got, err)
	}
	if got, err := LoadCache(path, "/b/"); got != nil || err != nil {
		t.Errorf("of another fleet: %v, %v", got, err)
	}
	if err := os.WriteFile(path, []byte(`{"format":1,"prefix":"/a/","version`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadCache(path, "/a/"); err == nil {
		t.Error("half a file is read")
	}
}

// A store that was never used takes over the history of the balancer that comes first.
func TestHistory(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	etcd := desired.Etcd{Endpoints: []string{server.Endpoint()}, Prefix: prefix}
	files, _, err := config.WithStored(f.member(etcd).file, []desired.Fields{service("web", 5)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := generation.Generations{}.Next(files.Desired.Services)
	files.Desired.Services[0].Servers = files.Desired.Services[0].Servers[:4]
	before = before.Next(files.Desired.Services)
	f.fill(service("web", 4))
	b := f.member(etcd)
	b.history = before
	b.start()
	b.await(func(s Status) bool { return s.Follows.Change == 1 }, "follow")
	g := b.State().Generations["web"]
	if g.Number != 2 || len(g.Sets) != 2 || len(g.Sets[1].Servers) != 5 {
		t.Errorf("the history is %+v", g)
	}
}
