// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/version"
)

// ResultsFile is the file with the results in a directory of results.
const ResultsFile = "results.json"

const runsFolder = "runs"

// store is a directory of results. While it is open, a lock keeps other commands away.
type store struct {
	directory string
	lock      *os.File
	results   Results
	changed   bool // runs have been added
}

// lockDirectory locks a directory of results until the file is closed.
func lockDirectory(directory string) (*os.File, error) {
	file, err := os.Open(directory)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = errors.New("another segue-lab lab run writes here")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", directory, err), file.Close())
	}
	return file, nil
}

// close lets other commands use the directory.
func (s *store) close() error { return s.lock.Close() }

// openStore opens a directory of results. Results that are there already must be of the same
// experiment, at the same size and speed, by the same build.
func openStore(directory string, s settings, text []byte, full bool) (st *store, err error) {
	if err := os.MkdirAll(filepath.Join(directory, runsFolder), 0o755); err != nil {
		return nil, err
	}
	lock, err := lockDirectory(directory)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	st = &store{directory: directory, lock: lock, results: newResults(s, text, full)}
	earlier, err := Read(directory)
	if errors.Is(err, fs.ErrNotExist) {
		return st, nil
	}
	if err != nil {
		return nil, err
	}
	if err := st.results.mayContinue(earlier); err != nil {
		return nil, fmt.Errorf("%s: %w; use another directory, or remove this one", directory, err)
	}
	st.results.Runs = earlier.Runs
	st.results.Environment = earlier.Environment
	return st, nil
}

// newResults returns results without runs.
func newResults(s settings, text []byte, full bool) Results {
	r := Results{
		Experiment: s.Name, Title: s.Title, Paper: s.Paper, About: s.About, Text: string(text),
		Kind: s.Kind, Axis: Axis{Key: string(s.Axis), Label: axisLabels[s.Axis]}, Points: s.Points,
		Seeds: s.Seeds, Claims: slices.Clone(s.Claims), Full: full, Speed: s.Speed,
		Environment: readEnvironment(), Planned: len(s.plan()), Runs: []Run{},
	}
	if s.recorded != nil {
		r.Trace = s.recorded.digest
	}
	if s.Kind == KindDay {
		r.Bin = s.Bin.Seconds()
	}
	for _, c := range s.Cases {
		r.Cases = append(r.Cases, c.Name)
	}
	return r
}

// mayContinue returns an error if new runs of r must not be added to earlier results. An experiment
// may continue with more seeds than before, but not with fewer.
func (r *Results) mayContinue(earlier *Results) error {
	differ := func(what string, here, now any) error {
		return fmt.Errorf("has results with another %s: %v, and not %v", what, here, now)
	}
	switch {
	case earlier.Experiment != r.Experiment:
		return differ("experiment", earlier.Experiment, r.Experiment)
	case earlier.Text != r.Text:
		return fmt.Errorf("has results of an earlier version of the experiment %s", r.Experiment)
	case earlier.Trace != r.Trace:
		return differ("trace, by its SHA-256 digest", earlier.Trace, r.Trace)
	case earlier.Full != r.Full:
		return differ("length (--full)", earlier.Full, r.Full)
	case earlier.Speed != r.Speed:
		return differ("speed", earlier.Speed, r.Speed)
	case earlier.Seeds > r.Seeds:
		return fmt.Errorf("has results of more seeds: %d, and not %d", earlier.Seeds, r.Seeds)
	case earlier.Environment.Kernel != r.Environment.Kernel:
		return differ("kernel", earlier.Environment.Kernel, r.Environment.Kernel)
	case earlier.Environment.CPU != r.Environment.CPU:
		return differ("CPU", earlier.Environment.CPU, r.Environment.CPU)
	case earlier.Environment.Version != r.Environment.Version:
		return differ("build", earlier.Environment.Version, r.Environment.Version)
	}
	return nil
}

// Read returns the results in a directory. The error is fs.ErrNotExist if there are none.
func Read(directory string) (*Results, error) {
	path := filepath.Join(directory, ResultsFile)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Results
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &r, nil
}

// run returns the results of a planned run, or nil if there are none.
func (s *store) run(p planned) *Run { return s.results.run(p.Case.Name, p.point, p.seed) }

// add adds a run to the results, in place of an earlier one, and writes them.
func (s *store) add(run *Run) error {
	r := &s.results
	s.changed = true
	r.Runs = slices.DeleteFunc(r.Runs, func(earlier Run) bool {
		return earlier.Case == run.Case && earlier.Point == run.Point && earlier.Seed == run.Seed
	})
	r.Runs = append(r.Runs, *run)
	slices.SortFunc(r.Runs, func(a, b Run) int {
		return cmp.Or(cmp.Compare(slices.Index(r.Cases, a.Case), slices.Index(r.Cases, b.Case)),
			cmp.Compare(a.Point, b.Point), cmp.Compare(a.Seed, b.Seed))
	})
	return s.write()
}

// finish writes the results when the last run has ended. If all runs were there before, the file
// stays as it is.
func (s *store) finish() error {
	if !s.changed {
		s.judge() // for the caller, who gets s.results
		return nil
	}
	s.results.Environment.Finished = time.Now().UTC().Truncate(time.Second)
	return s.write()
}

func (s *store) judge() {
	for i := range s.results.Claims {
		s.results.Claims[i].judge(&s.results)
	}
}

// write judges the claims, and writes the file of the results.
func (s *store) write() error {
	s.judge()
	text, err := json.MarshalIndent(&s.results, "", " ")
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(s.directory, ResultsFile), append(text, '\n'), 0o644)
}

// folder returns the path of a run's folder, relative to the directory.
func (p planned) folder() string {
	return filepath.Join(runsFolder, fmt.Sprintf("%s-%v-%d", p.Case.Name, p.point, p.seed))
}

// readEnvironment describes this machine. Unknown values are empty.
func readEnvironment() Environment {
	e := Environment{Version: version.String(), Started: time.Now().UTC().Truncate(time.Second)}
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		e.Kernel = string(bytes.TrimSpace(release))
	}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return e
	}
	if cores, err := proc.CPUInfo(); err == nil && len(cores) > 0 {
		e.CPU, e.Cores = cores[0].ModelName, len(cores)
	}
	if memory, err := proc.Meminfo(); err == nil && memory.MemTotal != nil {
		e.Memory = *memory.MemTotal << 10
	}
	return e
}
