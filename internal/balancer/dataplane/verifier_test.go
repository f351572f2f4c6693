// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/testhost"
)

// The verifier's work is most of the time of a start, and of the packet tests. It multiplies
// easily: by a loop that is inlined, or by a value that the verifier follows through all that comes
// after it (forget in bpf/net/parse.h). The kernel refuses a program at one million instructions.
func TestVerifierWork(t *testing.T) {
	t.Parallel()
	testhost.NeedBPF(t)
	attached, _, err := LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	dry, err := loadDryrun()
	if err != nil {
		t.Fatal(err)
	}
	NameDirectory(dry)
	sweeper, err := loadSweeper()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := setSweptSlots(sweeper, 1); err != nil {
		t.Fatal(err)
	}
	copier, err := loadCopier()
	if err != nil {
		t.Fatal(err)
	}
	nameCopiedWords(copier)
	for name, test := range map[string]struct {
		spec    *ebpf.CollectionSpec
		program string
		most    uint32 // instructions
	}{
		"attached": {attached, balancerProgXdpLb, 200_000},
		"dry run":  {dry, balancerProgXdpLb, 200_000},
		"sweep":    {sweeper, sweeperProgSweepFlows, 30_000},
		"copier":   {copier, copierProgCopyTable, 15_000},
	} {
		objects, err := ebpf.NewCollection(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		defer objects.Close()
		info, err := objects.Programs[test.program].Info()
		if err != nil {
			t.Fatal(err)
		}
		verified, ok := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", name, verified)
		if !ok || verified > test.most {
			t.Errorf("%s: %d instructions are more than %d", name, verified, test.most)
		}
	}
}
