// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
)

var manyBalancers = flag.Int("balancers", 100, "balancers in TestManyBalancers")

// add9 adds a server.
func add9(n int) func(Tree) {
	return put(keyOf(serversKey, "web", fmt.Sprint("added", n)),
		map[string]any{"address": fmt.Sprintf("2001:db8:9::%x", n+1)})
}

// faulty is a fleet of three balancers. The first two reach the store by a proxy.
func faulty(t *testing.T) (*fleet, *etcdtest.Server, *etcdtest.Proxy) {
	t.Helper()
	server := etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, server)
	f := newFleet(t, server.Endpoint())
	f.add(proxy.Endpoint())
	f.add(proxy.Endpoint())
	f.add(server.Endpoint())
	f.await(f.fill(service("web", 10), service("dns", 3)), time.Now())
	return f, server, proxy
}

// Balancers in a partition keep their state, and catch up after it.
func TestPartition(t *testing.T) {
	t.Parallel()
	f, _, proxy := faulty(t)
	proxy.Cut()
	for _, b := range f.balancers[:2] {
		b.await(func(s Status) bool { return !s.Reachable }, "notice the partition")
	}
	before := f.balancers[0].State()
	var version Version
	for i := range 3 {
		version = f.edit(add9(i))
	}
	f.await(version, time.Now(), f.balancers[2])
	if !f.balancers[0].State().equal(before) {
		t.Error("the state has changed during the partition")
	}
	if problem := f.balancers[0].Status().Problem; problem == "" {
		t.Error("no problem is reported")
	}
	proxy.Heal()
	t.Logf("all balancers agree %s after the end of the partition", f.await(version, time.Now()))
}

// A partition of the leader gives its lease to another balancer.
func TestLeaderIsCutOff(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, server)
	f := newFleet(t, server.Endpoint())
	leader := f.add(proxy.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	leader.await(func(s Status) bool { return s.Leader == leader.name }, "hold the lease")
	other := f.add(server.Endpoint())
	proxy.Cut()
	began := time.Now()
	version := f.edit(add9(0))
	t.Logf("another balancer makes the generations %s after the cut", f.await(version, began, other))
	other.await(func(s Status) bool { return s.Leader == other.name }, "hold the lease")
	proxy.Heal()
	f.await(version, time.Now())
	version = f.edit(add9(1))
	f.await(version, time.Now())
}

// A balancer that has lost its lease without knowing releases nothing.
func TestLostLease(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	b.stop()
	version := f.edit(add9(0))
	n, err := f.store.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	held := clientv3.Compare(clientv3.ModRevision(f.store.key(leaderKey)), "=", n.revision-1)
	r := newReleaser(b.Follower)
	r.Store = f.store
	if wait, err := r.release(t.Context(), n, held); wait > 0 || err != nil {
		t.Fatal(wait, err)
	}
	if n, err = f.store.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	if released, _ := n.released(); released == version {
		t.Error("a release without a lease")
	}
}

