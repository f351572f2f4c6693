// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/needs"
)

func TestStackFitsAllKernels(t *testing.T) {
	needs.Agent(t)
	for _, program := range []string{"xdp_agent", "tc_agent", "tc_forward"} {
		spec, err := loadAgent()
		if err != nil {
			t.Fatal(err)
		}
		// Include the code for interfaces that lead out of the domain. The verifier removes it on
		// other nodes.
		if err := spec.Variables[agentVarHostIsOutside].Set(true); err != nil {
			t.Fatal(err)
		}
		datapathtest.RequireStackForAllKernels(t, spec, program)
	}
}
