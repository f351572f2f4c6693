// SPDX-License-Identifier: Apache-2.0

// Package scenario reads files that say what to simulate, and judges the results by the assertions in
// them.
package scenario

import (
	"time"

	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/sim/placement"
)

// File is a scenario as it is written.
type File struct {
	Seed uint64 `yaml:"seed"` // default 1
	Runs int    `yaml:"runs"` // of each case, default 5
	Sections
	// Cases are simulated with the same flows. A case has the sections that it names instead of the
	// file's as a whole. Without cases the file is the only one.
	Cases []Case `yaml:"cases"`
	// Assert says what must hold of the results, or is known not to.
	Assert []Assertion `yaml:"assert"`
}

// Case is one configuration to simulate.
type Case struct {
	Name string `yaml:"name"`
	Sections
}

// Assertion is a condition, see parseCondition. One of the two is set.
type Assertion struct {
	Holds string `yaml:"holds"`
	Fails string `yaml:"fails"`
}

// Sections are what a configuration consists of. All are pointers: an empty one of a case is not none, which
// would be the file's.
type Sections struct {
	Servers   *[]Servers `yaml:"servers"`
	Balancers *Balancers `yaml:"balancers"` // default one
	FlowTable *FlowTable `yaml:"flow-table"`
	Network   *Network   `yaml:"network"`
	Clients   *Clients   `yaml:"clients"`
	Arrivals  *Arrivals  `yaml:"arrivals"`
	Jobs      *[]Job     `yaml:"jobs"`
	Placement *Placement `yaml:"placement"`
	Measure   *Measure   `yaml:"measure"`
	Events    *[]Event   `yaml:"events"`
}

// Servers are a group of equal servers. Servers are named s1, s2 and so on through all groups.
type Servers struct {
	Group      string   `yaml:"group"` // default g1, g2 and so on
	Count      int      `yaml:"count"`
	CPUs       *int32   `yaml:"cpus"`       // default 1
	Speed      *float64 `yaml:"speed"`      // work done by a processor in a second, default 1
	IOSpeed    *float64 `yaml:"io-speed"`   // the same of the IO queue
	Discipline string   `yaml:"discipline"` // fifo or processor-sharing; default fifo
	Workers    *int32   `yaml:"workers"`    // with processor-sharing; default no limit
	// Backlog is how many flows wait at most, or unlimited; default 64.
	Backlog string `yaml:"backlog"`
	Absent  bool   `yaml:"absent"` // until an event
}

// Balancers are named b1, b2 and so on.
type Balancers struct {
	Count  *int      `yaml:"count"`  // default 1, or as many as there are shares
	Shares []float64 `yaml:"shares"` // of the flows, relative; default equal
	Absent []string  `yaml:"absent"` // until an event
}

// FlowTable limits what balancers know.
type FlowTable struct {
	Buckets *int `yaml:"buckets"`
	Ways    *int `yaml:"ways"` // entries in a bucket, default 1
}

// Network has the delays of packets; default none.
type Network struct {
	ClientBalancer *Distribution `yaml:"client-balancer"`
	BalancerServer *Distribution `yaml:"balancer-server"`
	ServerServer   *Distribution `yaml:"server-server"`
	ServerClient   *Distribution `yaml:"server-client"`
}

// Clients is what clients do when they wait too long.
type Clients struct {
	Timeout *time.Duration `yaml:"timeout"` // default never
	// Overflow is what a server with a full backlog does: reset or drop. Default reset.
	Overflow string `yaml:"overflow"`
}

// Distribution is one of times. One field is set.
type Distribution struct {
	Constant    *time.Duration `yaml:"constant"`
	Exponential *time.Duration `yaml:"exponential"` // the mean
	Uniform     *Uniform       `yaml:"uniform"`
	Lognormal   *Lognormal     `yaml:"lognormal"`
	Pareto      *Pareto        `yaml:"pareto"`
	// Values is a file with a number of seconds on each line, of which each is as likely.
	Values *string `yaml:"values"`
}

// Uniform is between two times.
type Uniform struct {
	Min *time.Duration `yaml:"min"`
	Max *time.Duration `yaml:"max"`
}

// Lognormal is given by median and sigma, or by mean and deviation.
type Lognormal struct {
	Median    *time.Duration `yaml:"median"`
	Sigma     *float64       `yaml:"sigma"` // the standard deviation of the logarithm
	Mean      *time.Duration `yaml:"mean"`
	Deviation *time.Duration `yaml:"deviation"`
}

