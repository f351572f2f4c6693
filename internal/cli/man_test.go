// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestManPages writes the pages of all commands.
func TestManPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	dir := filepath.Join(t.TempDir(), "man8")
	root := newRoot()
	root.SetArgs([]string{"man", dir})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	pages := 0
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if !cmd.IsAvailableCommand() && cmd != root {
			return
		}
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
		text, err := os.ReadFile(filepath.Join(dir, name+".8"))
		if err != nil {
			t.Fatal(err)
		}
		pages++
		for _, want := range []string{`"8" "Nov 2023"`, `\fB` + cmd.CommandPath(), "EXAMPLE"} {
			if want == "EXAMPLE" && cmd.Example == "" {
				continue
			}
			if !strings.Contains(string(text), want) {
				t.Errorf("%s has no %q:\n%s", name, want, text)
			}
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(root)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != pages || pages < 20 {
		t.Errorf("%d pages of %d commands, %v", len(entries), pages, err)
	}
	// Signs of Markdown in a description stay as they are.
	text, err := os.ReadFile(filepath.Join(dir, "segue-trace.8"))
	if err != nil || !strings.Contains(string(text), `{} in it stands for the server's name`) &&
		!strings.Contains(string(text), "{}\nin it stands for the server") {
		t.Errorf("segue-trace.8, %v:\n%s", err, text)
	}
}
