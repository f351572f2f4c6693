// SPDX-License-Identifier: Apache-2.0

// Package report makes pages of the results of experiments in the lab. They show the claims of the
// papers, the measurements, the results of the simulator for the same arrivals, and those of
// queueing theory for the load.
package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"strings"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/version"
	"github.com/segue-lb/segue/research/chart"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"style":    func() template.CSS { return template.CSS(chart.StyleSheet()) },
	"unbroken": chart.Unbroken,
}).Parse(pageText))

// Settings tell how a report is made.
type Settings struct {
	// Directory gets the page, report.html, and the charts as SVG. It is made if it does not exist.
	// If it is empty, the directory of results gets them.
	Directory string
	// Bin shows the response times of all experiments in intervals of this length in seconds, as if
	// they replayed a day, unless it is 0.
	Bin float64
}

// Report is a report that was written.
type Report struct {
	Page        string
	Charts      int
	Experiments int
}

// Write makes a report of the results in a directory, or of all results in the directories in it.
// It writes a page that needs no other file, each chart as SVG, and the runs of each experiment as
// CSV. If the results have a value that a report cannot show, the error names the file and the
// value, and nothing is written.
func Write(directory string, s Settings) (*Report, error) {
	folders, err := openFolders(directory)
	if err != nil {
		return nil, err
	}
	var shown []*content
	ids := map[string]bool{}
	for _, f := range folders {
		if s.Bin > 0 {
			f.Bin = s.Bin
		}
		c, err := f.content()
		if err != nil {
			return nil, err
		}
		for n := 2; ids[c.ID]; n++ { // names may differ in characters that files do not have
			c.ID = fmt.Sprintf("%s-%d", fileName(f.name), n)
		}
		ids[c.ID] = true
		shown = append(shown, c)
	}
	var out bytes.Buffer
	err = page.Execute(&out, struct {
		Version     string
		Experiments []*content
	}{version.String(), shown})
	if err != nil {
		return nil, err
	}
	if s.Directory == "" {
		s.Directory = directory
	} else if err := os.MkdirAll(s.Directory, 0o755); err != nil {
		return nil, err
	}
	report := &Report{Page: filepath.Join(s.Directory, "report.html"), Experiments: len(shown)}
	for i, c := range shown {
		runs, err := folders[i].CSV()
		if err != nil {
			return nil, err
		}
		if err := atomicfile.Write(filepath.Join(s.Directory, c.ID+".csv"), runs, 0o644); err != nil {
			return nil, err
		}
		for i := range c.figures {
			name := c.ID + "-" + fileName(c.figures[i].name) + ".svg"
			path := filepath.Join(s.Directory, name)
			if err := atomicfile.Write(path, c.figures[i].chart.SVG(), 0o644); err != nil {
				return nil, err
			}
			report.Charts++
		}
	}
	return report, atomicfile.Write(report.Page, out.Bytes(), 0o644)
}

// fileName replaces all characters that a part of a file's name should not have.
func fileName(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9',
			r == '.', r == '_', r == '-':
			return r
		}
		return '-'
	}, text)
}
