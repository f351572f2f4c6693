// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"math"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

func TestValidate(t *testing.T) {
	for problem, spoil := range map[string]func(*sim.Config){
		"no servers": func(c *sim.Config) { c.Servers = nil },
		`server "s1": 0 CPUs: must be at least 1`:  func(c *sim.Config) { c.Servers[0].CPUs = 0 },
		`server "s1": speed -1: must be positive`:  func(c *sim.Config) { c.Servers[0].Speed = -1 },
		`server "s1": 3 workers: only with`:        func(c *sim.Config) { c.Servers[0].Workers = 3 },
		"no balancers":                             func(c *sim.Config) { c.Balancers = nil },
		"40000 balancers: more than 32767":         func(c *sim.Config) { c.Balancers = make([]sim.Share, 40_000) },
		"balancer 0: weight 0: must be positive":   func(c *sim.Config) { c.Balancers[0].Weight = 0 },
		"flow table of 0 ways: must be 1 to 65535": func(c *sim.Config) { c.FlowTable.Buckets = 1 },
		"no jobs":                                       func(c *sim.Config) { c.Jobs = nil },
		`job "": no stages`:                             func(c *sim.Config) { c.Jobs[0].Stages = nil },
		`job "": 256 stages: more than 255`:             func(c *sim.Config) { c.Jobs[0].Stages = make([]sim.Stage, 256) },
		"no placement":                                  func(c *sim.Config) { c.Placement = nil },
		"no arrivals":                                   func(c *sim.Config) { c.Arrivals = nil },
		"silent servers need a timeout":                 func(c *sim.Config) { c.Silent = true },
		"warmup 0.5 and cooldown 0.5: must be":          func(c *sim.Config) { c.Warmup, c.Cooldown = 0.5, 0.5 },
		"sample interval 0: must be positive":           func(c *sim.Config) { c.Sample = func(int, float64, sim.World) {} },
		"event 0: server 1 of 1":                        func(c *sim.Config) { c.Events = []sim.Event{{Servers: []int32{1}}} },
		"event 0: balancer -1 of 1":                     func(c *sim.Config) { c.Events = []sim.Event{{Balancers: []int32{-1}}} },
		"event 0: speed 0: must be positive":            func(c *sim.Config) { c.Events = []sim.Event{{Kind: sim.SetSpeed}} },
		"event 0: at -1, detected after 0: must not be": func(c *sim.Config) { c.Events = []sim.Event{{At: -1}} },
		`server "s1": -1 workers: must not be negative`: func(c *sim.Config) { c.Servers[0].Workers = -1 },
		`server "s1": IO speed 0: must be positive`: func(c *sim.Config) {
			c.Servers[0].IOSpeed, c.Jobs[0].Stages[0].Queue = 0, sim.IO
		},
		`job "": share -1: must not be negative`:    func(c *sim.Config) { c.Jobs[0].Share = -1 },
		"jobs: at least one share must be positive": func(c *sim.Config) { c.Jobs[0].Share = 0 },
		"a trace of 2 classes: only 1 jobs": func(c *sim.Config) {
			c.Arrivals = sim.Trace{Classes: make([]sim.TraceClass, 2)}
		},
		"balancer 0: an interval of 0 s: must be":       func(c *sim.Config) { c.Placement = idle{} },
		"arrivals: open nowhere: no such file or direc": func(c *sim.Config) { c.Arrivals = sim.Trace{File: "nowhere"} },
	} {
		c := constantly(1, sim.FIFO, 0)
		testhost.Must(t, sim.Check(c))
		spoil(c)
		if err := sim.Check(c); err == nil || !strings.HasPrefix(err.Error(), problem) {
			t.Errorf("error %v, want %s", err, problem)
		}
	}
}

// idle is a placement that asks for a step every 0 seconds.
type idle struct{ place }

func (idle) New(*sim.Balancer) (sim.Placement, error) { return idle{}, nil }

func (idle) Interval() float64 { return 0 }

func (idle) Step() {}

func TestRate(t *testing.T) {
	c := figure10(4, 1, 0.5, inTurn{}) // the servers have 6 processors
	c.Servers[0].Speed = 3
	c.Servers[1].Absent = true
	c.Jobs = append(c.Jobs, sim.Job{Share: 3, Stages: []sim.Stage{
		{Work: sim.Constant(0.1)}, {Queue: sim.IO, Work: sim.Constant(9)}, {Work: sim.Constant(0.2)},
	}})
	if got, want := c.Rate(0.5), 0.5*7/(0.25*0.5+0.75*0.3); math.Abs(got-want) > 1e-12 {
		t.Errorf("Rate: got %v, want %v", got, want)
	}
}
