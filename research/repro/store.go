// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"crypto/sha256"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/segue-lb/segue/internal/atomicfile"
)

// store is the directory of the figures.
type store struct {
	directory string
	key       key
}

// key tells whether a stored result is the one that a run would produce.
type key struct {
	// Code is a digest of the running program. Unlike a version, it also changes between commits.
	Code  string
	Quick bool
	Seed  uint64
}

// record is the content of a file NAME.json.
type record struct {
	Key    key
	Result Result
}

// openStore makes the directory of the figures, unless it exists.
func openStore(s Settings) (*store, error) {
	code, err := digestOfProgram()
	if err != nil {
		return nil, fmt.Errorf("version of the program: %w", err)
	}
	if err := os.MkdirAll(s.Directory, 0o755); err != nil {
		return nil, err
	}
	return &store{s.Directory, key{code, s.Quick, s.Seed}}, nil
}

// digestOfProgram returns the SHA-256 digest of the file of the running program.
func digestOfProgram() (string, error) {
	name, err := os.Executable()
	if err != nil {
		return "", err
	}
	file, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// load returns the stored result of a figure, or false if none has the store's key. A result that
// cannot be read counts as missing.
func (s *store) load(name string) (Result, bool) {
	content, err := os.ReadFile(filepath.Join(s.directory, name+".json"))
	if err != nil {
		return Result{}, false
	}
	var r record
	if json.Unmarshal(content, &r) != nil || r.Key != s.key {
		return Result{}, false
	}
	return r.Result, true
}

// withOthers returns the outcomes, and the stored results of all other figures under the same key,
// in the order of Figures.
func (s *store) withOthers(outcomes []Outcome) []Outcome {
	var all []Outcome
	rest := slices.Clone(outcomes)
	for _, figure := range Figures() {
		i := slices.IndexFunc(rest, func(o Outcome) bool { return o.Name == figure.Name })
		if i >= 0 {
			all, rest = append(all, rest[i]), slices.Delete(rest, i, i+1)
		} else if result, ok := s.load(figure.Name); ok {
			all = append(all, Outcome{figure, result, true})
		}
	}
	return append(all, rest...)
}

// save writes the files of a figure. It writes the file with the key last, so that a figure counts
// as missing until all its files are there.
func (s *store) save(name string, result Result) error {
	if err := s.saveCharts(name, result); err != nil {
		return err
	}
	content, err := json.MarshalIndent(record{s.key, result}, "", " ")
	if err != nil {
		return err
	}
	return s.write(name+".json", append(content, '\n'))
}

// saveCharts writes each chart of a figure as CSV and as SVG.
func (s *store) saveCharts(name string, result Result) error {
	for i := range result.Charts {
		c := &result.Charts[i]
		table, err := c.CSV()
		if err != nil {
			return err
		}
		base := chartName(name, i, len(result.Charts))
		if err := s.write(base+".csv", table); err != nil {
			return err
		}
		if err := s.write(base+".svg", c.SVG()); err != nil {
			return err
		}
	}
	return nil
}

// rowColumns are the columns of rows.csv. The column runs is quick or full.
var rowColumns = []string{
	"figure", "runs", "quantity", "paper", "measured", "rule", "tolerance", "verdict", "note",
}

// writeRows writes rows.csv, a line for each comparison with the papers.
func (s *store) writeRows(outcomes []Outcome) error {
	var out bytes.Buffer
	w := csv.NewWriter(&out)
	lines := [][]string{rowColumns}
	runs := "full"
	if s.key.Quick {
		runs = "quick"
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 5, 64) }
	for _, o := range outcomes {
		for _, c := range o.Checks {
			lines = append(lines, []string{
				c.Figure, runs, c.Quantity, c.Paper.String(), number(c.Measured), string(c.Rule),
				number(c.Tolerance), c.Verdict(), c.Note,
			})
		}
	}
	if err := w.WriteAll(lines); err != nil {
		return err
	}
	return s.write("rows.csv", out.Bytes())
}

// chartName returns the name of the figure, with a number if the figure has several charts.
func chartName(figure string, i, charts int) string {
	if charts == 1 {
		return figure
	}
	return fmt.Sprintf("%s-%d", figure, i+1)
}

func (s *store) write(name string, content []byte) error {
	return atomicfile.Write(filepath.Join(s.directory, name), content, 0o644)
}
