// SPDX-License-Identifier: Apache-2.0

// Package clitest contains the tests of command lines that all programs have in common. A program
// passes the function that assembles its command tree.
package clitest

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

var update = flag.Bool("update", false, "write the golden files anew")

// Golden compares an output with a file in testdata.
func Golden(t *testing.T, name string, output *bytes.Buffer) {
	t.Helper()
	GoldenFile(t, filepath.Join("testdata", name), output.String())
}

// GoldenFile compares an output with a file.
func GoldenFile(t *testing.T, path, output string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(output), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), output); diff != "" {
		t.Errorf("%s, -want +got:\n%s", path, diff)
	}
}

// Run runs a command in this process. input is its standard input. The result has the command's
// standard output and standard error.
func Run(ctx context.Context, root *cobra.Command, input string, args ...string) (output string, err error) {
	var out bytes.Buffer
	root.SetIn(strings.NewReader(input))
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err = root.ExecuteContext(ctx)
	return out.String(), err
}

// ArgumentErrors checks that each list of arguments, separated by spaces, causes the error to which
// the map errors maps it.
func ArgumentErrors(t *testing.T, newRoot func() *cobra.Command, errors map[string]string) {
	t.Helper()
	for args, want := range errors {
		_, err := Run(t.Context(), newRoot(), "", strings.Fields(args)...)
		if err == nil || err.Error() != want {
			t.Errorf("%s: error %v, want %s", args, err, want)
		}
	}
}

// eachCommand calls do for a command and all its subcommands, except for those that parse no flags:
// commands that have moved, and commands of the library that shells call.
func eachCommand(cmd *cobra.Command, do func(*cobra.Command)) {
	if cmd.DisableFlagParsing {
		return
	}
	do(cmd)
	for _, sub := range cmd.Commands() {
		eachCommand(sub, do)
	}
}

// listed returns the names of the commands that the help of a command lists.
func listed(cmd *cobra.Command) (names []string) {
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// ungrouped are the commands about the program itself, which belong to no group in the help.
var ungrouped = []string{"completion", "help", "man", "version"}

// withoutTable are the commands of every program that print no table.
var withoutTable = map[string]string{
	"help": "help", "completion": "help", "man": "nothing",
	"completion bash": "a script", "completion fish": "a script", "completion powershell": "a script",
	"completion zsh": "a script",
}

// placeholders are the words that name the kind of a flag's value.
var placeholders = []string{
	"", "address", "bytes", "command", "count", "counts", "distribution", "duration", "file", "folder",
	"format", "hex", "int", "kind", "line", "name", "number", "numbers", "process", "regexp", "role",
	"schedule", "share", "shares", "time", "version",
}

// Commands checks all commands of a program. The keys of tableless are the commands that need no
// --json, because they print no table, and the values tell what these commands print. The golden
// file help.txt has the help of the program.
func Commands(t *testing.T, newRoot func() *cobra.Command, tableless map[string]string) {
	t.Run("help", func(t *testing.T) { testHelp(t, newRoot) })
	t.Run("commands", func(t *testing.T) { testCommands(t, newRoot, tableless) })
	t.Run("flags", func(t *testing.T) { testFlags(t, newRoot()) })
	t.Run("arguments", func(t *testing.T) { testArguments(t, newRoot()) })
	t.Run("man pages", func(t *testing.T) { testManPages(t, newRoot()) })
	t.Run("version", func(t *testing.T) { testVersion(t, newRoot) })
}

// testHelp checks that the help lists each command in a group, except for the ungrouped ones.
func testHelp(t *testing.T, newRoot func() *cobra.Command) {
	root := newRoot()
	help, err := Run(t.Context(), root, "", "--help")
	if err != nil {
		t.Fatal(err)
	}
	Golden(t, "help.txt", bytes.NewBufferString(help))
	for _, cmd := range root.Commands() {
		grouped := cmd.GroupID != ""
		if cmd.IsAvailableCommand() && grouped == slices.Contains(ungrouped, cmd.Name()) {
			t.Errorf("%s is in group %q", cmd.CommandPath(), cmd.GroupID)
		}
	}
}
