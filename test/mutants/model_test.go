// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// TestMutantsFitTheThreatModel checks that each row of the threat model has mutants, or says why it
// has none, and that each mutant can be made.
func TestMutantsFitTheThreatModel(t *testing.T) {
	rows, err := readModel("../..", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		for _, test := range r.tests {
			if test.folder == "" {
				t.Errorf("%q: there is no test %s", r.attack, test.name)
			}
		}
		if len(r.tests) == 0 {
			t.Errorf("%q: names no test", r.attack)
		}
	}
}
