// SPDX-License-Identifier: Apache-2.0

package scenario

import "testing"

// FuzzParse checks that any file is either refused or can be run.
func FuzzParse(f *testing.F) {
	f.Add(valid)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse([]byte(text), ".")
		if err == nil && len(s.Cases) == 0 {
			t.Error("nothing to run, and no error")
		}
	})
}
