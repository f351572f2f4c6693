// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/testhost"
)

// The verifier's work is most of the time of a start. See TestVerifierWork of the balancer.
func TestVerifierWork(t *testing.T) {
	t.Parallel()
	testhost.NeedBPF(t)
	spec, err := loadAgent()
	testhost.Must(t, err)
	objects, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer objects.Close()
	most := map[string]uint32{
		"xdp_agent":           75_000,
		"tc_agent":            24_000,
		"tc_forward":          500,
		"count_connections":   4_000,
		"correct_connections": 100,
		"query_socket":        1_500,
		"query_load":          2_000,
	}
	for name, program := range objects.Programs {
		info, err := program.Info()
		testhost.Must(t, err)
		verified, ok := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", name, verified)
		if limit := testhost.VerifierLimit(t, most[name]); !ok || verified > limit {
			t.Errorf("%s: %d instructions are more than %d", name, verified, limit)
		}
	}
}