// An operator removes all keys, also that of the lease, and fills the store again. The leader then
// takes the lease anew.
func TestKeysAreRemoved(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	b.await(func(s Status) bool { return s.IsLeader }, "lead")
	if _, err := server.Client().Delete(t.Context(), f.store.prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	f.await(f.fill(service("web", 10)), time.Now())
}

// Watches go on after a restart of the store.
func TestRestart(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	server.Kill()
	for _, b := range f.balancers {
		b.await(func(s Status) bool { return !s.Reachable }, "notice the restart")
	}
	server.Run()
	began := time.Now()
	version := f.edit(add9(0))
	t.Logf("all balancers agree %s after the restart", f.await(version, began))
}

// A watch whose revisions were compacted reads everything anew.
func TestCompaction(t *testing.T) {
	t.Parallel()
	f, server, proxy := faulty(t)
	proxy.Cut()
	for _, b := range f.balancers[:2] {
		b.await(func(s Status) bool { return !s.Reachable }, "notice the partition")
	}
	for i := range 5 {
		f.edit(add9(i))
	}
	f.edit(func(t Tree) { delete(t, keyOf(serversKey, "web", "s1")) })
	version := f.edit(drain("web", "s2"))
	f.await(version, time.Now(), f.balancers[2])
	server.Compact()
	proxy.Heal()
	t.Logf("all balancers agree %s after the end of the partition", f.await(version, time.Now()))
	if slices.Contains(f.balancers[0].servers("web"), "s1") {
		t.Error("a server that was removed before the compaction is there")
	}
}

// A slow store delays changes, and nothing piles up meanwhile.
func TestSlowStore(t *testing.T) {
	f, _, proxy := faulty(t)
	before := runtime.NumGoroutine()
	proxy.Delay(time.Second)
	began := time.Now()
	var version Version
	for i := range 20 {
		version = f.edit(add9(i))
	}
	t.Logf("all balancers agree after %s with a delay of 1s in each direction", f.await(version, began))
	if now := runtime.NumGoroutine(); now > before+50 {
		t.Errorf("%d goroutines, before %d", now, before)
	}
	for _, b := range f.balancers {
		if s := b.Status(); !s.Reachable {
			t.Errorf("%s: a slow store is not reachable: %s", b.name, s.Problem)
		}
	}
}

// A store that has lost its content changes no balancer. When it is filled again, the history goes
// on.
func TestLostContent(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	f.await(f.edit(add9(0)), time.Now())
	before := f.balancers[0].State()
	server.Kill()
	server.Lose()
	server.Run()
	for _, b := range f.balancers {
		b.await(func(s Status) bool {
			return s.Reachable && strings.Contains(s.Held, ErrEmpty.Error())
		}, "report the loss")
		if !b.State().equal(before) {
			t.Errorf("%s has changed its state", b.name)
		}
	}
	// Half of the content is too little.
	half := f.fill(service("web", 5), service("dns", 3))
	for _, b := range f.balancers {
		b.await(func(s Status) bool { return s.Confirmable == half }, "refuse half the content")
		if want := "6 of 11 servers of web"; !strings.Contains(b.Status().Held, want) {
			t.Errorf("%s: %s; want %s", b.name, b.Status().Held, want)
		}
		if len(b.servers("web")) != 11 {
			t.Errorf("%s has %v", b.name, b.servers("web"))
		}
	}
	// The whole content ends that.
	began := time.Now()
	version := f.apply(Change{Edit: func(Tree) (Tree, error) { return before.Content, nil }})
	t.Logf("all balancers agree %s after the content is back", f.await(version, began))
	for _, b := range f.balancers {
		g := b.State().Generations["web"]
		if len(g.Sets) != 3 || len(g.Sets[0].Servers) != 11 {
			t.Errorf("%s: the history of web is %+v", b.name, g)
		}
	}
}

// A balancer that restarts while the store has lost its content, wholly or in part, goes on with what
// it followed last.
func TestRestartAtLostContent(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	b := f.balancers[2]
	before := b.State()
	server.Kill()
	server.Lose()
	server.Run()
	restart := func(held string) {
		t.Helper()
		b.stop()
		b.start()
		b.await(func(s Status) bool {
			return s.Reachable && s.FromCache && strings.Contains(s.Held, held)
		}, "start from its own file")
		if !b.State().equal(before) || len(b.servers("web")) != 10 || len(b.servers("dns")) != 3 {
			t.Errorf("after a restart with %q, the servers are %v and %v", held, b.servers("web"), b.servers("dns"))
		}
	}
	restart(ErrEmpty.Error())
	half := f.fill(service("web", 5))
	f.balancers[0].await(func(s Status) bool { return s.Confirmable == half }, "refuse half the content")
	restart("3 of 3 servers of dns, 5 of 10 servers of web")
	f.await(f.apply(Change{Edit: func(Tree) (Tree, error) { return before.Content, nil }}), time.Now())
}

// A watch that goes on at another store, whose revisions are lower, would never report a change.
func TestOtherStore(t *testing.T) {
	t.Parallel()
	server, other := etcdtest.Start(t), etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, server)
	f := newFleet(t, server.Endpoint())
	b := f.add(proxy.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	for i := range 10 {
		f.edit(add9(i))
	}
	f.await(f.edit(drain("web", "s1")), time.Now())
	proxy.Redirect(other)
	b.await(func(s Status) bool {
		return strings.Contains(s.Held, ErrEmpty.Error())
	}, "notice the other store")
}

// A store that was restored from a backup is followed as far as the limit permits.
func TestBackup(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	old := f.balancers[0].State().Version
	server.Kill()
	server.BackUp()
	server.Run()
	var version Version
	for i := range 10 {
		version = f.edit(add9(i))
	}
	f.await(version, time.Now())
	server.Kill()
	server.Restore()
	server.Run()
	for _, b := range f.balancers {
		b.await(func(s Status) bool { return s.Confirmable == old }, "refuse the backup")
		if len(b.servers("web")) != 20 {
			t.Errorf("%s has %v", b.name, b.servers("web"))
		}
		if err := b.Confirm(t.Context(), old); err != nil {
			t.Error(err)
		}
	}
	f.await(old, time.Now())
	for _, b := range f.balancers {
		if len(b.servers("web")) != 10 {
			t.Errorf("%s has %v after the confirmation", b.name, b.servers("web"))
		}
	}
}

// A confirmation is for the version that an operator has seen, and for no later one.
func TestConfirm(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 0
	b := f.add(server.Endpoint())
	first := f.fill(service("web", 10), service("dns", 10))
	f.await(first, time.Now())
	refused := func(version Version) {
		t.Helper()
		if err := b.Confirm(t.Context(), version); !errors.Is(err, ErrVersion) {
			t.Errorf("error %v", err)
		}
	}
	refused(Version{first.Epoch, first.Change + 1})
	removed := func(service string) Version {
		version := f.edit(func(t Tree) {
			for i := range 5 {
				delete(t, keyOf(serversKey, service, fmt.Sprint("s", i)))
			}
		})
		b.await(func(s Status) bool { return s.Confirmable == version }, "refuse")
		return version
	}
	seen := removed("web")
	next := removed("dns")
	if want := "segue store confirm " + next.String(); !strings.Contains(b.Status().Held, want) {
		t.Errorf("held: %s; want %s", b.Status().Held, want)
	}
	refused(seen)
	if len(b.servers("web")) != 10 || len(b.servers("dns")) != 10 {
		t.Error("a version that was not confirmed is in force")
	}
	for range 2 { // to confirm it again does no harm
		if err := b.Confirm(t.Context(), next); err != nil {
			t.Error(err)
		}
	}
	f.await(next, time.Now())
	if len(b.servers("web")) != 5 || len(b.servers("dns")) != 5 {
		t.Error("the confirmed version is not in force")
	}
}

// Removals above the limit need a permission.
func TestLimit(t *testing.T) {
	t.Parallel()
	f, _, _ := faulty(t)
	version := f.edit(func(t Tree) {
		for i := range 9 {
			delete(t, keyOf(serversKey, "web", fmt.Sprint("s", i)))
		}
	})
	for _, b := range f.balancers {
		b.await(func(s Status) bool { return s.Confirmable == version }, "refuse")
	}
	version = f.apply(Change{PermitsRemovals: true, Edit: func(t Tree) (Tree, error) {
		delete(t, keyOf(serversKey, "dns", "s1"))
		return t, nil
	}})
	f.await(version, time.Now())
	if got := len(f.balancers[0].servers("web")); got != 1 {
		t.Errorf("%d servers", got)
	}
}

// Keys that were deleted by hand, and keys with values that are not valid, change no balancer.
func TestDamage(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]struct{ key, value, want string }{
		"all servers": {serversKey, "", "would remove"},
		"head":        {headKey, "{", "key head"},
		"item":        {keyOf(serversKey, "web", "s1"), "[]", "has no version"},
		"value": {
			keyOf(serversKey, "web", "s1"), `[{"change":1,"value":{"address":"x"}}]`, "web/s1.address",
		},
		"name":             {serversKey + "web/%zz", `[{"change":1,"value":{}}]`, "%zz"},
		"unknown format":   {headKey, `{"format":2}`, "format 2"},
		"key of a service": {keyOf(servicesKey, "web"), "", "missing"},
	} {
		t.Run(name, func(t *testing.T) {
			server := etcdtest.Start(t)
			f := newFleet(t, server.Endpoint())
			b := f.add(server.Endpoint())
			f.await(f.fill(service("web", 10)), time.Now())
			before := b.State()
			client := server.Client()
			var err error
			if damage.value == "" {
				_, err = client.Delete(t.Context(), f.store.key(damage.key), clientv3.WithPrefix())
			} else {
				_, err = client.Put(t.Context(), f.store.key(damage.key), damage.value)
			}
			if err != nil {
				t.Fatal(err)
			}
			// The head moves, or is read.
			n, err := f.store.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if n.head != nil && n.head.Format == format && n.head.Change > 0 {
				next := *n.head
				next.Change++
				if _, err := client.Put(t.Context(), f.store.key(headKey), encode(next)); err != nil {
					t.Fatal(err)
				}
			}
			b.await(func(s Status) bool {
				return strings.Contains(s.Held, damage.want)
			}, "report "+damage.want)
			if !b.State().equal(before) {
				t.Error("the state has changed")
			}
		})
	}
}

