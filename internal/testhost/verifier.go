// SPDX-License-Identifier: Apache-2.0

package testhost

import (
	"testing"

	"github.com/cilium/ebpf/features"
)

// limitsOf is the version of Linux on which the limits of the verifier's work were set: 6.18.
const limitsOf = 6<<16 | 18<<8

// VerifierLimit returns how many instructions the verifier of this kernel may process for a program
// that takes at most `most` on Linux 6.18. Earlier verifiers prune fewer paths, and so process more
// instructions: on Linux 6.1, up to 43% more (docs/notes/linux-6.1.md).
func VerifierLimit(t testing.TB, most uint32) uint32 {
	t.Helper()
	version, err := features.LinuxVersionCode()
	Must(t, err)
	if version < limitsOf {
		return most + most/2
	}
	return most
}
