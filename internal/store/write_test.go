// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// lossy is a fleet without balancers, and a connection to its store by a proxy.
type lossy struct {
	*fleet
	far   *Store // by the proxy
	proxy *etcdtest.Proxy
}

func newLossy(t *testing.T) *lossy {
	t.Helper()
	server := etcdtest.Start(t)
	l := &lossy{fleet: newFleet(t, server.Endpoint()), proxy: etcdtest.NewProxy(t, server)}
	l.far = open(t, l.proxy.Endpoint(), "far")
	l.fill(service("web", 4))
	return l
}

// version returns the present version, and the drained servers.
func (l *lossy) version() (Version, []string) {
	l.t.Helper()
	n, err := l.store.Read(l.t.Context())
	testhost.Must(l.t, err)
	document, err := n.Tree().Document()
	testhost.Must(l.t, err)
	var drained []string
	for _, o := range document.Overrides {
		drained = append(drained, o.Server)
	}
	return n.Version(), drained
}

// drain drains s1 for an expected version. The fault happens just before the store gets the change.
func (l *lossy) drain(ctx context.Context, expected Version, fault func()) (Version, error) {
	return l.far.Apply(ctx, Change{Expected: expected, Edit: func(t Tree) (Tree, error) {
		drain("web", "s1")(t)
		fault()
		return t, nil
	}})
}

// awaitChange waits until the store has a change after a version. Any goroutine may call it.
func (l *lossy) awaitChange(before Version) error {
	deadline := time.Now().Add(patience)
	for {
		n, err := l.store.Read(l.t.Context())
		switch {
		case err != nil:
			return err
		case n.Version() != before:
			return nil
		case time.Now().After(deadline):
			return errors.New("the store gets no change")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// The answer to a change is lost. The writer finds out that the change was made.
func TestAnswerIsLost(t *testing.T) {
	t.Parallel()
	l := newLossy(t)
	before, _ := l.version()
	var healing sync.WaitGroup
	healing.Go(func() {
		if err := l.awaitChange(before); err != nil {
			t.Error(err)
		}
		l.proxy.Heal()
	})
	version, err := l.drain(t.Context(), before, l.proxy.Mute)
	healing.Wait()
	if err != nil || version.Change != before.Change+1 {
		t.Errorf("version %s, error %v", version, err)
	}
	if now, drained := l.version(); now != version || len(drained) != 1 {
		t.Errorf("the store has version %s, with %v drained", now, drained)
	}
}

// A change is lost on its way. The writer finds that out, and makes it.
func TestChangeIsLost(t *testing.T) {
	t.Parallel()
	l := newLossy(t)
	before, _ := l.version()
	var cut sync.Once
	version, err := l.drain(t.Context(), before, func() {
		cut.Do(func() {
			l.proxy.Cut()
			// Heal ends the connections, and their data is lost.
			time.AfterFunc(time.Second, l.proxy.Heal)
		})
	})
	if err != nil || version.Change != before.Change+1 {
		t.Errorf("version %s, error %v", version, err)
	}
	if now, drained := l.version(); now != version || len(drained) != 1 {
		t.Errorf("the store has version %s, with %v drained", now, drained)
	}
}

// The store does not answer for long. The error says that the change may have been made, and a
// repetition for the same version does not make it twice.
func TestUnknownChange(t *testing.T) {
	t.Parallel()
	l := newLossy(t)
	before, _ := l.version()
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		defer cancel()
		if err := l.awaitChange(before); err != nil {
			t.Error(err)
		}
	})
	if _, err := l.drain(ctx, before, l.proxy.Mute); !errors.Is(err, ErrUnknown) {
		t.Errorf("error %v", err)
	}
	watching.Wait()
	l.proxy.Heal()
	if _, err := l.drain(t.Context(), before, func() {}); !errors.Is(err, ErrVersion) {
		t.Errorf("error %v", err)
	}
}

// If a store refuses a change, the error is not uncertain: the change was not made.
func TestRefusedBatch(t *testing.T) {
	t.Parallel()
	l := newLossy(t)
	put := func(bytes int) clientv3.Op {
		return clientv3.OpPut(l.store.key(fmt.Sprint("x", bytes)), strings.Repeat("x", bytes))
	}
	many := make([]clientv3.Op, 129)
	for i := range many {
		many[i] = put(i)
	}
	for name, operations := range map[string][]clientv3.Op{
		"larger than the server takes": {put(1700 << 10)}, "larger than the client sends": {put(3 << 20)},
		"of many operations": many,
	} {
		_, ok, err := l.store.commit(t.Context(), nil, operations)
		if ok || err == nil || errors.Is(err, errUncertain) {
			t.Errorf("a change %s: ok %t, error %v", name, ok, err)
		}
	}
}

// A writer whose answer was lost finds out whether its change was made, even if others have made
// changes since. A change that was not made by then is not made later.
func TestOutcome(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		isMade bool
		others int // changes since
		want   error
	}{
		"made":                           {true, 0, nil},
		"made, and others since":         {true, 3, nil},
		"on its way":                     {false, 0, errNotMade},
		"too late, as others were first": {false, 2, errConflict},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLossy(t)
			w := &writer{Store: l.store, by: "lost"}
			n, err := l.store.Read(t.Context())
			testhost.Must(t, err)
			next := *n.head
			next.Change, next.By = next.Change+1, w.by
			send := func() (revision int64, ok bool) {
				put := []clientv3.Op{clientv3.OpPut(w.key(headKey), encode(next))}
				revision, ok, err := w.commit(t.Context(), []clientv3.Cmp{w.headIs(n.headAt)}, put)
				testhost.Must(t, err)
				return revision, ok
			}
			var madeAt int64
			if c.isMade {
				madeAt, _ = send()
			}
			for i := range c.others {
				l.edit(addServer(i))
			}
			for range 2 { // the first answer may be lost, too
				at, err := w.outcome(t.Context(), n.headAt, n.head, &next, false)
				if !errors.Is(err, c.want) || at != madeAt {
					t.Errorf("revision %d, error %v; want %d, %v", at, err, madeAt, c.want)
				}
			}
			if _, ok := send(); ok {
				t.Error("the change is made after all")
			}
			l.edit(drain("web", "s2")) // changes go on
		})
	}
}

