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
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
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
	deference time.Duration // of balancers without history

	mu sync.Mutex
	// tables has, by generationName, a digest of the sets and candidate tables of a generation.
	tables map[string]string
	// compared has, by generationName, the balancers that had the generation.
	compared map[string]map[string]bool
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
	history serversets.Generations

	mu         sync.Mutex
	refuses    error
	cannotRead error // for any content
	desired    *desired.Balancer
	followed   []string // the versions
}

// newFleet returns a fleet without balancers.
func newFleet(t *testing.T, endpoint string) *fleet {
	t.Helper()
	return fleetOf(t, open(t, endpoint, "operator"))
}

// filled returns a fleet of one balancer, which follows services.
func filled(t *testing.T, services ...desired.Fields) (*fleet, *etcdtest.Server, *simulated) {
	t.Helper()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(services...), time.Now())
	return f, server, b
}

// fleetOf is newFleet with an open connection to the store.
func fleetOf(t *testing.T, s *Store) *fleet {
	return &fleet{
		t: t, store: s, interval: 100 * time.Millisecond,
		tables: map[string]string{}, compared: map[string]map[string]bool{},
	}
}

func open(t *testing.T, endpoint, name string) *Store {
	t.Helper()
	s, err := Open(&desired.Etcd{Endpoints: []string{endpoint}, Prefix: prefix}, name)
	testhost.Must(t, err)
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

// whileDown changes the files of a server while the server does not run.
func whileDown(server *etcdtest.Server, change func()) {
	server.Kill()
	change()
	server.Run()
}

// rewrite restores the store from its backup, and makes more changes than were lost. It returns the
// last version, which a balancer near the store follows.
func (f *fleet) rewrite(server *etcdtest.Server, near *simulated) (version Version) {
	f.t.Helper()
	whileDown(server, server.Restore)
	f.mu.Lock()
	clear(f.tables) // generations of the same numbers have other servers now
	f.mu.Unlock()
	for i := range 10 {
		version = f.follow(addServer(i+2), near)
	}
	return version
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
	b.connect()
	b.run()
}

// connect opens the connection of a balancer to the store.
func (b *simulated) connect() {
	var err error
	if b.opened, err = Open(&b.file.File.Store.Etcd, b.name); err != nil {
		b.fleet.t.Fatal(err)
	}
}

// run starts the process of a balancer that has a connection.
func (b *simulated) run() {
	b.Follower = NewFollower(b.opened, b, b.file.File, b.history, slog.New(slog.DiscardHandler))
	b.interval, b.deference = b.fleet.interval, b.fleet.deference
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

// compare requires that the generations of a state fit the services of the balancer, and that all
// balancers compute the same candidate tables from the same generation.
func (f *fleet) compare(balancer string, wanted *desired.Balancer, state *State) error {
	if err := state.Generations.Check(wanted.Services); err != nil {
		f.t.Errorf("%s at %s: %v", balancer, state.Version, err)
	}
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
		key := generationName(state.Version.Epoch, service.Name, g.Number)
		digest := hex.EncodeToString(sum.Sum(nil))
		f.mu.Lock()
		if first, ok := f.tables[key]; ok && first != digest {
			f.t.Errorf("%s has other tables in generation %s", balancer, key)
		}
		f.tables[key] = digest
		if f.compared[key] == nil {
			f.compared[key] = map[string]bool{}
		}
		f.compared[key][balancer] = true
		f.mu.Unlock()
	}
	return nil
}

// generationName identifies a generation of a service.
func generationName(epoch, service string, number uint64) string {
	return fmt.Sprintf("%s %s %d", epoch, service, number)
}

// apply changes the store, and returns the version after it.
func (f *fleet) apply(c Change) Version {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	for {
		version, err := f.store.Apply(ctx, c)
		// A member that was cut off needs some time to find its leader. Nothing has changed yet.
		if errors.Is(err, errNoAnswer) && !errors.Is(err, ErrUnknown) && ctx.Err() == nil {
			continue
		}
		testhost.Must(f.t, err)
		return version
	}
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

// follow edits the store, and waits until some balancers, by default all, follow the new version.
func (f *fleet) follow(change func(Tree), balancers ...*simulated) Version {
	f.t.Helper()
	version := f.edit(change)
	f.await(version, time.Now(), balancers...)
	return version
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

// await waits until some balancers, by default all, follow a version. It returns how long that took
// since a time.
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

// awaitLoss waits until a balancer notices that the store is away.
func (b *simulated) awaitLoss() {
	b.fleet.t.Helper()
	b.await(func(s Status) bool { return !s.Reachable }, "notice that the store is away")
}

// refuse lets a balancer refuse all states with an error, or none for nil.
func (b *simulated) refuse(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refuses = err
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
