// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzRecord reads any bytes as the record of a process. An accepted record stays the same when it
// is written and read again.
func FuzzRecord(f *testing.F) {
	now := time.Unix(1700000000, 0).UTC()
	text, err := json.Marshal(Record{
		Since: now, Role: "balancer",
		Configuration: Configuration{
			File: "/etc/segue/lb.yaml", Read: now, Refused: &Refusal{now, []string{"node.seed: no"}},
			Overrides: []desired.Override{{Service: "web", Server: "s1", Set: desired.Fields{"drained": true}}},
		},
		Fixed: []desired.Setting{{Field: "node.seed", Value: "7"}},
	})
	testhost.Must(f, err)
	f.Add(text)
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, text []byte) {
		record, err := parseRecord(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(record)
		if err != nil {
			return // a time beyond the year 9999
		}
		back, err := parseRecord(again)
		if err != nil || !cmp.Equal(record, back) {
			t.Errorf("%s: %v", again, err)
		}
	})
}
