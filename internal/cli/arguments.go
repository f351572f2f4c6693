// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/segue-lb/segue/internal/wording"
)

// Arguments returns a check that a command has the named arguments. Its error names the missing
// ones. A last name in brackets is optional. If the last name ends in "...", the argument may occur
// several times.
func Arguments(names ...string) cobra.PositionalArgs {
	required, most := len(names), len(names)
	if most > 0 {
		last := names[most-1]
		if strings.HasPrefix(last, "[") {
			required--
		}
		if strings.HasSuffix(strings.TrimSuffix(last, "]"), "...") {
			most = math.MaxInt
		}
	}
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < required:
			missing := strings.Join(names[len(args):required], " ")
			return fmt.Errorf("%s: missing %s", CommandName(cmd), missing)
		case len(args) > most:
			return tooMany(cmd, args[most])
		}
		return nil
	}
}

// tooMany returns the error about an unexpected argument. If the command has subcommands, the user
// probably meant one of these.
func tooMany(cmd *cobra.Command, arg string) error {
	names, place := subcommands(cmd), CommandName(cmd)+": "
	if cmd == cmd.Root() {
		place = ""
	}
	if len(names) == 0 {
		return fmt.Errorf("%sunexpected argument %q", place, arg)
	}
	advice := "the commands are " + strings.Join(names, ", ")
	if cmd == cmd.Root() {
		advice = cmd.Name() + " --help lists the commands"
	}
	if near := wording.Nearest(arg, names...); near != "" {
		advice = fmt.Sprintf("did you mean %s?", near)
	}
	return fmt.Errorf("%sunknown command %q: %s", place, arg, advice)
}

// subcommands returns the names of the commands that the help of a command lists.
func subcommands(cmd *cobra.Command) (names []string) {
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// completeGroups completes cmd and each command below it that only groups other commands. Such a
// command shows its help, and refuses unknown commands. By default, the library shows the help for
// an unknown command, too, and succeeds.
func completeGroups(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		completeGroups(sub)
	}
	if !cmd.HasSubCommands() || cmd.Runnable() {
		return
	}
	cmd.Args, cmd.DisableFlagsInUseLine = Arguments(), true
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// NoArguments returns a check that a command has no arguments. Its error names the flag with which
// the user can give the argument, unless the argument resembles a subcommand. meant says what the
// flag names, such as "the file".
func NoArguments(meant, flag string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		if wording.Nearest(args[0], subcommands(cmd)...) != "" {
			return tooMany(cmd, args[0])
		}
		return fmt.Errorf("%s: unexpected argument %q; to name %s, write: %s %s %s",
			CommandName(cmd), args[0], meant, cmd.CommandPath(), flag, args[0])
	}
}

// CommandName returns a command as the user types it, without the name of the program, such as
// "store import".
func CommandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// FileFlag is the value of a flag that names a file. The flag can be given only once, because one
// of two files would have no effect.
type FileFlag struct {
	Name  *string
	given bool
}

var errGivenTwice = errors.New("can be given only once")

func (f *FileFlag) Set(name string) error {
	if f.given {
		return errGivenTwice
	}
	*f.Name, f.given = name, true
	return nil
}

func (f *FileFlag) String() string {
	if f.Name == nil { // the library calls String on a zero FileFlag
		return ""
	}
	return *f.Name
}

func (f *FileFlag) Type() string { return "string" }

// StandardInput names standard input in place of a file, for commands that read the file only once.
const StandardInput = "-"

// ReadInput returns the content of a file or of standard input, and its name for messages.
func ReadInput(in io.Reader, file string) (content []byte, name string, err error) {
	if file != StandardInput {
		content, err = os.ReadFile(file)
		return content, file, err
	}
	content, err = io.ReadAll(in)
	return content, "standard input", err
}

// JSONFlag adds the flag of the commands that can print JSON instead of a table.
func JSONFlag(cmd *cobra.Command, asJSON *bool) {
	cmd.Flags().BoolVar(asJSON, "json", false, "print JSON")
}

// valueForms describe the valid values of flags, by the type of the flag.
var valueForms = map[string]string{
	"bool":        "true or false",
	"duration":    "a duration with a unit, such as 500ms, 30s or 2h",
	"float64":     "a number",
	"int":         "a whole number",
	"intSlice":    "whole numbers separated by commas",
	"share":       "a share from 0% to 100%, such as 5%",
	"stringArray": "a text",
	"stringSlice": "values separated by commas",
	"uint32":      "a whole number from 0 to 4294967295",
	"uint64":      "a whole number from 0 to 18446744073709551615",
	"version":     "a version, as a dry run shows it",
}

// describeFlagError returns a better error about a flag than the library's. For an invalid value,
// it says what the value must be, where the library quotes an error of Go. For an unknown flag, it
// names a flag with a similar name, or the command that lists the flags.
func describeFlagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("%w; %s", err, adviseFlag(cmd, unknown.GetSpecifiedName()))
	case !errors.As(err, &invalid):
		return fmt.Errorf("%w; %s --help lists the flags", err, cmd.CommandPath())
	case errors.Is(err, errGivenTwice):
		return fmt.Errorf("--%s %q: %w", invalid.GetFlag().Name, invalid.GetValue(), errGivenTwice)
	}
	flag := invalid.GetFlag()
	problem := "must be " + valueForms[flag.Value.Type()]
	if errors.Is(err, strconv.ErrRange) {
		problem = "is out of range"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, invalid.GetValue(), problem)
}

// adviseFlag returns advice about an unknown flag of a command. If an earlier release had the flag,
// an annotation of the command says what replaces it.
func adviseFlag(cmd *cobra.Command, name string) string {
	if replaced := cmd.Annotations["--"+name]; replaced != "" {
		return replaced
	}
	var names []string
	cmd.Flags().VisitAll(func(flag *pflag.Flag) { names = append(names, flag.Name) })
	if near := wording.Nearest(name, names...); near != "" {
		return "did you mean --" + near + "?"
	}
	return cmd.CommandPath() + " --help lists the flags"
}

// ParseRegexp reads a flag's regular expression.
func ParseRegexp(flag, text string) (*regexp.Regexp, error) {
	expression, err := regexp.Compile(text)
	if wrong, ok := errors.AsType[*syntax.Error](err); ok {
		return nil, fmt.Errorf("%s %q: must be a regular expression: %s: %s", flag, text, wrong.Code, wrong.Expr)
	}
	return expression, err
}

// ParsePort reads an argument that is a port.
func ParsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("port %q: must be a number from 1 to 65535", text)
	}
	return uint16(port), nil
}
