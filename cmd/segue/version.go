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
		Short: "Show which build of segue this is",
		Long: `Version prints the version, the commit, the Go toolchain of this build, and the
version of the candidate tables. ("segue --version" prints only the first of these.)
Balancers that share a service must have the same version of candidate tables:
balancers of different versions place connections on different servers.

--json prints an object with the keys version, commit, time (of the commit), modified
(files were changed after the commit), go, platform and tables (the version of the
candidate tables, a number). In a build without git, the keys commit, time and modified
are missing.`,
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
	commit := "unknown: it was built without git"
	if b.Commit != "" {
		commit = b.Commit
		if b.Time != "" {
			commit += ", " + b.Time
		}
		if b.Modified {
			commit += ", with uncommitted changes"
		}
	}
	_, err := fmt.Fprintf(out, "segue %s\ncommit: %s\nbuilt with: %s for %s\ncandidate tables: version %d\n",
		b.Version, commit, b.Go, b.Platform, b.Tables)
	return err
}
