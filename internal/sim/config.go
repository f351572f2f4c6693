// SPDX-License-Identifier: Apache-2.0

// Package sim is an event-driven simulator of load balancers and servers: flows arrive at balancers,
// which offer them to servers, which serve them. What it simulates is exact down to the connection;
// packets are there only as the delays between the steps of a connection's life.
//
// A run follows from its configuration and seed alone. All randomness of a flow (its hash, its work,
// the delays of its packets) is drawn from its number and the seed, none from the order of events, so
// that different placements see the same flows: common random numbers, which make differences between
// placements much more certain than each one's value. Memory grows with the flows that are under way
// at a time, not with those that have been.
package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Config says what to simulate. Times are in seconds.
type Config struct {
	Servers   []Server
	Balancers []Share
	FlowTable FlowTable
	Network   Network
	Arrivals  Arrivals
	// Jobs are what flows want of servers, one for each class of flows.
	Jobs []Job
	// Placement is the balancers', Policy the servers'. Without a policy servers take what they are
	// offered.
	Placement Method
	Policy    Policy
	// Timeout is how long clients wait, from their SYN to the end of the response; 0 for ever. A
	// server notices that a client has gone when the flow's turn in the backlog comes.
	Timeout float64
	// Silent makes a server with a full backlog drop a flow instead of resetting it: the client then
	// gives up at its timeout, which must be set, and the flow counts as TimedOut instead of Refused.
	Silent bool
	// Connections and Duration end the arrivals: after so many flows or seconds, whichever is first;
	// 0 is no limit. Then the run goes on until all flows have ended.
	Connections uint64
	Duration    float64
	// Warmup and Cooldown are the shares of the arrivals, 0 to 1, at the beginning and the end that
	// are simulated but not measured: of Connections if that is set, otherwise of Duration.
	Warmup, Cooldown float64
	Events           []Event
	// Every, if not 0, has results kept also of each interval of so many seconds, at most MostIntervals
	// from the start on.
	Every float64
	// Completed, if set, is called for each measured flow that has ended. It runs in the goroutine of
	// the run, so it must be safe for concurrent use if several runs share it.
	Completed func(run int, flow Ended)
	// Sample, if set, is called every SampleInterval seconds while flows arrive.
	Sample         func(run int, now float64, world World)
	SampleInterval float64
}

// Server is a server's hardware and how it serves.
type Server struct {
	// Name is what consistent hashing knows the server by, and unique.
	Name string
	// Group is the kind of servers that results are also summed up for.
	Group int32
	CPUs  int32
	// Speed is how many seconds of work a processor does in a second.
	Speed float64
	// IOSpeed is the same of the IO queue.
	IOSpeed    float64
	Discipline Discipline
	// Workers limits how many flows a server with processor sharing serves at once; 0 is no limit.
	Workers int32
	// Backlog limits how many flows wait for a processor (FIFO) or a worker (processor sharing); -1 is
	// no limit.
	Backlog int32
	// Absent servers are there only after an event ServerAdd.
	Absent bool
}

// Capacity is how many seconds of work all processors do in a second.
func (s *Server) Capacity() float64 { return float64(s.CPUs) * s.Speed }

// Discipline is how flows share the processors of a server.
type Discipline uint8

// The disciplines.
const (
	// FIFO gives a processor to one flow until its stage is done, then to the one that waits longest.
	FIFO Discipline = iota
	// ProcessorSharing serves all at once, each at the speed of one processor at most.
	ProcessorSharing
)

// Share is a balancer's share of the flows, relative to the others'. With equal-cost multi-path
// routing all are equal.
type Share struct {
	Weight float64
	// Absent balancers are there only after an event BalancerAdd.
	Absent bool
}

// FlowTable limits how many flows a balancer knows. A flow goes to a bucket by its hash and has no
// entry if the ones there are taken (HLB, section IV-A2).
type FlowTable struct {
	Buckets int // 0 for no limit
	Ways    int // entries in a bucket
}

