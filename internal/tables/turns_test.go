// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// mustBuildTurns builds a table of turns.
func mustBuildTurns(t rapid.TB, servers []Server, buckets, candidates int) *Table {
	t.Helper()
	table, err := BuildTurns(servers, buckets, candidates)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// firsts returns the names of the servers whose turn it is, one after the other.
func firsts(table *Table) string {
	var names []string
	for b := range table.Buckets {
		names = append(names, table.Servers[table.Row(b)[0]].Name)
	}
	return strings.Join(names, " ")
}

func TestTurns(t *testing.T) {
	for _, c := range []struct {
		name    string
		servers []Server
		buckets int
		want    string
	}{
		{"equal weights", []Server{{"b", 3}, {"a", 3}, {"c", 3}}, 251, "a b c"},
		{"one server", []Server{{"a", 7}}, 251, "a"},
		{"weight 0", []Server{{"a", 1}, {"b", 0}, {"c", 1}}, 251, "a c"},
		{"a heavy server", []Server{{"a", 5}, {"b", 1}, {"c", 1}}, 251, "a b a a c a a"},
		{"a common divisor", []Server{{"a", 20}, {"b", 10}}, 251, "a b a"},
		{"half of all turns", []Server{{"a", 4}, {"b", 1}, {"c", 1}, {"d", 1}, {"e", 1}}, 251, "a b a c a d a e"},
		{"a cycle that is cut", []Server{{"a", 2}, {"b", 1}, {"c", 1}, {"d", 1}}, 3, "a b c"},
		{"no server", nil, 251, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := mustBuildTurns(t, c.servers, c.buckets, 1)
			if table.Candidates == 0 {
				if c.want != "" {
					t.Error("the table is empty")
				}
				return
			}
			if got := firsts(table); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// TestTurnsAreInProportion checks that, after any number of turns, the number of turns that a
// server has had differs from its share of them by less than one. After a whole cycle, both are
// equal.
func TestTurnsAreInProportion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weight := rapid.SampledFrom([]*rapid.Generator[uint32]{
			rapid.Uint32Range(1, 5), rapid.Uint32Range(1, 1000), rapid.Uint32Min(1),
		}).Draw(t, "weights")
		list := servers(t, 1, weight)
		table := mustBuildTurns(t, list, bucketNumbers.Draw(t, "buckets"), candidateNumbers.Draw(t, "candidates"))
		sum, divisor := uint64(0), uint32(0)
		for _, s := range list {
			sum += uint64(s.Weight)
			divisor = gcd(s.Weight, divisor)
		}
		had := make([]int, len(list))
		for b := range table.Buckets {
			had[table.Row(b)[0]]++
			for i, s := range list {
				share := float64(b+1) * float64(s.Weight) / float64(sum)
				if math.Abs(share-float64(had[i])) >= 1 {
					t.Fatalf("%s has had %d of %d turns, and its share is %.2f", s.Name, had[i], b+1, share)
				}
			}
		}
		if cycle := sum / uint64(divisor); uint64(table.Buckets) != cycle {
			if uint64(table.Buckets) > cycle {
				t.Fatalf("%d rows, and a cycle has %d turns", table.Buckets, cycle)
			}
			return
		}
		for i, s := range list {
			if had[i] != int(s.Weight/divisor) {
				t.Fatalf("%s has %d turns in a cycle, want %d", s.Name, had[i], s.Weight/divisor)
			}
		}
	})
}

// TestRowsOfTurns checks that rows contain distinct servers, and that the order of the servers does
// not matter.
func TestRowsOfTurns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := servers(t, 0, rapid.Uint32Range(0, 5))
		buckets, candidates := bucketNumbers.Draw(t, "buckets"), candidateNumbers.Draw(t, "candidates")
		table := mustBuildTurns(t, list, buckets, candidates)
		shuffled := mustBuildTurns(t, rapid.Permutation(list).Draw(t, "shuffled"), buckets, candidates)
		if table.Candidates == 0 {
			return
		}
		for b := range table.Buckets {
			if row := slices.Sorted(slices.Values(table.Row(b))); len(slices.Compact(row)) != table.Candidates {
				t.Fatalf("row %d: %v", b, table.Row(b))
			}
			if got, want := named(shuffled, b), named(table, b); !slices.Equal(got, want) {
				t.Fatalf("row %d: %v, and in another order of servers %v", b, want, got)
			}
		}
	})
}

func TestErrorsOfTurns(t *testing.T) {
	for name, build := range map[string]func() (*Table, error){
		"buckets":    func() (*Table, error) { return BuildTurns(nil, 6, 1) },
		"candidates": func() (*Table, error) { return BuildTurns(nil, 7, 9) },
		"name twice": func() (*Table, error) { return BuildTurns([]Server{{"a", 1}, {"a", 2}}, 7, 1) },
	} {
		if _, err := build(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
