package agent

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"
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
	for reason, c := range reasons {
		metrics <- prometheus.MustNewConstMetric(packetsDesc, prometheus.CounterValue, float64(c.Packets), reason)
		metrics <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(c.Bytes), reason)
	}
	synAcks, err := a.kernel.synAckCounters()
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(synAcksDesc, err)
	}
	for result, n := range synAcks {
		metrics <- prometheus.MustNewConstMetric(synAcksDesc, prometheus.CounterValue, float64(n), result)
	}
}

// reasonCounters sums up, over all CPUs, what was counted for each reason. Frames that are still on
// their way have none.
func (k *kernel) reasonCounters() (map[string]agentCounter, error) {
	counters := map[string]agentCounter{}
	for i, label := range k.reasons {
		if label == "none" {
			continue
		}
		perCPU, err := lookup[agentCounter](k.objects.Reasons, i)
		if err != nil {
			return nil, err
		}
		var sum agentCounter
		for _, c := range perCPU {
			sum.Packets += c.Packets
			sum.Bytes += c.Bytes
		}
		counters[label] = sum
	}
	return counters, nil
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
