// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
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

// declare declares the maps of a data path with these limits. The identity is pinned first, because
// its pin shows the role of an instance.
func declare(limits desired.Limits) datapath.Declarations {
	slots := serverSlots(limits.Servers)
	return datapath.Declarations{
		{Name: balancerMapIdentity, Life: datapath.Kept},

		{Name: balancerMapAnsweredOffers, Size: slots},
		{Name: balancerMapAnswers},
		{Name: balancerMapChecks, Size: slots},
		{Name: balancerMapColumns, Life: datapath.Kept},
		{Name: balancerMapCopied},
		{Name: DirectoryMap, Life: datapath.Kept},
		{Name: balancerMapEnds, Life: datapath.Kept, Size: slots},
		{Name: balancerMapEstimates, Life: datapath.Kept},
		{Name: balancerMapFlowCounts, Life: datapath.Kept, Size: slots + 1},
		{Name: FlowsMap, Life: datapath.Kept, Size: flowBuckets(limits.Flows)},
		{Name: FragmentsMap, Life: datapath.Kept},
		{Name: balancerMapHalfOpen, Life: datapath.Kept, Size: flowBuckets(limits.Flows / flowsPerHalfOpen)},
		{Name: balancerMapHeldFragments},
		{Name: HintsMap, Life: datapath.Kept, Size: hintSets(limits.Hints)},
		{Name: balancerMapHoldBudgets},
		{Name: balancerMapHoldByCore},
		{Name: balancerMapLatest, Life: datapath.Kept},
		{Name: LoadsMap, Life: datapath.Kept, Size: slots},
		{Name: balancerMapLocators},
		{Name: balancerMapObserved, Life: datapath.Kept, Size: flowBuckets(min(limits.Flows, observedFlows))},
		{Name: balancerMapOwnAddresses},
		{Name: balancerMapProbeTurns, Size: slots},
		{Name: balancerMapProbes, Size: slots},
		{Name: balancerMapQuicForms},
		{Name: balancerMapQuicServers},
		{Name: balancerMapRankLines, Life: datapath.Kept, Size: rankLines(slots)},
		{Name: balancerMapRankings, Life: datapath.Kept},
		{Name: ReasonsMap, Life: datapath.Expendable},
		{Name: balancerMapRemovedVips, Life: datapath.Kept},
		{Name: balancerMapReportCounters, Life: datapath.Kept, Size: slots},
		{Name: balancerMapReservoirs, Life: datapath.Kept, Size: slots},
		{Name: balancerMapSenders},
		{Name: ServerCountersMap, Life: datapath.Expendable, Size: slots},
		{Name: balancerMapServerLabels, Life: datapath.Kept},
		{Name: balancerMapServerSignals, Life: datapath.Kept, Size: slots},
		{Name: balancerMapServiceLabels, Life: datapath.Kept},
		{Name: balancerMapServiceReports, Life: datapath.Kept},
		{Name: balancerMapSignalKeys},
		{Name: balancerMapSourcePrefixes, Life: datapath.Kept},
		{Name: balancerMapStarts, Life: datapath.Kept, Size: timedFlows(limits.Flows)},
		{Name: TablesMap, Life: datapath.Kept},
		{Name: balancerMapTurns, Life: datapath.Kept},
	}
}

// pinned are the names of the maps that outlive the process.
var pinned = declare(desired.Limits{}).Names(datapath.Kept, datapath.Expendable)

// Pinned returns the maps that outlive the process, by the names of their pins.
func (t *Maps) Pinned() map[string]**ebpf.Map { return datapath.MapsIn(t, pinned...) }

// CountersByReason are the maps in which elements stand for reasons. If another build with other
// reasons has left them, a start replaces them, and the counters begin at zero.
var CountersByReason = declare(desired.Limits{}).Names(datapath.Expendable)

// Shared returns the maps that both sides share, by name.
func (o *Objects) Shared() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{}
	for name, m := range datapath.MapsIn(&o.Maps) {
		all[name] = *m
	}
	return all
}
