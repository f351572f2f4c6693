// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
)

// slowStore is a store that answers no transactions while it is slow, although its connections and its
// watches work. While it is stuck, its watches deliver nothing, and every second transaction gets an
// answer, as if from another member. It counts how often all keys are read, and the answers.
type slowStore struct {
	clientv3.KV
	clientv3.Watcher
	isSlow  atomic.Bool
	isStuck atomic.Bool
	reads   atomic.Int64
	begun   atomic.Int64
	answers atomic.Int64
}

func (s *slowStore) Watch(ctx context.Context, key string, options ...clientv3.OpOption) clientv3.WatchChan {
	events := make(chan clientv3.WatchResponse)
	go func() {
		defer close(events)
		for response := range s.Watcher.Watch(ctx, key, options...) {
			if s.isStuck.Load() {
				continue
			}
			select {
			case events <- response:
			case <-ctx.Done():
			}
		}
	}()
	return events
}

func (s *slowStore) Get(ctx context.Context, key string, options ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if key == prefix+"/" {
		s.reads.Add(1)
	}
	return s.KV.Get(ctx, key, options...)
}

func (s *slowStore) Txn(ctx context.Context) clientv3.Txn { return slowTxn{s.KV.Txn(ctx), s, ctx} }

type slowTxn struct {
	clientv3.Txn
	store *slowStore
	ctx   context.Context
}

func (t slowTxn) Then(operations ...clientv3.Op) clientv3.Txn {
	return slowTxn{t.Txn.Then(operations...), t.store, t.ctx}
}

func (t slowTxn) If(conditions ...clientv3.Cmp) clientv3.Txn {
	return slowTxn{t.Txn.If(conditions...), t.store, t.ctx}
}

func (t slowTxn) Commit() (*clientv3.TxnResponse, error) {
	if t.store.isSlow.Load() || t.store.isStuck.Load() && t.store.begun.Add(1)%2 == 1 {
		<-t.ctx.Done()
		return nil, t.ctx.Err()
	}
	t.store.answers.Add(1)
	return t.Txn.Commit()
}

// slowed is a fleet of which the last balancer has a slow store.
func slowed(t *testing.T) (*fleet, *simulated, *slowStore, *etcdtest.Server) {
	t.Helper()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.add(server.Endpoint())
	f.await(f.fill(service("web", 10)), time.Now())
	b := f.member(desired.Etcd{Endpoints: []string{server.Endpoint()}, Prefix: prefix})
	b.connect()
	slow := &slowStore{KV: b.opened.client.KV, Watcher: b.opened.client.Watcher}
	b.opened.client.KV, b.opened.client.Watcher = slow, slow
	b.run()
	f.balancers = append(f.balancers, b)
	f.follow(addServer(0))
	if reads := slow.reads.Load(); reads != 1 {
		t.Fatalf("all keys were read %d times at the start", reads)
	}
	return f, b, slow, server
}

// A slow store does not end the watch: the balancer reports the store, follows its changes meanwhile,
// and does not read all keys again.
func TestSlowAnswers(t *testing.T) {
	t.Parallel()
	f, b, slow, _ := slowed(t)
	for i := range 2 {
		slow.isSlow.Store(true)
		b.awaitLoss()
		f.follow(addServer(i + 1))
		slow.isSlow.Store(false)
		b.await(func(s Status) bool { return s.Reachable && s.Problem == "" }, "notice that the store answers")
	}
	f.follow(drain("web", "s1"))
	if reads := slow.reads.Load(); reads != 1 {
		t.Errorf("all keys were read %d times", reads)
	}
}

// The member of etcd at which a balancer watches the store is stuck, although its connections work.
// Other members answer. The balancer reads all keys again sooner than if all of its probes had
// answers.
func TestStuckMember(t *testing.T) {
	t.Parallel()
	f, b, slow, _ := slowed(t)
	slow.isStuck.Store(true)
	before := slow.answers.Load()
	f.await(f.edit(addServer(1)), time.Now(), f.balancers[0])
	for slow.reads.Load() == 1 {
		b.await(func(s Status) bool { return s.Reachable }, "get an answer")
		b.await(func(s Status) bool { return !s.Reachable || slow.reads.Load() > 1 }, "miss an answer")
	}
	if answers := slow.answers.Load() - before; answers > missedProbes {
		t.Errorf("the balancer got %d answers before it read all keys again", answers)
	}
	slow.isStuck.Store(false)
	f.follow(drain("web", "s1"))
}

// A store is restored from a backup while it does not answer, and has more revisions than before
// when it answers again. The watch goes on there, but the balancer keeps none of the lost changes.
func TestRestoredWhileSlow(t *testing.T) {
	t.Parallel()
	f, b, slow, server := slowed(t)
	near := f.balancers[0]
	whileDown(server, server.BackUp)
	f.follow(addServer(1))
	slow.isSlow.Store(true)
	b.awaitLoss()
	version := f.rewrite(server, near)
	slow.isSlow.Store(false)
	f.await(version, time.Now())
	if got, want := b.servers("web"), near.servers("web"); !slices.Equal(got, want) {
		t.Errorf("the balancer has %v, want %v", got, want)
	}
}
