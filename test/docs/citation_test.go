// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// reference is a work that CITATION.cff names, by version 1.2.0 of the format.
type reference struct {
	Type, Title, DOI string
	Authors          []map[string]string
}

// TestCitation checks the fields that the format requires, and that the file names the four papers.
func TestCitation(t *testing.T) {
	var file struct {
		Version    string `yaml:"cff-version"`
		Message    string
		Title      string
		Authors    []map[string]string
		References []reference
	}
	if err := yaml.Load([]byte(read(t, "CITATION.cff")), &file); err != nil {
		t.Fatal(err)
	}
	if file.Version != "1.2.0" || file.Message == "" || file.Title == "" || len(file.Authors) == 0 {
		t.Errorf("%+v: cff-version 1.2.0, message, title and authors are required", file)
	}
	papers := []string{"SRLB: ", "6LB: ", "Stateless Load-Aware ", "HLB: "}
	if len(file.References) != len(papers) {
		t.Fatalf("%d references, want %d", len(file.References), len(papers))
	}
	for i, r := range file.References {
		if !strings.HasPrefix(r.Title, papers[i]) || r.Type == "" || len(r.Authors) < 5 || !strings.HasPrefix(r.DOI, "10.1109/") {
			t.Errorf("reference %+v: want a type, authors, a DOI, and a title that begins with %s", r, papers[i])
		}
	}
}
