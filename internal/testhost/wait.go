// SPDX-License-Identifier: Apache-2.0

package testhost

import (
	"testing"
	"time"
)

// Patience is the limit for everything that should happen soon. It does not measure speed.
const Patience = 2 * time.Minute

// Must ends the test, which may be one of package rapid, if there is an error.
func Must(t interface {
	Helper()
	Fatal(args ...any)
}, err error) {
	if err != nil {
		t.Helper() // takes time, and packet tests have few errors
		t.Fatal(err)
	}
}

// Eventually calls try repeatedly until it returns no error. After Patience it ends the test with the
// last error.
func Eventually(t testing.TB, try func() error) {
	t.Helper()
	for start := time.Now(); ; {
		before := time.Now()
		err := try()
		if err == nil {
			return
		}
		if time.Since(start) > Patience {
			t.Fatalf("after %v: %v", Patience, err)
		}
		time.Sleep(pause(time.Since(start), time.Since(before)))
	}
}

// pause returns the time until the next try. Tries may start programs. They take at most half of a
// processor, and fewer are made the longer the wait lasts.
func pause(waited, try time.Duration) time.Duration {
	return max(try, min(max(waited/10, 10*time.Millisecond), 200*time.Millisecond))
}
