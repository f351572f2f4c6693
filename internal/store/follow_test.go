// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// All balancers have the tables of all changes, also those that start late.
func TestFollow(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	for range 3 {
		f.add(server.Endpoint())
	}
	f.await(f.fill(service("web", 4), service("dns", 2)), time.Now())
	f.follow(put(keyOf(serversKey, "web", "s9"), map[string]any{"address": "2001:db8:1::99"}))
	f.edit(func(t Tree) { delete(t, keyOf(serversKey, "web", "s1")) })
	version := f.follow(put(keyOf(servicesKey, "a%b"), without(service("a%b", 0), "name", "servers")))
	late := f.add(server.Endpoint())
	f.await(version, time.Now())
	for _, b := range f.balancers {
		if got, want := b.servers("web"), []string{"s0", "s2", "s3", "s9"}; !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", b.name, got, want)
		}
	}
	// The balancer that has started late knows the former servers.
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

// A drain also takes effect at once if an override adds the service of the server.
func TestDrainOfAddedService(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = time.Hour
	b := f.add(server.Endpoint())
	added := desired.Override{Service: "new", Add: without(service("new", 3), "name")}
	f.await(f.apply(Change{Fills: true, Edit: overrides(added)}), time.Now())
	first := b.State().Version
	drained := []desired.Override{added, {Service: "new", Server: "s1", Set: desired.Fields{"drained": true}}}
	version := f.apply(Change{Edit: func(t Tree) (Tree, error) {
		next, err := t.WithOverrides(drained)
		if err == nil { // the set of servers changes, too
			put(overrideKey("new", "s9"), bareOverride{Add: desired.Fields{"address": "2001:db8:1::99"}})(next)
		}
		return next, err
	}})
	b.await(func(s Status) bool { return s.Newest == version && b.isDrained("new", "s1") }, "drain")
	if got := b.servers("new"); len(got) != 3 || b.State().Version != first {
		t.Errorf("the servers are %v at %s, before their generation", got, b.State().Version)
	}
}

// overrides returns an edit that makes overrides the only content.
func overrides(list ...desired.Override) func(Tree) (Tree, error) {
	return func(Tree) (Tree, error) { return (&Document{Overrides: list}).Tree() }
}

// Each server of a service that an override adds has a key, with all that overrides say about it.
func TestOverridesOfAddedService(t *testing.T) {
	t.Parallel()
	address := func(n int) desired.Fields {
		return desired.Fields{"address": fmt.Sprintf("2001:db8:1::%x", n+2)}
	}
	set := desired.Fields{"weight": 7}
	d := &Document{Overrides: []desired.Override{
		{Service: "new", Server: "s0", Set: set},
		{Service: "new", Add: without(service("new", 3), "name")},
		{Service: "new", Server: "s1", Remove: true},
		{Service: "new", Server: "more", Add: address(9)},
		{Service: "web", Server: "s0", Remove: true},
	}}
	tree, err := d.Tree()
	testhost.Must(t, err)
	again, err := tree.Document()
	testhost.Must(t, err)
	if tree, err = again.Tree(); err != nil { // it stays so
		t.Fatal(err)
	}
	want := Tree{}
	for key, value := range map[string]bareOverride{
		overrideKey("new", "more"): {Add: address(9)},
		overrideKey("new", "s0"):   {Add: address(0), Set: set},
		overrideKey("new", "s2"):   {Add: address(2)},
		overrideKey("web", "s0"):   {Remove: true},
	} {
		put(key, value)(want)
	}
	own := without(service("new", 0), "name")
	put(overrideKey("new", ""), bareOverride{Add: own})(want)
	if !tree.Equal(want) {
		t.Errorf("tree %s\nwant %s", encode(tree), encode(want))
	}
	for name, servers := range map[string][]any{
		"mapping": {7}, "required": {map[string]any{"address": "x"}},
		"twice": {map[string]any{"name": "a"}, map[string]any{"name": "a"}},
	} {
		o := desired.Override{Service: "new", Add: desired.Fields{"servers": servers}}
		if _, err := (&Document{Overrides: []desired.Override{o}}).Tree(); err == nil ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("servers %v: error %v, want %s", servers, err, name)
		}
	}
}

