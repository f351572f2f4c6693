// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/segue-lb/segue/research/testbed"
)

// folder is a directory of results.
type folder struct {
	path string
	// name is unique among the folders of a report.
	name string
	*testbed.Results
}

// openFolders reads the results in a directory. If the directory has no results itself, it reads
// those in the directories in it, in the order of their names.
func openFolders(directory string) ([]*folder, error) {
	one, err := openFolder(directory)
	if err == nil {
		one.name = one.Experiment
		return []*folder{one}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	files, globError := filepath.Glob(filepath.Join(escapeGlob(directory), "*", testbed.ResultsFile))
	if globError != nil {
		return nil, globError
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: neither this directory nor a directory in it has a file %s, "+
			"which segue-lab lab run writes", directory, testbed.ResultsFile)
	}
	var all []*folder
	for _, file := range files {
		f, err := openFolder(filepath.Dir(file))
		if err != nil {
			return nil, err
		}
		f.name = filepath.Base(f.path)
		all = append(all, f)
	}
	return all, nil
}

// escapeGlob makes a path match itself in filepath.Glob.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}

// openFolder reads the results in a directory, and checks that a report can show them.
func openFolder(path string) (*folder, error) {
	results, err := testbed.Read(path)
	if err != nil {
		return nil, err
	}
	f := &folder{path: path, Results: results}
	if err := check(f.Results); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(path, testbed.ResultsFile), err)
	}
	return f, nil
}

// check returns an error about the first value of results that a report cannot show.
func check(r *testbed.Results) error {
	switch {
	case r.Experiment == "":
		return errors.New("experiment: required")
	case !(r.Speed > 0):
		return fmt.Errorf("speed %v: must be positive", r.Speed)
	case r.Bin < 0:
		return fmt.Errorf("bin %v: must not be negative", r.Bin)
	case !slices.IsSorted(r.Points):
		return fmt.Errorf("points %v: must be in ascending order", r.Points)
	case len(r.Cases) == 0:
		return errors.New("cases: at least one is required")
	case len(r.Points) == 0:
		return errors.New("points: at least one is required")
	case r.Planned < len(r.Runs):
		return fmt.Errorf("planned %d: there are %d runs", r.Planned, len(r.Runs))
	}
	for i := range r.Runs {
		if err := checkRun(r, &r.Runs[i]); err != nil {
			return fmt.Errorf("runs[%d].%w", i, err)
		}
	}
	return nil
}

// checkRun returns an error about the first value of a run that a report cannot show.
func checkRun(r *testbed.Results, run *testbed.Run) error {
	switch {
	case !slices.Contains(r.Cases, run.Case):
		return fmt.Errorf("case %q: must be one of the cases %s", run.Case, strings.Join(r.Cases, ", "))
	case !slices.Contains(r.Points, run.Point):
		return fmt.Errorf("point %v: must be one of the points %v", run.Point, r.Points)
	case run.Folder != "" && !filepath.IsLocal(run.Folder):
		return fmt.Errorf("folder %q: must be a path inside the directory of results", run.Folder)
	case run.Failed > run.Requests:
		return fmt.Errorf("failed %d: there are %d requests", run.Failed, run.Requests)
	}
	for name, r := range run.Types {
		if err := checkResponse(&r); err != nil {
			return fmt.Errorf("types[%q].%w", name, err)
		}
	}
	for _, of := range []struct {
		name string
		*testbed.Response
	}{
		{"measured", &run.Measured}, {"simulated", run.Simulated}, {"bound", run.Bound},
		{"model", run.Model}, {"handshake", run.Handshake},
	} {
		if err := checkResponse(of.Response); err != nil {
			return fmt.Errorf("%s.%w", of.name, err)
		}
	}
	return nil
}

// checkResponse returns an error about one of the values of a response that a report cannot show.
// It accepts nil, because a run need not have all responses.
func checkResponse(r *testbed.Response) error {
	if r == nil {
		return nil
	}
	for name, value := range map[string]float64{
		"mean": r.Mean, "p50": r.P50, "p90": r.P90, "p99": r.P99, "half": r.Half,
	} {
		if value < 0 {
			return fmt.Errorf("%s %v: must not be negative", name, value)
		}
	}
	last := testbed.DistributionPoint{}
	for i, p := range r.Distribution {
		if p.Seconds < last.Seconds || p.Share < last.Share || p.Share > 1+1e-9 || math.IsNaN(p.Share) {
			return fmt.Errorf("distribution[%d] {%v %v}: times and shares must ascend, and shares end at 1",
				i, p.Seconds, p.Share)
		}
		last = p
	}
	return nil
}

// withFiles returns the runs that have files. In some kinds of experiments, runs have none.
func withFiles(runs []*testbed.Run) []*testbed.Run {
	return slices.DeleteFunc(runs, func(run *testbed.Run) bool { return run.Folder == "" })
}

// runs returns the runs of a case at a point.
func (f *folder) runs(name string, point float64) (runs []*testbed.Run) {
	for i := range f.Runs {
		if run := &f.Runs[i]; run.Case == name && run.Point == point {
			runs = append(runs, run)
		}
	}
	return runs
}

// file is the path of a file of a run.
func (f *folder) file(run *testbed.Run, name string) string {
	return filepath.Join(f.path, run.Folder, name)
}
