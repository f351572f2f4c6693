// SPDX-License-Identifier: Apache-2.0

package poll

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Counts are numbers of datagrams since the start of the process.
type Counts struct {
	Received uint64 // all
	Refused  uint64 // of these: malformed, without a right tag, or not asked for
	Unknown  uint64 // accepted, but without a load
}

type counters struct{ received, refused, unknown atomic.Uint64 }

// Counts returns the counters.
func (c *counters) Counts() Counts {
	refused, unknown := c.refused.Load(), c.unknown.Load()
	// The counter of all datagrams is read last, so it is not below the sum of the others.
	return Counts{c.received.Load(), refused, unknown}
}

// Collect sends the numbers as counters, whose label is the result: load, unknown or refused.
func (c Counts) Collect(metrics chan<- prometheus.Metric, desc *prometheus.Desc) {
	for result, n := range map[string]uint64{
		"load": c.Received - c.Refused - c.Unknown, "unknown": c.Unknown, "refused": c.Refused,
	} {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), result)
	}
}

var pollsDesc = prometheus.NewDesc("segue_lb_polls_total",
	"Answers to polls of the loads of servers, by what became of them.", []string{"result"}, nil)

// Describe implements prometheus.Collector.
func (p *Poller) Describe(descs chan<- *prometheus.Desc) { descs <- pollsDesc }

// Collect implements prometheus.Collector. There are no metrics before the first answer.
func (p *Poller) Collect(metrics chan<- prometheus.Metric) {
	if c := p.Counts(); c.Received > 0 {
		c.Collect(metrics, pollsDesc)
	}
}
