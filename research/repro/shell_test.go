// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"math"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestPrintedHistory follows algorithm 1 of SHELL through changes of one place.
func TestPrintedHistory(t *testing.T) {
	row := func(server uint16) *tables.Table {
		return &tables.Table{Buckets: 1, Candidates: 1, Rows: []uint16{server}}
	}
	h := newPrintedHistory(row(1), 3)
	for _, step := range []struct {
		server uint16
		want   []uint16
	}{
		{2, []uint16{2, 1}},
		{3, []uint16{3, 2, 1}},
		{3, []uint16{3, 2}}, // nothing changed, but 1 is lost
		{3, []uint16{3, 2}},
		{2, []uint16{2, 3}},
		{4, []uint16{4, 2, 3}},
		{3, []uint16{3, 4, 2}},
	} {
		h.push(row(step.server))
		if got := h.column(0); !slices.Equal(got, step.want) {
			t.Errorf("after %d: %v, want %v", step.server, got, step.want)
		}
	}
}

// TestReconfigure checks that no connection is lost with histories as deep as the number of
// changes. It also checks that deeper histories lose no more connections than others, and that
// histories that keep unchanged entries lose no more than those of algorithm 1.
func TestReconfigure(t *testing.T) {
	const changes = 6
	c, err := reconfigure(t.Context(), 1, 0, 1021, changes, []int{1, 2, changes + 1})
	testhost.Must(t, err)
	for n := range changes + 1 {
		if c.kept[2][n] != 0 || c.printed[2][n] != 0 {
			t.Errorf("after %d changes a history of all of them has lost %v and %v", n, c.kept[2][n], c.printed[2][n])
		}
		if c.kept[1][n] > c.printed[1][n] || c.printed[1][n] > c.printed[0][n] || c.kept[0][n] != c.printed[0][n] {
			t.Errorf("after %d changes: lost %v and %v", n, c.kept, c.printed)
		}
		if n > 0 && c.printed[0][n] <= c.printed[0][n-1] {
			t.Errorf("change %d loses nothing without history", n)
		}
	}
}

// TestEnding compares with the sum over the number of reconfigurations that a connection sees.
func TestEnding(t *testing.T) {
	infinite := []float64{0, 0.1, 0.3, 0.35}
	const q = 0.6
	got := ending(infinite, q)
	for n := range infinite {
		want := 0.0
		for seen := range 200 {
			want += math.Pow(q, float64(seen)) * (1 - q) * infinite[min(seen, n)]
		}
		if math.Abs(got[n]-want) > 1e-12 {
			t.Errorf("n = %d: %v, want %v", n, got[n], want)
		}
	}
	if q := calibrate(infinite, 0.05); math.Abs(ending(infinite, q)[3]-0.05) > 1e-9 {
		t.Errorf("q = %v", q)
	}
}
