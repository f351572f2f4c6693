// SPDX-License-Identifier: Apache-2.0

package etcdtest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/testhost"
)

// Cluster is a cluster of several members. Each runs in a network namespace of its own. A bridge in
// another namespace connects them. Clients reach a member by Dial, and so by a Proxy, even if the
// member does not reach the others.
type Cluster struct {
	Members []*Server

	t      testing.TB
	middle *testhost.Namespace
}

// StartCluster starts a cluster, and ends it with the test. It skips the test if etcd is not
// installed, or if the test may not make network namespaces.
func StartCluster(t testing.TB, members int) *Cluster {
	t.Helper()
	testhost.NeedCommand(t, "etcd", "etcd-server")
	c := &Cluster{t: t, middle: testhost.NewNamespace(t)}
	c.do(func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "br0"
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes})
	})
	c.setLink("br0", netlink.LinkSetUp)
	var names []string
	for i := range members {
		m := &Server{
			t: t, name: fmt.Sprint("m", i), dir: filepath.Join(t.TempDir(), "etcd"), place: testhost.NewNamespace(t),
			listen: "127.0.0.1:2379", scheme: "http",
		}
		address := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
		m.peer = fmt.Sprintf("http://%s:2380", address)
		names = append(names, m.name+"="+m.peer)
		testhost.Connect(t, c.middle, m.name, nil, m.place, "eth0",
			[]netip.Prefix{netip.PrefixFrom(address, 24)})
		c.do(func() error {
			bridge, err := netlink.LinkByName("br0")
			if err != nil {
				return err
			}
			port, err := netlink.LinkByName(m.name)
			if err != nil {
				return err
			}
			return netlink.LinkSetMaster(port, bridge)
		})
		c.Members = append(c.Members, m)
	}
	for _, m := range c.Members {
		m.cluster = strings.Join(names, ",")
		t.Cleanup(m.Kill)
		m.Run()
	}
	c.Leader() // waits until there is one
	return c
}

// do runs a function in the namespace of the bridge.
func (c *Cluster) do(f func() error) {
	c.t.Helper()
	if err := c.middle.Do(f); err != nil {
		c.t.Fatal(err)
	}
}

// setLink calls set with the interface of this name in the namespace of the bridge.
func (c *Cluster) setLink(name string, set func(netlink.Link) error) {
	c.t.Helper()
	c.do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return set(link)
	})
}

// Isolate cuts a member off from the others. Rejoin ends that.
func (c *Cluster) Isolate(m *Server) { c.t.Helper(); c.setLink(m.name, netlink.LinkSetDown) }

// Rejoin ends Isolate.
func (c *Cluster) Rejoin(m *Server) { c.t.Helper(); c.setLink(m.name, netlink.LinkSetUp) }

// Leader waits until the members that run and reach each other have a leader, and returns it.
func (c *Cluster) Leader() *Server {
	c.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for time.Now().Before(deadline) {
		for _, m := range c.Members {
			if m.run != nil && c.leads(m) {
				return m
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	c.t.Fatal("the members of etcd elect no leader")
	return nil
}

// leads tells whether a member is the leader of a majority. A leader that has lost its majority
// does not answer reads.
func (c *Cluster) leads(m *Server) bool {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(c.t.Context()), time.Second)
	defer cancel()
	client := m.Client()
	defer client.Close()
	status, err := client.Status(ctx, m.Endpoint())
	if err != nil || status.Leader != status.Header.MemberId {
		return false
	}
	_, err = client.Get(ctx, "any")
	return err == nil
}

// Other returns a member that is none of the given ones.
func (c *Cluster) Other(than ...*Server) *Server {
	c.t.Helper()
	for _, m := range c.Members {
		isOther := true
		for _, t := range than {
			isOther = isOther && m != t
		}
		if isOther {
			return m
		}
	}
	c.t.Fatal("the cluster has no other member")
	return nil
}

// Replace makes a member that was killed and has lost its disk a new member, as etcd's manual says,
// and starts it.
func (c *Cluster) Replace(m *Server) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	client := c.Leader().Client()
	defer client.Close()
	list, err := client.MemberList(ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, member := range list.Members {
		if member.Name == m.name {
			c.reconfigure(ctx, func() error {
				_, err := client.MemberRemove(ctx, member.ID)
				return err
			})
		}
	}
	c.reconfigure(ctx, func() error {
		_, err := client.MemberAdd(ctx, []string{m.peer})
		return err
	})
	m.existing = true
	m.Run()
}

// reconfigure changes the members. For five seconds after an election, etcd may refuse that.
func (c *Cluster) reconfigure(ctx context.Context, change func() error) {
	c.t.Helper()
	for {
		err := change()
		if err == nil {
			return
		}
		if !errors.Is(err, rpctypes.ErrUnhealthy) || ctx.Err() != nil {
			c.t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
