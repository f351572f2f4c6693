// SPDX-License-Identifier: Apache-2.0

// Command segue is a load-aware layer-4 load balancer for Linux.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "segue:", err)
		os.Exit(exitCode(err))
	}
}

// coded is an error with an exit code of its own.
type coded struct {
	error
	code int
}

func (c coded) Unwrap() error { return c.error }

// exitCode returns the exit code for an error: 1 unless the error has another one.
func exitCode(err error) int {
	var c coded
	if errors.As(err, &c) {
		return c.code
	}
	return 1
}

// newRoot assembles the command tree. Commands write to cmd.OutOrStdout, so that
// tests run them in-process.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "segue",
		Short:         "Load-aware layer-4 load balancer",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(describeFlagError)
	root.SetUsageTemplate(withoutBareUse(root.UsageTemplate()))
	addGroup(root, "run", "Run a balancer or an agent:", newLB(), newAgent(), newCheck())
	addGroup(root, "change", "Change a running balancer or agent:", newDrain(), newUndrain(), newServer(), newService(), newDiff(),
		newApply(), newReload(), newStore())
	addGroup(root, "observe", "Observe a balancer or an agent:", newStatus(), newTrace(), newEvents())
	addGroup(root, "lab", "Try and measure on this machine:",
		newLab(), newApp(), newLoad(), newBench())
	addGroup(root, "research", "Simulate and compute:", newSim(), newModel(), newRepro())
	root.AddCommand(newMan(), newVersion())
	addLibraryCommands(root)
	completeGroups(root)
	return root
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
				shell.Args = arguments()
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

// program returns what the user has to type for this program, such as bin/segue in a checkout. It is segue
// in a process with another name, such as a test.
func program() string {
	if filepath.Base(os.Args[0]) == "segue" {
		return os.Args[0]
	}
	return "segue"
}

// addGroup adds commands to root. "segue --help" lists them under the title.
func addGroup(root *cobra.Command, id, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: id, Title: title})
	for _, cmd := range commands {
		cmd.GroupID = id
		root.AddCommand(cmd)
	}
}
