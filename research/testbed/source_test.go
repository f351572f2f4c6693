// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

// The intervals at which agents read loads are emulated time.
func TestSourcesByTheClock(t *testing.T) {
	s := settings{}
	s.Speed = 4
	const file, now = desired.LoadSharedMemory, desired.LoadSharedMap
	for _, c := range []struct{ given, want desired.Source }{
		{desired.Source{Kind: file, Interval: 20 * time.Millisecond}, desired.Source{Kind: file, Interval: 5 * time.Millisecond}},
		{desired.Source{Kind: file}, desired.Source{Kind: file, Interval: 2500 * time.Microsecond}},
		{desired.Source{Kind: file, Interval: time.Millisecond}, desired.Source{Kind: file, Interval: time.Millisecond}},
		{desired.Source{Kind: now}, desired.Source{Kind: now}},
		{desired.Source{Kind: desired.LoadConnections}, desired.Source{Kind: desired.LoadConnections}},
	} {
		hunts := Case{Placement: desired.PlacementHunt, Source: c.given}
		if got := hunts.service(0, s).Load; got != c.want {
			t.Errorf("%+v: the service has %+v, want %+v", c.given, got, c.want)
		}
	}
}
