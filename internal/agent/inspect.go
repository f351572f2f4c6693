// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// View reads the tables of an agent and never writes them. The agent's process need not run.
// Traffic and reloads change the tables while a View reads them, so what it returns is not of one
// moment.
type View struct {
	instance string
	maps     agentMaps
	labels   labels
	program  *ebpf.Program // xdp_agent
	dry      *dryRun       // of program; nil until the first trace
	sockets  *ebpf.Program // query_socket
	mapped   *ebpf.Program // query_load
	here     bool          // the calling thread is in the agent's network namespace
}

// viewed lists the names of the tables that a view reads.
var viewed = []string{
	agentMapAcceptances, agentMapAgentFlows, agentMapAgentFlowKeys, agentMapConnections, agentMapFirstKeys, agentMapListeners,
	agentMapLoadMaps, agentMapLoads, agentMapOffers, agentMapQuicIdCounts, agentMapQuicOwnIds, agentMapReasons,
	agentMapServiceNames, agentMapSignals, agentMapSynAcks, agentMapVips,
}

// OpenView opens the tables of an instance. It refuses the tables of a build with another layout. A
// view knows sockets only if the calling thread is in the agent's network namespace. Call its
// methods in the namespace in which OpenView was called.
func OpenView(instance string) (_ *View, err error) {
	v := &View{instance: instance}
	defer func() {
		if err != nil {
			_ = v.Close()
			err = fmt.Errorf("instance %s: %w", instance, err)
		}
	}()
	spec, labels, err := loadSpec()
	if err != nil {
		return nil, err
	}
	v.labels = labels
	for name, m := range datapath.MapsIn(&v.maps, viewed...) {
		if *m, err = datapath.OpenTable(filepath.Join(datapath.Dir(instance), name), spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("table %s: %w", name, err)
		}
	}
	pin := filepath.Join(datapath.Dir(instance), agentProgXdpAgent)
	if v.program, err = ebpf.LoadPinnedProgram(pin, nil); err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	refuseReads(spec) // only packets with an ACK need such reads, and the queries of a view have none
	if v.sockets, err = ebpf.NewProgram(spec.Programs[agentProgQuerySocket]); err != nil {
		return nil, fmt.Errorf("load program %s: %w", agentProgQuerySocket, err)
	}
	if v.mapped, err = loadQuery(spec, v.maps.LoadMaps); err != nil {
		return nil, fmt.Errorf("load program %s: %w", agentProgQueryLoad, err)
	}
	v.here, err = datapath.AttachedHere(instance)
	return v, err
}

// loadQuery loads query_load, which reads a table of an instance.
func loadQuery(spec *ebpf.CollectionSpec, table *ebpf.Map) (*ebpf.Program, error) {
	collection, err := ebpf.NewCollectionWithOptions(&ebpf.CollectionSpec{
		Maps:     map[string]*ebpf.MapSpec{agentMapLoadMaps: spec.Maps[agentMapLoadMaps]},
		Programs: map[string]*ebpf.ProgramSpec{agentProgQueryLoad: spec.Programs[agentProgQueryLoad]},
		Types:    spec.Types, ByteOrder: spec.ByteOrder,
	}, ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{agentMapLoadMaps: table}})
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	return collection.DetachProgram(agentProgQueryLoad), nil
}

// Close closes the tables.
func (v *View) Close() error {
	var errs []error
	if v.dry != nil {
		errs = append(errs, v.dry.close())
	}
	for _, program := range []*ebpf.Program{v.program, v.sockets, v.mapped} {
		errs = append(errs, program.Close()) // does nothing if program is nil
	}
	return errors.Join(append(errs, v.maps.Close())...)
}

// view returns a View of the tables of k. It must not be closed: k closes them.
func (k *kernel) view() *View {
	return &View{
		instance: k.loader.Instance, maps: k.objects.agentMaps, labels: k.labels,
		program: k.objects.XdpAgent, sockets: k.objects.QuerySocket, mapped: k.objects.QueryLoad,
		here: true,
	}
}

// Snapshot is the state of an agent.
type Snapshot struct {
	datapath.Snapshot
	Services []*ServiceState `json:"services"` // sorted by name
	// Signals and SYNACKs count the agent's signals and its services' SYN-ACKs, by outcome.
	Signals map[string]uint64 `json:"signals"`
	SYNACKs map[string]uint64 `json:"syn_acks"`
}

