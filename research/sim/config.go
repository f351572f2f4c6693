// SPDX-License-Identifier: Apache-2.0

// Package sim is an event-driven simulator of load balancers and servers. Flows arrive at
// balancers, balancers offer them to servers, and servers serve them. The simulation is exact down
// to connections. Packets exist only as delays between the steps of a connection.
//
// A run depends on nothing but its configuration and its seed. All random values of a flow (its
// hash, its work, the delays of its packets) follow from the seed and the number of the flow, and
// not from the order of events. So different placements see the same flows. With such common
// random numbers, differences between placements are much more certain than the value of each
// placement. The memory of a run depends on the number of flows that are under way at a time, and
// not on the number of all flows.
package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Config describes the system that a run simulates. Times are in seconds.
type Config struct {
	Servers   []Server
	Balancers []Share
	// Affinity makes the flows of a client have the same row; nil: each flow has its own.
	Affinity  *Affinity
	FlowTable FlowTable
	Network   Network
	Arrivals  Arrivals
	// Jobs describe the work of flows, one for each class of flows.
	Jobs []Job
	// Placement is the method of the balancers, Policy that of the servers. Without a policy,
	// servers take all offered flows.
	Placement Method
	Policy    Policy
	// Timeout is the time for which clients wait, from their SYN to the end of the response. 0
	// means for ever. A server notices that a client has gone when the flow comes to the head of
	// the backlog.
	Timeout float64
	// Silent makes a server with a full backlog drop a flow instead of resetting it. The client
	// then gives up after Timeout, which must not be 0, and the flow counts as TimedOut instead of
	// Refused.
	Silent bool
	// Flood is a number of SYNs per second, at random times, that nobody follows up: the balancers
	// offer them to servers, and the servers' agents decide about them. They take no room on
	// servers and in flow tables, as with SYN cookies. Only a policy can notice them.
	Flood float64
	// Connections and Duration end the arrivals, after that number of flows or seconds, whichever
	// is first. 0 means no limit. The run continues until all flows have ended.
	Connections uint64
	Duration    float64
	// Warmup and Cooldown are the shares of the arrivals at the beginning and the end that are
	// simulated but not measured, 0 to 1. They are shares of Connections if that is not 0,
	// otherwise of Duration.
	Warmup, Cooldown float64
	Events           []Event
	// Every, if not 0, is the length of intervals in seconds. Results are then also kept for each
	// of the first MostIntervals intervals.
	Every float64
	// Completed, if not nil, is called for each measured flow that has ended. It is called from
	// the goroutine of the run. So it must be safe for concurrent use if several runs share it.
	Completed func(run int, flow Ended)
	// Sample, if not nil, is called every SampleInterval seconds while flows arrive.
	Sample         func(run int, now float64, world World)
	SampleInterval float64
}

// Server describes a server's hardware and how the server serves flows.
type Server struct {
	// Name is the unique name by which consistent hashing knows the server.
	Name string
	// Group is the kind of the server. There are also results for each group.
	Group int32
	CPUs  int32
	// Speed is the work that a processor does in a second, in seconds of work.
	Speed float64
	// IOSpeed is the work that the IO queue does in a second, in seconds of work.
	IOSpeed    float64
	Discipline Discipline
	// Workers is the number of flows that a server with processor sharing serves at once. 0 means
	// no limit.
	Workers int32
	// Backlog is the number of flows that may wait for a processor (FIFO) or a worker (processor
	// sharing). -1 means no limit.
	Backlog int32
	// An Absent server exists only after an event ServerAdd.
	Absent bool
}

// Capacity returns the work that all processors do in a second, in seconds of work.
func (s *Server) Capacity() float64 { return float64(s.CPUs) * s.Speed }

// Discipline is the way in which flows share the processors of a server.
type Discipline uint8

// The disciplines.
const (
	// FIFO gives a processor to one flow until the flow's stage is done, and then to the flow that
	// has waited longest.
	FIFO Discipline = iota
	// ProcessorSharing serves all flows at once, each at most at the speed of one processor.
	ProcessorSharing
)

// Share is a balancer's share of the flows, relative to the shares of other balancers. With
// equal-cost multi-path routing all shares are equal.
type Share struct {
	Weight float64
	// An Absent balancer exists only after an event BalancerAdd.
	Absent bool
}

// FlowTable limits the number of flows that a balancer knows. The hash of a flow selects a bucket.
// The flow has no entry if all entries of the bucket are in use (HLB, section IV-A2).
type FlowTable struct {
	Buckets int // 0 means no limit
	Ways    int // entries in a bucket
}

// Network has the delays of a packet on each part of its path. The default is no delay.
type Network struct {
	ClientBalancer Distribution // from a client through the edge router to a balancer
	BalancerServer Distribution // in both directions
	ServerServer   Distribution // for offers that are passed on
	ServerClient   Distribution // replies, by direct server return
}

// Job describes the work of the flows of a class.
type Job struct {
	Name string
	// Share is the share of flows that belong to the class, relative to the other classes. A trace
	// may give the class of each flow instead.
	Share float64
	// Stages follow each other. The server sends the response after the last stage.
	Stages []Stage
	// Idle is the time for which the client then keeps the connection open and says nothing, as
	// with keep-alive connections. The default is none.
	Idle Distribution
}

