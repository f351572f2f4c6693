// SPDX-License-Identifier: Apache-2.0

// Package scenario reads scenario files, runs them, and judges the results by the assertions in
// the files.
package scenario

import (
	"time"

	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// File is the content of a scenario file.
type File struct {
	Seed uint64 `yaml:"seed"` // default 1
	Runs int    `yaml:"runs"` // runs of each case, default 5
	Sections
	// Cases are simulated with the same flows. A section of a case replaces the section of the
	// file as a whole. Without cases, the file is the only case.
	Cases []Case `yaml:"cases"`
	// Assert lists conditions that must hold for the results, or that are known to fail.
	Assert []Assertion `yaml:"assert"`
}

// Case is one configuration to simulate.
type Case struct {
	Name string `yaml:"name"`
	Sections
}

// Assertion is a condition that must hold, or one that is known to fail. One of the two fields has
// the condition, and the other is empty. See type expression for the grammar.
type Assertion struct {
	Holds string `yaml:"holds"`
	Fails string `yaml:"fails"`
}

// Sections are the parts of a configuration. All are pointers, because an empty section of a case
// replaces the file's section, and a missing one does not.
type Sections struct {
	Servers   *[]Servers `yaml:"servers"`
	Balancers *Balancers `yaml:"balancers"` // default: one balancer
	FlowTable *FlowTable `yaml:"flow-table"`
	Network   *Network   `yaml:"network"`
	Clients   *Clients   `yaml:"clients"`
	Arrivals  *Arrivals  `yaml:"arrivals"`
	Jobs      *[]Job     `yaml:"jobs"`
	Placement *Placement `yaml:"placement"`
	Measure   *Measure   `yaml:"measure"`
	Events    *[]Event   `yaml:"events"`
}

// Servers is a group of equal servers. All servers are named s1, s2 and so on, through all groups.
type Servers struct {
	Group string `yaml:"group"` // name; default g1, g2 and so on
	Count int    `yaml:"count"`
	CPUs  *int32 `yaml:"cpus"` // number of processors, default 1
	// Seconds of work that a processor does in a second, default 1.
	Speed      *float64 `yaml:"speed"`
	IOSpeed    *float64 `yaml:"io-speed"`   // seconds of work that the IO queue does in a second
	Discipline string   `yaml:"discipline"` // fifo or processor-sharing; default fifo
	Workers    *int32   `yaml:"workers"`    // for processor-sharing; default: no limit
	// Backlog is the maximum number of waiting flows, or unlimited. The default is 64.
	Backlog string `yaml:"backlog"`
	Absent  bool   `yaml:"absent"` // absent until an event
}

// Balancers is the set of balancers. They are named b1, b2 and so on.
type Balancers struct {
	Count  *int      `yaml:"count"`  // default 1, or the number of shares
	Shares []float64 `yaml:"shares"` // relative shares of the flows; default: equal
	Absent []string  `yaml:"absent"` // names of balancers that are absent until an event
	// Affinity makes the flows of a client have the same row (sim.Affinity). Default: none.
	Affinity *Affinity `yaml:"affinity"`
}

// Affinity describes the clients whose flows have the same row.
type Affinity struct {
	Clients int     `yaml:"clients"`
	Zipf    float64 `yaml:"zipf"` // default 0
}

// FlowTable limits the number of flows that a balancer knows.
type FlowTable struct {
	Buckets *int `yaml:"buckets"`
	Ways    *int `yaml:"ways"` // entries in a bucket, default 1
}

// Network has the delays of packets. The default is no delay.
type Network struct {
	ClientBalancer *Distribution `yaml:"client-balancer"`
	BalancerServer *Distribution `yaml:"balancer-server"`
	ServerServer   *Distribution `yaml:"server-server"`
	ServerClient   *Distribution `yaml:"server-client"`
}

// Clients describes what clients do if they wait too long.
type Clients struct {
	Timeout *time.Duration `yaml:"timeout"` // default: never
	// Overflow is the reaction of a server with a full backlog: reset or drop. The default is
	// reset.
	Overflow string `yaml:"overflow"`
	// Flood is a number of SYNs per second that nobody follows up (sim.Config.Flood).
	Flood float64 `yaml:"flood"`
}

// Distribution is a distribution of times. One field is set.
type Distribution struct {
	Constant    *time.Duration `yaml:"constant"`
	Exponential *time.Duration `yaml:"exponential"` // the mean
	Uniform     *Uniform       `yaml:"uniform"`
	Lognormal   *Lognormal     `yaml:"lognormal"`
	Pareto      *Pareto        `yaml:"pareto"`
	// Values is a file with one number of seconds per line. All are equally likely.
	Values *string `yaml:"values"`
}

// Uniform is the uniform distribution between two times.
type Uniform struct {
	Min *time.Duration `yaml:"min"`
	Max *time.Duration `yaml:"max"`
}

// Lognormal has a median and sigma, or a mean and a deviation.
type Lognormal struct {
	Median    *time.Duration `yaml:"median"`
	Sigma     *float64       `yaml:"sigma"` // standard deviation of the logarithm
	Mean      *time.Duration `yaml:"mean"`
	Deviation *time.Duration `yaml:"deviation"`
}

// Pareto has a tail index of more than 1.
type Pareto struct {
	Mean  time.Duration `yaml:"mean"`
	Index float64       `yaml:"index"`
}

// Arrivals tells when flows arrive. One field is set.
type Arrivals struct {
	Poisson *Poisson `yaml:"poisson"`
	// Wikibench and Queries are traces: lines of "counter time url ...", or of "time<TAB>query".
	Wikibench *Trace `yaml:"wikibench"`
	Queries   *Trace `yaml:"queries"`
}

// Poisson has a rate in flows per second, or a load of the processors that exist at the start.
// With load 1 they are always busy.
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

// Point is a factor of the rate at a time. Between points the factor changes linearly.
type Point struct {
	At     *time.Duration `yaml:"at"`
	Factor *float64       `yaml:"factor"`
}

// Trace has arrivals from a file.
type Trace struct {
	// File is relative to the directory of the scenario. It is compressed if its name ends with
	// .gz.
	File string `yaml:"file"`
	// Factor by which the trace is faster than its recording, default 1.
	Speed *float64 `yaml:"speed"`
	Load  *float64 `yaml:"load"` // instead of speed: the mean load of the processors
}

// Job is the work of the flows of a class: one stage, or several.
type Job struct {
	Name  string   `yaml:"name"`
	Share *float64 `yaml:"share"` // relative share of the flows; default 1
	// Match is a regular expression. The flows of a trace whose query matches it belong to this
	// class.
	Match string `yaml:"match"`
	Work
	Stages []Stage `yaml:"stages"`
	// Idle is how long the client keeps the connection open after the response; default: it does
	// not.
	Idle *Distribution `yaml:"idle"`
}

// Work is the duration of a stage at speed 1. One field is set.
type Work struct {
	Distribution
	Captured *Captured `yaml:"captured"`
}

// Captured is work in proportion to a number in the flow's query. The group in the job's Match
// captures the number.
type Captured struct {
	Factor string `yaml:"factor"` // a time with its unit, such as 35ns or 0.8ns
}

// Stage is a visit to a queue: cpu, the default, or io.
type Stage struct {
	Queue string `yaml:"queue"`
	Work
}

// Measure tells how long flows arrive, and which of them are measured.
type Measure struct {
	Connections *uint64        `yaml:"connections"`
	Duration    *time.Duration `yaml:"duration"`
	// Share of the arrivals at the beginning that is not measured.
	Warmup   float64 `yaml:"warmup"`
	Cooldown float64 `yaml:"cooldown"` // share of the arrivals at the end that is not measured
}

// Placement is the name of a placement, or a mapping from the name to its parameters.
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

// Event is a change at a time. Servers are given by name or group.
type Event struct {
	At           *time.Duration `yaml:"at"`
	ServerAdd    []string       `yaml:"server-add"`
	ServerDrain  []string       `yaml:"server-drain"`
	ServerFail   []string       `yaml:"server-fail"`
	AppFail      []string       `yaml:"application-fail"`
	Speed        *Speed         `yaml:"speed"`
	BalancerAdd  []string       `yaml:"balancer-add"`
	BalancerFail []string       `yaml:"balancer-fail"`
	// Detect is the time until balancers know that a server was added, drained or has failed.
	Detect time.Duration `yaml:"detect"`
}

// Speed is the new speed of the servers.
type Speed struct {
	Servers []string `yaml:"servers"`
	To      float64  `yaml:"to"`
}

// Scenario is a file after it was read and checked.
type Scenario struct {
	Name string
	Seed uint64
	Runs int
	// Every, if not 0, is the length of intervals for which Run also reports results.
	Every      time.Duration
	Cases      []RunnableCase
	Assertions []Condition
}

// RunnableCase is a case with its configuration.
type RunnableCase struct {
	Name   string
	Groups []string // names by sim.Server.Group
	Config *sim.Config
	events []string // for each of Config.Events, its path in the file
}