// Generations in the store that were damaged become again what they were, at the next change, or when
// a balancer becomes the leader. The history of no balancer changes.
func TestDamagedGenerations(t *testing.T) {
	t.Parallel()
	record := keyOf(generationsKey, "web")
	for name, damage := range map[string]func(Tree, *Snapshot){
		"no pieces":          func(t Tree, n *Snapshot) { maps.DeleteFunc(t, isPiece) },
		"other pieces":       func(t Tree, n *Snapshot) { t[first(n.pieces)] = json.RawMessage("{}") },
		"no record":          func(t Tree, n *Snapshot) { delete(t, record) },
		"record not valid":   func(t Tree, n *Snapshot) { t[record] = json.RawMessage("{") },
		"value not valid":    func(t Tree, n *Snapshot) { t[record] = json.RawMessage(`[{"change":1,"value":7}]`) },
		"name not valid":     func(t Tree, n *Snapshot) { t[generationsKey+"%zz"] = t[record] },
		"another, not valid": func(t Tree, n *Snapshot) { t[generationsKey+"old"] = json.RawMessage("{") },
	} {
		for _, isRestarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %t", name, isRestarted), func(t *testing.T) {
				server := etcdtest.Start(t)
				f := newFleet(t, server.Endpoint())
				f.interval = 0
				b := f.add(server.Endpoint())
				f.await(f.fill(service("web", 4), service("dns", 2)), time.Now())
				f.await(f.edit(add9(0)), time.Now())
				f.await(f.edit(add9(1)), time.Now())
				before := b.State()
				if isRestarted {
					b.stop()
				}
				damageRecords(t, f.store, damage)
				version := before.Version
				if isRestarted {
					b.start()
				} else {
					version = f.edit(drain("web", "s1"))
				}
				f.await(version, time.Now())
				late := f.add(server.Endpoint())
				f.await(version, time.Now())
				for _, b := range []*simulated{b, late} {
					if now := b.State(); !reflect.DeepEqual(now.Generations, before.Generations) {
						t.Errorf("%s has the generations %+v, want %+v", b.name, now.Generations, before.Generations)
					}
				}
				f.await(f.edit(add9(2)), time.Now())
			})
		}
	}
}

