// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
)

// TestMain makes the test binary a segue of which comparisons start workers. What else is not a
// test flag must not run the tests.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Equal(os.Args[1:], workerArguments) {
		if err := ServeWorker(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "segue:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