// Network has the delays of one packet's way; the default is none.
type Network struct {
	ClientBalancer Distribution // from a client by the edge router to a balancer
	BalancerServer Distribution // either way
	ServerServer   Distribution // of an offer that is passed on
	ServerClient   Distribution // direct server return
}

// Job is what flows of a class want.
type Job struct {
	Name string
	// Share is the class's share of the flows, relative to the others'. Traces may say the class
	// themselves.
	Share float64
	// Stages follow each other; the response is sent after the last.
	Stages []Stage
}

// Stage is a visit to a queue of the server (HLB, section V-B and figure 6).
type Stage struct {
	Queue Queue
	// Work is in seconds at speed 1.
	Work Distribution
	// PerUnit adds so many seconds for each unit of the flow's size. Only traces tell sizes
	// (TraceClass.Sized).
	PerUnit float64
}

// Queue is one of a server.
type Queue uint8

// The queues. CPU is served by the server's discipline; IO is shared by all that are in it, with the
// IO speed in total.
const (
	CPU Queue = iota
	IO
)

// Event is a change at a time.
type Event struct {
	At   float64
	Kind EventKind
	// Servers or Balancers are the indexes of those that it happens to.
	Servers, Balancers []int32
	// Speed is for SetSpeed.
	Speed float64
	// Detect is the time after which balancers know that a server is gone or there.
	Detect float64
}

// EventKind is what happens.
type EventKind uint8

// What can happen. A drained server gets no new flows and ends those that it has; one that fails
// breaks them, and loses what is sent to it until balancers know. A balancer that fails leaves its
// flows to the others.
const (
	ServerAdd EventKind = iota
	ServerDrain
	ServerFail
	SetSpeed
	BalancerAdd
	BalancerFail
)

// Ended is a measured flow that has ended.
type Ended struct {
	// Sent is when the client sent the SYN, Response how long until it had the response, or gave up.
	Sent, Response float64
	Number         uint64
	Server         int32 // -1 if no server had it
	Balancer       int32
	Class          int32
	Hops           int32 // servers that passed it on, or back
	Outcome        Outcome
}

// Capacity is that of all servers that are there from the start, in seconds of work per second.
func (c *Config) Capacity() float64 {
	sum := 0.0
	for i := range c.Servers {
		if !c.Servers[i].Absent {
			sum += c.Servers[i].Capacity()
		}
	}
	return sum
}

// Work is how many seconds of work a flow brings to the processors, in the mean over all classes.
func (c *Config) Work() float64 {
	sum, shares := 0.0, 0.0
	for i := range c.Jobs {
		shares += c.Jobs[i].Share
		sum += c.Jobs[i].Share * c.Jobs[i].Work(0)
	}
	return sum / shares
}

// Work is how many seconds of work a flow of the class and of a size (Stage.PerUnit) brings to the
// processors, in the mean.
func (j *Job) Work(size float64) float64 {
	sum := 0.0
	for i := range j.Stages {
		if stage := &j.Stages[i]; stage.Queue == CPU {
			sum += stage.Work.Mean() + stage.PerUnit*size
		}
	}
	return sum
}

// sized tells whether a stage's work depends on the flow's size.
func (j *Job) sized() bool {
	return slices.ContainsFunc(j.Stages, func(s Stage) bool { return s.PerUnit > 0 })
}

// Rate returns the arrivals per second that load the processors with rho: 1 is all that they can do.
func (c *Config) Rate(rho float64) float64 { return rho * c.Capacity() / c.Work() }

// Validate returns what makes a run impossible. Each problem names the field.
func (c *Config) Validate() error {
	var p problems
	c.checkServers(&p)
	c.checkBalancers(&p)
	c.checkJobs(&p)
	p.require(c.Placement != nil, "no placement")
	p.require(c.Arrivals != nil, "no arrivals")
	p.require(!c.Silent || c.Timeout > 0, "silent servers need a timeout")
	p.require(c.Warmup >= 0 && c.Cooldown >= 0 && c.Warmup+c.Cooldown < 1,
		"warmup %v and cooldown %v: must be less than 1 together", c.Warmup, c.Cooldown)
	p.require(c.Every >= 0, "intervals of %v s: must not be negative", c.Every)
	p.require(c.Sample == nil || c.SampleInterval > 0, "sample interval %v: must be positive", c.SampleInterval)
	for i := range c.Events {
		c.checkEvent(&p, i)
	}
	return errors.Join(p...)
}