func isPiece(key string, _ json.RawMessage) bool { return strings.HasPrefix(key, setsKey) }

func first(pieces map[string]string) string { return slices.Min(slices.Collect(maps.Keys(pieces))) }

// damageRecords changes the keys of generations and sets.
func damageRecords(t *testing.T, s *Store, damage func(Tree, *Snapshot)) {
	t.Helper()
	n, err := s.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	before := Tree{}
	for key, text := range n.pieces {
		before[key] = json.RawMessage(text)
	}
	for key, it := range n.items {
		if treeOf(key) == generationsKey {
			before[key] = json.RawMessage(it.text())
		}
	}
	after := maps.Clone(before)
	damage(after, n)
	for _, c := range before.changesTo(after) {
		if c.value == nil {
			_, err = s.client.Delete(t.Context(), s.key(c.key))
		} else {
			_, err = s.client.Put(t.Context(), s.key(c.key), string(c.value))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A leader that does not follow the released change does not know its generations. It leaves the
// repair to a balancer that does.
func TestDamageIsLeftToOthers(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 0
	leader := f.add(server.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
	leader.await(func(s Status) bool { return s.IsLeader }, "lead")
	leader.mu.Lock()
	leader.refuses = errors.New("no room")
	leader.mu.Unlock()
	other := f.add(server.Endpoint())
	f.await(f.edit(add9(0)), time.Now(), other)
	damageRecords(t, f.store, func(t Tree, _ *Snapshot) { maps.DeleteFunc(t, isPiece) })
	f.await(f.edit(add9(1)), time.Now(), other)
	g := other.State().Generations["web"]
	if g.Number != 3 || len(g.Sets) != 3 || len(g.Sets[1].Servers) != 5 || len(g.Sets[2].Servers) != 4 {
		t.Errorf("the history is %+v", g)
	}
}

// Content that no balancer can interpret is never released. All balancers report it and keep their
// state, and follow a correction.
func TestUnfitContent(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.add(server.Endpoint())
	f.add(server.Endpoint())
	first := f.fill(service("web", 10))
	f.await(first, time.Now())
	held := func(what string, b *simulated, version Version, wants ...string) {
		t.Helper()
		b.await(func(s Status) bool {
			isMissing := func(want string) bool { return !strings.Contains(s.Held, want) }
			return s.Newest == version && !slices.ContainsFunc(append(wants, version.String()), isMissing)
		}, "report "+what)
	}
	unfit := f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "x"}))
	for _, b := range f.balancers {
		held("the address", b, unfit, "web/s1.address", `"x"`, "segue store import --replace")
		if s := b.Status(); s.Follows != first || s.Confirmable != (Version{}) || len(b.servers("web")) != 10 {
			t.Errorf("%s has status %+v and %v", b.name, s, b.servers("web"))
		}
	}
	other := f.edit(put(keyOf(serversKey, "web", "s2"), map[string]any{"address": "y", "weight": -1}))
	held("all fields", f.balancers[0], other, "web/s1.address", "web/s2.address", "web/s2.weight")
	late := f.add(server.Endpoint())
	held("it at the start", late, other, "web/s1.address")
	if late.Status().Follows != first {
		t.Errorf("the status at the start is %+v", late.Status())
	}
	f.await(f.edit(func(t Tree) {
		put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "2001:db8:1::3"})(t)
		put(keyOf(serversKey, "web", "s2"), map[string]any{"address": "2001:db8:1::4"})(t)
	}), time.Now())
}

