// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// arguments requires the named arguments. Its error names the missing ones. The last name may be in
// brackets if it is optional, and end in "..." if there may be several.
func arguments(names ...string) cobra.PositionalArgs {
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
			return fmt.Errorf("%s: missing %s", commandName(cmd), missing)
		case len(args) > most:
			return tooMany(cmd, args[most])
		}
		return nil
	}
}

// tooMany returns the error about an unexpected argument.
func tooMany(cmd *cobra.Command, arg string) error {
	var names []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("%s: unexpected argument %q", commandName(cmd), arg)
	}
	return fmt.Errorf("%s: unknown command %q: the commands are %s", commandName(cmd), arg,
		strings.Join(names, ", "))
}

// noArguments refuses all arguments. Its error names the flag that the user probably meant, as in
// "segue check -c FILE".
func noArguments(meant, flag string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		name := commandName(cmd)
		return fmt.Errorf("%s: unexpected argument %q; to name %s, write: segue %s %s %s",
			name, args[0], meant, name, flag, args[0])
	}
}

// commandName returns the words after "segue" that call a command.
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// configFlag adds the required flag for the configuration file.
func configFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVarP(file, "config", "c", "", "configuration `file`")
	refuse := noArguments("the file", "-c")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := refuse(cmd, args); err != nil {
			return err
		}
		if *file == "" {
			return fmt.Errorf("%s: missing -c FILE", commandName(cmd))
		}
		return nil
	}
}

// valueForms describe the valid values of flags, by type.
var valueForms = map[string]string{
	"bool":        "true or false",
	"duration":    "a duration with a unit, such as 500ms, 30s or 2h",
	"float64":     "a number",
	"int":         "a whole number",
	"intSlice":    "whole numbers separated by commas",
	"once":        "one file, given once; more files follow without the flag",
	"share":       "a share from 0% to 100%, such as 5%",
	"stringArray": "a text",
	"stringSlice": "values separated by commas",
	"uint32":      "a whole number from 0 to 4294967295",
	"uint64":      "a whole number from 0 to 18446744073709551615",
	"version":     "a version, as a dry run shows it",
}

// describeFlagError says what the value of a flag must be, where the library would quote Go's own
// errors. For other errors it names the command that lists the flags.
func describeFlagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return fmt.Errorf("%w; %s --help lists the flags", err, cmd.CommandPath())
	}
	flag := invalid.GetFlag()
	problem := "must be " + valueForms[flag.Value.Type()]
	if errors.Is(err, strconv.ErrRange) {
		problem = "is out of range"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, invalid.GetValue(), problem)
}

// parseRegexp reads a flag's regular expression.
func parseRegexp(flag, text string) (*regexp.Regexp, error) {
	expression, err := regexp.Compile(text)
	var wrong *syntax.Error
	if errors.As(err, &wrong) {
		return nil, fmt.Errorf("%s %q: must be a regular expression: %s: %s", flag, text, wrong.Code, wrong.Expr)
	}
	return expression, err
}

// parsePort reads an argument that is a port.
func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("port %q: must be a number from 1 to 65535", text)
	}
	return uint16(port), nil
}

// parseEndpoint reads ADDRESS:PORT.
func parseEndpoint(text string) (netip.AddrPort, error) {
	colon := strings.LastIndexByte(text, ':')
	_, err := netip.ParseAddrPort(text[:max(colon, 0)] + ":1")
	if err != nil {
		return netip.AddrPort{}, errors.New("must be ADDRESS:PORT, with an IPv6 address in brackets")
	}
	if _, err := parsePort(text[colon+1:]); err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(text)
}
