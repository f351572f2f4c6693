// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
)

func TestStackFitsAllKernels(t *testing.T) {
	t.Parallel()
	balancer, _, err := LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	datapathtest.RequireStackForAllKernels(t, balancer, "xdp_lb")
	sweeper, err := loadSweeper()
	if err != nil {
		t.Fatal(err)
	}
	datapathtest.RequireStackForAllKernels(t, sweeper, "sweep_flows")
}
