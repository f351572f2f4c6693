// SPDX-License-Identifier: Apache-2.0

package serversets

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// service returns a service with servers of weight 1.
func service(names ...string) desired.Service {
	s := desired.Service{
		Name: "web", Placement: desired.PlacementHunt, Buckets: 251, Candidates: 2, Generations: 3,
	}
	for _, name := range names {
		s.Servers = append(s.Servers, desired.Server{Name: name, Weight: new(uint32(1))})
	}
	return s
}

// sets describes the sets of a generation by their servers.
func sets(g Generation) (all []string) {
	for _, set := range g.Sets {
		var names []string
		for _, server := range set.Servers {
			names = append(names, server.Name)
		}
		all = append(all, strings.Join(names, " "))
	}
	return all
}

// TestNext changes the servers of a service step by step.
func TestNext(t *testing.T) {
	drained := service("a", "b", "c")
	drained.Servers[0].Drained = true
	light := service("a", "b", "c")
	light.Servers[0].Weight = new(uint32(0))
	checked := service("c", "b", "a")
	checked.Health, checked.Timeouts.New = &desired.Health{}, 1
	short := service("c", "d")
	short.Generations = 1
	var all Generations
	for _, step := range []struct {
		name    string
		service desired.Service
		number  uint64
		sets    []string
	}{
		{"new", service("a", "b"), 1, []string{"a b"}},
		{"same", service("b", "a"), 1, []string{"a b"}},
		{"added", service("a", "b", "c"), 2, []string{"a b c", "a b"}},
		{"drained", drained, 2, []string{"a b c", "a b"}},
		{"other settings, other order", checked, 2, []string{"a b c", "a b"}},
		{"weight 0", light, 3, []string{"b c", "a b c", "a b"}},
		{"back to a former set", service("a", "b"), 4, []string{"a b", "b c", "a b c"}},
		{"too many sets", service("c", "d"), 5, []string{"c d", "a b", "b c"}},
		{"fewer are kept", short, 5, []string{"c d"}},
		{"none", service(), 6, []string{"", "c d"}},
	} {
		next := all.Next([]desired.Service{step.service})
		g := next["web"]
		if diff := cmp.Diff(step.sets, sets(g)); diff != "" || g.Number != step.number {
			t.Errorf("%s: number %d, want %d; -want +got:\n%s", step.name, g.Number, step.number, diff)
		}
		all = next
	}
	if next := all.Next(nil); len(next) != 0 {
		t.Errorf("a removed service has generations: %v", next)
	}
}

// TestNextChangesNothing keeps the generations before a change as they were, for an undo.
func TestNextChangesNothing(t *testing.T) {
	var all Generations
	for _, names := range []string{"a", "a b", "a b c"} {
		all = all.Next([]desired.Service{service(strings.Fields(names)...)})
	}
	before := sets(all["web"])
	all.Next([]desired.Service{service("x")})
	all.Next([]desired.Service{service("a", "b")})
	if diff := cmp.Diff(before, sets(all["web"])); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
}

// TestDigest tells sets apart by all of their fields.
func TestDigest(t *testing.T) {
	base := service("a", "b")
	heavy, wide, short, hash, fewer := service("a", "b"), service("a", "b"), service("a", "b"), service("a", "b"), service("a")
	heavy.Servers[1].Weight = new(uint32(2))
	wide.Candidates = 3
	short.Buckets = 257
	hash.Placement = desired.PlacementHash
	seen := map[uint32]string{}
	for name, s := range map[string]desired.Service{
		"base": base, "heavy": heavy, "wide": wide, "short": short, "hash": hash, "fewer": fewer,
	} {
		digest := Digest([]Set{SetOf(&s)}, 0)
		if other, ok := seen[digest]; ok {
			t.Errorf("%s and %s have the same digest", name, other)
		}
		seen[digest] = name
		if two := Digest([]Set{SetOf(&s), SetOf(&base)}, 0); two == digest {
			t.Errorf("%s: a former set does not change the digest", name)
		}
	}
}

// TestTables builds the table of a set. With placement hash, the first candidates are those of a
// table with one candidate.
func TestTables(t *testing.T) {
	hash := service("a", "b", "c", "d")
	hash.Placement = desired.PlacementHash
	one := hash
	one.Candidates = 1
	table, err := SetOf(&hash).Table()
	testhost.Must(t, err)
	first, err := SetOf(&one).Table()
	testhost.Must(t, err)
	for b := range table.Buckets {
		if table.Row(b)[0] != first.Row(b)[0] {
			t.Fatalf("bucket %d begins with %d, and with one candidate with %d", b, table.Row(b)[0], first.Row(b)[0])
		}
	}
	none := service()
	if table, err := SetOf(&none).Table(); err != nil || table.Candidates != 0 {
		t.Errorf("without servers: %v, %v", table, err)
	}
}

