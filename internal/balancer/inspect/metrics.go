// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/tables"
)

// Collector collects the metrics of a balancer. It reads the counters from the kernel at each
// scrape. The numbers of flows are those of the last sweep.
type Collector struct{ view *View }

// NewCollector returns a collector that reads the view.
func NewCollector(view *View) *Collector { return &Collector{view} }

// Close closes the tables that the collector reads.
func (c *Collector) Close() error {
	return c.view.Close()
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("segue_lb_"+name, help, labels, nil)
}

var (
	packetsDesc = desc("packets_total", "Packets that left the data path, by what became of them.", "reason")
	bytesDesc   = desc("bytes_total", "Bytes of layer 3 of packets as received, by what became of them.", "reason")

	serverPacketsDesc = desc("server_packets_total", "Packets sent to the server.", "service", "server")
	serverBytesDesc   = desc("server_bytes_total",
		"Bytes of layer 3 of the packets sent to the server, without encapsulation.", "service", "server")
	serverFlowsDesc    = desc("server_flows_total", "New flows placed on the server.", "service", "server")
	serverHopDesc      = desc("server_next_hop", "Whether the next hop to the server is known, and answers.", "service", "server")
	serverHealthyDesc  = desc("server_healthy", "Whether the server passes its health checks.", "service", "server")
	serverDrainingDesc = desc("server_draining", "Whether the server is drained, or has weight 0.", "service", "server")

	serviceGenerationDesc = desc("service_generation",
		"Number of the service's generation. It grows with each change of servers and weights. The digest "+
			"is the same on balancers with the same candidate table.", "service", "digest")
	serviceServersDesc = desc("service_servers", "Servers of the service by condition.", "service", "condition")
	serviceTakesDesc   = desc("service_takes_flows",
		"Whether at least one server gets new flows. If not, new flows are refused.", "service")
	serviceIgnoredDesc = desc("service_cause_ignored",
		"Whether servers get new flows despite the cause, because too few others could get them.",
		"service", "cause")

	flowsDesc    = desc("flows", "Flows in the flow table when it was last swept.", "service", "server", "state")
	halfOpenDesc = desc("half_open_flows",
		"Flows whose SYN the server has answered and the client has not, when they were last swept.", "service", "server")
	offersDesc = desc("server_offers_total",
		"New connections that were offered to the server first.", "service", "server")
	signalsDesc = desc("server_signals_total",
		"Packets with which the server told what becomes of connections.", "service", "server", "signal")
	resetsDesc = desc("server_resets_total",
		"Resets to the server, of connections that another one had.", "service", "server")
	reportedLoadDesc = desc("server_load",
		"Connections per unit of capacity, with one connection more, as the server last reported.",
		"service", "server")
	reportAgeDesc = desc("server_report_age_seconds",
		"Time since the server's last load report.", "service", "server")
	reportsDesc = desc("server_reports_total",
		"Load reports of the server, by what became of them.", "service", "server", "result")
	countedDesc = desc("server_counted_flows",
		"Flows of the server that count as its load now.", "service", "server", "state")
	placementsDesc = desc("server_placements_total",
		"Flows placed on the server, and how many of them had a second packet.",
		"service", "server", "event")
	serverCapacityDesc = desc("server_capacity",
		"Flows that the server serves at once, as inferred.", "service", "server")
	serverWeightDesc = desc("server_weight",
		"Weight of the server relative to that of the others, as inferred, configured or polled.",
		"service", "server")
	polledLoadDesc = desc("server_polled_load",
		"Load that the server told last, in units of its load source.", "service", "server")
	polledCapacityDesc = desc("server_polled_capacity",
		"Capacity that the server told last, in units of its load source.", "service", "server")
	polledAgeDesc = desc("server_poll_age_seconds",
		"Time since the server told its load.", "service", "server")
	serverWaitDesc = desc("server_wait_ratio",
		"Time that flows wait for each second of service, as inferred.", "service", "server")
	slowdownDesc = desc("server_slowdown",
		"Factor by which the server seems slower: it is new, does not answer, or its flows fall silent.",
		"service", "server", "reason")
	estimateAgeDesc = desc("service_estimate_age_seconds",
		"Time since the loads of the servers were last estimated.", "service", "estimator")
	capacityDesc     = desc("flow_table_capacity", "Flows that the flow table is made for.")
	hintsDesc        = desc("hints", "Hints, by use: idle, recent or shared.", "use")
	hintCapacityDesc = desc("hint_table_capacity", "Flows that the hint table is made for.")
	versionDesc      = desc("tables_version",
		"Version of the candidate tables, the same on all balancers of a service.")
)

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		packetsDesc, bytesDesc, serverPacketsDesc, serverBytesDesc, serverFlowsDesc, serverHopDesc,
		serverHealthyDesc, serverDrainingDesc, serviceServersDesc, serviceIgnoredDesc, serviceTakesDesc, flowsDesc, halfOpenDesc, capacityDesc,
		offersDesc, signalsDesc, resetsDesc, versionDesc, serviceGenerationDesc,
		reportedLoadDesc, reportAgeDesc, reportsDesc, hintsDesc, hintCapacityDesc,
		countedDesc, placementsDesc, serverCapacityDesc, serverWeightDesc, serverWaitDesc,
		slowdownDesc, estimateAgeDesc, polledLoadDesc, polledCapacityDesc, polledAgeDesc,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	reasons, err := c.view.tables.CountReasons()
	if err != nil {
		out <- prometheus.NewInvalidMetric(packetsDesc, err)
	}
	services, err := c.view.Services()
	if err != nil {
		out <- prometheus.NewInvalidMetric(serverPacketsDesc, err)
	}
	gauge(out, capacityDesc, float64(c.view.tables.Capacity()))
	gauge(out, versionDesc, tables.Version)
	collectReasons(out, reasons)
	c.collectHints(out)
	collectServers(out, services)
}

