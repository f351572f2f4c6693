// SPDX-License-Identifier: Apache-2.0

package clitest

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/version"
)

// testCommands checks that each command has help, refuses an unknown flag and, if it groups other
// commands, an unknown command. It must have --json, unless it prints no table.
func testCommands(t *testing.T, newRoot func() *cobra.Command, tableless map[string]string) {
	tableless = maps.Clone(tableless)
	maps.Copy(tableless, withoutTable)
	unused := maps.Clone(tableless)
	root := newRoot()
	eachCommand(root, func(cmd *cobra.Command) {
		words := strings.Fields(cmd.CommandPath())[1:]
		name := strings.Join(words, " ")
		run := func(args ...string) (string, error) { return Run(t.Context(), newRoot(), "", args...) }
		usage := "Usage:\n  " + cmd.CommandPath()
		if help, err := run(append(words, "--help")...); err != nil || !strings.Contains(help, usage) {
			t.Errorf("%s --help: %v\n%s", name, err, help)
		}
		if help, err := run(append([]string{"help"}, words...)...); err != nil || !strings.Contains(help, "Usage:\n") {
			t.Errorf("help %s: %v\n%s", name, err, help)
		}
		if _, err := run(append(words, "--no-such-flag")...); err == nil ||
			!strings.Contains(err.Error(), "unknown flag: --no-such-flag; "+cmd.CommandPath()) {
			t.Errorf("%s with an unknown flag: %v", name, err)
		}
		if subs := listed(cmd); len(subs) > 0 {
			mistyped := subs[0][:1] + subs[0][2:] // without its second letter
			advice := fmt.Sprintf("unknown command %q: did you mean ", mistyped)
			if out, err := run(append(words, mistyped)...); err == nil || !strings.Contains(err.Error(), advice) {
				t.Errorf("%s %s: %v\n%s", name, mistyped, err, out)
			}
			if out, err := run(append(words, "zzzzzz")...); err == nil {
				t.Errorf("%s zzzzzz succeeded:\n%s", name, out)
			}
		}
		cmd.InheritedFlags() // makes cmd.Flag find the flags of the parents, too
		if _, is := tableless[name]; cmd != root && is == (cmd.Flag("json") != nil) {
			t.Errorf("%s: either it has --json, or a map of the test says why not", name)
		}
		delete(unused, name)
	})
	for name := range unused {
		t.Errorf("the map of commands without --json has %s, which is no command", name)
	}
}

// testFlags checks that the help of each flag names the kind of its value by a placeholder, that a
// letter means the same everywhere, that a file can be given only once, and that an invalid value
// causes a clear error.
func testFlags(t *testing.T, root *cobra.Command) {
	letters := map[string]string{}
	eachCommand(root, func(cmd *cobra.Command) {
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			name := cmd.CommandPath() + ": --" + flag.Name
			if placeholder, _ := pflag.UnquoteUsage(flag); !slices.Contains(placeholders, placeholder) {
				t.Errorf("%s %s: the placeholder is none of %v", name, placeholder, placeholders)
			}
			other, known := letters[flag.Shorthand]
			if flag.Shorthand != "" && known && other != flag.Name {
				t.Errorf("%s: -%s is elsewhere --%s", name, flag.Shorthand, other)
			}
			letters[flag.Shorthand] = flag.Name
			_, isOnce := flag.Value.(*cli.FileFlag)
			if !isOnce && (flag.Name == "config" || flag.Name == "file" && flag.Shorthand != "") {
				t.Errorf("%s can be given twice", name)
			}
			if flag.Name == "out" && flag.Shorthand != "o" {
				t.Errorf("%s has no -o", name)
			}
			const invalid = `"?` // not even valid as values separated by commas
			err := cmd.ParseFlags([]string{"--" + flag.Name + "=" + invalid})
			if err == nil {
				return
			}
			err = cmd.FlagErrorFunc()(cmd, err)
			begin := fmt.Sprintf("--%s %q: must be ", flag.Name, invalid)
			if problem, is := strings.CutPrefix(err.Error(), begin); !is || problem == "" {
				t.Errorf("%s: the error does not say what the value must be: %v", name, err)
			}
		})
	})
}

// testArguments gives every command too few and too many arguments. The errors must not be those of
// the library.
func testArguments(t *testing.T, root *cobra.Command) {
	refused := 0
	eachCommand(root, func(cmd *cobra.Command) {
		if cmd == root {
			return // the arguments of this command are subcommands
		}
		for _, args := range [][]string{nil, slices.Repeat([]string{"x"}, 100)} {
			for _, err := range []error{cmd.ValidateArgs(args), cmd.ValidateRequiredFlags()} {
				if err == nil {
					continue
				}
				refused++
				text := err.Error()
				named := strings.HasPrefix(text, cli.CommandName(cmd)+": ")
				if !named || strings.Contains(text, "(s)") {
					t.Errorf("%s with %d arguments: %s", cmd.CommandPath(), len(args), text)
				}
			}
		}
	})
	if refused < 20 {
		t.Errorf("only %d errors were looked at", refused)
	}
}

// testManPages writes the pages of all commands.
func testManPages(t *testing.T, root *cobra.Command) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	dir := filepath.Join(t.TempDir(), "man8")
	if _, err := Run(t.Context(), root, "", "man", dir); err != nil {
		t.Fatal(err)
	}
	pages := 0
	eachCommand(root, func(cmd *cobra.Command) {
		if !cmd.IsAvailableCommand() && cmd != root || cmd.HasParent() && cmd.Parent().Hidden {
			return
		}
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
		text, err := os.ReadFile(filepath.Join(dir, name+".8"))
		if err != nil {
			t.Fatal(err)
		}
		pages++
		wants := []string{`"8" "Nov 2023"`, `\fB` + cmd.CommandPath()}
		if cmd.Example != "" {
			wants = append(wants, "EXAMPLE")
		}
		for _, want := range wants {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s has no %q:\n%s", name, want, text)
			}
		}
	})
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != pages || pages < 20 {
		t.Errorf("%d pages of %d commands, %v", len(entries), pages, err)
	}
}

// testVersion checks that the command and the flag print the same version.
func testVersion(t *testing.T, newRoot func() *cobra.Command) {
	run := func(args ...string) string {
		output, err := Run(t.Context(), newRoot(), "", args...)
		if err != nil {
			t.Fatal(err)
		}
		return output
	}
	var build version.Build
	if err := json.Unmarshal([]byte(run("version", "--json")), &build); err != nil {
		t.Fatal(err)
	}
	if build != version.Read() {
		t.Errorf("the command says %+v, the build is %+v", build, version.Read())
	}
	name := newRoot().Name()
	if got, want := run("--version"), name+" version "+build.Version+"\n"; got != want {
		t.Errorf("--version prints %q, want %q", got, want)
	}
	if got := run("version"); !strings.HasPrefix(got, name+" "+build.Version+"\n") {
		t.Errorf("version prints %q", got)
	}
}
