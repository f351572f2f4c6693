// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/testhost"
)

func mustBuild(t rapid.TB, servers []Server, buckets, candidates int) *Table {
	t.Helper()
	table, err := Build(servers, buckets, candidates)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// numbered returns n servers of weight 1.
func numbered(n int) []Server {
	servers := make([]Server, n)
	for i := range servers {
		servers[i] = Server{Name: "server-" + strconv.Itoa(i), Weight: 1}
	}
	return servers
}

// example calls BuildPermuted with valid arguments.
func example(t *testing.T, buckets, candidates int, permutations []Permutation) *Table {
	t.Helper()
	table, err := BuildPermuted(permutations, buckets, candidates)
	testhost.Must(t, err)
	return table
}

func TestFigure6(t *testing.T) {
	steps := []Permutation{
		{4, 1}, // 4 5 6 0 1 2 3
		{1, 2}, // 1 3 5 0 2 4 6
		{5, 5}, // 5 3 1 6 4 2 0
		{6, 1}, // 6 0 1 2 3 4 5
	}
	before := example(t, 7, 2, steps)
	steps[0] = Permutation{}
	after := example(t, 7, 2, steps)

	want := []uint16{3, 1, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 3, 0}
	if diff := cmp.Diff(want, before.Rows); diff != "" {
		t.Errorf("figure 6a (-want +got):\n%s", diff)
	}
	want = []uint16{3, 1, 1, 2, 3, 1, 1, 2, 3, 2, 2, 1, 3, 2}
	if diff := cmp.Diff(want, after.Rows); diff != "" {
		t.Errorf("figure 6b (-want +got):\n%s", diff)
	}
	rate, err := FailureRate(before, after)
	testhost.Must(t, err)
	if rate != 0.1 {
		t.Errorf("failure rate %v, want 1 of 10 flows", rate)
	}
}

// TestExhaustedPermutation is the smallest example in which servers of equal weight differ by more
// than one entry, contrary to section III-B2. Server 2 finds buckets 0 and 1 full, and has no
// other bucket left.
func TestExhaustedPermutation(t *testing.T) {
	table := example(t, 3, 2, []Permutation{
		{0, 1}, // 0 1 2
		{0, 1}, // 0 1 2
		{2, 1}, // 2 0 1
	})
	want := []uint16{0, 1, 0, 1, 2, 0}
	if diff := cmp.Diff(want, table.Rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestBuildPermutedErrors(t *testing.T) {
	for _, test := range []struct {
		permutations        []Permutation
		buckets, candidates int
		want                string
	}{
		{[]Permutation{{0, 1}}, 6, 1, "6 buckets: neither a prime nor a power of two; the nearest prime is 5, and the nearest powers of two are 4 and 8"},
		{[]Permutation{{0, 1}}, 7, 9, "9 candidates: out of range 1 to 8"},
		{[]Permutation{{0, 1}, {7, 1}}, 7, 1, "server 1: offset 7: must be below 7"},
		{[]Permutation{{0, 2}}, 8, 1, "server 0: skip 2: shares a divisor with 8 buckets"},
	} {
		if _, err := BuildPermuted(test.permutations, test.buckets, test.candidates); err == nil || err.Error() != test.want {
			t.Errorf("%v: error %v, want %q", test.permutations, err, test.want)
		}
	}
}

func TestFailureRate(t *testing.T) {
	a, b, c := Server{"a", 1}, Server{"b", 1}, Server{"c", 1}
	before := &Table{Buckets: 2, Candidates: 2, Servers: []Server{a, b, c}, Rows: []uint16{0, 1, 1, 2}}
	empty := &Table{Buckets: 2}
	for _, test := range []struct {
		name  string
		after *Table
		want  float64
	}{
		{"itself", before, 0},
		{"other indexes", &Table{2, 2, []Server{c, b, a}, []uint16{2, 1, 1, 0}}, 0},
		{"other positions", &Table{2, 2, []Server{a, b, c}, []uint16{1, 0, 2, 1}}, 0},
		{"rows exchanged", &Table{2, 2, []Server{a, b, c}, []uint16{1, 2, 0, 1}}, 0.5},
		{"a gone, c in its place", &Table{2, 2, []Server{b, c}, []uint16{1, 0, 1, 0}}, 0},
		{"a of weight 0, b lost twice", &Table{2, 1, []Server{{"a", 0}, b, c}, []uint16{2, 2}}, 2.0 / 3},
		{"all gone", empty, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := FailureRate(before, test.after)
			testhost.Must(t, err)
			if got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
	if _, err := FailureRate(before, &Table{Buckets: 3}); err == nil {
		t.Error("no error for tables of 2 and 3 buckets")
	}
	if got, err := FailureRate(empty, before); got != 0 || err != nil {
		t.Errorf("from an empty table: got %v, %v", got, err)
	}
}

func TestValidBuckets(t *testing.T) {
	for _, m := range []int{2, 3, 4, 7, 64, 251, 65536, DefaultBuckets, 655373, 1000003, 1 << 24} {
		if err := ValidBuckets(m); err != nil {
			t.Error(err)
		}
	}
	for m, want := range map[int]string{100: "101, and the nearest powers of two are 64 and 128", 90: "89,",
		1<<24 - 1: "16777213, and the nearest powers of two are 8388608 and 16777216"} {
		if err := ValidBuckets(m); err == nil || !strings.Contains(err.Error(), "the nearest prime is "+want) {
			t.Errorf("ValidBuckets(%d) = %v, want %s", m, err, want)
		}
	}
	// 1<<24 + 43 is the first prime out of range. 2047 passes weak tests of primality.
	for _, m := range []int{math.MinInt, -7, 0, 1, 6, 9, 1000, 2047, 65535, 1<<24 + 43, 1 << 25} {
		if err := ValidBuckets(m); err == nil || !strings.Contains(err.Error(), strconv.Itoa(m)) {
			t.Errorf("ValidBuckets(%d) = %v, want an error that names it", m, err)
		}
	}
}

func TestBuildErrors(t *testing.T) {
	for _, test := range []struct {
		name                string
		servers             []Server
		buckets, candidates int
		want                string
	}{
		{"buckets", numbered(2), 10, 1, "10 buckets"},
		{"no candidates", numbered(2), 7, 0, "0 candidates"},
		{"too many candidates", numbered(2), 7, 9, "9 candidates"},
		{"too many servers", numbered(65536), 7, 1, "65536 servers"},
		{"duplicate", []Server{{"a", 1}, {"b", 1}, {"a", 2}}, 7, 1, `server "a"`},
		{"duplicate of weight 0", []Server{{"a", 1}, {"a", 0}}, 7, 1, `server "a"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Build(test.servers, test.buckets, test.candidates)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestBuildEmpty(t *testing.T) {
	for _, servers := range [][]Server{nil, {{"a", 0}, {"b", 0}}} {
		table := mustBuild(t, servers, 7, 2)
		if diff := cmp.Diff(&Table{Buckets: 7, Servers: servers}, table); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestBuildMostServers(t *testing.T) {
	table := mustBuild(t, numbered(MaxServers), DefaultBuckets, 1)
	for server, n := range entries(table) {
		if n < 1 || n > 2 { // 65537 buckets
			t.Fatalf("server %d has %d entries", server, n)
		}
	}
}

// TestStability compares with a table that was computed by other means, because balancers of two
// builds must agree. The table has servers of different weights with turns at the same time, so
// the order of these turns matters.
func TestStability(t *testing.T) {
	table := mustBuild(t, []Server{{"s1", 1}, {"s2", 2}, {"s3", 3}, {"s4", 3}}, 17, 2)
	want := []uint16{
		2, 3, 3, 2, 1, 2, 0, 1, 2, 0, 3, 1, 3, 2, 2, 3, 1,
		2, 1, 3, 0, 1, 2, 3, 2, 0, 3, 1, 3, 1, 3, 2, 2, 3,
	}
	if diff := cmp.Diff(want, table.Rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

// entries counts the entries of each server.
func entries(table *Table) []int {
	n := make([]int, len(table.Servers))
	for _, server := range table.Rows {
		n[server]++
	}
	return n
}

// named returns the names of the servers in a row.
func named(table *Table, bucket int) []string {
	var names []string
	for _, server := range table.Row(bucket) {
		names = append(names, table.Servers[server].Name)
	}
	return names
}

// TestWeightsByPosition checks that the weights hold for each position in the rows, and not only
// for the sum. With 100 servers of weights 1 to 10, the share of the servers of each weight must
// be within 5% of the expected share. The largest difference seen is 3%. It comes from chance, and
// heavy servers are first a little more often.
func TestWeightsByPosition(t *testing.T) {
	const candidates = 4
	for _, buckets := range []int{DefaultBuckets, 65536} {
		servers := numbered(100)
		sum := 0.0
		for i := range servers {
			servers[i].Weight = uint32(1 + i%10)
			sum += float64(servers[i].Weight)
		}
		table := mustBuild(t, servers, buckets, candidates)
		var got [candidates][11]float64
		for i, server := range table.Rows {
			got[i%candidates][servers[server].Weight]++
		}
		for position := range got {
			for weight := 1; weight <= 10; weight++ {
				want := float64(buckets) * 10 * float64(weight) / sum
				if ratio := got[position][weight] / want; math.Abs(ratio-1) > 0.05 {
					t.Errorf("%d buckets, position %d, weight %d: %.3f of its share", buckets, position, weight, ratio)
				}
			}
		}
	}
}

// TestHeavyServer checks that a server whose weight exceeds its possible share has one entry in
// every row, and that the other servers share the other entries evenly.
func TestHeavyServer(t *testing.T) {
	servers := numbered(11)
	servers[0].Weight = math.MaxUint32
	table := mustBuild(t, servers, 1009, 2)
	got := entries(table)
	if got[0] != 1009 || slices.Min(got[1:]) < 100 || slices.Max(got[1:]) > 101 {
		t.Errorf("entries %v, want 1009 of the first and 100 or 101 of the others", got)
	}
}
