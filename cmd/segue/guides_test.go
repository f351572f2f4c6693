// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// guides are the documents that operators follow in a hurry.
var guides = []string{
	"../../README.md", "../../docs/bgp.md", "../../docs/fleet.md", "../../docs/incidents.md", "../../docs/sizing.md",
}

// commandInText matches a command of segue: a line of a code block, or code in a line.
var commandInText = regexp.MustCompile("(?m)(?:^    (?:# |\\$ )?|`|&& )(?:sudo )?(segue [a-z][^`|\n]*)")

// TestCommandsInGuides parses all commands of the guides.
func TestCommandsInGuides(t *testing.T) {
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
			if strings.HasSuffix(words[0], ":") || strings.HasPrefix(line, "segue service") {
				continue
			}
			found++
			root := newRoot()
			root.InitDefaultVersionFlag()
			cmd, args, err := root.Find(words[1:])
			isUnknown := cmd.HasSubCommands() && len(args) > 0 && !strings.HasPrefix(args[0], "-")
			if err != nil || cmd == root || isUnknown {
				t.Errorf("%s: %q: no such command: %v", guide, line, err)
				continue
			}
			cmd.InitDefaultHelpFlag()
			err = cmd.ParseFlags(args)
			if err != nil && !strings.Contains(err.Error(), "needs an argument") { // prose names flags alone
				t.Errorf("%s: %q: %v", guide, line, err)
			}
			isWhole := len(cmd.Flags().Args()) > 0 || strings.Contains(line, " -") // prose also names commands alone
			if strings.Contains(cmd.Use, " -c FILE") && isWhole && !cmd.Flags().Changed("config") {
				t.Errorf("%s: %q: lacks -c FILE", guide, line)
			}
		}
		if found == 0 {
			t.Errorf("%s has no command", guide)
		}
	}
}

// warningInText matches what segue status shows in capitals, up to the first word that is not.
var warningInText = regexp.MustCompile("`([A-Z]{2,}(?: [A-Z]{2,})+)")

var messageInText = regexp.MustCompile(`msg="([^"]*)"`)

// TestMessagesInIncidents looks for all log messages of the page in the source.
func TestMessagesInIncidents(t *testing.T) {
	text, err := os.ReadFile("../../docs/incidents.md")
	if err != nil {
		t.Fatal(err)
	}
	var source strings.Builder
	for _, dir := range []string{".", "../../internal"} {
		err := fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			code, err := os.ReadFile(filepath.Join(dir, path))
			source.Write(code)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// A message may be joined of several literals.
	code := regexp.MustCompile(`"\s*\+\s*"`).ReplaceAllString(source.String(), "")
	messages := messageInText.FindAllStringSubmatch(string(text), -1)
	messages = append(messages, warningInText.FindAllStringSubmatch(string(text), -1)...)
	for _, more := range []string{
		"HEALTH CHECKS ARE IGNORED", "NOT RUNNING, the data path keeps working", "no service of the VIP can serve",
		"held down after a withdrawal", "waits for the store", "only the default route is left", "is already running", "were made with other limits, or by another build",
		"belongs to the user %s", "start it by systemctl start segue-lb (or segue-agent), or without the package by segue lb", "it runs %s", "was changed, and not reloaded", "no native XDP: attached in generic mode",
	} {
		messages = append(messages, []string{"", more})
	}
	for _, message := range messages {
		if words := strings.Join(strings.Fields(message[1]), " "); !strings.Contains(code, words) {
			t.Errorf("nothing logs %q", words)
		}
	}
}
