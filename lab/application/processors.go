// SPDX-License-Identifier: Apache-2.0

package application

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/research/sim/processor"
)

// processors emulate processors in real time, without doing the work of jobs: a timer expires when
// a job ends. If the timer is late, only the answer to this job is late. Errors do not add up,
// because the station computes the ends of all jobs from the times at which they were added.
type processors struct {
	timer *timer
	start time.Time // time 0 of the station
	speed float64
	// stopped is closed when the processors stop. The jobs that are left then never end.
	stopped chan struct{}

	mu      sync.Mutex // protects the fields below
	station *processor.Station[*job]
	changes []change // coming changes of the share of co-located work, in ascending order of times
	armed   float64  // when the timer will expire, in seconds since start; +Inf: it is not set
	work    float64  // sum of the work of all jobs that have ended
	ended   uint64   // number of jobs that have ended
}

// job is the work of one request.
type job struct {
	work float64       // in seconds of a core of speed 1
	end  float64       // when the work ended, in seconds since the start of the processors
	done chan struct{} // closed when the work has ended
}

// change sets the share of co-located work at a time, in seconds since the start of the processors.
type change struct{ at, share float64 }

// served has the times of a job that has ended.
type served struct {
	service  time.Duration // emulated time that the job would have taken alone
	queueing time.Duration // the rest of its emulated time, in which other work had the cores
	sojourn  time.Duration // time from its arrival to its answer, by the clock
}

// newProcessors returns processors without jobs. run must run, or else no job ends.
func newProcessors(c processor.Config) (*processors, error) {
	t, err := newTimer()
	if err != nil {
		return nil, err
	}
	return &processors{
		timer: t, start: time.Now(), speed: c.Speed,
		stopped: make(chan struct{}), station: processor.NewStation[*job](c), armed: math.Inf(1),
	}, nil
}

// errStopped is the error for a job that never ends, because the processors have stopped.
var errStopped = errors.New("the processors have stopped")

// run ends each job when its work would end, and makes the changes of co-located work. It returns
// when the context ends.
func (p *processors) run(ctx context.Context) error {
	defer close(p.stopped)
	stop := context.AfterFunc(ctx, p.timer.interrupt)
	defer stop()
	for {
		if err := p.timer.wait(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		p.mu.Lock()
		p.armed = math.Inf(1) // the timer has expired, so it is not set
		err := p.arm(p.advance())
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// close releases the timer. The caller must not call other methods afterwards, or at the same time.
func (p *processors) close() error { return p.timer.file.Close() }

// advance ends all jobs and makes all changes that are due, in the order of their times. It returns
// the present time, in seconds since the start.
func (p *processors) advance() (now float64) {
	now = time.Since(p.start).Seconds()
	for {
		end := p.station.End()
		switch {
		case len(p.changes) > 0 && p.changes[0].at <= min(now, end): // a change is due first
			p.station.SetColocated(p.changes[0].at, p.changes[0].share)
			p.changes = p.changes[1:]
		case end <= now:
			j := p.station.Remove(end)
			j.end = end
			p.work += j.work
			p.ended++
			close(j.done)
		default:
			return now
		}
	}
}

// arm sets the timer to the time at which the next job ends, or the share of co-located work
// changes, whichever is first. now is the present time, as advance returns it.
func (p *processors) arm(now float64) error {
	next := p.station.End()
	if len(p.changes) > 0 {
		next = min(next, p.changes[0].at)
	}
	if next == p.armed {
		return nil
	}
	p.armed = next
	return p.timer.set(next - now)
}

// serve adds a job with the given work, in seconds of a core of speed 1. It returns the job's times
// when the job has ended, or errStopped when the processors stop first. A job without work ends at
// once.
func (p *processors) serve(work float64) (served, error) {
	if work == 0 {
		return served{}, nil
	}
	j := &job{work: work, done: make(chan struct{})}
	p.mu.Lock()
	arrived := p.advance()
	p.station.Add(arrived, j, work)
	err := p.arm(arrived)
	p.mu.Unlock()
	if err != nil {
		return served{}, err
	}
	select {
	case <-j.done:
	case <-p.stopped:
		return served{}, errStopped
	}
	service := work / p.speed
	return served{
		queueing: seconds(max(j.end-arrived-service, 0)),
		service:  seconds(service),
		sojourn:  time.Since(p.start) - seconds(arrived),
	}, nil
}

// colocate replaces the schedule of co-located work. The times of the new schedule count from now,
// and the share is 0 until its first change.
func (p *processors) colocate(schedule Schedule) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.advance()
	p.station.SetColocated(now, 0)
	p.changes = nil
	for _, c := range schedule {
		p.changes = append(p.changes, change{at: now + c.At.Seconds(), share: c.Share})
	}
	return p.arm(p.advance()) // a change may be due at once
}

// usage is the present use of the processors, with counts since their start.
type usage struct {
	jobs      int // in service and waiting for a core
	colocated float64
	ended     uint64  // number of jobs that have ended
	work      float64 // sum of their work, in seconds
}

func (p *processors) usage() usage {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.advance()
	return usage{p.station.Len(), p.station.Colocated(), p.ended, p.work}
}

// timer is a timer of the kernel (timerfd_create(2)). Go's own timers would expire up to a
// millisecond late, because an idle Go program waits for them in whole milliseconds.
type timer struct {
	file *os.File
	fd   int
}

// newTimer returns a timer that is not set.
func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a timer: %w", err)
	}
	return &timer{file: os.NewFile(uintptr(fd), "timer"), fd: fd}, nil
}

// set sets the timer to expire once, after the given number of seconds. +Inf stops the timer.
func (t *timer) set(after float64) error {
	var spec unix.ItimerSpec
	if !math.IsInf(after, 1) {
		const least = 1 // ns; 0 would stop the timer
		spec.Value = unix.NsecToTimespec(max(least, int64(math.Ceil(after*1e9))))
	}
	if err := unix.TimerfdSettime(t.fd, 0, &spec, nil); err != nil {
		return fmt.Errorf("set the timer to %v: %w", seconds(after), err)
	}
	return nil
}

// wait returns when the timer has expired. After interrupt it returns an error.
func (t *timer) wait() error {
	var expirations [8]byte
	_, err := t.file.Read(expirations[:])
	if err == nil && binary.NativeEndian.Uint64(expirations[:]) == 0 {
		err = errors.New("the timer reports no expiration")
	}
	return err
}

// interrupt makes wait return, now and later.
func (t *timer) interrupt() { t.file.SetReadDeadline(time.Now()) }
