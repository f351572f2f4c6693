// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
)

// TestReportedLoad checks that the policy follows the load that an application writes to memory.
// Without the application, all offers are accepted. The same holds without the agent's process. A
// reload changes the policy of a running agent and affects no connection.
func TestReportedLoad(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 2)
	vip := netip.AddrPortFrom(vip6.Addr(), 80)
	path := filepath.Join(t.TempDir(), "load")
	one := uint32(1)
	cfg := n.config(1, desired.SRv6Encap, vip6.Addr())
	cfg.Services[0].Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: &one}
	cfg.Services[0].Load = desired.Source{Kind: desired.LoadSharedMemory, Path: path, Interval: 10 * time.Millisecond}
	a := n.run(1, cfg, link.AttachTCX)
	n.run(2, n.config(2, desired.SRv6Encap, vip6.Addr()), link.AttachTCX)
	n.serve(1, vip6.Addr())
	n.serve(2, vip6.Addr())
	n.hunt(desired.SRv6Encap)

	// dialed returns the result of a connection at the first server. While a SYN waits for a
	// neighbour, the client repeats it, but an accepted SYN is not offered again.
	dialed := func() string {
		t.Helper()
		before := offers(t, a.kernel, vip)
		n.echo(n.dial(vip6.Addr()), 100)
		for result, count := range offers(t, a.kernel, vip) {
			if count > before[result] {
				return result
			}
		}
		return "not offered"
	}
	key := serviceKey(cfg.Services[0])
	shown := func() (uint32, bool) {
		var acceptance agentAcceptance
		testhost.Must(t, a.kernel.objects.Acceptances.Lookup(key, &acceptance))
		l, ok, err := a.kernel.view().reportedLoad(key, &acceptance)
		testhost.Must(t, err)
		return l.Busy, ok
	}
	if got := dialed(); got != "accepted_stale" {
		t.Errorf("without a load: %s", got)
	}
	application, err := loadshm.Open(path, 4)
	testhost.Must(t, err)
	first := n.dial(vip6.Addr())
	n.echo(first, 100) // it is no longer in the accept queue, which counts as load
	eventually(t, "the load is read", func() bool { b, ok := shown(); return ok && b == 0 })
	if got := dialed(); got != "accepted" {
		t.Errorf("idle: %s", got)
	}
	application.Begin()
	eventually(t, "the load is read", func() bool { b, ok := shown(); return ok && b == 1 })
	if got := dialed(); got != "refused" {
		t.Errorf("busy: %s", got)
	}

	always := *cfg
	always.Services = append([]desired.AgentService{}, cfg.Services...)
	always.Services[0].Accept = desired.Accept{Policy: desired.AcceptAlways}
	testhost.Must(t, a.Reload(context.Background(), &always, desired.Secrets{}))
	if got := dialed(); got != "accepted" {
		t.Errorf("with policy always: %s", got)
	}
	testhost.Must(t, a.Reload(context.Background(), cfg, desired.Secrets{}))
	n.echo(first, 100_000)
	if got := dialed(); got != "refused" {
		t.Errorf("with the policy before: %s", got)
	}
	testhost.Must(t, os.Remove(path))
	eventually(t, "the load is stale", func() bool { return dialed() == "accepted_stale" })
}

// TestRestartKeepsConnections checks that another process keeps the state of connections of the
// process before it.
func TestRestartKeepsConnections(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	n := newNetwork(t, 1)
	cfg := n.config(1, desired.SRv6Insert, vip6.Addr())
	cfg.Services[0].Accept = dynamicRule(50, 0.1, 5, 0)
	cfg.Services[0].Load.Kind = desired.LoadConnections
	a := n.run(1, cfg, link.AttachTCX)
	n.serve(1, vip6.Addr())
	signals := n.hunt(desired.SRv6Insert)
	c := n.dial(vip6.Addr())
	n.echo(c, 1000)
	before := offers(t, a.kernel, netip.AddrPortFrom(vip6.Addr(), 80))
	a.stop()
	a = n.run(1, cfg, link.AttachTCX)
	n.echo(c, 1000)
	if open := connections(t, a.kernel, cfg.Services[0]); open != 1 {
		t.Errorf("%d connections counted after the restart, want 1", open)
	}
	// A wrong count, as after a time without the program, is corrected at the next start.
	key := serviceKey(cfg.Services[0])
	kept, err := a.kernel.objects.Connections.Clone()
	testhost.Must(t, err)
	defer kept.Close()
	a.stop()
	testhost.Must(t, kept.Put(key, agentConnectionCount{Open: [2]int64{-1, 5}}))
	a = n.run(1, cfg, link.AttachTCX)
	eventually(t, "a wrong count is corrected", func() bool { return connections(t, a.kernel, cfg.Services[0]) == 1 })
	n.echo(c, 1000)
	if diff := cmp.Diff(before, offers(t, a.kernel, netip.AddrPortFrom(vip6.Addr(), 80))); diff != "" {
		t.Errorf("offers (-before +after):\n%s", diff)
	}
	// While one or two processes run, another load source decides. Connections are still counted.
	other := *cfg
	other.Services = slices.Clone(cfg.Services)
	other.Services[0].Load.Kind = desired.LoadAcceptQueue
	a.stop()
	a = n.run(1, &other, link.AttachTCX)
	testhost.Must(t, a.Reload(context.Background(), cfg, desired.Secrets{}))
	testhost.Must(t, a.Reload(context.Background(), &other, desired.Secrets{}))
	_ = c.Close()
	eventually(t, "the end is signalled", func() bool { return signals()[removeStickiness] > 0 })
	eventually(t, "the connection is counted as closed", func() bool { return connections(t, a.kernel, cfg.Services[0]) == 0 })
}
