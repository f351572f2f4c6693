// SPDX-License-Identifier: Apache-2.0

package testnet

import (
	"testing"
	"time"
)

// Patience is the limit for everything that should happen soon. It does not measure speed.
const Patience = 2 * time.Minute

// Must ends the test if there is an error.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually calls try repeatedly until it returns no error. After Patience it ends the test with the
// last error.
func Eventually(t testing.TB, try func() error) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(Patience); ; <-tick.C {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %v", Patience, err)
		}
	}
}
