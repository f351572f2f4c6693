// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/store/etcdtest"
)

const fleetText = `
node: {instance: edge, name: %s, interface: eth0, addresses: ["2001:db8::1"], state: %s}
store: {etcd: {endpoints: [%q], prefix: /segue/main}}
`

// storedText has two further servers.
const storedText = services + `  - {name: s3, address: "2001:db8:1::3"}
  - {name: s4, address: "2001:db8:1::4"}
`

// member is a balancer of a fleet, without a data path.
type member struct {
	*site[*desired.Balancer]
	fleet *Fleet
}

// server returns a server as the balancer has it.
func (m *member) server(name string) *desired.Server { return m.runner.last().Server("web", name) }

// join starts a member that reaches the store at an endpoint.
func join(t *testing.T, name, endpoint string) *member {
	t.Helper()
	m := &member{site: writeSite[*desired.Balancer](t, fmt.Sprintf(fleetText, name, "%q", endpoint))}
	b, _, err := LoadBalancer(m.file)
	if err != nil {
		t.Fatal(err)
	}
	if m.fleet, err = b.Join(t.Context(), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.fleet.Close() })
	if err := m.fleet.First(t.Context(), func(store.Status) {}); err != nil {
		t.Fatal(err)
	}
	if err := m.runner.Follow(t.Context(), b.Desired(), b.Generations()); err != nil {
		t.Fatal(err)
	}
	m.Controller = &b.Controller
	b.Attach(&m.runner, m.report)
	return m
}

// await waits until all members follow a version.
func await(t *testing.T, version string, members ...*member) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, m := range members {
		err := m.fleet.Await(ctx, func(s store.Status) bool {
			return s.Follows.String() == version && s.Held == ""
		})
		if err != nil {
			t.Fatalf("%v; status %+v", err, m.fleet.Status())
		}
	}
}

// fleetOf returns two members of a fleet whose store has the services of storedText.
func fleetOf(t *testing.T) (a, b *member) {
	t.Helper()
	endpoint := etcdtest.Start(t).Endpoint()
	own, _, err := config.ParseBalancerFiles(fmt.Appendf(nil, fleetText, "a", t.TempDir(), endpoint))
	if err != nil {
		t.Fatal(err)
	}
	content, _, err := config.ParseContent(own, []byte(storedText))
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(&own.File.Store.Etcd, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = s.Apply(t.Context(), store.Change{Fills: true, Edit: func(store.Tree) (store.Tree, error) {
		return (&store.Document{Services: content.Services}).Tree()
	}})
	if err != nil {
		t.Fatal(err)
	}
	return join(t, "a", endpoint), join(t, "b", endpoint)
}

// A change by one member takes effect on both, and both list it.
func TestFleetChange(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	result, err := a.Change(t.Context(), []Edit{drain("s1", true)}, Terms{})
	if err != nil {
		t.Fatal(err)
	}
	await(t, result.Version, a, b)
	for _, m := range []*member{a, b} {
		if !m.server("s1").Drained {
			t.Error("s1 is not drained")
		}
		list, version := m.Overrides()
		if len(list) != 1 || version != result.Version {
			t.Errorf("overrides %v at version %s, want one at %s", list, version, result.Version)
		}
	}
	if lines := result.Changes.Lines(); len(lines) != 1 || !strings.Contains(lines[0], "web/s1") {
		t.Errorf("changes %q", lines)
	}
	// The other member ends the drain.
	result, err = b.Change(t.Context(), []Edit{drain("s1", false)},
		Terms{Version: result.Version})
	if err != nil {
		t.Fatal(err)
	}
	await(t, result.Version, a, b)
	if list, _ := a.Overrides(); len(list) > 0 || a.server("s1").Drained {
		t.Errorf("overrides %v after the end of the drain", list)
	}
	digest := func(m *member) uint32 { return generation.Digest(m.runner.generations["web"].Sets, 0) }
	if digest(a) != digest(b) {
		t.Error("the generations differ")
	}
}

// A change that is refused reaches no member.
func TestFleetRefuses(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	_, version := a.Overrides()
	outdated := version
	weight := func(w int) []Edit { return []Edit{set("s1", desired.Fields{"weight": w})} }
	result, err := a.Change(t.Context(), weight(5), Terms{Version: version})
	if err != nil {
		t.Fatal(err)
	}
	remove := func(server string) Edit { return Edit{Service: "web", Server: server, Remove: true} }
	for name, refused := range map[string]struct {
		edits []Edit
		terms Terms
		want  error
		says  string
	}{
		"version":  {weight(7), Terms{Version: outdated}, ErrVersion, "meanwhile"},
		"form":     {weight(7), Terms{Version: "7"}, ErrVersion, "EPOCH-CHANGE"},
		"server":   {[]Edit{set("s9", desired.Fields{"weight": 7})}, Terms{}, ErrNotFound, "web/s9"},
		"value":    {weight(7000), Terms{}, nil, "web/s1.weight"},
		"removals": {[]Edit{remove("s1"), remove("s2")}, Terms{}, ErrRemovals, "2 of 4 servers of web"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := b.Change(t.Context(), refused.edits, refused.terms)
			if err == nil || refused.want != nil && !errors.Is(err, refused.want) ||
				!strings.Contains(err.Error(), refused.says) {
				t.Errorf("error %v, want %v: %s", err, refused.want, refused.says)
			}
		})
	}
	dry, err := b.Change(t.Context(), weight(7), Terms{DryRun: true})
	if err != nil || len(dry.Changes) != 1 {
		t.Errorf("a dry run gives %+v, error %v", dry, err)
	}
	await(t, result.Version, a, b)
	result, err = b.Change(t.Context(), []Edit{remove("s1"), remove("s2")}, Terms{PermitsRemovals: true})
	if err != nil {
		t.Fatal(err)
	}
	await(t, result.Version, a, b)
	if a.server("s1") != nil || a.server("s3") == nil {
		t.Error("the permitted removal has no effect")
	}
}

// A reload takes the member's own file again, and keeps what the store has.
func TestFleetReload(t *testing.T) {
	t.Parallel()
	a, _ := fleetOf(t)
	a.edit(`"2001:db8::1"`, `"2001:db8::99"`)
	if _, err := a.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := a.runner.last().Node.Addresses[0].String()
	if got != "2001:db8::99" || a.server("s4") == nil || a.runner.generations == nil {
		t.Errorf("after the reload the address is %s, the services are %v", got, a.runner.last().Services)
	}
	a.edit("/segue/main", "/segue/other")
	if _, err := a.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "store.etcd.prefix") {
		t.Errorf("error %v", err)
	}
	a.edit("store:", services+"store:")
	if _, err := a.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "must be absent") {
		t.Errorf("error %v", err)
	}
}