// ServiceState is the state of a service in the data path.
type ServiceState struct {
	Name string `json:"name"`
	// VIP and Port are the first ones of a service with several. VIPs and Ports then have all of
	// them, in ascending order. The other fields of ServiceState are about the whole service, except
	// Presence, of which only VIPPresent is about all VIPs.
	VIP      netip.Addr       `json:"vip"`
	VIPs     []netip.Addr     `json:"vips,omitempty"`
	Port     uint16           `json:"port"` // 0: all ports that no other service of the VIP has
	Ports    []uint16         `json:"ports,omitempty"`
	Protocol desired.Protocol `json:"protocol"`
	Presence
	// Connections is the number of open connections. It is nil if the service cannot be offered
	// connections, or if no program counts connections.
	Connections *uint32 `json:"connections"`
	// Corrected is the sum of all corrections of Connections, in connections.
	Corrected uint64 `json:"connections_corrected"`
	// Accept is nil if the service cannot be offered connections.
	Accept *AcceptState `json:"accept"`
	// QUIC is nil if connection IDs of the service are not compared.
	QUIC *QUICState `json:"quic"`
}

// AcceptState is the accept policy of a service, with its load and its counters.
type AcceptState struct {
	Policy desired.AcceptPolicy `json:"policy"`
	// Source is the load source of the policy. It is empty for policies that do not use the load.
	Source string `json:"source,omitempty"`
	// Load is nil if it is unknown, or if the policy does not use it. The load of an accept queue
	// is known only in the agent's network namespace, and only for services with one port and a
	// listening socket.
	Load *Load `json:"load"`
	// Stale tells that the policy uses the load and the data path does not know it. Policies static
	// and dynamic then accept all offers. Policy least then accepts an offer if this server is the
	// first candidate, or if it is the last and no load of an earlier candidate is known.
	Stale bool `json:"stale"`
	// Threshold is the smallest load at which the service refuses connections. It is nil for
	// policies without a threshold.
	Threshold *uint32 `json:"threshold"`
	// Offered is the number of offers. Offers counts them by outcome.
	Offered uint64 `json:"offered"`
	// Accepted is the number of offers that the policy has accepted, whether the load was known or
	// not. Forced connections, and those that another server handed back, are not included.
	Accepted uint64            `json:"accepted"`
	Offers   map[string]uint64 `json:"offers"`
	// OfferedRate is the rate of offers over an interval, in connections per second.
	OfferedRate *float64 `json:"offered_per_second,omitempty"`
}

// Load is how busy a service is, in units of its load source.
type Load struct {
	// Busy includes connections that the load source does not show yet, if View.loadNow knows them.
	Busy uint32 `json:"busy"`
	// Capacity is nil if neither the configuration nor the load source gives one.
	Capacity *uint32 `json:"capacity"`
}

// DescribeLoad formats the load for output.
func (a *AcceptState) DescribeLoad() string {
	switch {
	case a.Stale:
		return fmt.Sprintf("STALE (%s)", a.Source)
	case a.Load == nil:
		return "-"
	case a.Load.Capacity == nil:
		return fmt.Sprintf("%d (%s)", a.Load.Busy, a.Source)
	}
	return fmt.Sprintf("%d of %d (%s)", a.Load.Busy, *a.Load.Capacity, a.Source)
}

// DescribeThreshold formats the threshold for output.
func (a *AcceptState) DescribeThreshold() string {
	if a.Threshold == nil {
		return "-"
	}
	return strconv.FormatUint(uint64(*a.Threshold), 10)
}

// Snapshot reads the state of the agent.
func (v *View) Snapshot() (*Snapshot, error) {
	reasons, err := datapath.CountReasons(v.maps.Reasons, v.labels.reasons)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.instance, err)
	}
	common, err := datapath.Inspect(datapath.Instance{Name: v.instance, Role: datapath.RoleAgent}, agentProgXdpAgent, reasons)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Snapshot: *common}
	var failed [3]error
	s.Services, failed[0] = v.services()
	s.Signals, failed[1] = sums(v.maps.Signals, v.labels.signals)
	s.SYNACKs, failed[2] = sums(v.maps.SynAcks, v.labels.synAcks)
	if err := errors.Join(failed[:]...); err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.instance, err)
	}
	return s, nil
}

