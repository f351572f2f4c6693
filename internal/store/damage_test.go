// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// Keys that were deleted by hand, and keys with values that are not valid, change no balancer.
func TestDamage(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]struct{ key, value, want string }{
		"all servers": {serversKey, "", "would remove"},
		"head":        {headKey, "{", "key " + prefix + "/head"},
		"item":        {keyOf(serversKey, "web", "s1"), "[]", "has no version"},
		"value": {
			keyOf(serversKey, "web", "s1"), `[{"change":1,"value":{"address":"x"}}]`, "web/s1.address",
		},
		"name":             {serversKey + "web/%zz", `[{"change":1,"value":{}}]`, "%zz"},
		"unknown format":   {headKey, `{"format":2}`, "format 2"},
		"key of a service": {keyOf(servicesKey, "web"), "", "missing"},
	} {
		t.Run(name, func(t *testing.T) {
			f, server, b := filled(t, service("web", 10))
			before := b.State()
			client := server.Client()
			var err error
			if damage.value == "" {
				_, err = client.Delete(t.Context(), f.store.key(damage.key), clientv3.WithPrefix())
			} else {
				_, err = client.Put(t.Context(), f.store.key(damage.key), damage.value)
			}
			testhost.Must(t, err)
			// A new head makes the balancer read the damage, unless the damage is the head itself.
			n, err := f.store.Read(t.Context())
			testhost.Must(t, err)
			if n.head != nil && n.head.Format == format && n.head.Change > 0 {
				next := *n.head
				next.Change++
				if _, err := client.Put(t.Context(), f.store.key(headKey), encode(next)); err != nil {
					t.Fatal(err)
				}
			}
			b.await(func(s Status) bool {
				return strings.Contains(s.Held, damage.want)
			}, "report "+damage.want)
			if !b.State().equal(before) {
				t.Error("the state has changed")
			}
		})
	}
}

// Damaged generations in the store are repaired at the next change, or when a balancer becomes the
// leader. The history of no balancer changes.
func TestDamagedGenerations(t *testing.T) {
	t.Parallel()
	record := keyOf(generationsKey, "web")
	for name, damage := range map[string]func(Tree, *Snapshot){
		"no pieces":    func(t Tree, n *Snapshot) { maps.DeleteFunc(t, isPiece) },
		"other pieces": func(t Tree, n *Snapshot) { t[first(n.pieces)] = json.RawMessage("{}") },
		"no record":    func(t Tree, n *Snapshot) { delete(t, record) },
		"no record of an added service": func(t Tree, n *Snapshot) {
			delete(t, keyOf(generationsKey, "new"))
		},
		"record not valid":   func(t Tree, n *Snapshot) { t[record] = json.RawMessage("{") },
		"value not valid":    func(t Tree, n *Snapshot) { t[record] = json.RawMessage(`[{"change":1,"value":7}]`) },
		"name not valid":     func(t Tree, n *Snapshot) { t[generationsKey+"%zz"] = t[record] },
		"another, not valid": func(t Tree, n *Snapshot) { t[generationsKey+"old"] = json.RawMessage("{") },
	} {
		for _, isRestarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %t", name, isRestarted), func(t *testing.T) {
				server := etcdtest.Start(t)
				f := newFleet(t, server.Endpoint())
				f.interval = 0
				b := f.add(server.Endpoint())
				f.await(f.fill(service("web", 4), service("dns", 2)), time.Now())
				added := desired.Override{Service: "new", Add: without(service("new", 2), "name")}
				f.await(f.apply(Change{Edit: func(t Tree) (Tree, error) {
					return t.WithOverrides([]desired.Override{added})
				}}), time.Now())
				f.follow(addServer(0))
				f.follow(addServer(1))
				before := b.State()
				if isRestarted {
					b.stop()
				}
				damageRecords(t, f.store, damage)
				version := before.Version
				if isRestarted {
					b.start()
				} else {
					version = f.edit(drain("web", "s1"))
				}
				f.await(version, time.Now())
				late := f.add(server.Endpoint())
				f.await(version, time.Now())
				for _, b := range []*simulated{b, late} {
					if now := b.State(); !reflect.DeepEqual(now.Generations, before.Generations) {
						t.Errorf("%s has the generations %+v, want %+v", b.name, now.Generations, before.Generations)
					}
				}
				f.follow(addServer(2))
			})
		}
	}
}

