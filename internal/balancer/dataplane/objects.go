// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// Maps are the maps of the data path, loaded or opened.
type Maps struct {
	balancerMaps
	Directory *ebpf.Map `ebpf:"directory"`
}

// Close closes the maps. Memory into which they are mapped stays mapped.
func (t *Maps) Close() error { return errors.Join(t.balancerMaps.Close(), t.Directory.Close()) }

// Objects are the loaded maps, programs and variables of the data path.
type Objects struct {
	balancerPrograms
	Maps
	balancerVariables
	Variables *ebpf.Map `ebpf:".bss"` // the memory of the variables of the outside
}

// Close unloads the objects that are not pinned.
func (o *Objects) Close() error {
	return errors.Join(o.balancerPrograms.Close(), o.Maps.Close(), o.Variables.Close())
}

// Pinned returns the maps that outlive the process, by the names of their pins.
func (maps *Maps) Pinned() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		DirectoryMap:              &maps.Directory,
		balancerMapColumns:        &maps.Columns,
		balancerMapEnds:           &maps.Ends,
		balancerMapEstimates:      &maps.Estimates,
		balancerMapFlowCounts:     &maps.FlowCounts,
		FlowsMap:                  &maps.Flows,
		FragmentsMap:              &maps.Fragments,
		balancerMapIdentity:       &maps.Identity,
		balancerMapHalfOpen:       &maps.HalfOpen,
		balancerMapObserved:       &maps.Observed,
		HintsMap:                  &maps.Hints,
		balancerMapLatest:         &maps.Latest,
		LoadsMap:                  &maps.Loads,
		balancerMapRemovedVips:    &maps.RemovedVips,
		balancerMapRankings:       &maps.Rankings,
		balancerMapRankLines:      &maps.RankLines,
		ReasonsMap:                &maps.Reasons,
		balancerMapReportCounters: &maps.ReportCounters,
		balancerMapReservoirs:     &maps.Reservoirs,
		ServerCountersMap:         &maps.ServerCounters,
		balancerMapServerLabels:   &maps.ServerLabels,
		balancerMapServerSignals:  &maps.ServerSignals,
		balancerMapServiceLabels:  &maps.ServiceLabels,
		balancerMapServiceReports: &maps.ServiceReports,
		balancerMapStarts:         &maps.Starts,
		TablesMap:                 &maps.Tables,
		balancerMapTurns:          &maps.Turns,
	}
}

// CountersByReason are the maps in which elements stand for reasons. If another build with other
// reasons has left them, a start replaces them, and the counters begin at zero.
var CountersByReason = []string{ReasonsMap, ServerCountersMap}

// parsed is the specification of this build's data path. Tests load many data paths.
var parsed = sync.OnceValues(loadBalancer)

// LoadSpec returns the specification of this build's data path, and the names of its reasons by
// number. LoadSpec returns an error if the embedded object is invalid.
func LoadSpec() (spec *ebpf.CollectionSpec, reasons []string, err error) {
	if spec, err = parsed(); err != nil {
		return nil, nil, err
	}
	spec = spec.Copy()
	if reasons, err = datapath.EnumLabels(spec.Types, "lb_reason", "LB_"); err != nil {
		return nil, nil, err
	}
	for _, name := range CountersByReason {
		datapath.NameAfter(spec.Maps[name], reasons)
	}
	NameDirectory(spec)
	return spec, reasons, nil
}

// LoadObjects loads the objects of the outside. It uses the given maps, by name, instead of new
// ones. Tests replace it, to use objects again: the verifier's work is most of the time of a start.
var LoadObjects = func(spec *ebpf.CollectionSpec, objects *Objects, maps map[string]*ebpf.Map) error {
	return spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: maps})
}

// Shared returns the maps that both sides share, by name.
func (o *Objects) Shared() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{
		balancerMapAnsweredOffers: o.AnsweredOffers,
		balancerMapAnswers:        o.Answers,
		balancerMapChecks:         o.Checks,
		balancerMapCopied:         o.Copied,
		balancerMapHeldFragments:  o.HeldFragments,
		balancerMapHoldBudgets:    o.HoldBudgets,
		balancerMapHoldByCore:     o.HoldByCore,
		balancerMapLocators:       o.Locators,
		balancerMapOwnAddresses:   o.OwnAddresses,
		balancerMapProbes:         o.Probes,
		balancerMapProbeTurns:     o.ProbeTurns,
		balancerMapQuicForms:      o.QuicForms,
		balancerMapQuicServers:    o.QuicServers,
		balancerMapSenders:        o.Senders,
		balancerMapSignalKeys:     o.SignalKeys,
	}
	for name, table := range o.Maps.Pinned() {
		all[name] = *table
	}
	return all
}
