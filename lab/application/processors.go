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

// processors are emulated processors in real time. No work is done: a timer expires when a job
// ends. A late timer delays the answer to the job that ends, and nothing else: the station computes
// all ends from the times at which jobs were added.
type processors struct {
	timer *timer
	start time.Time // time 0 of the station
	speed float64
	// stopped is closed when the processors stop. The jobs that are left do not end.
	stopped chan struct{}

	mu      sync.Mutex
	station *processor.Station[*job]
	changes []change // of the share of co-located work, in ascending order of times
	armed   float64  // the time at which the timer expires
	work    float64  // of the jobs that have ended
	jobs    uint64   // that have ended
}

// job is a request that is served.
type job struct {
	work float64
	end  float64
	done chan struct{}
}

type change struct{ at, share float64 }

// served tells how a job was served.
type served struct {
	// Queueing and service are emulated. Service is the time that the job would have taken alone;
	// queueing is the rest of its sojourn time, because other jobs and co-located work had the
	// cores.
	queueing, service time.Duration
	sojourn           time.Duration // by the clock
}

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

// errStopped is the error about a job that does not end, because the processors have stopped.
var errStopped = errors.New("the processors have stopped")

// run ends jobs and changes the share of co-located work when their time comes, until the context
// ends.
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
		p.armed = math.Inf(1) // it has expired
		err := p.arm(p.advance())
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// close releases the timer. No other method may run then, or be called afterwards.
func (p *processors) close() error { return p.timer.file.Close() }

// advance lets everything happen that is due. It returns the time, in seconds since the start.
func (p *processors) advance() (now float64) {
	now = time.Since(p.start).Seconds()
	for {
		end := p.station.End()
		switch {
		case len(p.changes) > 0 && p.changes[0].at <= min(now, end):
			p.station.SetColocated(p.changes[0].at, p.changes[0].share)
			p.changes = p.changes[1:]
		case end <= now:
			j := p.station.Remove(end)
			j.end = end
			p.work += j.work
			p.jobs++
			close(j.done)
		default:
			return now
		}
	}
}

// arm sets the timer to the next time at which something happens.
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

// serve has the processors do work, in seconds of a core of speed 1, and returns when it is done.
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

// colocate replaces the schedule of co-located work. The times of the new schedule count from now.
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

// usage is what the processors do, and have done.
type usage struct {
	jobs      int // in service and waiting for a core
	colocated float64
	ended     uint64
	work      float64 // of the jobs that have ended, in seconds
}

func (p *processors) usage() usage {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.advance()
	return usage{p.station.Len(), p.station.Colocated(), p.jobs, p.work}
}

// timer is a timer of the kernel (timerfd_create(2)). Go's own timers expire up to a millisecond
// late when the process is idle, because its runtime waits in whole milliseconds.
type timer struct {
	file *os.File
	fd   int
}

func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a timer: %w", err)
	}
	return &timer{file: os.NewFile(uintptr(fd), "timer"), fd: fd}, nil
}

// set has the timer expire once, in so many seconds. +Inf stops it.
func (t *timer) set(after float64) error {
	var spec unix.ItimerSpec
	if !math.IsInf(after, 1) {
		spec.Value = unix.NsecToTimespec(max(1, int64(math.Ceil(after*1e9)))) // 0 would stop it
	}
	if err := unix.TimerfdSettime(t.fd, 0, &spec, nil); err != nil {
		return fmt.Errorf("set the timer to %v: %w", seconds(after), err)
	}
	return nil
}

// wait returns when the timer expires. It returns an error after interrupt.
func (t *timer) wait() error {
	var expirations [8]byte
	_, err := t.file.Read(expirations[:])
	if err == nil && binary.NativeEndian.Uint64(expirations[:]) == 0 {
		err = errors.New("the timer reports no expiration")
	}
	return err
}

// interrupt ends wait.
func (t *timer) interrupt() { t.file.SetReadDeadline(time.Now()) }
