// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/needs"
)

// mostVerified is how many instructions the kernel's verifier may process for xdp_lb. It processes
// 162,000, and 153,000 of the dry run: the test logs both. The kernel refuses a program at
// one million.
const mostVerified = 200_000

// The verifier's work is most of the time of a start, and of the packet tests. It multiplies
// easily: by a loop that is inlined, or by a value that the verifier follows through all that comes
// after it (forget in bpf/net/parse.h).
func TestVerifierWork(t *testing.T) {
	t.Parallel()
	needs.BPF(t)
	attached, _, err := LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	dry, err := loadDryrun()
	if err != nil {
		t.Fatal(err)
	}
	NameDirectory(dry)
	for name, spec := range map[string]*ebpf.CollectionSpec{"attached": attached, "dry run": dry} {
		objects, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Fatal(err)
		}
		defer objects.Close()
		info, err := objects.Programs[balancerProgXdpLb].Info()
		if err != nil {
			t.Fatal(err)
		}
		verified, ok := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", name, verified)
		if !ok || verified > mostVerified {
			t.Errorf("%s: %d instructions are more than %d", name, verified, mostVerified)
		}
	}
}
