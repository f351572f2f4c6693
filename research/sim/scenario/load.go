// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/research/sim"
)

// jobs reads the jobs of a case.
func (m *merger) jobs(r *RunnableCase) {
	c := r.Config
	section, path := section[*[]Job](m, "Jobs")
	jobs := given(section, nil)
	m.require(len(jobs) > 0, path, "at least one is required")
	for i := range jobs {
		at := fmt.Sprintf("%s[%d]", path, i)
		m.require(jobs[i].Name == "" || !slices.ContainsFunc(jobs[:i], func(j Job) bool { return j.Name == jobs[i].Name }),
			at+".name", "used twice")
		c.Jobs = append(c.Jobs, m.job(at, &jobs[i]))
		m.require(m.fromTrace() || !jobs[i].captures(), at,
			"captured: only the queries of a trace have a number to capture%s", m.inCase(at, r))
	}
	// Without jobs, or with a job that captures, another problem is reported above.
	m.require(len(jobs) == 0 || m.fromTrace() || drawn(c) || slices.ContainsFunc(jobs, Job.captures),
		path, "at least one share must be positive")
}

// fromTrace tells whether a trace gives the arrivals.
func (m *merger) fromTrace() bool {
	arrivals, _ := section[*Arrivals](m, "Arrivals")
	return arrivals != nil && (arrivals.Wikibench != nil || arrivals.Queries != nil)
}

// drawn tells whether a job has a positive share, so that the class of a flow can be drawn.
func drawn(c *sim.Config) bool {
	return slices.ContainsFunc(c.Jobs, func(j sim.Job) bool { return j.Share > 0 })
}

// job reads a job. Without a list of stages, the job itself describes its only stage. The share of
// a job that captures is 0, because its flows cannot be drawn.
func (m *merger) job(path string, j *Job) sim.Job {
	job := sim.Job{Name: j.Name, Share: 1}
	if j.captures() {
		job.Share = 0
		m.require(j.Share == nil, path+".share",
			"not allowed with captured, because a class that is drawn has no number")
	}
	job.Share = given(j.Share, job.Share)
	m.require(job.Share >= 0, path+".share", "must not be negative")
	m.match(path, j)
	if j.Idle != nil {
		job.Idle = m.distribution(path+".idle", j.Idle)
	}
	if len(j.Stages) == 0 {
		job.Stages = []sim.Stage{m.stage(path, &j.Work)}
		return job
	}
	m.require(j.Work == Work{}, path, "stages exclude a distribution and captured beside them")
	m.require(len(j.Stages) <= 255, path+".stages", "must be at most 255")
	for i := range j.Stages {
		at := fmt.Sprintf("%s.stages[%d]", path, i)
		stage := m.stage(at, &j.Stages[i].Work)
		switch j.Stages[i].Queue {
		case "", "cpu":
		case "io":
			stage.Queue = sim.IO
		default:
			m.failf(at+".queue", "must be cpu or io")
		}
		job.Stages = append(job.Stages, stage)
	}
	return job
}

// captures tells whether the work of a stage depends on the query.
func (j Job) captures() bool {
	return j.Captured != nil ||
		slices.ContainsFunc(j.Stages, func(s Stage) bool { return s.Captured != nil })
}

// match checks a job's pattern.
func (m *merger) match(path string, j *Job) {
	pattern, err := regexp.Compile(j.Match)
	if err != nil {
		m.failf(path+".match", "%v", err)
		return
	}
	m.require(!j.captures() || pattern.NumSubexp() == 1, path+".match",
		`must have one group, such as n=(\d+), for captured; (?:...) does not count`)
	if j.Match != "" {
		m.mustUse(path+".match", "is not used: only flows of traces have a query")
	}
}

// stage reads the work of a stage.
func (m *merger) stage(path string, w *Work) sim.Stage {
	if w.Captured == nil {
		return sim.Stage{Work: m.distribution(path, &w.Distribution, "captured")}
	}
	m.require(w.Distribution == Distribution{}, path,
		"captured and a distribution exclude each other")
	return sim.Stage{PerUnit: m.factor(join(path, "captured.factor"), w.Captured.Factor)}
}

// factor reads a time in seconds. It may be less than a nanosecond, which is the unit of
// time.Duration.
func (m *merger) factor(path, text string) float64 {
	units := map[string]float64{"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1}
	number := strings.TrimRight(text, "nuµms") // without the letters of the units
	unit, known := units[text[len(number):]]
	x, err := strconv.ParseFloat(number, 64)
	m.require(known && err == nil && x > 0 && !math.IsInf(x, 1), path,
		"must be a positive time with a unit, such as 35ns or 0.8ns")
	return x * unit
}

// ParseDistribution reads a distribution of times in the form that scenarios use, such as
// "exponential: 190ms". If the distribution names a file, the file is relative to dir.
func ParseDistribution(text, dir string) (sim.Distribution, error) {
	var read Distribution
	var d sim.Distribution
	m := merger{builder: &builder{dir: dir}}
	err := config.Decode([]byte(text), &read, func() fieldpath.Errors {
		d = m.distribution("", &read)
		return m.errs
	})
	if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
		for _, p := range problems {
			p.Line = 0 // the text has only one line
			if p.Path == "" {
				p.Problem += `, such as "exponential: 190ms"`
			}
		}
	}
	return d, err
}

