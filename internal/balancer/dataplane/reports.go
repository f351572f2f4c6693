// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/accept"
)

// LoadReport is the last report of a server about its load: struct report of bpf/balancer/types.h.
type LoadReport struct {
	// Load is the number of connections per unit of the server's capacity, with one connection
	// more. It is 0 if the server does not know its load.
	Load float64
	// Age is the time since the report was heard.
	Age time.Duration
}

// estimateOfOne stands for one connection per unit of capacity in the tables: ESTIMATE_SHIFT in
// bpf/balancer/signal/reports.h.
const estimateOfOne = accept.ValueOfOne << 8

// EstimatedLoad returns a load of the tables in connections per unit of capacity.
func EstimatedLoad(estimate uint32) float64 { return float64(estimate) / estimateOfOne }

// halfLife is the time after which a report counts half: ln 2 times the `age` of 200 ms in
// docs/research/placement.md.
const halfLife = 139 * time.Millisecond

// halfLifeShift returns the exponent for which 2^n jiffies are nearest to halfLife.
func halfLifeShift(jiffy time.Duration) uint32 {
	return uint32(max(0, math.Round(math.Log2(float64(halfLife)/float64(jiffy)))))
}

// Report returns the last report of the slot's server. It returns false if there is none. It
// returns an error if the clock cannot be read.
func (r *Reader) Report(slot uint32) (report LoadReport, ok bool, err error) {
	heard := atomic.LoadUint64(&r.directory.Reports[slot].Heard)
	if heard == 0 {
		return report, false, nil
	}
	now, err := r.Clock.jiffies()
	if err != nil {
		return report, false, err
	}
	return LoadReport{
		Load: EstimatedLoad(uint32(heard >> 32)),
		Age:  time.Duration(uint32(now)-uint32(heard)) * r.Clock.Jiffy,
	}, true, nil
}

// reportResults are the names of the results of reports, by number.
var reportResults = map[balancerReportResult]string{
	balancerReportResultREPORT_TAKEN:          "taken",
	balancerReportResultREPORT_UNKNOWN_LOAD:   "unknown_load",
	balancerReportResultREPORT_OLD:            "old",
	balancerReportResultREPORT_UNSYNCHRONISED: "unsynchronised",
	balancerReportResultREPORT_RELAYED:        "relayed",
}

// ReportCounts returns the number of reports of the slot's server by their result. It returns an
// error if the counters cannot be read.
func (r *Reader) ReportCounts(slot uint32) (map[string]uint64, error) {
	var cpus []balancerReportCounter
	if err := r.maps.ReportCounters.Lookup(slot, &cpus); err != nil {
		return nil, fmt.Errorf("read the counters of reports of slot %d: %w", slot, err)
	}
	counts := make(map[string]uint64, len(reportResults))
	for number, name := range reportResults {
		counts[name] = 0
		for _, cpu := range cpus {
			counts[name] += cpu.Count[number]
		}
	}
	return counts, nil
}

// clearReports removes what is known of the load of the slot's server.
func (p *Plane) clearReports(slot uint32) error {
	p.Directory.Reports[slot] = balancerReport{}
	zero := make([]balancerReportCounter, ebpf.MustPossibleCPU())
	if err := p.Objects.ReportCounters.Put(slot, zero); err != nil {
		return fmt.Errorf("clear the counters of reports of slot %d: %w", slot, err)
	}
	return nil
}

// ForgetReports removes what is known of the loads of a service. It returns an error if the table
// cannot be written.
func (p *Plane) ForgetReports(service uint32) error {
	if err := p.Objects.ServiceReports.Put(service, balancerServiceReports{}); err != nil {
		return fmt.Errorf("clear the reports of service %d: %w", service, err)
	}
	return nil
}
