// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRatesSince(t *testing.T) {
	at := func(second int64, counts ...ReasonCount) *Snapshot {
		return &Snapshot{Time: time.Unix(second, 0), Reasons: counts}
	}
	before := at(10, ReasonCount{Reason: "a", Packets: 100, Bytes: 1000}, ReasonCount{Reason: "b", Packets: 50, Bytes: 500})
	now := at(14, ReasonCount{Reason: "a", Packets: 108, Bytes: 1200}, ReasonCount{Reason: "b", Packets: 4, Bytes: 40})
	now.RatesSince(before)
	want := []ReasonCount{
		{Reason: "a", Packets: 108, Bytes: 1200, Rate: &Rate{Packets: 2, Bits: 400}},
		{Reason: "b", Packets: 4, Bytes: 40, Rate: &Rate{Packets: 1, Bits: 80}}, // reset meanwhile
	}
	if diff := cmp.Diff(want, now.Reasons); diff != "" || now.Interval != 4 {
		t.Errorf("in %v s, -want +got:\n%s", now.Interval, diff)
	}
}
