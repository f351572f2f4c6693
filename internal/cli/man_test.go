// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestManPageQuotes checks that characters of Markdown in a description appear in the man page.
func TestManPageQuotes(t *testing.T) {
	const long = "Describe prints *all* of _it_, such as `x`, [y], <z> and {}."
	root := NewRoot("program", "Program of a test")
	AddGroup(root, "one", "One:", &cobra.Command{Use: "describe", Long: long, Run: func(*cobra.Command, []string) {}})
	Complete(root)
	dir := t.TempDir()
	root.SetArgs([]string{"man", dir})
	testhost.Must(t, root.Execute())
	text, err := os.ReadFile(filepath.Join(dir, "program-describe.8"))
	if err != nil || !strings.Contains(string(text), long) {
		t.Errorf("%v, %s", err, text)
	}
}
