// SPDX-License-Identifier: Apache-2.0

package l2

import "github.com/prometheus/client_golang/prometheus"

// desc describes a metric of layer 2.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("segue_lb_l2_"+name, help, labels, nil)
}

var (
	vipDesc       = desc("vip_answered", "1 if this balancer answers for the VIP, otherwise 0.", "vip")
	leaderDesc    = desc("vip_led", "1 if any balancer is the leader of the VIP, otherwise 0.", "vip")
	balancersDesc = desc("balancers", "Balancers that the store knows, with this one.")
	upDesc        = desc("link_up", "1 if the interface can be used, otherwise 0.")
	answersDesc   = desc("answers_total", "Answers to ARP requests and neighbour solicitations.")
	claimsDesc    = desc("claims_total", "Claims of strangers to a VIP of this balancer.")
	drainedDesc   = desc("drained", "1 if the balancer is drained, otherwise 0.")
)

// Describe implements prometheus.Collector.
func (s *Speaker) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		vipDesc, leaderDesc, balancersDesc, upDesc, answersDesc, claimsDesc, drainedDesc,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (s *Speaker) Collect(out chan<- prometheus.Metric) {
	state := s.State()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for _, v := range state.VIPs {
		gauge(vipDesc, number(v.Answers), v.Address)
		gauge(leaderDesc, number(v.Leader != ""), v.Address)
	}
	gauge(balancersDesc, float64(len(state.Balancers)))
	gauge(upDesc, number(state.IsUp))
	gauge(drainedDesc, number(state.Drained != nil))
	out <- prometheus.MustNewConstMetric(answersDesc, prometheus.CounterValue, float64(state.Answers))
	out <- prometheus.MustNewConstMetric(claimsDesc, prometheus.CounterValue, float64(state.Claims))
}

// number returns a condition as the value of a metric.
func number(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
