// SPDX-License-Identifier: Apache-2.0

// Package processor emulates the processors of a server. It computes when jobs of known work end,
// and knows no clock: callers pass the time. The simulator and the emulated application of the lab
// use it.
//
// Times are in seconds from a start that the caller chooses. Work is in seconds of one processor of
// speed 1. Callers pass times in ascending order.
package processor

import "math"

// Sharing is a set of processors that all jobs share: each of n jobs on k processors of speed v is
// served at the speed v·min(1, k/n).
//
// All jobs are served at the same speed. The virtual time is the work that a job would have
// received if it had been served since the processors were last idle. A job ends when the virtual
// time has advanced by the job's work since the job was added. A change of the speed, or of the
// number of jobs, changes the speed of virtual time. It does not change the order in which jobs
// end.
type Sharing[Job any] struct {
	processors int32
	speed      float64
	jobs       []share[Job] // a heap; the first job ends first
	virtual    float64      // at the time since
	since      float64
}

// share is a job. It ends when the virtual time reaches until.
type share[Job any] struct {
	until float64
	job   Job
}

// NewSharing returns idle processors. Their number is at least 1 and the speed positive.
func NewSharing[Job any](processors int32, speed float64) *Sharing[Job] {
	return &Sharing[Job]{processors: processors, speed: speed}
}

// Len returns the number of jobs.
func (s *Sharing[Job]) Len() int { return len(s.jobs) }

// rate returns the speed of virtual time.
func (s *Sharing[Job]) rate() float64 {
	n := int32(len(s.jobs))
	if n <= s.processors {
		return s.speed
	}
	return s.speed * float64(s.processors) / float64(n)
}

// virtualAt returns the virtual time at the time now, which must not be before s.since.
func (s *Sharing[Job]) virtualAt(now float64) float64 {
	if len(s.jobs) == 0 {
		return 0 // so that it stays small, and exact
	}
	return s.virtual + (now-s.since)*s.rate()
}

// advance brings the virtual time up to now. It is called before a change of the speed, or of
// the number of jobs.
func (s *Sharing[Job]) advance(now float64) {
	s.virtual, s.since = s.virtualAt(now), now
}

// End returns the time at which the next job ends, if no job is added before and the speed stays.
// It is +Inf if there is no job.
func (s *Sharing[Job]) End() float64 {
	if len(s.jobs) == 0 {
		return math.Inf(1)
	}
	return s.since + max(s.jobs[0].until-s.virtual, 0)/s.rate()
}

// SetSpeed changes the speed of the processors, which stays positive.
func (s *Sharing[Job]) SetSpeed(now, speed float64) {
	s.advance(now)
	s.speed = speed
}

// Left returns the sum of the work that the jobs have not received yet.
func (s *Sharing[Job]) Left(now float64) float64 {
	virtual, sum := s.virtualAt(now), 0.0
	for _, j := range s.jobs {
		sum += j.until - virtual
	}
	return sum
}

// Clear removes all jobs.
func (s *Sharing[Job]) Clear() { s.jobs = s.jobs[:0] }

// Add adds a job.
func (s *Sharing[Job]) Add(now float64, job Job, work float64) {
	s.advance(now)
	added := share[Job]{until: s.virtual + work, job: job}
	s.jobs = append(s.jobs, added)
	i := len(s.jobs) - 1
	for i > 0 && added.until < s.jobs[(i-1)/2].until {
		s.jobs[i] = s.jobs[(i-1)/2]
		i = (i - 1) / 2
	}
	s.jobs[i] = added
}

// Remove removes the job that ends now, at the time that End returned.
func (s *Sharing[Job]) Remove(now float64) Job {
	first := s.jobs[0]
	s.virtual, s.since = first.until, now
	n := len(s.jobs) - 1
	last := s.jobs[n]
	s.jobs[n] = share[Job]{} // so that the garbage collector can free the job
	s.jobs = s.jobs[:n]
	i := 0
	for {
		child := 2*i + 1
		if child >= n {
			break
		}
		if child+1 < n && s.jobs[child+1].until < s.jobs[child].until {
			child++
		}
		if last.until <= s.jobs[child].until {
			break
		}
		s.jobs[i] = s.jobs[child]
		i = child
	}
	if n > 0 {
		s.jobs[i] = last
	}
	return first.job
}
