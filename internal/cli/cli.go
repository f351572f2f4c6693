// SPDX-License-Identifier: Apache-2.0

// Package cli contains what the command lines of all programs have in common: errors about
// arguments and flags, help, exit codes, man pages and the version.
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

// Main runs a program. SIGINT and SIGTERM end the context of its command. If the command returns an
// error, Main prints the error and exits.
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

// NewRoot returns the command of a program, without subcommands. When the program has added them,
// it must call Complete. Commands must write to cmd.OutOrStdout: tests read their output there.
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

// Complete adds the commands that every program has, and completes those that group others.
func Complete(root *cobra.Command) {
	root.AddCommand(newMan(), newVersion(root.Name()))
	addLibraryCommands(root)
	completeGroups(root)
}

// withoutBareUse changes the library's template of the help. A command that groups others can run,
// because it shows its help. So the template would print a line of usage with only the name of the
// command. The result lacks this line.
func withoutBareUse(template string) string {
	return strings.Replace(template, "{{if .Runnable}}",
		"{{if and .Runnable (or (not .HasSubCommands) (ne .UseLine .CommandPath))}}", 1)
}

// addLibraryCommands adds the library's commands completion and help. It makes their errors the
// same as those of the other commands.
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
	// The library adds these flags only when it runs the command, but the help must list them.
	of.InitDefaultHelpFlag()
	of.InitDefaultVersionFlag()
	return of.Help()
}

// Program returns what the user has to type to run the program segue or segue-lab. If the user has
// typed a directory before the name of the running program, as in bin/segue, the result has the
// same directory. If another program runs, such as a test, the result is the name alone.
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