// collectHints collects the capacity of the hint table, and the number of hints by use. Without a
// hint table all are 0.
func (c *Collector) collectHints(out chan<- prometheus.Metric) {
	hints, err := c.view.tables.Hints()
	if err != nil {
		out <- prometheus.NewInvalidMetric(hintsDesc, err)
		return
	}
	gauge(out, hintCapacityDesc, float64(hints.Capacity))
	for use, n := range map[string]uint64{"idle": hints.Idle, "recent": hints.Recent, "shared": hints.Shared} {
		gauge(out, hintsDesc, float64(n), use)
	}
}

func collectReasons(out chan<- prometheus.Metric, reasons []datapath.ReasonCount) {
	for _, r := range reasons {
		counter(out, packetsDesc, r.Packets, r.Reason)
		counter(out, bytesDesc, r.Bytes, r.Reason)
	}
}

// collectServers collects the metrics of services and their configured servers. During a reload, a
// server whose address changes has two slots. Its metrics are then those of the first slot.
func collectServers(out chan<- prometheus.Metric, services []*ServiceState) {
	for _, service := range services {
		seen := map[string]bool{}
		counts := map[Condition]int{}
		for _, server := range service.Servers {
			if server.Condition == ServerRemoved || seen[server.Name] {
				continue
			}
			seen[server.Name] = true
			counts[server.Condition]++
			collectServer(out, server, []string{service.Name, server.Name})
		}
		if i := service.Inference; i != nil && i.Age != nil {
			gauge(out, estimateAgeDesc, *i.Age, service.Name, i.Estimator)
		}
		gauge(out, serviceGenerationDesc, float64(service.Generation), service.Name, service.Digest)
		gauge(out, serviceTakesDesc, boolean(service.TakesFlows), service.Name)
		for _, condition := range conditions {
			gauge(out, serviceServersDesc, float64(counts[condition]), service.Name, string(condition))
		}
		for _, condition := range conditionsOf(dataplane.AnyCause) {
			ignored := slices.Contains(service.Ignored, condition)
			gauge(out, serviceIgnoredDesc, boolean(ignored), service.Name, string(condition))
		}
	}
}

// collectServer collects the metrics of a server. The labels are the names of the service and of
// the server. Metrics that the server does not have are left out: serverHealthyDesc before the
// first check, those of offers without placement hunt, those of loads without a placement that
// infers, and the numbers of flows before a sweep has counted them.
func collectServer(out chan<- prometheus.Metric, server *ServerState, labels []string) {
	counter(out, serverPacketsDesc, server.Packets, labels...)
	counter(out, serverBytesDesc, server.Bytes, labels...)
	counter(out, serverFlowsDesc, server.Placed, labels...)
	gauge(out, serverHopDesc, boolean(hasHop(server)), labels...)
	gauge(out, serverDrainingDesc, boolean(server.Condition == ServerDrained), labels...)
	if server.Checked {
		gauge(out, serverHealthyDesc, boolean(!slices.Contains(server.Causes, ServerFailing)), labels...)
	}
	if server.Hunt != nil {
		collectHunt(out, server.Hunt, labels)
	}
	if server.Inferred != nil {
		collectInferred(out, server.Inferred, labels)
	}
	if server.Flows != nil {
		collectFlows(out, *server.Flows, labels)
	}
}