// An override that adds a service with servers has no effect if the content itself has the service.
func TestOverridesOfAdoptedService(t *testing.T) {
	t.Parallel()
	drained := desired.Fields{"drained": true}
	added := []desired.Override{
		{Service: "web", Add: without(service("web", 3), "name")},
		{Service: "web", Server: "s0", Set: drained},
		{Service: "web", Server: "s2", Set: drained},
		{Service: "dns", Add: without(service("dns", 2), "name")},
	}
	tree := func(d *Document) Tree {
		t.Helper()
		tree, err := d.Tree()
		testhost.Must(t, err)
		return tree
	}
	content := []desired.Fields{service("web", 1)}
	for name, both := range map[string]Tree{
		"import of both":      tree(&Document{Services: content, Overrides: added}),
		"import of a service": tree(&Document{Services: content}).WithOverridesOf(tree(&Document{Overrides: added})),
	} {
		document, err := both.Document()
		testhost.Must(t, err)
		want := desired.Serving{"web": {"s0": false}, "dns": {"s0": true, "s1": true}}
		if got := document.serving(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: servers %v, want %v", name, got, want)
		}
		for _, server := range []string{"s0", "s2"} {
			o, err := both.override(overrideKey("web", server))
			if err != nil || !reflect.DeepEqual(o.Set, drained) {
				t.Errorf("%s: override of %s: %+v, error %v", name, server, o, err)
			}
		}
		// A server that an operator adds from now on stays.
		put(overrideKey("web", "s9"), bareOverride{Add: desired.Fields{"address": "2001:db8:1::9"}})(both)
		again := tree(&Document{Services: content}).WithOverridesOf(both)
		if again[overrideKey("web", "s9")] == nil {
			t.Errorf("%s: another import removes s9", name)
		}
	}
}

// A service that an override adds may have as many servers as any other.
func TestLargeOverride(t *testing.T) {
	t.Parallel()
	f := newFleet(t, etcdtest.Start(t).Endpoint())
	f.fill()
	const many = 40000
	f.apply(Change{Edit: overrides(desired.Override{Service: "new", Add: without(bulk("new", many), "name")})})
	f.edit(put(overrideKey("new", "s1"), bareOverride{Add: desired.Fields{"address": "2001:db8:1::1"}}))
	n, err := f.store.Read(t.Context())
	testhost.Must(t, err)
	document, err := n.Tree().Document()
	testhost.Must(t, err)
	if got := len(document.serving()["new"]); got != many {
		t.Errorf("%d servers, want %d", got, many)
	}
}

// Changes within the interval become one generation, after the interval.
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
	f.follow(drain("web", "s1"))
	if since := time.Since(began); since < f.interval {
		t.Errorf("a second generation after %s", since)
	}
	if g := b.State().Generations["web"]; g.Number != 2 || len(g.Sets[0].Servers) != 7 {
		t.Errorf("generation %d with %d servers, want 2 with 7", g.Number, len(g.Sets[0].Servers))
	}
}

// Generations keep their distance also when another balancer begins to make them, even if the
// process of this balancer is new.
func TestIntervalAcrossLeaders(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 3 * time.Second
	began := watchGenerations(t, f.store, "web")
	first := f.add(server.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
	first.await(func(s Status) bool { return s.IsLeader }, "lead")
	second := f.add(server.Endpoint())
	f.await(first.State().Version, time.Now())

	first.stop()
	f.follow(addServer(0), second)
	second.stop()
	first.start() // a new process
	f.follow(addServer(1), first)

	var times []time.Time
	for len(times) < 3 {
		select {
		case at := <-began:
			times = append(times, at)
		case <-time.After(patience):
			t.Fatalf("%d generations, want 3", len(times))
		}
	}
	if len(began) > 0 {
		t.Error("there are more than 3 generations")
	}
	for i, at := range times[1:] {
		// On a busy machine, the watch may deliver the first of two much later.
		if distance := at.Sub(times[i]); distance < f.interval/2 {
			t.Errorf("generation %d began %s after the one before, want %s", i+2, distance, f.interval)
		}
	}
}

// watchGenerations notes when the store gets each generation of a service.
func watchGenerations(t *testing.T, s *Store, service string) <-chan time.Time {
	t.Helper()
	changes := s.client.Watch(t.Context(), s.key(keyOf(generationsKey, service)))
	times := make(chan time.Time, 16)
	last := uint64(0)
	go func() {
		for response := range changes {
			for _, event := range response.Events {
				it, err := parseItem(event.Kv.Value)
				var r record
				if err == nil {
					err = json.Unmarshal(it[0].Value, &r)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if r.Number != last {
					last = r.Number
					times <- time.Now()
				}
			}
		}
	}()
	return times
}

// The keys of removed services, servers and generations do not stay in the store.
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
		testhost.Must(t, err)
		// The items are those of web, its four servers and its record of generations.
		if len(n.items) == 6 && len(n.pieces) <= 4 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d items and %d pieces of sets are left", len(n.items), len(n.pieces))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// LoadCache refuses a file that is cut off, and ignores that of another fleet.
func TestCache(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "deep", "lb.store.json")
	tree, err := (&Document{Services: []desired.Fields{service("web", 2)}}).Tree()
	testhost.Must(t, err)
	state := &State{Version: Version{"e", 7}, Content: tree}
	if got, err := LoadCache(path, "/a/"); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	testhost.Must(t, state.save(path, "/a/"))
	got, err := LoadCache(path, "/a/")
	if err != nil || !got.equal(state) {
		t.Errorf("got %+v, error %v", got, err)
	}
	if got, err := LoadCache(path, "/b/"); got != nil || err != nil {
		t.Errorf("of another fleet: %v, %v", got, err)
	}
	testhost.Must(t, os.WriteFile(path, []byte(`{"format":1,"prefix":"/a/","version`), 0o644))
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
	testhost.Must(t, err)
	before := serversets.Generations{}.Next(files.Desired.Services)
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
