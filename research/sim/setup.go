// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"

	"github.com/segue-lb/segue/research/sim/processor"
)

// newEngine prepares a run: it creates servers and balancers, and schedules the first arrival, the
// events of the configuration, and the first of each kind of periodic events.
func newEngine(c *Config, seed uint64, run int) (*engine, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	e := &engine{
		config:     c,
		run:        run,
		free:       none,
		keys:       newRand(seed, streamFlows, 0),
		probeDraws: newRand(seed, streamProbe, 0),
		floodDraws: newRand(seed, streamFlood, 0),
		clients:    newClients(c.Affinity, seed),
		meter:      newMeter(c),
		arriving:   true,
		until:      never,
		series:     series{every: c.Every},
		queue:      eventQueue{heap: make([]event, 0, 64)},
		transits:   make([]transit, 0, 16),
		result: &RunResult{
			Run: run, Seed: seed,
			Servers: make([]ServerUse, len(c.Servers)), Balancers: make([]uint64, len(c.Balancers)),
		},
	}
	shares := 0.0
	for _, job := range c.Jobs {
		shares += job.Share
		e.shares = append(e.shares, shares)
		if job.sized() {
			e.sizes = make(map[uint64]float64)
		}
	}
	if err := e.addServers(seed); err != nil {
		return nil, err
	}
	if err := e.addBalancers(seed); err != nil {
		return nil, err
	}
	var err error
	if e.source, err = c.Arrivals.Start(newRand(seed, streamArrivals, 0)); err != nil {
		return nil, fmt.Errorf("arrivals: %w", err)
	}
	e.nextArrival()
	for i := range c.Events {
		e.queue.push(c.Events[i].At, change, int32(i))
	}
	if c.Every > 0 {
		e.queue.push(c.Every, interval, 0)
	}
	if c.Flood > 0 {
		e.nextFlood()
	}
	if c.Sample != nil {
		e.queue.push(c.SampleInterval, sample, 0)
	}
	return e, nil
}

// addServers adds the servers with their stations and slots, and with a policy also their agents.
// The stations of the IO queues come after all stations of processors.
func (e *engine) addServers(seed uint64) error {
	c := e.config
	e.servers, e.changes = make([]server, len(c.Servers)), make([]int32, len(c.Servers))
	for i := range c.Servers {
		s, state := &c.Servers[i], &e.servers[i]
		*state = server{
			alive: !s.Absent, live: !s.Absent, workers: s.Workers, backlog: s.Backlog,
			waiting: newFlowList(),
		}
		e.processors += float64(s.CPUs)
		e.addStation(int32(i), s.Discipline == ProcessorSharing, s.CPUs, s.Speed)
		if state.alive {
			e.live = append(e.live, int32(i))
		}
		if c.Policy == nil {
			continue
		}
		a, err := c.Policy.New(&Host{Index: i, Rand: newRand(seed, streamAgent, i), e: e})
		if err != nil {
			return fmt.Errorf("server %q: %w", s.Name, err)
		}
		agent := agent{Agent: a}
		agent.observer, _ = a.(Observer)
		agent.estimator, _ = a.(Estimator)
		e.agents = append(e.agents, agent)
	}
	if c.usesIO() {
		for i := range c.Servers {
			e.addStation(int32(i), true, 1, c.Servers[i].IOSpeed)
		}
	}
	e.services = NewTournament(len(e.slots))
	return nil
}

// addStation adds a station of a server. shared tells whether the flows share its processors.
func (e *engine) addStation(server int32, shared bool, cpus int32, speed float64) {
	at := int32(len(e.stations))
	e.stations = append(e.stations, station{
		server: server, cpus: cpus, speed: speed, each: 1 / float64(cpus),
		slot: int32(len(e.slots)), waiting: newFlowList(),
	})
	slots := cpus
	if shared {
		slots = 1
		e.stations[at].sharing = processor.NewSharing[int32](cpus, speed)
	}
	for range slots {
		e.slots = append(e.slots, slot{station: at, flow: none})
	}
}

// usesIO tells whether a job has a stage in the IO queue.
func (c *Config) usesIO() bool {
	for _, job := range c.Jobs {
		for _, stage := range job.Stages {
			if stage.Queue == IO {
				return true
			}
		}
	}
	return false
}

// addBalancers adds the balancers, and starts those that are not absent.
func (e *engine) addBalancers(seed uint64) error {
	c := e.config
	e.balancers = make([]balancer, len(c.Balancers))
	for i, share := range c.Balancers {
		if !share.Absent {
			e.peers = append(e.peers, int32(i))
		}
		e.unequal = e.unequal || share.Weight != c.Balancers[0].Weight
	}
	for i := range c.Balancers {
		b := &e.balancers[i]
		b.weight, b.salt = c.Balancers[i].Weight, mix(uint64(i+1))
		b.view = Balancer{
			Index: i, Servers: c.Servers, World: World{e}, e: e,
			Rand: newRand(seed, streamPlacement, i),
		}
		if c.FlowTable.Buckets > 0 {
			b.ways = uint16(c.FlowTable.Ways)
		}
		if c.Balancers[i].Absent {
			continue
		}
		if err := e.startBalancer(int32(i)); err != nil {
			return err
		}
	}
	return nil
}

// startBalancer starts a balancer with an empty flow table.
func (e *engine) startBalancer(i int32) error {
	b := &e.balancers[i]
	b.alive = true
	b.view.Live, b.view.Peers = e.live, e.peers
	if n := e.config.FlowTable.Buckets; n > 0 {
		b.entries = make([]uint16, n)
	}
	if err := b.begin(e.config.Placement); err != nil {
		return err
	}
	if b.stepper != nil {
		e.scheduleStep(i)
	}
	return nil
}

// Check finds out whether a configuration can run, by preparing a run.
func Check(c *Config) error {
	e, err := newEngine(c, 1, 0)
	if err != nil {
		return err
	}
	return e.source.Close()
}