func isPiece(key string, _ json.RawMessage) bool { return strings.HasPrefix(key, setsKey) }

func first(pieces map[string]string) string { return slices.Min(slices.Collect(maps.Keys(pieces))) }

// damageRecords changes the keys of generations and sets.
func damageRecords(t *testing.T, s *Store, damage func(Tree, *Snapshot)) {
	t.Helper()
	n, err := s.Read(t.Context())
	testhost.Must(t, err)
	before := Tree{}
	for key, text := range n.pieces {
		before[key] = json.RawMessage(text)
	}
	for key, it := range n.items {
		if kindOf(key) == generationsKey {
			before[key] = json.RawMessage(it.text())
		}
	}
	after := maps.Clone(before)
	damage(after, n)
	for _, c := range before.changesTo(after) {
		if c.value == nil {
			_, err = s.client.Delete(t.Context(), s.key(c.key))
		} else {
			_, err = s.client.Put(t.Context(), s.key(c.key), string(c.value))
		}
		testhost.Must(t, err)
	}
}

// A leader that does not follow the released change does not know its generations. It leaves the
// repair to a balancer that does.
func TestDamageIsLeftToOthers(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.interval = 0
	leader := f.add(server.Endpoint())
	f.await(f.fill(service("web", 4)), time.Now())
	leader.await(func(s Status) bool { return s.IsLeader }, "lead")
	leader.refuse(errors.New("no room"))
	other := f.add(server.Endpoint())
	f.follow(addServer(0), other)
	damageRecords(t, f.store, func(t Tree, _ *Snapshot) { maps.DeleteFunc(t, isPiece) })
	f.follow(addServer(1), other)
	g := other.State().Generations["web"]
	if g.Number != 3 || len(g.Sets) != 3 || len(g.Sets[1].Servers) != 5 || len(g.Sets[2].Servers) != 4 {
		t.Errorf("the history is %+v", g)
	}
}

// Content that no balancer can interpret is never released. All balancers report it and keep their
// state, and follow a correction.
func TestUnfitContent(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	f.add(server.Endpoint())
	f.add(server.Endpoint())
	first := f.fill(service("web", 10))
	f.await(first, time.Now())
	held := func(what string, b *simulated, version Version, wants ...string) {
		t.Helper()
		b.await(func(s Status) bool {
			isMissing := func(want string) bool { return !strings.Contains(s.Held, want) }
			return s.Newest == version && !slices.ContainsFunc(append(wants, version.String()), isMissing)
		}, "report "+what)
	}
	broken := f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "x"}))
	for _, b := range f.balancers {
		held("the address", b, broken, "web/s1.address", `"x"`, "segue store import --replace")
		if s := b.Status(); s.Follows != first || s.Confirmable != (Version{}) || len(b.servers("web")) != 10 {
			t.Errorf("%s has status %+v and %v", b.name, s, b.servers("web"))
		}
	}
	other := f.edit(put(keyOf(serversKey, "web", "s2"), map[string]any{"address": "y", "weight": -1}))
	held("all fields", f.balancers[0], other, "web/s1.address", "web/s2.address", "web/s2.weight")
	late := f.add(server.Endpoint())
	held("it at the start", late, other, "web/s1.address")
	if late.Status().Follows != first {
		t.Errorf("the status at the start is %+v", late.Status())
	}
	f.await(f.edit(func(t Tree) {
		put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "2001:db8:1::3"})(t)
		put(keyOf(serversKey, "web", "s2"), map[string]any{"address": "2001:db8:1::4"})(t)
	}), time.Now())
}

// A balancer that has given the lease back for some content takes it again for a correction.
func TestLeaderAfterCorrection(t *testing.T) {
	t.Parallel()
	f, _, b := filled(t, service("web", 10))
	f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "x"}))
	b.await(func(s Status) bool { return s.Held != "" && s.Leader == "" }, "give the lease back")
	began := time.Now()
	f.await(f.edit(put(keyOf(serversKey, "web", "s1"), map[string]any{"address": "2001:db8:1::3"})), began)
	if waited := time.Since(began); waited > cannotLeadPause/2 {
		t.Errorf("the correction was followed after %s", waited)
	}
}

// If no balancer can interpret the first content of a store, the balancers report the reason.
func TestUnfitFirstContent(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	f.fill(desired.Fields{"name": "web", "port": "http"})
	b.await(func(s Status) bool { return strings.Contains(s.Held, `web.port "http"`) }, "report the port")
	f.await(f.apply(Change{Edit: replace(service("web", 2))}), time.Now())
}

