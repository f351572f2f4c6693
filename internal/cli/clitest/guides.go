// SPDX-License-Identifier: Apache-2.0

package clitest

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Guides parses all commands of a program that documents contain, in code blocks and in sentences.
func Guides(t *testing.T, newRoot func() *cobra.Command, guides ...string) {
	// A command is in an indented line or in backquotes, or follows && or --.
	const before = "(?m)(?:^    (?:# |\\$ )?|`|&& |-- )(?:sudo )?(?:bin/)?"
	commandInText := regexp.MustCompile(before + "(" + newRoot().Name() + " [a-z][^`|\n]*)")
	for _, guide := range guides {
		text, err := os.ReadFile(guide)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, match := range commandInText.FindAllStringSubmatch(string(text), -1) {
			line, _, _ := strings.Cut(match[1], " #")
			line, _, _ = strings.Cut(line, " &&")
			line, _, _ = strings.Cut(line, " >")
			words := strings.Fields(strings.NewReplacer("'", "", "…", "").Replace(line))
			if strings.HasSuffix(words[0], ":") { // an error of the program
				continue
			}
			found++
			testGuide(t, newRoot(), guide+": "+line, words[1:])
		}
		if found == 0 {
			t.Errorf("%s has no command", guide)
		}
	}
}

// testGuide parses one command.
func testGuide(t *testing.T, root *cobra.Command, place string, words []string) {
	root.InitDefaultVersionFlag()
	cmd, args, err := root.Find(words)
	isUnknown := cmd.HasSubCommands() && len(args) > 0 && !strings.HasPrefix(args[0], "-")
	if err != nil || cmd == root || isUnknown {
		t.Errorf("%s: no such command: %v", place, err)
		return
	}
	cmd.InitDefaultHelpFlag()
	err = cmd.ParseFlags(args)
	// The values of a synopsis are placeholders. A sentence can name a flag without its value.
	isSynopsis := strings.Contains(place, " [-")
	if err != nil && !isSynopsis && !strings.Contains(err.Error(), "needs an argument") {
		t.Errorf("%s: %v", place, err)
	}
	// A sentence can name a command without its arguments.
	isWhole := len(cmd.Flags().Args()) > 0 || strings.Contains(place, " -")
	if strings.Contains(cmd.Use, " -c FILE") && isWhole && !cmd.Flags().Changed("config") {
		t.Errorf("%s: lacks -c FILE", place)
	}
}