// If the earlier values of the head are gone, it stays unknown whether a change was made.
func TestOutcomeIsGone(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*etcdtest.Server, *Store) error{
		"compacted": func(server *etcdtest.Server, _ *Store) error { server.Compact(); return nil },
		"removed": func(server *etcdtest.Server, s *Store) error {
			_, err := server.Client().Delete(t.Context(), s.prefix, clientv3.WithPrefix())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := etcdtest.Start(t)
			f := newFleet(t, server.Endpoint())
			f.fill(service("web", 4))
			w := &writer{Store: f.store, by: "lost"}
			n, err := f.store.Read(t.Context())
			testhost.Must(t, err)
			next := *n.head
			next.Change, next.By = next.Change+1, w.by
			f.edit(addServer(0))
			f.edit(addServer(1))
			testhost.Must(t, lose(server, f.store))
			if _, err := w.outcome(t.Context(), n.headAt, n.head, &next, false); !errors.Is(err, ErrUnknown) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// A writer that fills a store has given up, and has left the head of a store without services. The
// next writer can fill the store, even with no services.
func TestFillAfterLoss(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	w := &writer{Store: f.store, by: "lost"}
	empty := head{Format: format, Epoch: newID()}
	next := empty
	next.Change = 1
	if _, err := w.outcome(t.Context(), 0, &empty, &next, false); !errors.Is(err, errNotMade) {
		t.Fatal(err)
	}
	version := f.fill()
	n, err := f.store.Read(t.Context())
	testhost.Must(t, err)
	if err := n.Check(); err != nil || version.Change != 1 || n.Version() != version {
		t.Errorf("version %s, error %v", version, err)
	}
}

// A change of many servers takes effect as a whole, even if its writer dies.
func TestBulk(t *testing.T) {
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	for range 3 {
		f.add(server.Endpoint())
	}
	many := *bulkServers
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
	testhost.Must(t, err)
	after := Tree{keyOf(servicesKey, "web"): n.Tree()[keyOf(servicesKey, "web")]}
	for i := range 300 {
		key := keyOf(serversKey, "web", fmt.Sprint("s", i+400))
		testhost.Must(t, after.put(key, map[string]any{"weight": 7}))
	}
	changes := n.Tree().changesTo(after)
	all := w.batches(n, changes, n.head.Change+1)
	if len(all) < 5 {
		t.Fatalf("%d transactions", len(all))
	}
	reserved := *n.head
	reserved.Writing, reserved.By = n.head.Change+1, w.by
	at, err := w.finish(t.Context(), n.headAt, nil, n.head, &reserved)
	testhost.Must(t, err)
	for _, batch := range all[:len(all)-1] {
		testhost.Must(t, w.writeBatch(t.Context(), at, batch))
	}
	late := f.add(server.Endpoint())
	f.await(first, time.Now())
	if !late.State().equal(before) {
		t.Error("a balancer that starts meanwhile has another state")
	}
	f.follow(drain("web", "s1"))
	if got := len(b.servers("web")); got != 500 || !b.isDrained("web", "s1") {
		t.Errorf("%d servers after the next change, want 500", got)
	}
	// Should the writer live after all, it can write no more.
	if err := w.writeBatch(t.Context(), at, all[len(all)-1]); !errors.Is(err, errConflict) {
		t.Errorf("the dead writer writes: %v", err)
	}
	n, err = f.store.Read(t.Context())
	testhost.Must(t, err)
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
	testhost.Must(t, err)
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