// hasHop tells whether the next hop of the server is known and answers.
func hasHop(server *ServerState) bool {
	return server.NextHop != nil && !slices.Contains(server.Causes, ServerUnreachable)
}

// collectHunt collects the metrics of a server that is offered flows.
func collectHunt(out chan<- prometheus.Metric, hunt *HuntCounts, labels []string) {
	counter(out, offersDesc, hunt.Offered, labels...)
	counter(out, signalsDesc, hunt.Created, with(labels, "create")...)
	counter(out, signalsDesc, hunt.Removed, with(labels, "remove")...)
	counter(out, resetsDesc, hunt.Resets, labels...)
	if hunt.HalfOpen != nil {
		gauge(out, halfOpenDesc, float64(*hunt.HalfOpen), labels...)
	}
	if hunt.Reports != nil {
		collectReports(out, hunt.Reports, labels)
	}
}

// collectReports collects the last load report of a server, and the numbers of reports by result.
func collectReports(out chan<- prometheus.Metric, reports *ReportState, labels []string) {
	if reports.Load != nil {
		gauge(out, reportedLoadDesc, *reports.Load, labels...)
	}
	if reports.Age != nil {
		gauge(out, reportAgeDesc, *reports.Age, labels...)
	}
	for result, n := range reports.Counts {
		counter(out, reportsDesc, n, with(labels, result)...)
	}
}

// collectInferred collects the metrics of a server whose load is inferred. Before the first
// estimate, there are only the numbers of flows.
func collectInferred(out chan<- prometheus.Metric, i *InferredServer, labels []string) {
	gauge(out, countedDesc, float64(i.New), with(labels, "new")...)
	gauge(out, countedDesc, float64(i.Established), with(labels, "established")...)
	counter(out, placementsDesc, uint64(i.Placed), with(labels, "placed")...)
	counter(out, placementsDesc, uint64(i.Answered), with(labels, "answered")...)
	e := i.Estimate
	if e == nil {
		return
	}
	for desc, number := range map[*prometheus.Desc]*float64{
		serverCapacityDesc: e.Capacity, serverWeightDesc: e.Weight, serverWaitDesc: e.Wait,
	} {
		if number != nil {
			gauge(out, desc, *number, labels...)
		}
	}
	gauge(out, slowdownDesc, e.SlowStart, with(labels, "slow_start")...)
	gauge(out, slowdownDesc, e.NoAnswers, with(labels, "no_answers")...)
	gauge(out, slowdownDesc, e.SilentFlows, with(labels, "silent_flows")...)
	if e.Polled != nil {
		collectPolled(out, e.Polled, labels)
	}
}

func collectPolled(out chan<- prometheus.Metric, p *PolledLoad, labels []string) {
	gauge(out, polledLoadDesc, float64(p.Busy), labels...)
	gauge(out, polledAgeDesc, p.Age, labels...)
	if p.Capacity != nil {
		gauge(out, polledCapacityDesc, float64(*p.Capacity), labels...)
	}
}

// collectFlows collects the numbers of a server's flows by state.
func collectFlows(out chan<- prometheus.Metric, counts dataplane.FlowCounts, labels []string) {
	for state, count := range map[dataplane.FlowState]uint64{
		dataplane.FlowNew:         counts.New,
		dataplane.FlowEstablished: counts.Established,
		dataplane.FlowSilent:      counts.Silent,
		dataplane.FlowClosing:     counts.Closing,
	} {
		gauge(out, flowsDesc, float64(count), with(labels, state.String())...)
	}
}

// with returns a copy of the labels with one more.
func with(labels []string, last string) []string { return append(slices.Clone(labels), last) }

func counter(out chan<- prometheus.Metric, desc *prometheus.Desc, value uint64, labels ...string) {
	out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), labels...)
}

func gauge(out chan<- prometheus.Metric, desc *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
