// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/datapath"
)

var (
	packetsDesc = prometheus.NewDesc("segue_agent_packets_total",
		"Frames received, by reason.", []string{"reason"}, nil)
	bytesDesc = prometheus.NewDesc("segue_agent_bytes_total",
		"Bytes of layer 3 received, by reason.", []string{"reason"}, nil)
	synAcksDesc = prometheus.NewDesc("segue_agent_syn_acks_total",
		"SYN-ACKs sent by services, by what was done with their MSS option.", []string{"result"}, nil)
	offersDesc = prometheus.NewDesc("segue_agent_offers_total",
		"New connections that balancers offered, by outcome.", []string{"service", "result"}, nil)
	signalsDesc = prometheus.NewDesc("segue_agent_signals_total",
		"Signals to balancers about connections, by outcome.", []string{"signal"}, nil)
	quicIDsDesc = prometheus.NewDesc("segue_agent_quic_ids_total",
		"Packets of QUIC whose connection IDs were compared with this server's ID, by result.",
		[]string{"service", "result"}, nil)
	busyDesc = prometheus.NewDesc("segue_agent_load",
		"The load of a service, in units of its load source; absent while it is unknown.",
		[]string{"service"}, nil)
	capacityDesc = prometheus.NewDesc("segue_agent_capacity",
		"The capacity of a service, in units of its load source; absent while it is unknown.",
		[]string{"service"}, nil)
	staleDesc = prometheus.NewDesc("segue_agent_load_stale",
		"1 if the accept policy needs the load, and the load is unknown or stale; otherwise 0.",
		[]string{"service"}, nil)
	pollsDesc = prometheus.NewDesc("segue_agent_polls_total",
		"Datagrams at poll.listen, by outcome.", []string{"result"}, nil)
	correctionsDesc = prometheus.NewDesc("segue_agent_connection_corrections_total",
		"Connections by which the count of a service's open connections was wrong and was corrected.",
		[]string{"service"}, nil)
	vipDesc = prometheus.NewDesc("segue_agent_vip_present",
		"1 if the VIP of a service is an address of this host, otherwise 0.", []string{"service"}, nil)
	listeningDesc = prometheus.NewDesc("segue_agent_listening",
		"1 if an application listens on the VIP and the port of a service, here or in a container, "+
			"otherwise 0; absent if that is unknown.",
		[]string{"service"}, nil)
	thresholdDesc = prometheus.NewDesc("segue_agent_threshold",
		"The smallest load at which policies static and dynamic refuse offers.", []string{"service"}, nil)
)

// Describe implements prometheus.Collector.
func (a *Agent) Describe(descs chan<- *prometheus.Desc) {
	descs <- packetsDesc
	descs <- bytesDesc
	descs <- synAcksDesc
	descs <- offersDesc
	descs <- signalsDesc
	descs <- quicIDsDesc
	descs <- busyDesc
	descs <- capacityDesc
	descs <- staleDesc
	descs <- correctionsDesc
	descs <- vipDesc
	descs <- listeningDesc
	descs <- thresholdDesc
	descs <- pollsDesc
}

// Collect implements prometheus.Collector. It reads the tables of the data path. For what it cannot
// read, it sends an invalid metric.
func (a *Agent) Collect(metrics chan<- prometheus.Metric) {
	view := a.kernel.view()
	reasons, err := datapath.CountReasons(view.maps.Reasons, view.labels.reasons)
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(packetsDesc, err)
	}
	for _, r := range reasons {
		metrics <- prometheus.MustNewConstMetric(packetsDesc, prometheus.CounterValue, float64(r.Packets), r.Reason)
		metrics <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(r.Bytes), r.Reason)
	}
	collectArray(metrics, synAcksDesc, view.maps.SynAcks, view.labels.synAcks)
	collectArray(metrics, signalsDesc, view.maps.Signals, view.labels.signals)
	if a.polls != nil {
		a.polls.Counts().Collect(metrics, pollsDesc)
	}
	services, err := view.services()
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(offersDesc, err)
	}
	for _, s := range services {
		collectPresence(metrics, s.Name, &s.Presence)
		if s.Accept != nil {
			collectAcceptance(metrics, s.Name, s.Accept)
			metrics <- prometheus.MustNewConstMetric(correctionsDesc, prometheus.CounterValue,
				float64(s.Corrected), s.Name)
		}
		if s.QUIC != nil {
			for result, ids := range s.QUIC.IDs {
				metrics <- prometheus.MustNewConstMetric(quicIDsDesc, prometheus.CounterValue,
					float64(ids.Packets), s.Name, result)
			}
		}
	}
}

// collectArray sends the counters of a per-CPU array, each under its label.
func collectArray(metrics chan<- prometheus.Metric, desc *prometheus.Desc, m *ebpf.Map, labels []string) {
	counters, err := sums(m, labels)
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(desc, err)
	}
	for label, n := range counters {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), label)
	}
}

// collectPresence sends the metrics about the VIP and the application of a service.
func collectPresence(metrics chan<- prometheus.Metric, service string, p *Presence) {
	gauge := func(desc *prometheus.Desc, value bool) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, truth(value), service)
	}
	gauge(vipDesc, p.VIPPresent)
	if p.Listening != "" {
		gauge(listeningDesc, p.Listening != ListeningNo)
	}
}

// truth returns a condition as the value of a metric.
func truth(holds bool) float64 {
	if holds {
		return 1
	}
	return 0
}

// collectAcceptance sends the metrics of a service's accept policy.
func collectAcceptance(metrics chan<- prometheus.Metric, service string, a *AcceptState) {
	for result, n := range a.Offers {
		metrics <- prometheus.MustNewConstMetric(offersDesc, prometheus.CounterValue, float64(n), service, result)
	}
	gauge := func(desc *prometheus.Desc, value float64) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, service)
	}
	if a.Threshold != nil {
		gauge(thresholdDesc, float64(*a.Threshold))
	}
	if a.Source != "" {
		gauge(staleDesc, truth(a.Stale))
	}
	if a.Load != nil {
		gauge(busyDesc, float64(a.Load.Busy))
		if a.Load.Capacity != nil {
			gauge(capacityDesc, float64(*a.Load.Capacity))
		}
	}
}
