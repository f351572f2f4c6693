// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestLabReport makes a report of results without a run. The page says that runs are missing.
func TestLabReport(t *testing.T) {
	directory := t.TempDir()
	output := t.TempDir()
	page := filepath.Join(output, "report.html")
	results := `{"experiment": "x", "title": "An <experiment>", "axis": {"key": "load"}, "cases": ["sc"],
		"points": [0.5], "seeds": 1, "speed": 1, "runs": [], "planned": 3}`
	testhost.Must(t, os.WriteFile(filepath.Join(directory, "results.json"), []byte(results), 0o644))
	printed, err := runLab("report -o " + output + " " + directory)
	testhost.Must(t, err)
	if want := page + ": 1 experiment, and 0 charts as SVG beside it\n"; printed != want {
		t.Errorf("printed %q, want %q", printed, want)
	}
	content, err := os.ReadFile(page)
	testhost.Must(t, err)
	for _, want := range []string{"An &lt;experiment&gt;", "0 of 3 runs have ended"} {
		if !strings.Contains(string(content), want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	runs, err := os.ReadFile(filepath.Join(output, "x.csv"))
	testhost.Must(t, err)
	if !strings.HasSuffix(string(runs), "\ncase,point,seed,requests,failed,warnings\n") {
		t.Errorf("x.csv: %s", runs)
	}
	for _, test := range []struct{ args, err string }{
		{"table", "lab table: missing FILE"},
		{"table no-such-experiment.csv", "lab table: no-such-experiment.csv: "},
		{"report", "lab report: missing DIR"},
		{"report --bin -1s x", "--bin -1s: must not be negative"},
		{"report " + t.TempDir(), "has a file results.json, which segue-lab lab run writes"},
		{"report --out /dev/null/x " + directory, "/dev/null"},
		{"report -o x.html " + directory, `--out "x.html": must be a folder, which gets the page report.html`},
		{"report --output x.html " + directory, "unknown flag: --output; --out names the folder of the page"},
	} {
		if _, err := runLab(test.args); err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("lab %s: %v, want %s", test.args, err, test.err)
		}
	}
}
