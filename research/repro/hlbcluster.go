// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"slices"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// hlbCluster is the simulated data centre of HLB, sections V-B and VI-A3. The servers serve first
// come, first served. One half of them has more processors than the other.
type hlbCluster struct {
	servers   int
	cpus      [2]int32 // processors of a server in each half
	balancers int
	jobs      []sim.Stage
	flowTable sim.FlowTable
}

func newHLBCluster() hlbCluster {
	return hlbCluster{
		servers: 128, cpus: [2]int32{1, 2}, balancers: 4,
		jobs: []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(0.5)}},
	}
}

// ratioClusters are the clusters of table III, with their names on an axis.
func ratioClusters() ([]hlbCluster, places) {
	var clusters []hlbCluster
	for _, cpus := range []int32{1, 2, 4} {
		c := newHLBCluster()
		c.cpus[1] = cpus
		clusters = append(clusters, c)
	}
	return clusters, categories("ratio of the halves' processors", "1x", "2x", "4x")
}

// balancerClusters are clusters with different numbers of balancers, with the axis of this number.
func balancerClusters(balancers ...int) ([]hlbCluster, places) {
	var clusters []hlbCluster
	var names []string
	for _, n := range balancers {
		c := newHLBCluster()
		c.balancers = n
		clusters, names = append(clusters, c), append(names, fmt.Sprint(n))
	}
	return clusters, categories("balancers", names...)
}

// config returns the configuration of a run of 80000 flows. Only those that arrive in the middle
// half are measured (HLB, footnote 10). The load is that of the resource that the flows use most.
func (h hlbCluster) config(spec placement.Spec, load float64) (*sim.Config, error) {
	method, _, err := spec.Build()
	if err != nil {
		return nil, err
	}
	delay := sim.Uniform(0.0001, 0.001)
	c := &sim.Config{
		Balancers: slices.Repeat([]sim.Share{{Weight: 1}}, h.balancers),
		FlowTable: h.flowTable,
		Network: sim.Network{
			ClientBalancer: delay, BalancerServer: delay, ServerServer: delay, ServerClient: delay,
		},
		Jobs:      []sim.Job{{Share: 1, Stages: h.jobs}},
		Arrivals:  sim.Poisson{Rate: h.rate(load)},
		Placement: method, Connections: 80_000, Warmup: 0.25, Cooldown: 0.25, Timeout: 40, Silent: true,
	}
	for i := range h.servers {
		group := 2 * i / h.servers // the half, 0 or 1
		c.Servers = append(c.Servers, sim.Server{
			Name: fmt.Sprintf("server-%d", i), Group: int32(group), CPUs: h.cpus[group], Speed: 1, IOSpeed: 1,
			Discipline: sim.FIFO, Backlog: 64,
		})
	}
	return c, nil
}

// rate returns the number of arrivals per second that cause a load of the resource that the flows
// use most: of the processors, or of the IO queues.
func (h hlbCluster) rate(load float64) float64 {
	var work [2]float64 // of a flow, by queue
	for _, stage := range h.jobs {
		work[stage.Queue] += stage.Work.Mean()
	}
	processors := float64(h.servers) / 2 * float64(h.cpus[0]+h.cpus[1])
	queues := float64(h.servers) // of IO
	return load / max(work[sim.CPU]/processors, work[sim.IO]/queues)
}

// powerful returns the share of the flows on the half with more processors.
func powerful(result *sim.Result) sim.Estimate {
	return result.Estimate(func(run *sim.RunResult) float64 {
		sums := halves(run, func(s *sim.ServerUse) float64 { return float64(s.Connections) })
		return sums[1] / (sums[0] + sums[1])
	})
}

// queueRatio returns the mean number of flows on a server of the half with more processors, divided
// by that on a server of the other half.
func queueRatio(result *sim.Result) sim.Estimate {
	return result.Estimate(func(run *sim.RunResult) float64 {
		sums := halves(run, func(s *sim.ServerUse) float64 { return s.Open })
		return sums[1] / sums[0]
	})
}

// halves returns the sum of a value over the servers of each half.
func halves(run *sim.RunResult, value func(*sim.ServerUse) float64) (sums [2]float64) {
	for i := range run.Servers {
		sums[2*i/len(run.Servers)] += value(&run.Servers[i])
	}
	return sums
}

// places are the positions of settings on an axis of a chart.
type places struct {
	axis chart.Axis
	at   []float64
}

// categories are positions with names.
func categories(label string, names ...string) places {
	p := places{axis: chart.Axis{Label: label, Categories: names}}
	for i := range names {
		p.at = append(p.at, float64(i))
	}
	return p
}
