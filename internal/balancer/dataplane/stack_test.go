// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
)

func TestStackFitsAllKernels(t *testing.T) {
	t.Parallel()
	spec, _, err := LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	datapathtest.RequireStackForAllKernels(t, spec, "xdp_lb")
}