// A balancer that cannot follow a state keeps the one before, and tries again.
func TestBalancerRefuses(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	f := newFleet(t, server.Endpoint())
	b := f.add(server.Endpoint())
	first := f.fill(service("web", 10))
	f.await(first, time.Now())
	b.refuse(errors.New("no room"))
	version := f.edit(addServer(0))
	b.await(func(s Status) bool { return s.Held == "no room" && s.Follows == first }, "report the error")
	b.refuse(nil)
	f.await(version, time.Now())
}

// The file of a balancer's last state is damaged. The balancer follows the store, and keeps the file.
func TestDamagedCache(t *testing.T) {
	t.Parallel()
	f, _, b := filled(t, service("web", 10))
	b.stop()
	const damaged = `{"format":1,"prefix":`
	testhost.Must(t, os.WriteFile(b.cache, []byte(damaged), 0o640))
	version := f.edit(addServer(0))
	b.start()
	f.await(version, time.Now(), b)
	b.stop() // when the file is written
	if text, err := os.ReadFile(b.cache + ".invalid"); err != nil || string(text) != damaged {
		t.Errorf("the file that was set aside has %q, error %v", text, err)
	}
	if saved, err := LoadCache(b.cache, f.store.prefix); err != nil || saved.Version != version {
		t.Errorf("the file has %+v, error %v", saved, err)
	}
}

// Services, servers and overrides whose values are not valid can be replaced, and nothing else can be
// changed before.
func TestReplaceDamage(t *testing.T) {
	t.Parallel()
	f, server, _ := faulty(t)
	client := server.Client()
	for key, value := range map[string]string{
		keyOf(serversKey, "web", "s1"):    `{"address":"2001:db8:1::99"}`,
		keyOf(serversKey, "web", "extra"): `{"address":"2001:db8:1::98"}`,
		keyOf(servicesKey, "dns"):         `[]`,
		overrideKey("web", "s2"):          `{`,
	} {
		if _, err := client.Put(t.Context(), f.store.key(key), value); err != nil {
			t.Fatal(err)
		}
	}
	before := f.balancers[0].State()
	change := Change{
		Edit:  replace(service("web", 10), service("dns", 2)),
		Check: func(before, after Tree) error { return CheckRemovals(before, after, 30, false) },
	}
	_, err := f.store.Apply(t.Context(), change)
	if err == nil || !strings.Contains(err.Error(), prefix+"/overrides/web/s2") ||
		!strings.Contains(err.Error(), "segue store import --replace") {
		t.Errorf("error %v", err)
	}
	change.Replaces = true
	few := change
	few.Edit = replace(service("web", 5), service("dns", 2))
	if _, err := f.store.Apply(t.Context(), few); err == nil || !strings.Contains(err.Error(), "6 of 11 servers") {
		t.Errorf("error %v", err)
	}
	f.await(f.apply(change), time.Now())
	for _, b := range f.balancers {
		if web, dns := b.servers("web"), b.servers("dns"); len(web) != 10 || len(dns) != 2 {
			t.Errorf("%s has %v and %v", b.name, web, dns)
		}
		g := b.State().Generations
		if g["web"].Number != before.Generations["web"].Number || g["dns"].Number != 2 {
			t.Errorf("%s has the generations %+v", b.name, g)
		}
	}
	f.follow(drain("web", "s2"))
}

// A balancer that cannot read the content gives the lease back, and leaves it to others for a while.
func TestLeaderThatCannotLead(t *testing.T) {
	t.Parallel()
	f, server, b := filled(t, service("web", 10))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	leases := f.store.client.Watch(ctx, f.store.key(leaderKey), clientv3.WithFilterDelete())
	b.mu.Lock()
	b.cannotRead = errors.New("of a newer build")
	b.mu.Unlock()
	f.edit(addServer(0))
	taken := 0
	for response := range leases { // until the time has passed
		taken += len(response.Events)
	}
	if taken > 1 {
		t.Errorf("the balancer has taken the lease %d times in three seconds", taken)
	}
	b.mu.Lock()
	b.cannotRead = nil
	b.mu.Unlock()
	other := f.add(server.Endpoint())
	other.await(func(s Status) bool { return s.Follows == s.Newest && s.Newest.Change > 1 }, "make the generations")
}
