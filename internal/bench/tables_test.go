package bench

import (
	"os"
	"testing"
	"time"
)

// A change of servers is in force soon: 1,000 servers in 50 ms, 10,000 in 2 s. Machines that test are
// busy, so the test allows twice as much; the bench tells the time.
func TestTables(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loading BPF programs needs root")
	}
	times, err := MeasureTables(t.Context(), TableSizes, 5, nil)
	if err != nil {
		t.Fatal(err)
	}
	limits := map[int]time.Duration{10: 50 * time.Millisecond, 1000: 50 * time.Millisecond, 10000: 2 * time.Second}
	for _, got := range times {
		t.Logf("%+v", got)
		if got.Swap <= got.Build {
			t.Errorf("%d servers: swapped in %v, of which %v to build", got.Servers, got.Swap, got.Build)
		}
		if limit := 2 * limits[got.Servers]; got.Swap > limit {
			t.Errorf("%d servers: swapped in %v, more than %v", got.Servers, got.Swap, limit)
		}
	}
}
