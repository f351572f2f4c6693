// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/segue-lb/segue/internal/testhost"
)

// The metric of a stale load is there for each policy that uses the load, whether it has a threshold
// or not, and for no other.
func TestStaleLoadMetric(t *testing.T) {
	t.Parallel()
	threshold := uint32(4)
	for name, c := range map[string]struct {
		state AcceptState
		want  float64
		isNot bool
	}{
		"least":           {state: AcceptState{Source: "connections", Stale: true}, want: 1},
		"static":          {state: AcceptState{Source: "connections", Threshold: &threshold}, want: 0},
		"without a load":  {state: AcceptState{}, isNot: true},
		"static, unknown": {state: AcceptState{Source: "shm", Threshold: &threshold, Stale: true}, want: 1},
	} {
		metrics := make(chan prometheus.Metric, 16)
		collectAcceptance(metrics, "web", &c.state)
		close(metrics)
		found := false
		for metric := range metrics {
			if metric.Desc() != staleDesc {
				continue
			}
			found = true
			var out dto.Metric
			testhost.Must(t, metric.Write(&out))
			if got := out.GetGauge().GetValue(); got != c.want {
				t.Errorf("%s: %v, want %v", name, got, c.want)
			}
		}
		if found == c.isNot {
			t.Errorf("%s: the metric is there: %v", name, found)
		}
	}
}