// distribution reads a distribution, of which exactly one field must be set. instead lists other
// fields of the section that may be set in place of a distribution, for the error.
func (m *merger) distribution(path string, d *Distribution, instead ...string) sim.Distribution {
	// If a field has a problem, a wrong number of fields is not reported as well.
	before := len(m.errs)
	var all []sim.Distribution // one for each field that is set
	positive := func(name string, t time.Duration) float64 {
		m.require(t > 0, join(path, name), "must be positive")
		return t.Seconds()
	}
	if d.Constant != nil {
		m.require(*d.Constant >= 0, join(path, "constant"), "must not be negative")
		all = append(all, sim.Constant(d.Constant.Seconds()))
	}
	if d.Exponential != nil {
		all = append(all, sim.Exponential(positive("exponential", *d.Exponential)))
	}
	if u := d.Uniform; u != nil {
		low, high := given(u.Min, 0), given(u.Max, 0)
		m.require(u.Min != nil && u.Max != nil && 0 <= low && low <= high, join(path, "uniform"), "must have 0 <= min <= max")
		all = append(all, sim.Uniform(low.Seconds(), high.Seconds()))
	}
	if d.Lognormal != nil {
		all = append(all, m.lognormal(join(path, "lognormal"), d.Lognormal))
	}
	if p := d.Pareto; p != nil {
		m.require(p.Index > 1, join(path, "pareto.index"), "must be more than 1")
		all = append(all, sim.Pareto(positive("pareto.mean", p.Mean), p.Index))
	}
	if d.Values != nil {
		all = append(all, m.values(join(path, "values"), *d.Values))
	}
	if len(all) != 1 {
		if len(m.errs) == before {
			known := []string{"constant", "exponential", "uniform", "lognormal", "pareto", "values"}
			known = append(known, instead...)
			last := len(known) - 1
			m.failf(path, "must have one of %s and %s", strings.Join(known[:last], ", "), known[last])
		}
		return sim.Distribution{}
	}
	return all[0]
}

// lognormal reads a lognormal distribution, which has either a median and sigma, or a mean and a
// deviation.
func (m *merger) lognormal(path string, l *Lognormal) sim.Distribution {
	positive := func(name string, t time.Duration) float64 {
		m.require(t > 0, path+"."+name, "must be positive")
		return t.Seconds()
	}
	switch {
	case l.Median != nil && l.Sigma != nil && l.Mean == nil && l.Deviation == nil:
		m.require(*l.Sigma >= 0, path+".sigma", "must not be negative")
		return sim.Lognormal(positive("median", *l.Median), *l.Sigma)
	case l.Mean != nil && l.Deviation != nil && l.Median == nil && l.Sigma == nil:
		m.require(*l.Deviation >= 0, path+".deviation", "must not be negative")
		return sim.LognormalMoments(positive("mean", *l.Mean), l.Deviation.Seconds())
	}
	m.failf(path, "must have median and sigma, or mean and deviation")
	return sim.Distribution{}
}

// values reads a file with observed times: a number of seconds in each line.
func (m *merger) values(path, name string) sim.Distribution {
	text, err := os.ReadFile(m.file(name))
	if err != nil {
		m.failf(path, "%v", err)
		return sim.Distribution{}
	}
	var values []float64
	for i, line := range strings.Split(strings.TrimRight(string(text), "\n"), "\n") {
		x, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
		if err != nil || !(x >= 0) || math.IsInf(x, 1) {
			m.failf(path, "line %d of the file, %q: must be a number of seconds", i+1, line)
			return sim.Distribution{}
		}
		values = append(values, x)
	}
	return sim.Empirical(values)
}

// file returns the path of a file that the scenario names.
func (m *merger) file(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(m.dir, name)
}

// arrivals reads the arrivals. It comes last, because a load refers to servers and jobs, which
// must be valid.
func (m *merger) arrivals(c *sim.Config) {
	arrivals, path := section[*Arrivals](m, "Arrivals")
	if arrivals == nil {
		m.failf(path, "is required")
		return
	}
	switch one := only(m, path, arrivals).(type) {
	case *Poisson:
		c.Arrivals = m.poisson(join(path, "poisson"), c, one)
	case *Trace:
		if arrivals.Queries != nil {
			c.Arrivals = m.trace(join(path, "queries"), c, one, sim.TimedQueries)
		} else {
			c.Arrivals = m.trace(join(path, "wikibench"), c, one, sim.Wikibench)
		}
	}
}

