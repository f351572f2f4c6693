// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"fmt"
	"testing"
	"time"
)

// TestDamping: a VIP that comes and goes waits longer each time, up to a limit.
func TestDamping(t *testing.T) {
	t.Parallel()
	const holdDown = 10 * time.Second
	var d Damping
	now := time.Unix(1e9, 0)
	if due := d.Due(now, holdDown); due != now {
		t.Errorf("the first announcement waits for %v", due.Sub(now))
	}
	var waits []time.Duration
	for range 8 {
		d.Announced(now)
		now = now.Add(time.Second)
		d.Withdrawn(now, holdDown)
		now = now.Add(time.Minute)
		due := d.Due(now, holdDown)
		waits = append(waits, due.Sub(now)/time.Second)
		if again := d.Due(now.Add(time.Second), holdDown); again != due {
			t.Errorf("due %v, and a second later %v", due, again)
		}
		now = due
	}
	if got := fmt.Sprint(waits); got != "[10ns 20ns 40ns 80ns 160ns 320ns 320ns 320ns]" {
		t.Errorf("waits %s", got)
	}
	d.Announced(now)
	now = now.Add(stableFactor*holdDown + time.Second)
	d.Withdrawn(now, holdDown)
	if due := d.Due(now, holdDown); due != now.Add(holdDown) {
		t.Errorf("a VIP that was stable waits for %v", due.Sub(now))
	}
}
