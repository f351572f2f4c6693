package scenario

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/sim"
)

func (m *merger) jobs(c *sim.Config) {
	section, path := section[*[]Job](m, "Jobs")
	jobs := given(section, nil)
	m.require(len(jobs) > 0, path, "at least one is required")
	for i := range jobs {
		at := fmt.Sprintf("%s[%d]", path, i)
		m.require(jobs[i].Name == "" || !slices.ContainsFunc(jobs[:i], func(j Job) bool { return j.Name == jobs[i].Name }),
			at+".name", "used twice")
		c.Jobs = append(c.Jobs, m.job(at, &jobs[i]))
	}
	m.require(len(jobs) == 0 || slices.ContainsFunc(c.Jobs, func(j sim.Job) bool { return j.Share > 0 }),
		path, "at least one share must be positive")
}

func (m *merger) job(path string, j *Job) sim.Job {
	job := sim.Job{Name: j.Name, Share: 1}
	if j.Share != nil {
		job.Share = *j.Share
	}
	m.require(job.Share >= 0, path+".share", "must not be negative")
	if _, err := regexp.Compile(j.Match); err != nil {
		m.failf(path+".match", "%v", err)
	}
	if j.Match != "" {
		m.mustUse(path+".match", "is not used: only flows of traces have a query")
	}
	if len(j.Stages) == 0 {
		job.Stages = []sim.Stage{{Work: m.distribution(path, &j.Distribution)}}
		return job
	}
	m.require(j.Distribution == Distribution{}, path, "a distribution and stages exclude each other")
	m.require(len(j.Stages) <= 255, path+".stages", "must be at most 255")
	for i := range j.Stages {
		at := fmt.Sprintf("%s.stages[%d]", path, i)
		stage := sim.Stage{Work: m.distribution(at, &j.Stages[i].Distribution)}
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

// distribution reads one. Its fields are among others of the section.
func (m *merger) distribution(path string, d *Distribution) sim.Distribution {
	before := len(m.errs)
	var all []sim.Distribution
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
			m.failf(path, "must have one of constant, exponential, uniform, lognormal, pareto and values")
		}
		return sim.Distribution{}
	}
	return all[0]
}

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

// values reads a file of observed times.
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

// file is the path of a file that the scenario names.
func (m *merger) file(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(m.dir, name)
}

// arrivals come last: a load is one of servers and jobs, which have to be right.
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

func (m *merger) poisson(path string, c *sim.Config, p *Poisson) sim.Arrivals {
	m.require(given(p.Rate, 1) > 0, path+".rate", "must be positive")
	m.require(given(p.Load, 1) > 0, path+".load", "must be positive")
	m.require((p.Rate == nil) != (p.Load == nil), path, "must have one of rate and load")
	rate := given(p.Rate, 0)
	if p.Load != nil && m.loadable(path, c) {
		rate = c.Rate(*p.Load)
	}
	return sim.Poisson{Rate: rate, Curve: m.curve(path, p)}
}

// loadable tells whether there is a rate of arrivals that loads the processors, as far as servers and
// jobs are valid.
func (m *merger) loadable(path string, c *sim.Config) bool {
	if len(m.errs) > 0 {
		return false
	}
	m.require(c.Capacity() > 0, path+".load", "is not possible: no server is there at the start")
	m.require(c.Work() > 0, path+".load", "is not possible: the jobs are no work for processors")
	return len(m.errs) == 0
}

func (m *merger) curve(path string, p *Poisson) sim.Curve {
	m.require(p.Diurnal == nil || p.Curve == nil, path, "diurnal and curve exclude each other")
	if d := p.Diurnal; d != nil {
		period, amplitude := given(d.Period, 24*time.Hour), given(d.Amplitude, -1)
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
		m.require(i == 0 || next.At >= points[i-1].At, at+".at", "must not be before the point before")
		points = append(points, next)
	}
	m.require(points.Max() > 0, path+".curve", "must not be 0 everywhere")
	m.require(points[len(points)-1].Factor > 0, path+".curve", "must not end with 0: no flow would arrive any more")
	return points
}

func (m *merger) trace(path string, c *sim.Config, t *Trace, format sim.TraceFormat) sim.Arrivals {
	if t.File == "" {
		m.failf(path+".file", "is required")
		return nil
	}
	trace := sim.Trace{File: m.file(t.File), Format: format, Speed: given(t.Speed, 1), Classes: m.classes()}
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

// speed is that at which a trace loads the processors.
func (m *merger) speed(path string, c *sim.Config, load float64, trace sim.Trace) float64 {
	extent, err := trace.Extent()
	if err != nil {
		m.failf(path+".file", "%v", err)
		return 0
	}
	work := float64(extent.Drawn) * c.Work()
	for class, n := range extent.Matched {
		work += float64(n) * c.Jobs[class].Work()
	}
	m.require(extent.Seconds > 0, path+".load", "is not possible: all of the trace is at one time")
	m.require(work > 0, path+".load", "is not possible: the trace is no work for processors")
	return load * c.Capacity() * extent.Seconds / work
}

// classes are the jobs' patterns; nil where there is none, or no valid one.
func (m *merger) classes() []*regexp.Regexp {
	section, path := section[*[]Job](m, "Jobs")
	jobs := given(section, nil)
	classes := make([]*regexp.Regexp, len(jobs))
	for i, j := range jobs {
		if j.Match != "" {
			m.use(fmt.Sprintf("%s[%d].match", path, i))
			classes[i], _ = regexp.Compile(j.Match)
		}
	}
	return classes
}
