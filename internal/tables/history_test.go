// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestHistory compares with the last different servers of each place, computed from all tables.
func TestHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const buckets, servers = 13, 6
		depth := rapid.IntRange(1, 5).Draw(t, "depth")
		list := numbered(servers)
		past := make([][]uint16, 2*buckets) // the newest first
		var h *History
		for range rapid.IntRange(1, 12).Draw(t, "changes") {
			// Two servers always stay, so rows always have two candidates.
			i := rapid.IntRange(2, servers-1).Draw(t, "server")
			list[i].Weight = 1 - list[i].Weight
			table := mustBuild(t, list, buckets, 2)
			var err error
			if h == nil {
				h, err = NewHistory(table.Rows, depth)
			} else {
				err = h.Push(table.Rows)
			}
			if err != nil {
				t.Fatal(err)
			}
			for place, server := range table.Rows {
				past[place] = slices.Insert(past[place], 0, server)
				var want []uint16
				for _, s := range past[place] {
					if !slices.Contains(want, s) && len(want) < depth {
						want = append(want, s)
					}
				}
				if got := h.ServersOf(place); !slices.Equal(got, want) {
					t.Fatalf("place %d of depth %d: %v, want %v of %v", place, depth, got, want, past[place])
				}
			}
		}
	})
}

func TestHistoryErrors(t *testing.T) {
	list := numbered(4)
	table := mustBuild(t, list, 7, 2)
	for depth, want := range map[int]string{
		0:   "history of depth 0: out of range 1 to 255",
		256: "history of depth 256: out of range 1 to 255",
	} {
		if _, err := NewHistory(table.Rows, depth); err == nil || err.Error() != want {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	h, err := NewHistory(table.Rows, 2)
	testhost.Must(t, err)
	want := "history of 14 places: a table has 16"
	if err := h.Push(mustBuild(t, list, 8, 2).Rows); err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
}

// TestFormerServersHaveRoom removes 1 or 8 of 48 servers, or 2, 5 and 8 in turn. A packet of
// an unknown flow visits the candidates of its bucket, those of the present table first, and at
// most ten. With eight candidates, at most one flow in 100,000 has its server behind these ten.
// With four there is no such flow.
func TestFormerServersHaveRoom(t *testing.T) {
	const servers, mostVisited = 48, 10
	list := numbered(servers)
	for _, removals := range [][]int{{1}, {8}, {2, 7, 15}} {
		for _, candidates := range []int{4, 8} {
			history := []*Table{mustBuild(t, list, DefaultBuckets, candidates)} // the newest first
			for _, removed := range removals {
				history = slices.Insert(history, 0, mustBuild(t, list[removed:], DefaultBuckets, candidates))
			}
			gone := list[:removals[len(removals)-1]]
			flows, missed := 0, 0
			for bucket := range DefaultBuckets {
				row := visited(history, bucket, gone)
				for _, server := range row {
					if slices.Contains(namesOf(history[len(history)-1], bucket), server) {
						flows++
						if slices.Index(row, server) >= mostVisited {
							missed++
						}
					}
				}
			}
			t.Logf("%v of %d servers removed, %d candidates: %d of %d flows have no room", removals, servers,
				candidates, missed, flows)
			if missed*100_000 > flows || candidates == 4 && missed > 0 {
				t.Errorf("%v of %d servers removed, %d candidates: %d of %d flows have no room", removals,
					servers, candidates, missed, flows)
			}
		}
	}
}

// visited returns the names of a bucket's servers in all tables, without duplicates and without the
// servers that are gone.
func visited(history []*Table, bucket int, gone []Server) (names []string) {
	for _, table := range history {
		for _, name := range namesOf(table, bucket) {
			isGone := slices.ContainsFunc(gone, func(s Server) bool { return s.Name == name })
			if !isGone && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

func namesOf(table *Table, bucket int) (names []string) {
	for _, server := range table.Row(bucket) {
		names = append(names, table.Servers[server].Name)
	}
	return names
}
