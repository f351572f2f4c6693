// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"testing"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestStackFitsAllKernels(t *testing.T) {
	testhost.NeedAgent(t)
	for _, c := range []struct {
		program string
		dryRun  bool
	}{{"xdp_agent", false}, {"xdp_agent", true}, {"tc_agent", false}, {"tc_forward", false}} {
		spec, err := loadAgent()
		testhost.Must(t, err)
		// Include the code for interfaces that lead out of the domain. The verifier removes it on
		// other nodes.
		outside := spec.Variables[agentVarHostIsOutside].Set(true)
		testhost.Must(t, errors.Join(outside, spec.Variables[agentVarDryRun].Set(c.dryRun)))
		datapathtest.RequireStackForAllKernels(t, spec, c.program)
	}
}
