// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

var (
	manyBalancers = flag.Int("balancers", 10, "balancers in TestManyBalancers")
	bulkServers   = flag.Int("bulk", 600, "servers in TestBulk")
)

// addServer returns an edit that adds a server to web.
func addServer(n int) func(Tree) {
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
		b.awaitLoss()
	}
	before := f.balancers[0].State()
	var version Version
	for i := range 3 {
		version = f.edit(addServer(i))
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
	version := f.edit(addServer(0))
	t.Logf("another balancer makes the generations %s after the cut", f.await(version, began, other))
	other.await(func(s Status) bool { return s.Leader == other.name }, "hold the lease")
	proxy.Heal()
	f.await(version, time.Now())
	f.follow(addServer(1))
}

// A balancer that has lost its lease without knowing releases nothing.
func TestLostLease(t *testing.T) {
	t.Parallel()
	f, _, b := filled(t, service("web", 10))
	b.stop()
	version := f.edit(addServer(0))
	n, err := f.store.Read(t.Context())
	testhost.Must(t, err)
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
	f, server, b := filled(t, service("web", 10))
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
		b.awaitLoss()
	}
	server.Run()
	began := time.Now()
	version := f.edit(addServer(0))
	t.Logf("all balancers agree %s after the restart", f.await(version, began))
}

// A watch whose revisions were compacted reads everything anew.
func TestCompaction(t *testing.T) {
	t.Parallel()
	f, server, proxy := faulty(t)
	proxy.Cut()
	for _, b := range f.balancers[:2] {
		b.awaitLoss()
	}
	for i := range 5 {
		f.edit(addServer(i))
	}
	f.edit(func(t Tree) { delete(t, keyOf(serversKey, "web", "s1")) })
	version := f.follow(drain("web", "s2"), f.balancers[2])
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
		version = f.edit(addServer(i))
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

// A store answers pings, but no requests, as if its disk hangs. A request still ends by itself.
func TestRequestsHaveTimeLimits(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "[::1]:0")
	testhost.Must(t, err)
	pings := grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingInterval / 2})
	server := grpc.NewServer(pings, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	}))
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = open(t, "http://"+listener.Addr().String(), "balancer").ask(ctx)
	if err == nil || ctx.Err() != nil {
		t.Errorf("the request has ended with %v, and its caller's limit: %v", err, ctx.Err())
	}
}

// A balancer that cannot write its own file follows the store, reports that, and tries again.
func TestUnsaved(t *testing.T) {
	t.Parallel()
	f, _, b := filled(t, service("web", 10))
	b.await(func(s Status) bool { return s.Held == "" }, "write its file")
	obstacle := filepath.Join(b.cache, "obstacle")
	testhost.Must(t, errors.Join(os.Remove(b.cache), os.MkdirAll(obstacle, 0o755)))
	version := f.follow(addServer(0))
	b.await(func(s Status) bool { return strings.Contains(s.Unsaved, b.cache) }, "report its file")
	testhost.Must(t, os.RemoveAll(b.cache))
	b.await(func(s Status) bool { return s.Unsaved == "" }, "write its file again")
	if saved, err := LoadCache(b.cache, f.store.prefix); err != nil || saved.Version != version {
		t.Errorf("the file has %+v, error %v", saved, err)
	}
}

// A balancer that restarts while the store is away goes on with its last state.
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
	// A balancer that has never seen the store waits for it.
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
	testhost.Must(t, <-done)
	f.follow(addServer(1))
}

// Stopped balancers leave nothing behind, whatever the store does.
func TestNoGoroutineIsLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("fleet", func(t *testing.T) {
		f, server, proxy := faulty(t)
		proxy.Cut()
		server.Stop()
		for _, b := range f.balancers {
			b.awaitLoss()
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
		took = append(took, f.await(f.edit(addServer(i)), began))
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
