// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// Every size is measured. To swap a table takes longer than to build it.
func TestTables(t *testing.T) {
	testhost.NeedBPF(t)
	times, err := MeasureTables(t.Context(), TableSizes, 5, nil)
	testhost.Must(t, err)
	if len(times) != len(TableSizes) {
		t.Errorf("%d results, want %d", len(times), len(TableSizes))
	}
	for _, got := range times {
		t.Logf("%+v", got)
		if got.Build <= 0 || got.Swap <= got.Build {
			t.Errorf("%d servers: swapped in %v, of which %v to build", got.Servers, got.Swap, got.Build)
		}
	}
}
