// SPDX-License-Identifier: Apache-2.0

// Package cli is what the command lines of all programs have in common: how they name missing and
// unexpected arguments, their help, exit codes, man pages and version.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/version"
)

// Main runs a program until it ends, or until SIGINT or SIGTERM ends the context of its commands. It
// does not return if there is an error: then it prints the error and exits.
func Main(root *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := root.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", root.Name(), err)
		os.Exit(ExitCode(err))
	}
}

// Coded is an error with an exit code of its own.
type Coded struct {
	error
	code int
}

// WithCode returns an error with an exit code.
func WithCode(err error, code int) Coded { return Coded{err, code} }

func (c Coded) Unwrap() error { return c.error }

// ExitCode returns the exit code for an error: 1 unless the error has another one.
func ExitCode(err error) int {
	if c, ok := errors.AsType[Coded](err); ok {
		return c.code
	}
	return 1
}

// NewRoot returns the command of a program. Commands write to cmd.OutOrStdout, so that tests run them
// in-process. Complete has to follow when the program has all its commands.
func NewRoot(name, short string) *cobra.Command {
	root := &cobra.Command{
		Use:           name,
		Short:         short,
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(describeFlagError)
	root.SetUsageTemplate(withoutBareUse(root.UsageTemplate()))
	return root
}

// Complete adds the commands that every program has.
func Complete(root *cobra.Command) {
	root.AddCommand(newMan(), newVersion(root.Name()))
	addLibraryCommands(root)
	completeGroups(root)
}

// withoutBareUse changes the library's template of the help: a command that groups others has no line of
// use that only repeats its name.
func withoutBareUse(template string) string {
	return strings.Replace(template, "{{if .Runnable}}",
		"{{if and .Runnable (or (not .HasSubCommands) (ne .UseLine .CommandPath))}}", 1)
}

// addLibraryCommands adds the commands completion and help of the library. Their errors become those of
// the other commands.
func addLibraryCommands(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			for _, shell := range cmd.Commands() {
				shell.Args = Arguments()
			}
		case "help":
			cmd.Run, cmd.RunE = nil, showHelp
		}
	}
}

// showHelp shows the help of the command that the arguments name.
func showHelp(cmd *cobra.Command, args []string) error {
	of, unknown, err := cmd.Root().Find(args)
	if err != nil {
		return err
	}
	if len(unknown) > 0 {
		return tooMany(of, unknown[0])
	}
	of.InitDefaultHelpFlag() // the help lists these flags
	of.InitDefaultVersionFlag()
	return of.Help()
}

// Program returns what the user has to type for one of the programs, such as bin/segue in a checkout. It
// is the name in another process, such as a test.
func Program(name string) string {
	dir, called := filepath.Split(os.Args[0])
	if called == "segue" || called == "segue-lab" {
		return dir + name
	}
	return name
}

// AddGroup adds commands to root. The help lists them under the title.
func AddGroup(root *cobra.Command, id, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: id, Title: title})
	for _, cmd := range commands {
		cmd.GroupID = id
		root.AddCommand(cmd)
	}
}

// PrintJSON prints a value as the option --json does.
func PrintJSON(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
