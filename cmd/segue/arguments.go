package main

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// arguments demands exactly the named arguments, and says which are missing.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		command := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
		switch {
		case len(args) < len(names):
			return fmt.Errorf("%s: missing %s", command, strings.Join(names[len(args):], " "))
		case len(args) > len(names):
			return fmt.Errorf("%s: unexpected argument %q", command, args[len(names)])
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

// describeFlagError says what a flag's value must be where the library would quote Go's own errors.
func describeFlagError(_ *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
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