// poisson reads Poisson arrivals. It computes the rate from the load if the file has a load.
func (m *merger) poisson(path string, c *sim.Config, p *Poisson) sim.Arrivals {
	m.require(given(p.Rate, 1) > 0, path+".rate", "must be positive")
	m.require(given(p.Load, 1) > 0, path+".load", "must be positive")
	m.require((p.Rate == nil) != (p.Load == nil), path, "must have one of rate and load")
	rate := given(p.Rate, 0)
	if p.Load != nil && m.loadable(path, c) {
		m.require(c.Work() > 0, path+".load", "not possible, because the jobs have no work for processors")
		rate = c.Rate(*p.Load)
	}
	return sim.Poisson{Rate: rate, Curve: m.curve(path, p)}
}

// loadable tells whether servers and jobs are valid, and a server is present at the start. It
// reports a problem if none is present.
func (m *merger) loadable(path string, c *sim.Config) bool {
	if len(m.errs) > 0 {
		return false
	}
	m.require(c.Capacity() > 0, path+".load", "not possible, because no server is present at the start")
	return len(m.errs) == 0
}

// curve reads the curve of a rate, which is nil if the rate is constant.
func (m *merger) curve(path string, p *Poisson) sim.Curve {
	m.require(p.Diurnal == nil || p.Curve == nil, path, "diurnal and curve exclude each other")
	if d := p.Diurnal; d != nil {
		period := given(d.Period, 24*time.Hour)
		amplitude := given(d.Amplitude, -1) // a missing amplitude is out of range
		m.require(period > 0, path+".diurnal.period", "must be positive")
		m.require(amplitude > 0 && amplitude <= 1, path+".diurnal.amplitude", "must be more than 0, and at most 1")
		return sim.Diurnal{Period: period.Seconds(), Amplitude: amplitude, Phase: d.Phase.Seconds()}
	}
	if p.Curve == nil {
		return nil
	}
	var points sim.Points
	for i, point := range p.Curve {
		at := fmt.Sprintf("%s.curve[%d]", path, i)
		m.require(point.At != nil && point.Factor != nil, at, "must have at and factor")
		next := sim.Point{At: given(point.At, 0).Seconds(), Factor: given(point.Factor, 1)}
		m.require(next.Factor >= 0, at+".factor", "must not be negative")
		m.require(i == 0 || next.At >= points[i-1].At, at+".at", "must not be earlier than the point before it")
		points = append(points, next)
	}
	m.require(points.Max() > 0, path+".curve", "must not be 0 everywhere")
	m.require(points[len(points)-1].Factor > 0, path+".curve", "must not end with 0: no flow would arrive any more")
	return points
}

// trace reads a trace. If the scenario sets a load, it computes the speed for it.
func (m *merger) trace(path string, c *sim.Config, t *Trace, format sim.TraceFormat) sim.Arrivals {
	if t.File == "" {
		m.failf(path+".file", "is required")
		return nil
	}
	trace := sim.Trace{
		File: m.file(t.File), Format: format, Speed: given(t.Speed, 1),
		Classes: m.classes(), MustMatch: !drawn(c), // a class can only be drawn by shares
	}
	if _, err := os.Stat(trace.File); err != nil {
		m.failf(path+".file", "%v", err)
		return nil
	}
	m.require(given(t.Speed, 1) > 0, path+".speed", "must be positive")
	m.require(given(t.Load, 1) > 0, path+".load", "must be positive")
	m.require(t.Speed == nil || t.Load == nil, path, "speed and load exclude each other")
	if t.Load != nil && m.loadable(path, c) {
		trace.Speed = m.speed(path, c, *t.Load, trace)
	}
	return trace
}

// speed reads the whole trace, and returns the speed at which it causes the given load.
func (m *merger) speed(path string, c *sim.Config, load float64, trace sim.Trace) float64 {
	extent, err := trace.Extent()
	if err != nil {
		m.failf(path+".file", "%v", err)
		return 0
	}
	work := 0.0 // of the whole trace
	if extent.Drawn > 0 {
		work = float64(extent.Drawn) * c.Work()
	}
	for class, n := range extent.Matched {
		if n > 0 {
			work += float64(n) * c.Jobs[class].Work(extent.Sizes[class]/float64(n))
		}
	}
	m.require(extent.Seconds > 0, path+".load", "not possible, because all flows of the trace arrive at one time")
	m.require(work > 0, path+".load", "not possible, because the trace has no work for processors")
	return load * c.Capacity() * extent.Seconds / work
}

// classes returns the patterns of the jobs, and marks them as used. A job without a valid pattern
// has the pattern nil.
func (m *merger) classes() []sim.TraceClass {
	section, path := section[*[]Job](m, "Jobs")
	jobs := given(section, nil)
	classes := make([]sim.TraceClass, len(jobs))
	for i := range jobs {
		if j := &jobs[i]; j.Match != "" {
			m.use(fmt.Sprintf("%s[%d].match", path, i))
			classes[i].Match, _ = regexp.Compile(j.Match)
			classes[i].Sized = j.captures()
		}
	}
	return classes
}
