// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
)

// TestMain lets comparisons start the test binary as a worker. Other arguments that are not test
// flags must not run the tests.
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
