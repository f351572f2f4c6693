// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
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
	return joinWith(t, name, endpoint, slog.New(slog.DiscardHandler))
}

func joinWith(t *testing.T, name, endpoint string, log *slog.Logger) *member {
	t.Helper()
	m := &member{site: writeSite[*desired.Balancer](t, fmt.Sprintf(fleetText, name, "%q", endpoint))}
	b, _, err := LoadBalancer(m.file)
	testhost.Must(t, err)
	// The balancer had services of its own before, so it need not leave the lease to others.
	node := &b.Desired().Node
	former := serversets.Generations{"former": {Number: 1}}
	testhost.Must(t, former.Save(serversets.File(node.State, node.Instance)))
	if m.fleet, err = b.Join(t.Context(), log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.fleet.Close() })
	testhost.Must(t, m.fleet.First(t.Context(), func(store.Status) {}))
	testhost.Must(t, m.runner.Follow(t.Context(), b.Desired(), b.Secrets(), b.Generations()))
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

// filled returns a store that has the services of storedText.
func filled(t *testing.T, overrides ...desired.Override) *etcdtest.Server {
	t.Helper()
	server := etcdtest.Start(t)
	endpoint := server.Endpoint()
	own, _, err := config.ParseBalancerFiles(fmt.Appendf(nil, fleetText, "a", t.TempDir(), endpoint))
	testhost.Must(t, err)
	content, _, err := config.ParseContent(own, []byte(storedText))
	testhost.Must(t, err)
	s, err := store.Open(&own.File.Store.Etcd, "test")
	testhost.Must(t, err)
	defer s.Close()
	_, err = s.Apply(t.Context(), store.Change{Fills: true, Edit: func(store.Tree) (store.Tree, error) {
		return (&store.Document{Services: content.Services, Overrides: overrides}).Tree()
	}})
	testhost.Must(t, err)
	return server
}

// fleetOf returns two members of a fleet whose store has the services of storedText.
func fleetOf(t *testing.T) (a, b *member) {
	t.Helper()
	endpoint := filled(t).Endpoint()
	return join(t, "a", endpoint), join(t, "b", endpoint)
}

