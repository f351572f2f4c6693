// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
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

// TestEnding compares with the geometric distribution: a connection with an exponential duration of
// mean m sees n reconfigurations at a rate r with the probability (rm/(1+rm))ⁿ.
func TestEnding(t *testing.T) {
	infinite := []float64{0, 0.1, 0.3, 0.35}
	const mean = 0.2
	got := exponential.ending(infinite, mean)
	want := 0.0
	for n := 1; n < len(infinite); n++ {
		for _, rate := range reconfigurationRates {
			share := math.Pow(rate*mean/(1+rate*mean), float64(n)) / float64(len(reconfigurationRates))
			want += share * (infinite[n] - infinite[n-1])
		}
		if math.Abs(got[n]/want-1) > 0.02 { // 100 quantiles instead of the whole distribution
			t.Errorf("n = %d: %v, want %v", n, got[n], want)
		}
	}
	for _, d := range []durations{exponential, heavyTailed} {
		if m := d.shortest(infinite, 0.05); math.Abs(d.ending(infinite, m)[3]-0.05) > 1e-9 {
			t.Errorf("mean %v loses %v, want 0.05", m, d.ending(infinite, m)[3])
		}
	}
}

// TestSwitchTables counts the tables of SHELL with its numbers by hand: keys of 16 and 17 bits, two
// servers of 128 bits and their number in each list, and 500 ports. It also checks that all tables of
// Segue's program have a number of entries.
func TestSwitchTables(t *testing.T) {
	programs, err := switchPrograms()
	testhost.Must(t, err)
	s := switchSetup{"", &programs[0], shellEntries(35591)}
	if got, want := s.count(), 35591+2*35591+500; got != want {
		t.Errorf("SHELL: %d entries, want %d", got, want)
	}
	bytes := s.bytes()
	for use, bits := range map[string]int{
		ofSYNs: 35591 * (16 + 258), ofOtherPackets: 2 * 35591 * (17 + 258), ofServers: 500 * 137,
	} {
		if bytes[use] != float64(bits)/8 {
			t.Errorf("SHELL: %v bytes for %s, want %v", bytes[use], use, float64(bits)/8)
		}
	}
	entries := segueEntries(65536, false)
	for _, table := range programs[len(programs)-1].Tables() {
		if _, ok := entries[lastName(table.Name)]; !ok {
			t.Errorf("Segue: unknown table %s", table.Name)
		}
	}
}

// TestDocumentedSizes checks that reproduction.md has the present sizes of the programs. If a program
// changes, the errors have the new rows.
func TestDocumentedSizes(t *testing.T) {
	text, err := os.ReadFile("../../docs/research/reproduction.md")
	testhost.Must(t, err)
	page := strings.ReplaceAll(string(text), "`", "")
	want := func(format string, values ...any) {
		t.Helper()
		if row := fmt.Sprintf(format, values...); !strings.Contains(page, row) {
			t.Errorf("docs/research/reproduction.md does not have %q", row)
		}
	}
	programs, err := switchPrograms()
	testhost.Must(t, err)
	for _, p := range programs {
		size := p.Parser()
		bits, err := p.headerBits()
		testhost.Must(t, err)
		want("| %s | %d | %d | %d | %d |", p.name, size.States, size.Entries, bits, p.Metadata())
	}
	for _, s := range switchSetups(programs) {
		if s.tcam() > 0 {
			t.Errorf("%s needs %v bytes of TCAM, and the page says that no table does", s.name, s.tcam())
		}
		stages, dependencies := s.Stages(s.entriesByName())
		want("| %s | %d | %.2f MB | %d | %d |", s.name, s.count(), s.megabytes(), dependencies, stages)
	}
	for i, name := range map[int]string{3: "SHELL, if d_off max is not smaller", 4: "Segue"} {
		parses, err := programs[i].parses(true)
		testhost.Must(t, err)
		row := "| parser states, " + name + " |"
		for _, parse := range parses {
			row += fmt.Sprintf(" %d |", parse.States)
		}
		want("%s", row)
	}
}