// Stage is a visit to a queue of the server (HLB, section V-B and figure 6).
type Stage struct {
	Queue Queue
	// Work is the work of the stage, in seconds at speed 1.
	Work Distribution
	// PerUnit is additional work in seconds for each unit of the flow's size. Only traces give
	// sizes (TraceClass.Sized).
	PerUnit float64
}

// Queue is one of the queues of a server.
type Queue uint8

// The queues. The server's discipline applies to CPU. All flows in IO share it, and IOSpeed is the
// speed of all of them together.
const (
	CPU Queue = iota
	IO
)

// Event is a change at a given time.
type Event struct {
	At   float64
	Kind EventKind
	// Servers or Balancers are the indexes of the servers or balancers that change.
	Servers, Balancers []int32
	// Speed is the new speed, for SetSpeed.
	Speed float64
	// Detect is the time until balancers know that a server was added, drained or has failed.
	Detect float64
}

// EventKind is the kind of an event.
type EventKind uint8

// The kinds of events. A drained server gets no new flows and completes those that it has. A
// server that fails breaks its flows, and loses all packets to it until balancers know of the
// failure. When only the application of a server fails, the server also breaks its flows, but it
// passes offers on to the next candidate. It refuses an offer without a next candidate. When a
// balancer fails, other balancers get its flows.
const (
	ServerAdd EventKind = iota
	ServerDrain
	ServerFail
	ApplicationFail
	SetSpeed
	BalancerAdd
	BalancerFail
)

// Ended describes a measured flow that has ended.
type Ended struct {
	// Sent is the time at which the client sent the SYN. Response is the time from then until the
	// client had the response, or gave up.
	Sent, Response float64
	Number         uint64
	Server         int32 // -1 if the flow was on no server
	Balancer       int32
	Class          int32
	Hops           int32 // number of times that servers passed the flow on or sent it back
	Outcome        Outcome
}

// Capacity returns the capacity of all servers that exist from the start, in seconds of work per
// second.
func (c *Config) Capacity() float64 {
	sum := 0.0
	for i := range c.Servers {
		if !c.Servers[i].Absent {
			sum += c.Servers[i].Capacity()
		}
	}
	return sum
}

// Work returns the mean work that a flow brings to the processors, over all classes, in seconds.
func (c *Config) Work() float64 {
	sum, shares := 0.0, 0.0
	for i := range c.Jobs {
		shares += c.Jobs[i].Share
		sum += c.Jobs[i].Share * c.Jobs[i].Work(0)
	}
	return sum / shares
}

// Work returns the mean work that a flow of the class and of a given size (Stage.PerUnit) brings
// to the processors, in seconds.
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

// Rate returns the number of arrivals per second that load the processors with rho. With rho 1 the
// processors are always busy.
func (c *Config) Rate(rho float64) float64 { return rho * c.Capacity() / c.Work() }

// Validate returns all problems that make a run impossible. Each problem names the field.
func (c *Config) Validate() error {
	var p problems
	c.checkServers(&p)
	c.checkBalancers(&p)
	c.checkAffinity(&p)
	c.checkJobs(&p)
	p.require(c.Placement != nil, "no placement")
	p.require(c.Arrivals != nil, "no arrivals")
	p.require(!c.Silent || c.Timeout > 0, "silent servers need a timeout")
	p.require(c.Warmup >= 0 && c.Cooldown >= 0 && c.Warmup+c.Cooldown < 1,
		"warmup %v and cooldown %v: must be less than 1 together", c.Warmup, c.Cooldown)
	p.require(c.Flood >= 0, "a flood of %v SYNs per second: must not be negative", c.Flood)
	p.require(c.Flood == 0 || c.Policy != nil, "a flood of SYNs: only with a policy")
	p.require(c.Every >= 0, "intervals of %v s: must not be negative", c.Every)
	p.require(c.Sample == nil || c.SampleInterval > 0, "sample interval %v: must be positive", c.SampleInterval)
	for i := range c.Events {
		c.checkEvent(&p, i)
	}
	return errors.Join(p...)
}

type problems []error

// require adds a problem unless ok is true.
func (p *problems) require(ok bool, format string, args ...any) {
	if !ok {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

// checkServers checks the servers. Their IO speed counts only if a job uses IO.
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

// checkBalancers checks the balancers and the flow table.
func (c *Config) checkBalancers(p *problems) {
	p.require(len(c.Balancers) > 0, "no balancers")
	p.require(len(c.Balancers) <= math.MaxInt16, "%d balancers: more than %d", len(c.Balancers), math.MaxInt16)
	p.require(c.FlowTable.Buckets == 0 || c.FlowTable.Ways > 0 && c.FlowTable.Ways <= math.MaxUint16,
		"flow table of %d ways: must be 1 to %d", c.FlowTable.Ways, math.MaxUint16)
	for i, b := range c.Balancers {
		p.require(b.Weight > 0, "balancer %d: weight %v: must be positive", i, b.Weight)
	}
}

// checkJobs checks the jobs, and whether the arrivals fit them. If the work of a job depends on the
// size of a flow, each flow of the job must come from a trace that tells its size. So the job's
// share must be 0: a flow that is drawn by the shares has no size. If all flows must match a class
// of the trace, none is drawn, so all shares may be 0.
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

// checkEvent checks the event with index i. It does not check whether the event changes anything.
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
