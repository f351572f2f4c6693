// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	root = "../.."
	// resultsFolder has the files of the published runs, and rows.csv of segue-lab repro.
	resultsFolder = "docs/research/results"
	// The published files must not make a clone large.
	mostBytesOfFile, mostBytesOfResults = 64 << 10, 512 << 10
)

// publishedTable matches a command that prints a table of published runs, and the table below it.
var publishedTable = regexp.MustCompile(`(?m)^    bin/segue-lab (lab table (` + resultsFolder + `/[\w-]+\.csv).*)\n\n((?:\|.*\n)+)`)

// TestPublishedTables checks that each table below such a command is what the command prints, and that
// each file of published runs has a table. With -update, it writes the tables.
func TestPublishedTables(t *testing.T) {
	t.Chdir(root)
	const page = "docs/research/testbed.md"
	text, err := os.ReadFile(page)
	testhost.Must(t, err)
	shown := map[string]bool{}
	written := publishedTable.ReplaceAllStringFunc(string(text), func(found string) string {
		match := publishedTable.FindStringSubmatch(found)
		shown[match[2]] = true
		table, err := runLab(strings.TrimPrefix(match[1], "lab "))
		testhost.Must(t, err)
		return "    bin/segue-lab " + match[1] + "\n\n" + table
	})
	clitest.GoldenFile(t, page, written)
	files, err := filepath.Glob(resultsFolder + "/*")
	testhost.Must(t, err)
	total := int64(0)
	for _, file := range files {
		info, err := os.Stat(file)
		testhost.Must(t, err)
		total += info.Size()
		if info.Size() > mostBytesOfFile {
			t.Errorf("%s has %d bytes, more than %d", file, info.Size(), mostBytesOfFile)
		}
		if filepath.Base(file) != "rows.csv" && !shown[file] {
			t.Errorf("%s has no table of %s", page, file)
		}
	}
	if total > mostBytesOfResults {
		t.Errorf("%s has %d bytes, more than %d", resultsFolder, total, mostBytesOfResults)
	}
}