// Count returns the number of packets that an instance has counted under a reason. The instance
// need not be attached.
func Count(instance, reason string) (uint64, error) {
	spec, labels, err := loadSpec()
	if err != nil {
		return 0, err
	}
	pin := filepath.Join(datapath.Dir(instance), agentMapReasons)
	reasons, err := datapath.OpenTable(pin, spec.Maps[agentMapReasons])
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pin, err)
	}
	defer reasons.Close()
	counts, err := datapath.CountReasons(reasons, labels.reasons)
	if err != nil {
		return 0, fmt.Errorf("instance %s: %w", instance, err)
	}
	for _, count := range counts {
		if count.Reason == reason {
			return count.Packets, nil
		}
	}
	return 0, fmt.Errorf("instance %s: there is no reason %s", instance, reason)
}

// RatesSince sets the rates of s, over the time since an earlier snapshot of the instance.
func (s *Snapshot) RatesSince(earlier *Snapshot) {
	interval := s.Snapshot.RatesSince(&earlier.Snapshot)
	before := map[string]uint64{}
	for _, service := range earlier.Services {
		if service.Accept != nil {
			before[service.Name] = service.Accept.Offered
		}
	}
	for _, service := range s.Services {
		if a := service.Accept; a != nil {
			rate := datapath.PerSecond(datapath.Growth(a.Offered, before[service.Name]), interval)
			a.OfferedRate = &rate
		}
	}
}

// services reads the services, sorted by name.
func (v *View) services() ([]*ServiceState, error) {
	services, local := []*ServiceState{}, localVIPs{}
	others, err := v.otherKeys()
	if err != nil {
		return nil, err
	}
	var key agentServiceKey
	var label agentServiceLabel
	labels := v.maps.ServiceNames.Iterate()
	for labels.Next(&key, &label) {
		service := newServiceState(key, label)
		service.addKeys(key, others[key])
		var failed [4]error
		service.Presence, failed[0] = v.presenceOfAll(key, others[key], local)
		service.Accept, failed[1] = v.acceptState(key)
		service.QUIC, failed[2] = v.quicState(key)
		if service.Accept != nil {
			service.Connections, service.Corrected, failed[3] = v.countedConnections(key)
		}
		if err := errors.Join(failed[:]...); err != nil {
			return nil, fmt.Errorf("service %s: %w", service.Name, err)
		}
		services = append(services, service)
	}
	if err := labels.Err(); err != nil {
		return nil, fmt.Errorf("read the labels of services: %w", err)
	}
	slices.SortFunc(services, func(a, b *ServiceState) int { return cmp.Compare(a.Name, b.Name) })
	return services, nil
}

// newServiceState returns the state of a service, with only its name and address set.
func newServiceState(key agentServiceKey, label agentServiceLabel) *ServiceState {
	s := &ServiceState{
		Name:     text(label.Name[:]),
		VIP:      addressOf(key).Addr(),
		Port:     addressOf(key).Port(),
		Protocol: desired.TCP,
	}
	if key.Protocol == unix.IPPROTO_UDP {
		s.Protocol = desired.UDP
	}
	return s
}

// otherKeys returns the keys by which packets find services with several VIPs or ports, by the key of
// the service. It leaves out the key of the service itself.
func (v *View) otherKeys() (map[agentServiceKey][]agentServiceKey, error) {
	others := map[agentServiceKey][]agentServiceKey{}
	var key, first agentServiceKey
	all := v.maps.FirstKeys.Iterate()
	for all.Next(&key, &first) {
		others[first] = append(others[first], key)
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", v.maps.FirstKeys, err)
	}
	return others, nil
}

// presenceOfAll returns the presence of a service with several VIPs or ports: that of its first ones,
// and whether all of its VIPs are present.
func (v *View) presenceOfAll(
	first agentServiceKey, others []agentServiceKey, local localVIPs,
) (all Presence, err error) {
	all, err = v.presence(first, local)
	for _, key := range others {
		if err != nil || !all.VIPPresent {
			return all, err
		}
		var other Presence
		other, err = v.presence(key, local)
		all.VIPPresent = other.VIPPresent
	}
	return all, err
}

