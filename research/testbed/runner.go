// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/lab"
)

// Options tell how an experiment runs.
type Options struct {
	// Directory gets the results. It is made if it does not exist.
	Directory string
	// Full makes runs of full length, with the values that the experiment has under full.
	Full bool
	// Speed and Seeds replace those of the experiment, unless they are 0.
	Speed float64
	Seeds int
	// Trace is the file of the requests that experiments with a Replay need.
	Trace string
	// MostLate makes disturbed runs be repeated (Run.isDisturbed), unless it is 0.
	MostLate time.Duration
	// Progress is called with what was done. It may be nil.
	Progress func(text string)
}

// Check returns an error if the experiment cannot run with the options: if the points are speeds
// and the options set one, if the options ask for a full length and the experiment has none, or if
// it cannot have their speed or seeds.
func (e *Experiment) Check(o Options) error {
	fail := func(option, format string, args ...any) error {
		return fmt.Errorf("experiment %s: %s: %s", e.Name, option, fmt.Sprintf(format, args...))
	}
	if o.Speed > 0 && e.Axis == AxisSpeed {
		return fail(fmt.Sprintf("speed %v", o.Speed), "the points are the speeds")
	}
	if o.Full && !e.hasFull() {
		return fail("full", "the file has no values for it")
	}
	var err error
	given := map[string]any{"seeds": o.Seeds, "speed": o.Speed}
	Size{Seeds: o.Seeds, Speed: o.Speed}.problems(e, e.Servers, func(name, problem string) {
		err = fail(fmt.Sprintf("%s %v", name, given[name]), "%s", problem)
	})
	return err
}

// hasFull tells whether the experiment has values for runs of full length.
func (e *Experiment) hasFull() bool { return !reflect.ValueOf(e.Full).IsZero() }

// Duration estimates how long the experiment takes by the clock.
func (e *Experiment) Duration(o Options) time.Duration {
	s := e.with(o)
	total := time.Duration(0)
	if e.Kind == KindDay {
		total += s.warmUpTime()
	}
	for _, p := range s.plan() {
		total += p.duration()
		if p.Kind == KindLoad {
			total += pause
		}
	}
	return total.Round(time.Second)
}

// pause is about the time between two runs: the last requests end, thresholds are reset, and the
// simulator replays the run.
const pause = 4 * time.Second

// with returns the settings that the options ask for.
func (e *Experiment) with(o Options) settings {
	s := e.settings(o.Full)
	if o.Speed > 0 {
		s.Speed = o.Speed
	}
	if o.Seeds > 0 {
		s.Seeds = o.Seeds
	}
	return s
}

// planned is a run to be made.
type planned struct {
	settings
	point float64
	Case  Case
	seed  uint64
}

// plan lists all runs. The cases of a point and a seed follow each other, so that changes of the
// machine disturb all of them alike.
func (s settings) plan() (runs []planned) {
	for _, point := range s.Points {
		for seed := range s.Seeds {
			for _, c := range s.Cases {
				runs = append(runs, planned{s.at(point), point, c, uint64(seed + 1)})
			}
		}
	}
	return runs
}

// duration is the time by the clock in which requests arrive, or connections open and change.
func (p planned) duration() time.Duration {
	switch p.Kind {
	case KindChange, KindHold:
		return time.Duration(p.Connections) * time.Millisecond
	case KindForward:
		return time.Duration(p.Connections) * 700 * time.Millisecond
	case KindDay:
		return p.Day
	}
	seconds := float64(p.Connections) / p.rate() / p.Speed
	return time.Duration(seconds * float64(time.Second))
}

// Run makes the runs of the experiment that are not in the directory yet. It needs root. It writes
// each run when it has ended, so an experiment that was interrupted goes on where it was. After an
// error, the results have the runs that ended before. Run leaves no lab behind, also if the process
// is killed.
func (e *Experiment) Run(ctx context.Context, text []byte, o Options) (results *Results, err error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if err := e.Check(o); err != nil {
		return nil, err
	}
	s, err := e.with(o).replayed(o.Trace)
	if err != nil {
		return nil, fmt.Errorf("experiment %s: %w", e.Name, err)
	}
	store, err := openStore(o.Directory, s, text, o.Full)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.close()) }()
	if e.Kind == KindForward { // needs no lab
		if err := s.forward(ctx, store, o.Progress); err != nil {
			return &store.results, err
		}
		return &store.results, store.finish()
	}
	b := rig{progress: o.Progress, directory: o.Directory}
	defer func() { err = errors.Join(err, b.close()) }()
	plan := s.plan()
	started, done := time.Now(), 0
	for i, p := range plan {
		if earlier := store.run(p); earlier != nil && !earlier.isDisturbed(o.MostLate) {
			continue
		}
		o.Progress(p.describe(i, len(plan), remaining(started, done, len(plan)-i)))
		run, err := undisturbed(o, func() (*Run, error) {
			if err := b.prepare(ctx, p); err != nil {
				return nil, err
			}
			return b.make(ctx, p, store)
		})
		if err != nil {
			return &store.results, fmt.Errorf("%s: %w", p.name(), err)
		}
		if err := store.add(run); err != nil {
			return &store.results, err
		}
		done++
	}
	return &store.results, store.finish()
}

