// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/version"
)

// newVersion returns the command that shows the build of the program with this name.
func newVersion(name string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show which build of " + name + " this is",
		Long: `Version prints the version, the commit and the Go toolchain of this build, and the version
of the candidate tables. The flag --version prints only the version of the build.

Balancers that share a service must have the same version of candidate tables. With different
versions, they place connections on different servers.

--json prints an object with the keys version, commit, time (of the commit), modified
(files were changed after the commit), go, platform and tables (the version of the
candidate tables, a number). In a build without git, the keys commit, time and modified
are missing.`,
		Args: Arguments(),
	}
	asJSON := cmd.Flags().Bool("json", false, "print JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *asJSON {
			return PrintJSON(cmd.OutOrStdout(), version.Read())
		}
		return printVersion(cmd.OutOrStdout(), name, version.Read())
	}
	return cmd
}

func printVersion(out io.Writer, name string, b version.Build) error {
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
	_, err := fmt.Fprintf(out, "%s %s\ncommit: %s\nbuilt with: %s for %s\ncandidate tables: version %d\n",
		name, b.Version, commit, b.Go, b.Platform, b.Tables)
	return err
}
