// SPDX-License-Identifier: Apache-2.0

package testhost

import (
	"testing"
	"time"
)

// Patience is how long a test waits for something that should happen soon. It is long, because it
// is no test of speed.
const Patience = 2 * time.Minute

// Must ends the test if there is an error. The test may be one of package rapid.
func Must(t interface {
	Helper()
	Fatal(args ...any)
}, err error) {
	if err != nil {
		t.Helper() // only here: it takes time, and packet tests call Must often
		t.Fatal(err)
	}
}

// Eventually calls try until it returns nil. After Patience it ends the test with the last error.
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

// pause returns the time until the next try. It is a tenth of the time waited so far, within
// limits. It is at least as long as the last try took: tries may start programs, and should take no
// more than half of a processor.
func pause(waited, try time.Duration) time.Duration {
	return max(try, min(max(waited/10, 10*time.Millisecond), 200*time.Millisecond))
}