// A change by one member takes effect on both, and both list it.
func TestFleetChange(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	result, err := a.Change(t.Context(), []Edit{drain("s1", true)}, Terms{})
	testhost.Must(t, err)
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
	testhost.Must(t, err)
	await(t, result.Version, a, b)
	if list, _ := a.Overrides(); len(list) > 0 || a.server("s1").Drained {
		t.Errorf("overrides %v after the end of the drain", list)
	}
	digest := func(m *member) uint32 { return serversets.Digest(m.runner.generations["web"].Sets, 0) }
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
	testhost.Must(t, err)
	remove := func(server string) Edit { return Edit{Service: "web", Server: server, Remove: true} }
	for name, refused := range map[string]struct {
		edits []Edit
		terms Terms
		want  error
		says  string
	}{
		"version":  {weight(7), Terms{Version: outdated}, ErrVersion, "has another version"},
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
	await(t, result.Version, a, b)
	result, err = b.Change(t.Context(), []Edit{remove("s1"), remove("s2")}, Terms{PermitsRemovals: true})
	testhost.Must(t, err)
	await(t, result.Version, a, b)
	if a.server("s1") != nil || a.server("s3") == nil {
		t.Error("the permitted removal has no effect")
	}
}

// A change that names each server may drain any number of them. A file that drains more servers
// than the limit, or gives them the weight 0, is refused.
func TestFleetDrains(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	text := func(field string) []byte {
		servers := ""
		for i := range 4 {
			servers += fmt.Sprintf("{name: s%d, address: \"2001:db8:1::%d\"%s}, ", i+1, i+1, field)
		}
		return []byte("services: [{name: web, vip: \"2001:db8:80::1\", port: 80, protocol: tcp, encapsulation: gre, " +
			"servers: [" + servers + "]}]\n")
	}
	for _, field := range []string{", drained: true", ", weight: 0"} {
		for _, dry := range []bool{true, false} {
			_, err := a.ApplyFile(t.Context(), text(field), Terms{DryRun: dry})
			if !errors.Is(err, ErrRemovals) || !strings.Contains(err.Error(), "3 of 4 servers of web, the last in service") {
				t.Errorf("a file with %s: error %v", field, err)
			}
		}
	}
	ctx := events.WithActor(t.Context(), func() string { return "alice (uid 1000)" })
	result, err := a.Change(ctx, []Edit{drain("s1", true), drain("s2", true), drain("s3", true)}, Terms{})
	if err != nil || len(result.Warnings) > 0 {
		t.Fatalf("warnings %v, error %v", result, err)
	}
	await(t, result.Version, a, b)
	for _, m := range []*member{a, b} {
		if !m.server("s1").Drained || !m.server("s3").Drained || m.fleet.Status().Held != "" {
			t.Errorf("%+v", m.fleet.Status())
		}
		m.runner.mu.Lock()
		if want := "store: alice (uid 1000) on a"; m.runner.by != want {
			t.Errorf("changed by %q, want %q", m.runner.by, want)
		}
		m.runner.mu.Unlock()
	}
}

// remove and add are edits of a server of web.
func remove(server string) Edit { return Edit{Service: "web", Server: server, Remove: true} }

func add(server, address string) Edit {
	return Edit{Service: "web", Server: server, Add: desired.Fields{"address": address}}
}

// Changes that become one generation count together, because the members follow them as one.
func TestFleetRemovalsAddUp(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	// The first generation has just begun, so the next one has to wait.
	a.apply(add("s5", "2001:db8:1::5"), add("s6", "2001:db8:1::6"))
	version := a.apply(remove("s1"))
	_, err := a.Change(t.Context(), []Edit{remove("s2")}, Terms{})
	if !errors.Is(err, ErrRemovals) || !strings.Contains(err.Error(), "2 of 4 servers of web") {
		t.Errorf("a second removal for the same generation: error %v", err)
	}
	await(t, version, a, b)
	if _, err := a.Change(t.Context(), []Edit{remove("s2")}, Terms{}); err != nil {
		t.Error(err)
	}
}

// A permitted removal that waits for its generation does not stand in the way of other changes,
// which are still limited themselves.
func TestFleetPermittedRemovalsWait(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	// The first generation has just begun, so the next one has to wait.
	a.apply(add("s5", "2001:db8:1::5"), add("s6", "2001:db8:1::6"))
	edits := []Edit{remove("s1"), remove("s2"), remove("s5")}
	permitted, err := a.Change(t.Context(), edits, Terms{PermitsRemovals: true})
	testhost.Must(t, err)
	if follows := a.fleet.Status().Follows.String(); follows == permitted.Version {
		t.Fatalf("version %s is in force already", follows)
	}
	edits = []Edit{remove("s3"), remove("s4")}
	if _, err := a.Change(t.Context(), edits, Terms{}); !errors.Is(err, ErrRemovals) {
		t.Errorf("two of three servers: error %v", err)
	}
	drained, err := a.Change(t.Context(), []Edit{drain("s3", true)}, Terms{})
	testhost.Must(t, err)
	await(t, drained.Version, a, b)
	if b.server("s1") != nil || b.server("s3") == nil || !b.server("s3").Drained {
		t.Errorf("the servers are %v", b.runner.last().Services)
	}
}

// While a version awaits confirmation, a change that permits removals is refused: it would permit
// the removals of this version, too.
func TestFleetPermissionWhileHeld(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	held, err := a.fleet.store.Apply(t.Context(), store.Change{
		Edit: func(tree store.Tree) (store.Tree, error) { // as a script that has read half a list
			delete(tree, "servers/web/s1")
			delete(tree, "servers/web/s2")
			return tree, nil
		},
	})
	testhost.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	testhost.Must(t, a.fleet.Await(ctx, func(s store.Status) bool { return s.Confirmable == held }))
	edits := []Edit{{Service: "web", Server: "s3", Remove: true}}
	_, err = a.Change(t.Context(), edits, Terms{PermitsRemovals: true})
	if !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), held.String()) {
		t.Errorf("error %v", err)
	}
	dry, err := a.Change(t.Context(), edits, Terms{PermitsRemovals: true, DryRun: true})
	if err != nil || len(dry.Changes) == 0 {
		t.Errorf("a dry run gives %+v, error %v", dry, err)
	}
	for _, m := range []*member{a, b} {
		testhost.Must(t, m.fleet.Confirm(ctx, held.String()))
	}
	result, err := a.Change(t.Context(), edits, Terms{PermitsRemovals: true})
	testhost.Must(t, err)
	await(t, result.Version, a, b)
}

// A dry run changes nothing. Its version is the one of the store that it was made for, also if the
// member has not seen that version yet.
func TestFleetDryRun(t *testing.T) {
	t.Parallel()
	a, b := fleetOf(t)
	edits := []Edit{set("s3", desired.Fields{"drained": true})}
	version := ""
	for i := range 10 {
		version = a.apply(set("s1", desired.Fields{"drained": i%2 == 0}))
		dry, err := b.Change(t.Context(), edits, Terms{DryRun: true})
		if err != nil || len(dry.Changes) != 1 || dry.Version != version {
			t.Fatalf("a dry run for version %s gives %+v, error %v", version, dry, err)
		}
	}
	await(t, version, a, b)
	if b.server("s3").Drained {
		t.Error("the dry run has drained a server")
	}
	if _, err := b.Change(t.Context(), edits, Terms{Version: version}); err != nil {
		t.Error(err)
	}
}

