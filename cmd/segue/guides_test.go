// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestCommandsInGuides parses all commands in the guides for operators.
func TestCommandsInGuides(t *testing.T) {
	clitest.Guides(t, newRoot, "../../README.md", "../../docs/operate/bgp.md", "../../docs/operate/fleet.md", "../../docs/operate/drain.md", "../../docs/operate/deploy.md", "../../docs/operate/ipv4.md", "../../docs/operate/ipv4-fabric.md",
		"../../docs/operate/upgrade.md", "../../docs/operate/install.md", "../../docs/operate/container.md", "../../docs/operate/incidents.md")
}

// TestConfigurationsInGuides checks that the files that a guide writes are valid and fit together.
func TestConfigurationsInGuides(t *testing.T) {
	file := regexp.MustCompile(`(?ms)^ *cat > /etc/segue/(\S+) <<EOF\n(.*?)^ *EOF$`)
	for _, guide := range []string{"README.md", "docs/operate/ipv4.md", "docs/operate/ipv4-fabric.md"} {
		text, err := os.ReadFile("../../" + guide)
		testhost.Must(t, err)
		args, dir := []string{"check"}, t.TempDir()
		for _, match := range file.FindAllStringSubmatch(string(text), -1) {
			args = append(args, filepath.Join(dir, match[1]))
			testhost.Must(t, os.WriteFile(args[len(args)-1], []byte(match[2]), 0o644))
		}
		if len(args) != 3 {
			t.Errorf("%s: %d files were found, want a balancer's and an agent's", guide, len(args)-1)
		}
		root, output := newRoot(), new(strings.Builder)
		root.SetArgs(args)
		root.SetOut(output)
		root.SetErr(output)
		if err := root.Execute(); err != nil {
			t.Errorf("%s: %v\n%s", guide, err, output)
		}
	}
}

// warningInText matches the words in capitals with which a warning of segue status begins.
var warningInText = regexp.MustCompile("`([A-Z]{2,}(?: [A-Z]{2,})+)")

var messageInText = regexp.MustCompile(`msg="([^"]*)"`)

// TestMessagesInIncidents looks in the source for all messages and warnings of incidents.md.
func TestMessagesInIncidents(t *testing.T) {
	text, err := os.ReadFile("../../docs/operate/incidents.md")
	testhost.Must(t, err)
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
		testhost.Must(t, err)
	}
	// The source may join a message from several literals.
	code := regexp.MustCompile(`"\s*\+\s*"`).ReplaceAllString(source.String(), "")
	messages := messageInText.FindAllStringSubmatch(string(text), -1)
	messages = append(messages, warningInText.FindAllStringSubmatch(string(text), -1)...)
	for _, more := range []string{ // texts of incidents.md that neither pattern matches
		"HEALTH CHECKS ARE IGNORED", "NOT RUNNING, the data path keeps working", "none of its services can serve",
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