// mostRepeats is how often a disturbed run is repeated. If the last one is disturbed, too, it stays.
const mostRepeats = 9

// undisturbed makes a run, and repeats it while it is disturbed.
func undisturbed(o Options, makeRun func() (*Run, error)) (*Run, error) {
	for repeats := 0; ; repeats++ {
		run, err := makeRun()
		if err != nil {
			return nil, err
		}
		run.Machine.Repeats = repeats
		if !run.isDisturbed(o.MostLate) || repeats == mostRepeats {
			return run, nil
		}
		o.Progress(fmt.Sprintf("repeating the run: 1%% of the requests were sent %.1f ms late or "+
			"later, and %.0f%% of the CPU time was left", 1000*run.Machine.LateP99, 100*run.Machine.Idle))
	}
}

// isDisturbed tells whether other programs may have changed the results: if 1% of the requests were
// sent later than mostLate, or if the machine was busy. No run is disturbed if mostLate is 0, or if
// the run has no numbers about the machine.
func (r *Run) isDisturbed(mostLate time.Duration) bool {
	m := r.Machine
	return mostLate > 0 && m.Idle > 0 && (m.LateP99 > mostLate.Seconds() || m.Idle < leastIdle)
}

func (p planned) name() string {
	return fmt.Sprintf("%s, %s %v, seed %d", p.Case.Name, p.Axis, p.point, p.seed)
}

// describe returns the line of progress about run i of all. left is an estimate of the remaining
// time, or empty.
func (p planned) describe(i, all int, left string) string {
	return fmt.Sprintf("%d of %d: %s%s", i+1, all, p.name(), left)
}

// remaining estimates how long the remaining runs take, by the time of those that have been made.
// It returns nothing before the first run has ended.
func remaining(started time.Time, done, left int) string {
	if done == 0 {
		return ""
	}
	each := time.Since(started) / time.Duration(done)
	return fmt.Sprintf(" (%s left)", (each * time.Duration(left)).Round(time.Second))
}

// rig is the lab in which runs are made. Runs with the same servers and tables share it.
type rig struct {
	progress  func(string)
	directory string // of the results
	lab       *lab.Lab
	guard     *guard
	built     labKind
	inferred  map[string]bool // by case: it infers, and had a run in this lab
	sources   []load.Source   // of the servers' loads
	reading   sync.Mutex      // held while the sources are read
}

// labKind has the properties by which labs differ. Runs with the same labKind can share a lab.
type labKind struct {
	servers, balancers, buckets, switches int
	speed, capacity                       float64
	proxy                                 lab.Proxy
	only                                  string // the only case that the lab is for, if there is one
}

// labKind returns the properties of the lab for a run.
func (p planned) labKind() labKind {
	kind := labKind{
		servers: p.present, balancers: p.Balancers, buckets: p.Buckets, switches: p.Case.Switches,
		speed: p.Speed, capacity: p.capacity(p.present), proxy: p.Case.Proxy,
	}
	if p.CPUTime {
		kind.only = p.Case.Name
	}
	return kind
}

// prepare makes a lab for a run of the case, unless there is one that fits. A case that infers
// needs a new lab for each run, because its balancers must not know the servers from an earlier
// run.
func (b *rig) prepare(ctx context.Context, p planned) error {
	s, c, want := p.settings, p.Case, p.labKind()
	if b.lab != nil && b.built == want && !b.inferred[c.Name] {
		b.inferred[c.Name] = c.Placement.Infers()
		return nil
	}
	if err := b.close(); err != nil {
		return err
	}
	name := fmt.Sprintf("x%d", os.Getpid())
	guard, err := startGuard(name)
	if err != nil {
		return err
	}
	b.guard = guard
	built, err := lab.Up(ctx, s.topology(name, c), lab.Options{Progress: b.progress})
	if err != nil {
		return errors.Join(err, b.close())
	}
	b.lab, b.built = built, want
	b.inferred = map[string]bool{c.Name: c.Placement.Infers()}
	for i := range s.present {
		b.sources = append(b.sources, built.Node(serverName(i+1)).LoadSource())
	}
	if s.Kind == KindDay {
		return b.warmUp(ctx, s)
	}
	return nil
}

func (b *rig) make(ctx context.Context, p planned, st *store) (*Run, error) {
	switch p.Kind {
	case KindChange:
		return b.change(ctx, p)
	case KindHold:
		return b.hold(ctx, p)
	}
	return b.run(ctx, p, st)
}

// close removes the lab, if there is one, and ends its guard.
func (b *rig) close() error {
	if b.guard == nil { // there is no lab: prepare starts the guard first
		return nil
	}
	var err error
	for _, source := range b.sources {
		if closer, ok := source.(io.Closer); ok {
			err = errors.Join(err, closer.Close())
		}
	}
	if b.lab != nil {
		err = errors.Join(err, b.lab.Down())
	}
	err = errors.Join(err, b.guard.stop())
	b.lab, b.guard, b.sources = nil, nil, nil
	return err
}