// If the answer of the store to a change is lost, the error says that the change may have been
// made. To repeat it for the same version does not make it twice.
func TestFleetUnknownChange(t *testing.T) {
	t.Parallel()
	server := filled(t)
	proxy := etcdtest.NewProxy(t, server)
	far, near := join(t, "far", proxy.Endpoint()), join(t, "near", server.Endpoint())
	_, before := far.Overrides()
	edits := []Edit{set("s1", desired.Fields{"drained": true})}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // the client goes away
		_ = near.fleet.Await(ctx, func(s store.Status) bool { return s.Newest.Change > 1 })
		cancel()
	}()
	muting := func(f *config.BalancerFiles) (*config.BalancerFiles, fieldpath.Errors, error) {
		proxy.Mute()
		return edited(f, edits)
	}
	_, err := far.fleet.Change(ctx, Terms{Version: before}, change[*desired.Balancer]{compute: muting})
	if !errors.Is(err, store.ErrUnknown) || !strings.Contains(err.Error(), "look with segue service list") {
		t.Errorf("error %v", err)
	}
	proxy.Heal()
	if _, err := far.Change(t.Context(), edits, Terms{Version: before}); !errors.Is(err, ErrVersion) {
		t.Errorf("the repetition: error %v", err)
	}
	_, now := near.Overrides()
	await(t, now, far, near)
	if !far.server("s1").Drained {
		t.Error("the change has no effect")
	}
}

// apply makes edits in the store, and does not wait until a member follows it.
func (m *member) apply(edits ...Edit) (version string) {
	m.t.Helper()
	applied, err := m.fleet.store.Apply(m.t.Context(), store.Change{
		Edit: func(tree store.Tree) (store.Tree, error) {
			compute := func(f *config.BalancerFiles) (*config.BalancerFiles, fieldpath.Errors, error) {
				return edited(f, edits)
			}
			next, _, err := m.fleet.edit(m.t.Context(), tree, change[*desired.Balancer]{compute: compute})
			return next, err
		},
	})
	testhost.Must(m.t, err)
	return applied.String()
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

// Reloads and new states of the store come at the same time. Whichever is last, the balancer
// follows the newest file and the newest state.
func TestFleetReloadAndFollow(t *testing.T) {
	t.Parallel()
	m, _ := fleetOf(t)
	former := "2001:db8::1"
	first := m.fleet.follower.State()
	for i := 1; i <= 100; i++ {
		address := fmt.Sprintf("2001:db8::%x", 0x100+i)
		m.edit(strconv.Quote(former), strconv.Quote(address))
		former = address
		next := &store.State{Version: first.Version, Content: maps.Clone(first.Content)}
		weight := uint32(i + 1)
		next.Content["servers/web/s1"] = fmt.Appendf(nil, `{"address":"2001:db8:1::1","weight":%d}`, weight)
		wanted, err := m.fleet.Interpret(documentOf(t, next))
		testhost.Must(t, err)
		next.Generations = first.Generations.Next(wanted.Services)
		var both sync.WaitGroup
		both.Go(func() {
			if err := m.fleet.Follow(t.Context(), next); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() {
			if _, err := m.Reload(t.Context()); err != nil {
				t.Error(err)
			}
		})
		both.Wait()
		for where, has := range map[string]*desired.Balancer{"balancer": m.runner.last(), "controller": m.Desired()} {
			a, w := has.Node.Addresses[0].String(), *has.Server("web", "s1").Weight
			if a != address || w != weight {
				t.Fatalf("round %d: the %s has address %s and weight %d, want %s and %d",
					i, where, a, w, address, weight)
			}
		}
	}
}

func documentOf(t *testing.T, state *store.State) *store.Document {
	t.Helper()
	document, err := state.Content.Document()
	testhost.Must(t, err)
	return document
}

// journal is a log that several goroutines use.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(line)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// The log has the warnings about the first state of the store, and of later states the new ones.
func TestFleetLogsWarnings(t *testing.T) {
	t.Parallel()
	ghost := func(server string) desired.Override {
		return desired.Override{Service: "web", Server: server, Set: desired.Fields{"weight": 2}}
	}
	var log journal
	m := joinWith(t, "a", filled(t, ghost("s8")).Endpoint(), slog.New(slog.NewTextHandler(&log, nil)))
	logged := func() []string { return regexp.MustCompile(`warning=.*`).FindAllString(log.String(), -1) }
	if all := logged(); len(all) != 1 || !strings.Contains(all[0], "web/s8: does not exist") {
		t.Errorf("after the first state: %q", all)
	}
	first := m.fleet.follower.State()
	next := &store.State{
		Version: first.Version, Generations: first.Generations, Content: maps.Clone(first.Content),
	}
	next.Content["overrides/web/s9"] = []byte(`{"set":{"weight":2}}`)
	for range 2 {
		testhost.Must(t, m.fleet.Follow(t.Context(), next))
	}
	if all := logged(); len(all) != 2 || !strings.Contains(all[1], "web/s9: does not exist") {
		t.Errorf("after the next state: %q", all)
	}
}
