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

// arguments demands the named arguments, and says which are missing. The last one may be in
// brackets, if it can be left out, and end in "...", if there may be several.
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

// tooMany is the error about an argument too many.
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

// noArguments refuses arguments of a command whose flag names what an argument is most likely meant
// for: the file, as in "segue check -c FILE".
func noArguments(meant, flag string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		name := commandName(cmd)
		return fmt.Errorf("%s: unexpected argument %q; a flag names %s: segue %s %s %s",
			name, args[0], meant, name, flag, args[0])
	}
}

// commandName is how a command is called after segue.
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// configFlag adds the flag that names a configuration file, without which the command does nothing.
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

// valueForms say, by their type, what the values of flags look like.
var valueForms = map[string]string{
	"bool":        "true or false",
	"duration":    "a duration with its unit, such as 500ms, 30s or 2h",
	"int":         "a whole number",
	"share":       "a share from 0% to 100%, such as 5%",
	"stringSlice": "values separated by commas",
	"uint32":      "a whole number from 0 to 4294967295",
	"uint64":      "a whole number from 0 to 18446744073709551615",
}

// describeFlagError says what a flag's value must be where the library would quote Go's own errors,
// and else where to read which flags there are.
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
		return netip.AddrPort{}, errors.New("must be ADDRESS:PORT, IPv6 addresses in brackets")
	}
	if _, err := parsePort(text[colon+1:]); err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(text)
}
