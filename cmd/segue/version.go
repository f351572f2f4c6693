// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/version"
)

func newVersion() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Tell which build of segue this is",
		Long: `Version prints the version, which "segue --version" prints alone, the commit, the Go
toolchain that this build was made with, and the version of the candidate tables.
Balancers that share a service must have the same version of candidate tables: those of
different versions place connections on different servers.

--json prints an object with the keys version, commit, time (of the commit), modified
(whether files were changed since), go, platform and tables (the version of the candidate
tables, a number); those of the commit are missing where the build did not know it.`,
		Args: arguments(),
	}
	asJSON := cmd.Flags().Bool("json", false, "print JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *asJSON {
			return printJSON(cmd.OutOrStdout(), version.Read())
		}
		return printVersion(cmd.OutOrStdout(), version.Read())
	}
	return cmd
}

func printVersion(out io.Writer, b version.Build) error {
	commit := "not known to this build"
	if b.Commit != "" {
		commit = b.Commit
		if b.Time != "" {
			commit += ", " + b.Time
		}
		if b.Modified {
			commit += ", files were changed since"
		}
	}
	_, err := fmt.Fprintf(out, "segue %s\ncommit: %s\nbuilt with: %s for %s\ncandidate tables: version %d\n",
		b.Version, commit, b.Go, b.Platform, b.Tables)
	return err
}
