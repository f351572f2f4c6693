package agent

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/datapath"
)

var (
	packetsDesc = prometheus.NewDesc("segue_agent_packets_total",
		"Frames received, by what became of them.", []string{"reason"}, nil)
	bytesDesc = prometheus.NewDesc("segue_agent_bytes_total",
		"Bytes of layer 3 received, by what became of them.", []string{"reason"}, nil)
	synAcksDesc = prometheus.NewDesc("segue_agent_syn_acks_total",
		"SYN-ACKs sent by services, by what became of their MSS option.", []string{"result"}, nil)
)

// Describe implements prometheus.Collector.
func (a *Agent) Describe(descs chan<- *prometheus.Desc) {
	descs <- packetsDesc
	descs <- bytesDesc
	descs <- synAcksDesc
}

// Collect implements prometheus.Collector: it reads the data path's counters.
func (a *Agent) Collect(metrics chan<- prometheus.Metric) {
	reasons, err := a.kernel.reasonCounters()
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(packetsDesc, err)
	}
	for _, r := range reasons {
		metrics <- prometheus.MustNewConstMetric(packetsDesc, prometheus.CounterValue, float64(r.Packets), r.Reason)
		metrics <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(r.Bytes), r.Reason)
	}
	synAcks, err := a.kernel.synAckCounters()
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(synAcksDesc, err)
	}
	for result, n := range synAcks {
		metrics <- prometheus.MustNewConstMetric(synAcksDesc, prometheus.CounterValue, float64(n), result)
	}
}

func (k *kernel) reasonCounters() ([]datapath.ReasonCount, error) {
	return datapath.CountReasons(k.objects.Reasons, k.reasons)
}

// synAckCounters sums up, over all CPUs, what became of SYN-ACKs.
func (k *kernel) synAckCounters() (map[string]uint64, error) {
	counters := map[string]uint64{}
	for i, label := range k.synAcks {
		perCPU, err := lookup[uint64](k.objects.SynAcks, i)
		if err != nil {
			return nil, err
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		counters[label] = sum
	}
	return counters, nil
}

// lookup reads an element of a per-CPU array.
func lookup[T any](m *ebpf.Map, i int) ([]T, error) {
	var perCPU []T
	if err := m.Lookup(uint32(i), &perCPU); err != nil {
		return nil, fmt.Errorf("read counter %d of %s: %w", i, m, err)
	}
	return perCPU, nil
}
