// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

// desc describes a metric of BGP.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("segue_lb_bgp_"+name, help, labels, nil)
}

var (
	sessionDesc  = desc("session_established", "1 if the session is established, otherwise 0.", "peer")
	sessionsDesc = desc("sessions_total", "How often a session was established.", "peer")
	prefixesDesc = desc("prefixes", "Prefixes that the peer was sent.", "peer")
	routeDesc    = desc("route_announced", "1 if the prefix is announced, otherwise 0.", "prefix")
	drainedDesc  = desc("drained", "1 if the balancer is drained, otherwise 0.")
)

// Describe implements prometheus.Collector.
func (a *Announcer) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sessionDesc, sessionsDesc, prefixesDesc, routeDesc, drainedDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (a *Announcer) Collect(out chan<- prometheus.Metric) {
	state, err := a.State(context.Background())
	if err != nil {
		out <- prometheus.NewInvalidMetric(sessionDesc, err)
		return
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for _, p := range state.Peers {
		gauge(sessionDesc, number(p.IsEstablished()), p.Address)
		gauge(prefixesDesc, float64(p.Prefixes), p.Address)
		out <- prometheus.MustNewConstMetric(
			sessionsDesc, prometheus.CounterValue, float64(p.Sessions), p.Address)
	}
	for _, r := range state.Routes {
		gauge(routeDesc, number(r.Announced), r.Prefix)
	}
	gauge(drainedDesc, number(state.Drained != nil))
}

// number returns a condition as the value of a metric.
func number(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
