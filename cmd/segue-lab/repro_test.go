// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

// runRepro runs segue-lab repro with a directory for the figures, and returns the output.
func runRepro(t *testing.T, directory string, args ...string) *bytes.Buffer {
	t.Helper()
	out := new(bytes.Buffer)
	root := newRoot()
	root.SetOut(out)
	root.SetErr(new(bytes.Buffer))
	root.SetArgs(append([]string{"repro", "--quick", "--out", directory}, args...))
	if err := root.Execute(); err != nil {
		t.Fatalf("segue-lab repro %v: %v", args, err)
	}
	return out
}

func TestRepro(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "figures")
	got := runRepro(t, directory, "6lb-8f", "6lb-9")
	// The name of the directory differs from run to run.
	text := strings.ReplaceAll(got.String(), directory, "DIRECTORY")
	clitest.Golden(t, "repro.txt", bytes.NewBufferString(text))

	var checks []map[string]any
	testhost.Must(t, json.Unmarshal(runRepro(t, directory, "6lb-8f", "--json").Bytes(), &checks))
	if len(checks) != 1 || checks[0]["paper"] != 71.0 || checks[0]["ok"] != true ||
		len(checks[0]) != 8 {
		t.Errorf("%v", checks)
	}
}

func TestReproList(t *testing.T) {
	got := runRepro(t, t.TempDir(), "--list", "6lb-8?").String()
	if lines := strings.Count(got, "\n"); lines != 6 || !strings.HasPrefix(got, "6lb-8a  ") {
		t.Errorf("%d lines:\n%s", lines, got)
	}
}

func TestReproErrors(t *testing.T) {
	clitest.ArgumentErrors(t, newRoot, map[string]string{
		"repro 6lb-99":      `figure "6lb-99": unknown; segue-lab repro --list lists all figures`,
		"repro [":           `figure "[": syntax error in pattern`,
		"repro --workers 0": "--workers 0: must be at least 1",
		"repro --out=":      "--out \"\": must be the name of a directory",
		"repro --seed -1":   `--seed "-1": must be a whole number from 0 to 18446744073709551615`,
	})
}
