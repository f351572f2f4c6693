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
	for program, most := range map[string]uint32{"xdp_agent": 95_000, "tc_agent": 30_000} {
		info, err := objects.Programs[program].Info()
		testhost.Must(t, err)
		verified, ok := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", program, verified)
		if !ok || verified > most {
			t.Errorf("%s: %d instructions are more than %d", program, verified, most)
		}
	}
}