// A balancer that has given the lease back for some content takes it again for a correction.
func TestUnfitLeaderAfterCorrection(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "x"}))
	b.await(func(s Status) bool { return s.Held != "" && s.Leader == "" }, "give the lease back")
	began := time.Now()
	f.await(f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "2001:db8:1::3"})), began)
	if waited := time.Since(began); waited > unfitPause/2 {
		t.Errorf("the correction was followed after %s", waited)
	}
}

// A store that is filled for the first time, with what no balancer can interpret, is reported as such.
func TestUnfitFirstContent(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.fill(desired.Fields{"name": "web", "port": "http"})
	b.await(func(s Status) bool { return strings.Contains(s.Held, `web.port "http"`) }, "report the port")
	f.await(f.apply(Change{Edit: replace(service("web", 2))}), time.Now())
}

// A balancer that cannot follow a state keeps the one before, and tries again.
func TestBalancerRefuses(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	first := f.fill(service("web", 10))
	f.await(first, time.Now())
	b.mu.Lock()
	b.refuses = errors.New("no room")
	b.mu.Unlock()
	version := f.edit(add9(0))
	b.await(func(s Status) bool { return s.Held == "no room" && s.Follows == first }, "report the error")
	b.mu.Lock()
	b.refuses = nil
	b.mu.Unlock()
	f.await(version, time.Now())
}