// addKeys sets VIPs and Ports, if the service has other keys.
func (s *ServiceState) addKeys(first agentServiceKey, others []agentServiceKey) {
	for _, key := range append(others, first) {
		at := addressOf(key)
		if !slices.Contains(s.VIPs, at.Addr()) {
			s.VIPs = append(s.VIPs, at.Addr())
		}
		if !slices.Contains(s.Ports, at.Port()) {
			s.Ports = append(s.Ports, at.Port())
		}
	}
	if len(s.VIPs) == 1 {
		s.VIPs = nil
	}
	if len(s.Ports) == 1 {
		s.Ports = nil
	}
	slices.SortFunc(s.VIPs, netip.Addr.Compare)
	slices.Sort(s.Ports)
}

// text returns the bytes before the first zero byte.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}

// acceptState reads the accept policy of a service with its counters, threshold and load. It
// returns nil for a service without an accept policy.
func (v *View) acceptState(key agentServiceKey) (*AcceptState, error) {
	a, err := v.acceptance(key)
	if a == nil || err != nil {
		return nil, err
	}
	state := &AcceptState{Policy: named(acceptPolicies, a.Policy)}
	if state.Offers, err = v.offerCounters(a); err != nil {
		return nil, err
	}
	for _, n := range state.Offers {
		state.Offered += n
	}
	state.Accepted = state.Offers["accepted"] + state.Offers["accepted_stale"] + state.Offers["accepted_least"]
	if hasThreshold(a) {
		state.Threshold = &a.Threshold
	}
	if asksForLoad(a) {
		load, known, err := v.loadNow(key, a)
		if err != nil {
			return nil, err
		}
		state.setLoad(a, load, known)
	}
	return state, nil
}

// acceptance returns the accept policy of a service, or nil if it has none.
func (v *View) acceptance(key agentServiceKey) (*agentAcceptance, error) {
	var a agentAcceptance
	err := v.maps.Acceptances.LookupWithFlags(key, &a, ebpf.LookupLock)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", v.maps.Acceptances, err)
	}
	return &a, nil
}

// hasThreshold tells whether the policy compares the load with a threshold.
func hasThreshold(a *agentAcceptance) bool {
	policy := agentAcceptPolicy(a.Policy)
	return policy == agentAcceptPolicyACCEPT_STATIC || policy == agentAcceptPolicyACCEPT_DYNAMIC
}

// asksForLoad tells whether the policy uses the load.
func asksForLoad(a *agentAcceptance) bool {
	return hasThreshold(a) || agentAcceptPolicy(a.Policy) == agentAcceptPolicyACCEPT_LEAST
}

// setLoad sets the load, its source, and whether it is stale. The load of an accept queue is never
// stale, because the data path always knows it. It is unknown here if no socket listens, or if this
// process cannot see the socket.
func (s *AcceptState) setLoad(a *agentAcceptance, load agentLoad, known bool) {
	s.Source = string(named(loadSources, a.Source))
	s.Stale = !known && agentLoadSource(a.Source) != agentLoadSourceLOAD_ACCEPT_QUEUE
	if !known {
		return
	}
	s.Load = &Load{Busy: load.Busy}
	if load.Capacity != accept.NoCapacity {
		s.Load.Capacity = &load.Capacity
	}
}

// named returns the configuration's word for a number of the data path. For a number without a
// word, it returns the number's digits.
func named[Name ~string, Number ~uint32](names map[Name]Number, number uint8) Name {
	for name, n := range names {
		if uint8(n) == number {
			return name
		}
	}
	return Name(fmt.Sprint(number))
}

// offerCounters returns the numbers of offers to a service, by outcome.
func (v *View) offerCounters(a *agentAcceptance) (map[string]uint64, error) {
	var offers agentOffers
	if err := v.maps.Offers.Lookup(a.Number, &offers); err != nil {
		return nil, fmt.Errorf("read %s: %w", v.maps.Offers, err)
	}
	counters := map[string]uint64{}
	for i, label := range v.labels.offers {
		counters[label] = offers.Count[i]
	}
	return counters, nil
}

// sums adds up the counters of a per-CPU array over all CPUs. It returns them by label.
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

// find reads an element of a hash table. It reports false if there is none.
func find(m *ebpf.Map, key, value any) (bool, error) {
	err := m.Lookup(key, value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read %s: %w", m, err)
	}
	return true, nil
}

// lookup reads an element of a per-CPU array.
func lookup[T any](m *ebpf.Map, i int) ([]T, error) {
	var perCPU []T
	if err := m.Lookup(uint32(i), &perCPU); err != nil {
		return nil, fmt.Errorf("read counter %d of %s: %w", i, m, err)
	}
	return perCPU, nil
}