// Pareto has a tail index of more than 1.
type Pareto struct {
	Mean  time.Duration `yaml:"mean"`
	Index float64       `yaml:"index"`
}

// Arrivals are of one kind.
type Arrivals struct {
	Poisson *Poisson `yaml:"poisson"`
	// Wikibench and Queries are traces: lines of "counter time url ...", or of "time<TAB>query".
	Wikibench *Trace `yaml:"wikibench"`
	Queries   *Trace `yaml:"queries"`
}

// Poisson has a rate in flows a second, or as the load of the processors that are there at the start:
// 1 is all that they can do.
type Poisson struct {
	Rate    *float64 `yaml:"rate"`
	Load    *float64 `yaml:"load"`
	Diurnal *Diurnal `yaml:"diurnal"`
	Curve   []Point  `yaml:"curve"`
}

// Diurnal multiplies the rate by 1 + amplitude · sin(2π (t + phase) / period).
type Diurnal struct {
	Period    *time.Duration `yaml:"period"` // default 24h
	Amplitude *float64       `yaml:"amplitude"`
	Phase     time.Duration  `yaml:"phase"`
}

// Point is a factor of the rate at a time; between points it goes in straight lines.
type Point struct {
	At     *time.Duration `yaml:"at"`
	Factor *float64       `yaml:"factor"`
}

// Trace is a file, relative to the scenario's, compressed if its name ends with .gz.
type Trace struct {
	File  string   `yaml:"file"`
	Speed *float64 `yaml:"speed"` // how many times faster than recorded, default 1
	Load  *float64 `yaml:"load"`  // instead: as fast as loads the processors so in the mean
}

// Job is what a class of flows wants of a server: one stage, or several.
type Job struct {
	Name  string   `yaml:"name"`
	Share *float64 `yaml:"share"` // of the flows, relative; default 1
	// Match is a regular expression: flows of a trace whose query it matches are of this class.
	Match string `yaml:"match"`
	Work
	Stages []Stage `yaml:"stages"`
}

// Work is how long a stage takes at speed 1. One field is set.
type Work struct {
	Distribution
	Captured *Captured `yaml:"captured"`
}

// Captured multiplies the number that the group in the job's Match captures in the flow's query.
type Captured struct {
	Factor string `yaml:"factor"` // a time with its unit, such as 35ns or 0.8ns
}

// Stage is a visit to a queue: cpu, the default, or io.
type Stage struct {
	Queue string `yaml:"queue"`
	Work
}

// Measure says how long arrivals go on, and which are measured.
type Measure struct {
	Connections *uint64        `yaml:"connections"`
	Duration    *time.Duration `yaml:"duration"`
	Warmup      float64        `yaml:"warmup"`   // the share at the beginning that is not measured
	Cooldown    float64        `yaml:"cooldown"` // likewise at the end
}

// Placement is the name of one, or a mapping of the name to its parameters.
type Placement struct {
	placement.Spec
	name string
}

// Choose implements config.Variant.
func (p *Placement) Choose(name string) (into any, err error) {
	p.name = name
	p.Spec, err = placement.Named(name)
	return p.Spec, err
}

// Event is one thing that happens at a time. Servers are given by name or group.
type Event struct {
	At           *time.Duration `yaml:"at"`
	ServerAdd    []string       `yaml:"server-add"`
	ServerDrain  []string       `yaml:"server-drain"`
	ServerFail   []string       `yaml:"server-fail"`
	Speed        *Speed         `yaml:"speed"`
	BalancerAdd  []string       `yaml:"balancer-add"`
	BalancerFail []string       `yaml:"balancer-fail"`
	// Detect is the time after which balancers know that a server is gone or there.
	Detect time.Duration `yaml:"detect"`
}

// Speed changes that of servers.
type Speed struct {
	Servers []string `yaml:"servers"`
	To      float64  `yaml:"to"`
}

// Scenario is a file, read and checked.
type Scenario struct {
	Name string
	Seed uint64
	Runs int
	// Every, if not 0, has Run report also each interval of this length.
	Every      time.Duration
	Cases      []RunnableCase
	Assertions []Condition
}

// RunnableCase is a case that can be run.
type RunnableCase struct {
	Name   string
	Groups []string // names, by sim.Server.Group
	Config *sim.Config
	events []string // paths of Config.Events in the file
}