// A balancer that cannot write its own file follows the store, reports that, and tries again.
func TestUnsaved(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	b.await(func(s Status) bool { return s.Held == "" }, "write its file")
	obstacle := filepath.Join(b.cache, "obstacle")
	if err := errors.Join(os.Remove(b.cache), os.MkdirAll(obstacle, 0o755)); err != nil {
		t.Fatal(err)
	}
	version := f.edit(add9(0))
	f.await(version, time.Now())
	b.await(func(s Status) bool { return strings.Contains(s.Unsaved, b.cache) }, "report its file")
	if err := os.RemoveAll(b.cache); err != nil {
		t.Fatal(err)
	}
	b.await(func(s Status) bool { return s.Unsaved == "" }, "write its file again")
	if saved, err := LoadCache(b.cache, f.store.prefix); err != nil || saved.Version != version {
		t.Errorf("the file has %+v, error %v", saved, err)
	}
}

// A balancer that cannot read the content gives the lease back, and leaves it to others for a while.
func TestUnfitLeader(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	leases := f.store.client.Watch(ctx, f.store.key(leaderKey), clientv3.WithFilterDelete())
	b.mu.Lock()
	b.cannotRead = errors.New("of a newer build")
	b.mu.Unlock()
	f.edit(add9(0))
	taken := 0
	for response := range leases { // until the time has passed
		taken += len(response.Events)
	}
	if taken > 1 {
		t.Errorf("the balancer has taken the lease %d times in three seconds", taken)
	}
	b.mu.Lock()
	b.cannotRead = nil
	b.mu.Unlock()
	other := f.add(server.Endpoint())
	other.await(func(s Status) bool { return s.Follows == s.Newest && s.Newest.Change > 1 }, "make the generations")
}

// A balancer that restarts while the store is away goes on with what it followed last.
func TestStartWithoutStore(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	b := f.balancers[2]
	before := b.State()
	server.Kill()
	b.stop()
	b.start()
	b.await(func(s Status) bool { return s.FromCache && s.Follows == before.Version }, "start")
	if !b.State().equal(before) || len(b.servers("web")) != 10 {
		t.Error("the state after the restart is another one")
	}
	// One that has never seen the store waits for it.
	late := f.add(server.Endpoint())
	waited := make(chan Status, 100)
	done := make(chan error, 1)
	go func() { done <- late.First(t.Context(), func(s Status) { waited <- s }) }()
	if s := <-waited; s.Reachable || s.Problem == "" {
		t.Errorf("status %+v", s)
	}
	select {
	case <-done:
		t.Fatal("started without a state")
	default:
	}
	server.Run()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	f.await(f.edit(add9(1)), time.Now())
}

// Stopped balancers leave nothing behind, whatever the store does.
func TestNoGoroutineIsLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("fleet", func(t *testing.T) {
		f, server, proxy := faulty(t)
		proxy.Cut()
		server.Stop()
		for _, b := range f.balancers {
			b.await(func(s Status) bool { return !s.Reachable }, "notice")
			b.stop()
		}
		server.Continue()
	})
	deadline := time.Now().Add(patience)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, before %d\n%s", runtime.NumGoroutine(), before,
				stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Many balancers agree after each change.
func TestManyBalancers(t *testing.T) {
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	version := f.fill(service("web", 20), service("dns", 3))
	began := time.Now()
	for range *manyBalancers {
		f.add(server.Endpoint())
	}
	t.Logf("%d balancers have started and agree after %s", *manyBalancers, f.await(version, began))
	var took []time.Duration
	for i := range 10 {
		began := time.Now()
		took = append(took, f.await(f.edit(add9(i)), began))
	}
	slices.Sort(took)
	t.Logf("they agree %s (median) and %s (worst) after a change", took[len(took)/2], took[len(took)-1])
	began = time.Now()
	version = f.edit(drain("web", "s1"))
	f.await(version, began)
	t.Logf("a server is drained on all of them after %s", time.Since(began).Round(time.Millisecond))
	if generations := f.balancers[0].State().Generations["web"].Number; generations != 11 {
		t.Errorf("generation %d, want 11", generations)
	}
	for number := range uint64(11) {
		name := generationName(version.Epoch, "web", number+1)
		if had := len(f.compared[name]); had != *manyBalancers {
			t.Errorf("generation %s: the tables of %d balancers were compared, want %d", name, had, *manyBalancers)
		}
	}
}
