package agent

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

var (
	packetsDesc = prometheus.NewDesc("segue_agent_packets_total",
		"Frames received, by what became of them.", []string{"reason"}, nil)
	bytesDesc = prometheus.NewDesc("segue_agent_bytes_total",
		"Bytes of layer 3 received, by what became of them.", []string{"reason"}, nil)
	synAcksDesc = prometheus.NewDesc("segue_agent_syn_acks_total",
		"SYN-ACKs sent by services, by what became of their MSS option.", []string{"result"}, nil)
	offersDesc = prometheus.NewDesc("segue_agent_offers_total",
		"New connections that balancers offered, by what became of them.", []string{"service", "result"}, nil)
	signalsDesc = prometheus.NewDesc("segue_agent_signals_total",
		"Packets that were to tell a balancer what becomes of a connection.", []string{"signal"}, nil)
	busyDesc = prometheus.NewDesc("segue_agent_load",
		"How busy a service is, in units of its load source; absent while that is not known.", []string{"service"}, nil)
	capacityDesc = prometheus.NewDesc("segue_agent_capacity",
		"How busy a service can be, in units of its load source; absent while that is not known.", []string{"service"}, nil)
	thresholdDesc = prometheus.NewDesc("segue_agent_threshold",
		"The load from which on connections are passed on, of the policies static and dynamic.", []string{"service"}, nil)
)

// Describe implements prometheus.Collector.
func (a *Agent) Describe(descs chan<- *prometheus.Desc) {
	descs <- packetsDesc
	descs <- bytesDesc
	descs <- synAcksDesc
	descs <- offersDesc
	descs <- signalsDesc
	descs <- busyDesc
	descs <- capacityDesc
	descs <- thresholdDesc
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
	a.collectArray(metrics, synAcksDesc, a.kernel.objects.SynAcks, a.kernel.synAcks)
	a.collectArray(metrics, signalsDesc, a.kernel.objects.Signals, a.kernel.signals)
	if services := a.services.Load(); services != nil {
		for _, s := range *services {
			a.collectService(metrics, s)
		}
	}
}

// collectArray sends the counters of a per-CPU array, each under its label.
func (a *Agent) collectArray(metrics chan<- prometheus.Metric, desc *prometheus.Desc, m *ebpf.Map, labels []string) {
	counters, err := sums(m, labels)
	if err != nil {
		metrics <- prometheus.NewInvalidMetric(desc, err)
	}
	for label, n := range counters {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), label)
	}
}

// collectService sends what is known of a service that hunts.
func (a *Agent) collectService(metrics chan<- prometheus.Metric, s config.AgentService) {
	key := serviceKey(s)
	offers, err := a.kernel.offerCounters(key)
	if err != nil {
		if !errors.Is(err, ebpf.ErrKeyNotExist) { // a service without a policy, or taken away meanwhile
			metrics <- prometheus.NewInvalidMetric(offersDesc, err)
		}
		return
	}
	for result, n := range offers {
		metrics <- prometheus.MustNewConstMetric(offersDesc, prometheus.CounterValue, float64(n), s.Name, result)
	}
	gauge := func(desc *prometheus.Desc, value uint32) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), s.Name)
	}
	var acceptance agentAcceptance
	if a.kernel.objects.Acceptances.Lookup(key, &acceptance) != nil {
		return
	}
	if s.Accept.Policy == config.AcceptStatic || s.Accept.Policy == config.AcceptDynamic {
		gauge(thresholdDesc, acceptance.Threshold)
	}
	if load, ok := a.kernel.readLoad(key, acceptance); ok {
		gauge(busyDesc, load.Busy)
		if load.Capacity != noBound {
			gauge(capacityDesc, load.Capacity)
		}
	}
}

func (k *kernel) reasonCounters() ([]datapath.ReasonCount, error) {
	return datapath.CountReasons(k.objects.Reasons, k.reasons)
}

// sums are the counters of a per-CPU array over all CPUs, by their labels.
func sums(m *ebpf.Map, labels []string) (map[string]uint64, error) {
	counters := map[string]uint64{}
	for i, label := range labels {
		perCPU, err := lookup[uint64](m, i)
		if err != nil {
			return nil, err
		}
		for _, n := range perCPU {
			counters[label] += n
		}
	}
	return counters, nil
}

// offerCounters are what became of the connections that a service was offered.
func (k *kernel) offerCounters(key agentServiceKey) (map[string]uint64, error) {
	var perCPU []agentOffers
	if err := k.objects.Offers.Lookup(key, &perCPU); err != nil {
		return nil, fmt.Errorf("read %s: %w", k.objects.Offers, err)
	}
	counters := map[string]uint64{}
	for i, label := range k.offers {
		counters[label] = 0
		for _, c := range perCPU {
			counters[label] += c.Count[i]
		}
	}
	return counters, nil
}

// readLoad is the load that the data path decides by; ok is false where it is not known, and for the
// accept queue, which only packets see.
func (k *kernel) readLoad(key agentServiceKey, a agentAcceptance) (l agentLoad, ok bool) {
	switch agentLoadSource(a.Source) {
	case agentLoadSourceLOAD_REPORTED:
		now, err := monotonic()
		if err != nil || k.objects.Loads.Lookup(key, &l) != nil || l.When == 0 {
			return l, false
		}
		return l, now-int64(l.When) <= int64(a.StaleAfter)
	case agentLoadSourceLOAD_CONNECTIONS:
		var counted uint32
		var open int64
		if k.objects.ConnectionsCounted.Get(&counted) != nil || counted == 0 ||
			k.objects.Connections.Lookup(key, &open) != nil {
			return l, false
		}
		return agentLoad{Busy: uint32(max(open, 0)), Capacity: a.Capacity}, true
	}
	return l, false
}

// lookup reads an element of a per-CPU array.
func lookup[T any](m *ebpf.Map, i int) ([]T, error) {
	var perCPU []T
	if err := m.Lookup(uint32(i), &perCPU); err != nil {
		return nil, fmt.Errorf("read counter %d of %s: %w", i, m, err)
	}
	return perCPU, nil
}
