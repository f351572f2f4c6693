// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// clustered is a fleet whose store has three members. Each balancer, and the operator, reaches each
// member by a proxy of its own.
type clustered struct {
	*fleet
	cluster *etcdtest.Cluster
	proxies []map[*etcdtest.Server]*etcdtest.Proxy // of each balancer
}

func newClustered(t *testing.T, balancers int) *clustered {
	t.Helper()
	c := &clustered{cluster: etcdtest.StartCluster(t, 3)}
	operator, _ := c.access(t)
	s, err := Open(&operator, "operator")
	testhost.Must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	c.fleet = fleetOf(t, s)
	for range balancers {
		etcd, proxies := c.access(t)
		c.proxies = append(c.proxies, proxies)
		c.addWith(etcd)
	}
	c.await(c.fill(service("web", 10), service("dns", 3)), time.Now())
	return c
}

// access returns a configuration that reaches each member by a new proxy, and the proxies.
func (c *clustered) access(t *testing.T) (desired.Etcd, map[*etcdtest.Server]*etcdtest.Proxy) {
	t.Helper()
	etcd := desired.Etcd{Prefix: prefix}
	proxies := map[*etcdtest.Server]*etcdtest.Proxy{}
	for _, m := range c.cluster.Members {
		proxies[m] = etcdtest.NewProxy(t, m)
		etcd.Endpoints = append(etcd.Endpoints, proxies[m].Endpoint())
	}
	return etcd, proxies
}

// onlyReaches cuts a balancer off from all members but one. reachesAll ends that.
func (c *clustered) onlyReaches(balancer int, m *etcdtest.Server, cut func(*etcdtest.Proxy)) {
	for other, proxy := range c.proxies[balancer] {
		if other != m {
			cut(proxy)
		}
	}
}

func (c *clustered) reachesAll() {
	for _, proxies := range c.proxies {
		for _, proxy := range proxies {
			proxy.Heal()
		}
	}
}

// The leader of the store is killed. A change at that moment is made as soon as there is another.
func TestClusterLeaderIsKilled(t *testing.T) {
	t.Parallel()
	c := newClustered(t, 3)
	for i := range 2 {
		leader := c.cluster.Leader()
		leader.Kill()
		began := time.Now()
		t.Logf("all balancers agree %s after the leader was killed", c.await(c.edit(addServer(i)), began))
		leader.Run()
	}
}

// A change that is asked for while the store has no leader is made when the store has one again.
func TestClusterWithoutLeader(t *testing.T) {
	t.Parallel()
	c := newClustered(t, 3)
	leader := c.cluster.Leader()
	other := c.cluster.Other(leader)
	leader.Kill()
	other.Kill()
	awaitRefusal := func() {
		for {
			_, err := c.store.Read(t.Context())
			if errors.Is(err, rpctypes.ErrNoLeader) {
				return
			}
			if t.Context().Err() != nil {
				t.Fatal(err)
			}
		}
	}
	awaitRefusal()
	made := make(chan error, 1)
	go func() {
		_, err := c.store.Apply(t.Context(), Change{Edit: func(tree Tree) (Tree, error) {
			drain("web", "s1")(tree)
			return tree, nil
		}})
		made <- err
	}()
	awaitRefusal() // the library has repeated this read for as long as that of the change
	leader.Run()
	other.Run()
	if err := <-made; err != nil {
		t.Error(err)
	}
}

// A balancer reaches only a member that is cut off from the others, and was their leader. It keeps
// its state, and the other balancers go on.
func TestClusterMinority(t *testing.T) {
	t.Parallel()
	c := newClustered(t, 3)
	minority := c.cluster.Leader()
	c.cluster.Isolate(minority)
	c.onlyReaches(0, minority, (*etcdtest.Proxy).Cut)
	alone, others := c.balancers[0], c.balancers[1:]
	alone.awaitLoss()
	before := alone.State()
	began := time.Now()
	version := c.edit(addServer(0))
	t.Logf("the balancers of the majority agree %s after a change", c.await(version, began, others...))
	if !alone.State().equal(before) {
		t.Error("the balancer of the minority follows a change")
	}
	if _, err := alone.opened.Apply(t.Context(), Change{Edit: func(t Tree) (Tree, error) {
		drain("web", "s1")(t)
		return t, nil
	}}); err == nil {
		t.Error("the balancer of the minority has made a change")
	}
	c.cluster.Rejoin(minority)
	c.reachesAll()
	began = time.Now()
	t.Logf("all balancers agree %s after the end of the partition", c.await(version, began))
	c.await(c.edit(drain("web", "s1")), time.Now())
}

// One of three members is cut off from the other two, and all balancers still reach all three. When
// this member knows that it has no leader, the balancers use the others, and get all answers.
func TestClusterMemberWithoutMajority(t *testing.T) {
	t.Parallel()
	c := newClustered(t, 3)
	c.cluster.Isolate(c.cluster.Other(c.cluster.Leader()))
	const quiet = 8 * probeInterval // each member gets several requests
	since, began := map[*simulated]time.Time{}, time.Now()
	for i, last := 0, began; time.Since(last) < quiet; i++ {
		c.await(c.edit(addServer(i)), time.Now())
		for _, b := range c.balancers {
			if s := b.Status(); !s.Reachable || !s.Since.Equal(since[b]) {
				since[b], last = s.Since, time.Now()
			}
		}
		if time.Since(began) > patience {
			t.Fatal("the store does not answer again and again")
		}
		time.Sleep(probeInterval / 2)
	}
	t.Logf("the store answers always after %s", (time.Since(began) - quiet).Round(time.Second))
}

// A member loses its disk, and is replaced. The balancers then reach only the new member, and
// follow it.
func TestClusterMemberIsReplaced(t *testing.T) {
	t.Parallel()
	c := newClustered(t, 3)
	lost := c.cluster.Other(c.cluster.Leader())
	lost.Kill()
	lost.Lose()
	began := time.Now()
	t.Logf("all balancers agree %s after a member was killed", c.await(c.edit(addServer(0)), began))
	c.cluster.Replace(lost)
	for i := range c.balancers {
		c.onlyReaches(i, lost, (*etcdtest.Proxy).Refuse)
	}
	began = time.Now()
	t.Logf("all balancers agree %s after a change that they have from the new member",
		c.await(c.edit(addServer(1)), began))
	for _, b := range c.balancers {
		if g := b.State().Generations["web"]; g.Number != 3 || len(g.Sets) != 3 {
			t.Errorf("%s: the history is %+v", b.name, g)
		}
	}
}