type problems []error

// require adds a problem unless ok.
func (p *problems) require(ok bool, format string, args ...any) {
	if !ok {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

func (c *Config) checkServers(p *problems) {
	p.require(len(c.Servers) > 0, "no servers")
	io := c.usesIO()
	for i := range c.Servers {
		s := &c.Servers[i]
		p.require(s.CPUs > 0, "server %q: %d CPUs: must be at least 1", s.Name, s.CPUs)
		p.require(s.Speed > 0, "server %q: speed %v: must be positive", s.Name, s.Speed)
		p.require(!io || s.IOSpeed > 0, "server %q: IO speed %v: must be positive", s.Name, s.IOSpeed)
		p.require(s.Workers >= 0, "server %q: %d workers: must not be negative", s.Name, s.Workers)
		p.require(s.Workers == 0 || s.Discipline == ProcessorSharing,
			"server %q: %d workers: only with processor sharing", s.Name, s.Workers)
	}
}

func (c *Config) checkBalancers(p *problems) {
	p.require(len(c.Balancers) > 0, "no balancers")
	p.require(len(c.Balancers) <= math.MaxInt16, "%d balancers: more than %d", len(c.Balancers), math.MaxInt16)
	p.require(c.FlowTable.Buckets == 0 || c.FlowTable.Ways > 0 && c.FlowTable.Ways <= math.MaxUint16,
		"flow table of %d ways: must be 1 to %d", c.FlowTable.Ways, math.MaxUint16)
	for i, b := range c.Balancers {
		p.require(b.Weight > 0, "balancer %d: weight %v: must be positive", i, b.Weight)
	}
}

func (c *Config) checkJobs(p *problems) {
	p.require(len(c.Jobs) > 0, "no jobs")
	p.require(len(c.Jobs) <= math.MaxInt16, "%d jobs: more than %d", len(c.Jobs), math.MaxInt16)
	shares := 0.0
	trace, _ := c.Arrivals.(Trace)
	p.require(len(trace.Classes) <= len(c.Jobs),
		"a trace of %d classes: only %d jobs", len(trace.Classes), len(c.Jobs))
	for i, job := range c.Jobs {
		p.require(len(job.Stages) > 0, "job %q: no stages", job.Name)
		p.require(len(job.Stages) <= math.MaxUint8, "job %q: %d stages: more than %d", job.Name, len(job.Stages), math.MaxUint8)
		p.require(job.Share >= 0, "job %q: share %v: must not be negative", job.Name, job.Share)
		hasSize := i < len(trace.Classes) && trace.Classes[i].captures()
		p.require(!job.sized() || hasSize && job.Share == 0,
			"job %q: work by the size: needs a trace that tells sizes, and the share 0", job.Name)
		shares += job.Share
	}
	p.require(len(c.Jobs) == 0 || shares > 0 || trace.MustMatch,
		"jobs: at least one share must be positive")
}

func (c *Config) checkEvent(p *problems, i int) {
	e := &c.Events[i]
	p.require(e.At >= 0 && e.Detect >= 0, "event %d: at %v, detected after %v: must not be negative", i, e.At, e.Detect)
	p.require(e.Kind != SetSpeed || e.Speed > 0, "event %d: speed %v: must be positive", i, e.Speed)
	for _, s := range e.Servers {
		p.require(s >= 0 && int(s) < len(c.Servers), "event %d: server %d of %d", i, s, len(c.Servers))
	}
	for _, b := range e.Balancers {
		p.require(b >= 0 && int(b) < len(c.Balancers), "event %d: balancer %d of %d", i, b, len(c.Balancers))
	}
}
