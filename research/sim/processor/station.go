// SPDX-License-Identifier: Apache-2.0

package processor

import (
	"fmt"
	"math"
)

// Discipline is the way in which jobs share the processors of a server.
type Discipline uint8

// The disciplines. Under FIFO a job has a processor to itself from its start to its end, and jobs
// start in the order in which they came.
const (
	ProcessorSharing Discipline = iota
	FIFO
)

var disciplineNames = map[string]Discipline{"processor-sharing": ProcessorSharing, "fifo": FIFO}

// ParseDiscipline returns the discipline with the name: processor-sharing or fifo.
func ParseDiscipline(name string) (Discipline, error) {
	d, known := disciplineNames[name]
	if !known {
		return 0, fmt.Errorf("must be processor-sharing or fifo")
	}
	return d, nil
}

// Station is the processors of a server, with the jobs that they serve and the jobs that wait for
// them.
type Station[Job any] struct {
	speed     float64
	colocated float64
	limit     int // of jobs in service
	inService *Sharing[Job]
	waiting   []waiting[Job] // in the order of their arrival
}

type waiting[Job any] struct {
	job  Job
	work float64
}

// Config describes the processors of a server.
type Config struct {
	Cores      int     // at least 1
	Speed      float64 // of each core; positive. A job of 1 s takes 1/Speed seconds alone
	Discipline Discipline
}

// Validate returns an error that names the field and its value, unless all fields are in range.
func (c Config) Validate() error {
	switch {
	case c.Cores < 1 || c.Cores > MaxCores:
		return fmt.Errorf("cores %d: must be 1 to %d", c.Cores, MaxCores)
	case !(c.Speed > 0) || math.IsInf(c.Speed, 1):
		return fmt.Errorf("speed %v: must be a positive number", c.Speed)
	}
	return nil
}

// MaxCores is the largest number of cores of a station.
const MaxCores = 1024

// NewStation returns idle processors. The configuration must be valid.
func NewStation[Job any](c Config) *Station[Job] {
	s := &Station[Job]{
		speed: c.Speed, limit: math.MaxInt, inService: NewSharing[Job](int32(c.Cores), c.Speed),
	}
	if c.Discipline == FIFO {
		// With no more jobs in service than cores, each job has a core to itself.
		s.limit = c.Cores
	}
	return s
}

// Add adds a job with its work.
func (s *Station[Job]) Add(now float64, job Job, work float64) {
	if s.inService.Len() < s.limit {
		s.inService.Add(now, job, work)
		return
	}
	s.waiting = append(s.waiting, waiting[Job]{job, work})
}

// End returns the time at which the next job ends, or +Inf if there is none.
func (s *Station[Job]) End() float64 { return s.inService.End() }

// Remove removes the job that ends now, at the time that End returned. The job that waits longest
// takes its place.
func (s *Station[Job]) Remove(now float64) Job {
	job := s.inService.Remove(now)
	if len(s.waiting) > 0 {
		next := s.waiting[0]
		s.waiting[0] = waiting[Job]{} // so that the garbage collector can free the job
		s.waiting = s.waiting[1:]
		s.inService.Add(now, next.job, next.work)
	}
	return job
}

// Len returns the number of jobs, in service and waiting.
func (s *Station[Job]) Len() int { return s.inService.Len() + len(s.waiting) }

// SetColocated lets other work on the same host take a share of each core, from 0 to less than 1.
// The speed that is left is (1 - share) of the whole speed.
func (s *Station[Job]) SetColocated(now, share float64) {
	s.colocated = share
	s.inService.SetSpeed(now, s.speed*(1-share))
}

// Colocated returns the share that co-located work takes.
func (s *Station[Job]) Colocated() float64 { return s.colocated }