// TestFile writes and reads the file of generations.
func TestFile(t *testing.T) {
	path := File(filepath.Join(t.TempDir(), "state"), "lb")
	if got, err := Load(path); err != nil || len(got) != 0 {
		t.Errorf("without a file: %v, %v", got, err)
	}
	var all Generations
	for _, names := range []string{"a", "a b", ""} {
		all = all.Next([]desired.Service{service(strings.Fields(names)...)})
		testhost.Must(t, all.Save(path))
		got, err := Load(path)
		testhost.Must(t, err)
		if diff := cmp.Diff(all, got); diff != "" {
			t.Errorf("-saved +loaded:\n%s", diff)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("the directory has %v, %v", entries, err)
	}
	if err := all.Save(filepath.Join(path, "below-a-file")); err == nil {
		t.Error("saved below a file")
	}
}

// TestBadFiles checks that errors name the invalid part of a file.
func TestBadFiles(t *testing.T) {
	const set = `{"placement": "hunt", "buckets": 251, "candidates": 2, "servers": [{"name": "a", "weight": 1}, {"name": "b", "weight": 2}]}`
	file := func(set string) string {
		return fmt.Sprintf(`{"format": 1, "services": {"web": {"number": 3, "sets": [%s]}}}`, set)
	}
	for _, c := range []struct{ name, text, want string }{
		{"valid", file(set), ""},
		{"empty", "", "EOF"},
		{"cut", file(set)[:60], "unexpected EOF"},
		{"other format", `{"format": 2}`, "format 2 is not 1, the format of this build"},
		{"unknown field", `{"format": 1, "service": {}}`, `unknown field "service"`},
		{"placement", file(strings.Replace(set, "hunt", "best", 1)), `service web: set 0: placement "best": not known`},
		{"buckets", file(strings.Replace(set, "251", "250", 1)), "service web: set 0: 250 buckets: neither a prime nor a power of two; " +
			"the nearest prime is 251, and the nearest powers of two are 128 and 256"},
		{"candidates", file(strings.Replace(set, `"candidates": 2`, `"candidates": 9`, 1)), "service web: set 0: 9 candidates: out of range 1 to 8"},
		{"weight", file(strings.Replace(set, `"weight": 1`, `"weight": 0`, 1)), "service web: set 0: server 0: no name or weight 0"},
		{"order", file(strings.Replace(set, `"b"`, `"a"`, 1)), `service web: set 0: server "a": not in the order of names`},
	} {
		path := filepath.Join(t.TempDir(), "lb.generations.json")
		testhost.Must(t, os.WriteFile(path, []byte(c.text), 0o600))
		_, err := Load(path)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want != "" && (err == nil || err.Error() != path+": "+c.want && !strings.HasSuffix(err.Error(), c.want)):
			t.Errorf("%s: error %v, want %s", c.name, err, c.want)
		}
	}
}

// TestGivesSameServers checks when a client gets the same server of two services that share their
// affinity.
func TestGivesSameServers(t *testing.T) {
	of := func(buckets, prefix int, servers ...Server) Set {
		return Set{
			Placement: desired.PlacementHash, Buckets: buckets, Servers: servers,
			Affinity: &desired.ClientAffinity{Prefix: prefix, Shared: true},
		}
	}
	one := of(251, 24, Server{"s1", 1}, Server{"s2", 1})
	for _, c := range []struct {
		other Set
		want  bool
	}{
		{of(251, 24, Server{"s1", 1}, Server{"s2", 1}), true},
		{of(251, 24, Server{"s1", 1}), false},
		{of(251, 24, Server{"s1", 1}, Server{"s2", 2}), false},
		{of(257, 24, Server{"s1", 1}, Server{"s2", 1}), false},
		{of(251, 32, Server{"s1", 1}, Server{"s2", 1}), false},
	} {
		if got := one.GivesSameServers(c.other); got != c.want {
			t.Errorf("%+v: %t, want %t", c.other, got, c.want)
		}
	}
}

// TestCanHold checks which former sets fit the table of a present set: those with the same number
// of buckets, the same bucket hash and the same affinity, and all of round-robin, any of whose rows
// is as good as another.
func TestCanHold(t *testing.T) {
	set := func(placement desired.Placement, buckets int) Set {
		return Set{Placement: placement, Buckets: buckets}
	}
	const hash, hunt, turns = desired.PlacementHash, desired.PlacementHunt, desired.PlacementRoundRobin
	for _, c := range []struct {
		present, former Set
		want            bool
	}{
		{set(hash, 251), set(hunt, 251), true},
		{set(hash, 251), set(hunt, 256), false},
		{set(hash, 256), Set{Placement: hash, Buckets: 256, BucketHash: desired.BucketHashCRC32}, false},
		{set(hash, 251), Set{Placement: hash, Buckets: 251, Affinity: &desired.ClientAffinity{Prefix: 24}}, false},
		{set(hunt, 251), set(turns, 256), true},
		{set(turns, 251), set(turns, 256), true},
		{set(turns, 251), set(hash, 251), false},
		{set(turns, 251), set(hunt, 251), false},
	} {
		if got := c.present.CanHold(c.former); got != c.want {
			t.Errorf("%+v can hold %+v: %t", c.present, c.former, got)
		}
	}
}
