// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// A store that has lost its content changes no balancer. When it is filled again, the history goes
// on.
func TestLostContent(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	f.follow(addServer(0))
	before := f.balancers[0].State()
	whileDown(server, server.Lose)
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
	// The balancers follow the whole content.
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

// After a loss of the content, a balancer without history leaves the lease to one with a history.
func TestLostContentAndStranger(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, server)
	f := newFleet(t, server.Endpoint())
	f.interval = 0
	b := f.add(proxy.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
	f.follow(addServer(0))
	before := b.State()
	server.Kill()
	server.Lose()
	proxy.Cut()
	server.Run()
	f.deference = time.Hour
	stranger := f.add(server.Endpoint())
	stranger.await(func(s Status) bool { return strings.Contains(s.Held, ErrEmpty.Error()) }, "see the loss")
	version := f.apply(Change{Fills: true, Edit: func(Tree) (Tree, error) { return before.Content, nil }})
	stranger.await(func(s Status) bool { return s.Newest == version }, "see the content")
	if s := stranger.Status(); s.Leader != "" {
		t.Errorf("%s is the leader", s.Leader)
	}
	proxy.Heal()
	f.await(version, time.Now())
	for _, b := range f.balancers {
		if g := b.State().Generations; !reflect.DeepEqual(g, before.Generations) {
			t.Errorf("%s has the generations %+v, want %+v", b.name, g, before.Generations)
		}
	}
}

// Balancers without history begin a history if no other balancer does.
func TestStrangerBegins(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.deference = 500 * time.Millisecond
	f.add(server.Endpoint())
	f.add(server.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
}

// A balancer that restarts while the store has lost its content, wholly or in part, goes on with what
// it followed last.
func TestRestartAtLostContent(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	b := f.balancers[2]
	before := b.State()
	whileDown(server, server.Lose)
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

// A balancer notices that its watch goes on at another store with lower revisions. The watch itself
// would never report a change there.
func TestOtherStore(t *testing.T) {
	t.Parallel()
	server, other := etcdtest.Start(t), etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, server)
	f := newFleet(t, server.Endpoint())
	b := f.add(proxy.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	for i := range 10 {
		f.edit(addServer(i))
	}
	f.follow(drain("web", "s1"))
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
	whileDown(server, server.BackUp)
	var version Version
	for i := range 10 {
		version = f.edit(addServer(i))
	}
	f.await(version, time.Now())
	whileDown(server, server.Restore)
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

// A leader goes on at a store that was restored from a backup, and has lower revisions than before.
func TestLeaderAfterBackup(t *testing.T) {
	t.Parallel()
	f, server, b := filled(t, service("web", 10))
	b.await(func(s Status) bool { return s.IsLeader }, "lead")
	whileDown(server, server.BackUp)
	for i := range 3 {
		f.follow(addServer(i))
	}
	f.await(f.edit(drain("web", "s1")), time.Now()) // after which the leader removes no keys
	whileDown(server, server.Restore)
	f.mu.Lock()
	clear(f.tables) // generations of the same numbers have other servers now
	f.mu.Unlock()
	f.follow(addServer(3))
}

// A store is restored from a backup while a balancer does not reach it. When the balancer reaches
// it again, the store has more revisions than before. The balancer keeps none of the lost changes.
func TestBackupDuringPartition(t *testing.T) {
	t.Parallel()
	f, server, proxy := faulty(t)
	whileDown(server, server.BackUp)
	f.edit(addServer(0))
	f.follow(addServer(1))
	far, near := f.balancers[:2], f.balancers[2]
	lost, err := f.store.Read(t.Context())
	testhost.Must(t, err)
	proxy.Cut()
	for _, b := range far {
		b.awaitLoss()
	}
	version := f.rewrite(server, near)
	now, err := f.store.Read(t.Context())
	testhost.Must(t, err)
	if now.revision <= lost.revision || version.Change <= lost.head.Change {
		t.Fatalf("revision %d at %s, before %d", now.revision, version, lost.revision)
	}
	proxy.Heal()
	f.await(version, time.Now())
	for _, b := range far {
		if got, want := b.servers("web"), near.servers("web"); !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", b.name, got, want)
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

// Balancers do not follow content in which too many servers are drained or have the weight 0,
// unless somebody has named these servers. An old backup may be such content.
func TestLimitCountsDrains(t *testing.T) {
	t.Parallel()
	f, _, _ := faulty(t)
	damage := func(fields desired.Fields) func(Tree) {
		return func(tree Tree) {
			for i := range 4 {
				put(overrideKey("web", fmt.Sprint("s", i)), bareOverride{Set: fields})(tree)
			}
		}
	}
	edit := func(change func(Tree)) func(Tree) (Tree, error) {
		return func(t Tree) (Tree, error) { change(t); return t, nil }
	}
	heal := func(tree Tree) {
		for i := range 4 {
			delete(tree, overrideKey("web", fmt.Sprint("s", i)))
		}
	}
	drained := desired.Fields{"drained": true}
	for _, fields := range []desired.Fields{drained, {"weight": 0}, {"weight": "0"}} {
		version := f.edit(damage(fields))
		for _, b := range f.balancers {
			b.await(func(s Status) bool { return s.Confirmable == version }, "refuse")
			if want := "would take out of service 4 of 10 servers of web"; !strings.Contains(b.Status().Held, want) {
				t.Errorf("%v: held: %s, want %s", fields, b.Status().Held, want)
			}
			if b.isDrained("web", "s1") {
				t.Errorf("%v: a held drain is in force", fields)
			}
		}
		f.follow(heal)
	}
	f.await(f.apply(Change{NamesDrains: true, Edit: edit(damage(drained))}), time.Now())
	f.follow(heal)
	// A change that names its drains does not permit removals.
	version := f.apply(Change{NamesDrains: true, Edit: edit(func(tree Tree) {
		damage(drained)(tree)
		for i := range 4 {
			delete(tree, keyOf(serversKey, "web", fmt.Sprint("s", 9-i)))
		}
	})})
	for _, b := range f.balancers {
		b.await(func(s Status) bool { return s.Confirmable == version }, "refuse")
	}
}
