// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/segue-lb/segue/internal/version"
)

// manSection is the section of man pages for system administration commands.
const manSection = "8"

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "Write the man pages",
		Long: `Man writes a man page of each command into a directory. It makes the directory if it does
not exist. The date of the pages is that of the environment variable SOURCE_DATE_EPOCH (seconds
since 1970). Without the variable, it is today's date. The Debian package contains the pages
already.`,
		Args: Arguments("DIRECTORY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return writeManPages(cmd.Root(), args[0])
		},
	}
}

// writeManPages writes a man page of each command into a directory.
func writeManPages(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root.DisableAutoGenTag = true // the tag would contain a second date
	quoteLong(root)
	err := doc.GenManTreeFromOpts(root, doc.GenManTreeOptions{
		Header: &doc.GenManHeader{
			Section: manSection, Source: root.Name() + " " + version.String(), Manual: "Segue",
		},
		Path: dir, CommandSeparator: "-",
	})
	if err != nil {
		return fmt.Errorf("write the man pages to %s: %w", dir, err)
	}
	return nil
}

// quoteLong escapes the descriptions of a command and its subcommands, because package doc reads
// them as Markdown. It does not escape indented lines: they are code.
func quoteLong(cmd *cobra.Command) {
	lines := strings.Split(cmd.Long, "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "  ") {
			lines[i] = markdown.Replace(line)
		}
	}
	cmd.Long = strings.Join(lines, "\n")
	for _, sub := range cmd.Commands() {
		quoteLong(sub)
	}
}

// markdown escapes the characters that have a meaning in Markdown.
var markdown = strings.NewReplacer(
	`\`, `\\`, "*", `\*`, "_", `\_`, "`", "\\`", "[", `\[`, "]", `\]`, "<", `\<`, ">", `\>`, "#", `\#`,
)
