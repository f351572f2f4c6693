// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// TestMutantsFitTheThreatModel checks that each row of the threat model has mutants, or says why it
// has none, and that each mutant can be made.
func TestMutantsFitTheThreatModel(t *testing.T) {
	if _, err := readModel("../.."); err != nil {
		t.Fatal(err)
	}
}
