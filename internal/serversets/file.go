// SPDX-License-Identifier: Apache-2.0

package serversets

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/segue-lb/segue/internal/atomicfile"
)

// File returns the path of the file with the generations of a balancer's instance. The directory is
// node.state of the configuration. Another balancer that gets a copy of the file before it starts
// has the same candidate tables.
func File(dir, instance string) string {
	return filepath.Join(dir, instance+".generations.json")
}

// format is the version of the file's format.
const format = 1

type document struct {
	Format   int         `json:"format"`
	Services Generations `json:"services"`
}

// Load reads the file of generations. If there is none, the result is empty. Load returns an error
// if the file cannot be read or contains an invalid value.
func Load(path string) (Generations, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Generations{}, nil
	} else if err != nil {
		return nil, err
	}
	g, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return g, nil
}

// parse reads the content of a file of generations. It returns an error about an invalid value.
func parse(text []byte) (Generations, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	var d document
	if err := decoder.Decode(&d); err != nil {
		return nil, err
	}
	if d.Format != format {
		return nil, fmt.Errorf("format %d is not %d, the format of this build", d.Format, format)
	}
	for name, g := range d.Services {
		if err := g.Validate(); err != nil {
			return nil, fmt.Errorf("service %s: %w", name, err)
		}
	}
	return d.Services, nil
}

// Save replaces the file of generations atomically. It returns an error if the file cannot be
// written; the former file then stays.
func (g Generations) Save(path string) error {
	text, err := g.text()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(path, text, 0o644)
}

// text returns the content of the file: a document with a line for each service. To indent it
// further would take four times as long.
func (g Generations) text() ([]byte, error) {
	text := fmt.Appendf(nil, `{"format": %d, "services": {`, format)
	separator := "\n"
	for _, name := range slices.Sorted(maps.Keys(g)) {
		quoted, _ := json.Marshal(name) // a string causes no error
		generation, err := json.Marshal(g[name])
		if err != nil {
			return nil, err
		}
		text = fmt.Appendf(text, "%s%s: %s", separator, quoted, generation)
		separator = ",\n"
	}
	return append(text, "\n}}\n"...), nil
}
