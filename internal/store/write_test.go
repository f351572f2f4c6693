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
)

// lossy is a store that an operator reaches by a proxy.
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
	if err != nil {
		l.t.Fatal(err)
	}
	document, err := n.Tree().Document()
	if err != nil {
		l.t.Fatal(err)
	}
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

// awaitChange waits until the store has a change after a version.
func (l *lossy) awaitChange(before Version) {
	l.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		if now, _ := l.version(); now != before {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatal("the store gets no change")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// The answer to a change is lost. The writer finds out that the change was made.
func TestAnswerIsLost(t *testing.T) {
	t.Parallel()
	l := newLossy(t)
	before, _ := l.version()
	healed := make(chan struct{})
	go func() {
		defer close(healed)
		l.awaitChange(before)
		l.proxy.Heal()
	}()
	version, err := l.drain(t.Context(), before, l.proxy.Mute)
	<-healed
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
			// The connections end then, with what they carry.
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
	go func() {
		defer cancel()
		l.awaitChange(before)
	}()
	if _, err := l.drain(ctx, before, l.proxy.Mute); !errors.Is(err, ErrUnknown) {
		t.Errorf("error %v", err)
	}
	l.proxy.Heal()
	if _, err := l.drain(t.Context(), before, func() {}); !errors.Is(err, ErrVersion) {
		t.Errorf("error %v", err)
	}
}

// A store that refuses a change has not made it, so nobody has to find out.
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

// A writer whose answer was lost finds out what became of its change, whatever others have done
// since. A change that was not made by then is not made later.
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
			if err != nil {
				t.Fatal(err)
			}
			next := *n.head
			next.Change, next.By = next.Change+1, w.by
			send := func() (revision int64, ok bool) {
				put := []clientv3.Op{clientv3.OpPut(w.key(headKey), encode(next))}
				revision, ok, err := w.commit(t.Context(), []clientv3.Cmp{w.headIs(n.headAt)}, put)
				if err != nil {
					t.Fatal(err)
				}
				return revision, ok
			}
			var madeAt int64
			if c.isMade {
				madeAt, _ = send()
			}
			for i := range c.others {
				l.edit(add9(i))
			}
			for range 2 { // the first answer may be lost, too
				at, err := w.outcome(t.Context(), n.headAt, n.head, &next)
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
