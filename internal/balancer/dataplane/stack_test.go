// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestStackFitsAllKernels(t *testing.T) {
	t.Parallel()
	balancer, _, err := LoadSpec()
	testhost.Must(t, err)
	datapathtest.RequireStackForAllKernels(t, balancer, "xdp_lb")
	sweeper, err := loadSweeper()
	testhost.Must(t, err)
	if _, err := setSweptSlots(sweeper, 1); err != nil {
		t.Fatal(err)
	}
	datapathtest.RequireStackForAllKernels(t, sweeper, "sweep_flows")
	copier, err := loadCopier()
	testhost.Must(t, err)
	nameCopiedWords(copier)
	datapathtest.RequireStackForAllKernels(t, copier, "copy_table")
	dry, err := loadDryrun()
	testhost.Must(t, err)
	NameDirectory(dry)
	datapathtest.RequireStackForAllKernels(t, dry, "xdp_lb")
}

// The attached program has no variables of a dry run.
func TestDecisionsOnlyInDryRuns(t *testing.T) {
	t.Parallel()
	attached, _, err := LoadSpec()
	testhost.Must(t, err)
	dry, err := loadDryrun()
	testhost.Must(t, err)
	for _, name := range []string{"decision", "whole_length"} {
		if attached.Variables[name] != nil || dry.Variables[name] == nil {
			t.Errorf("variable %s: %v in the attached program, %v in the dry run", name, attached.Variables[name], dry.Variables[name])
		}
	}
}
