// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// View reads the tables of an agent, whether its process runs or not, and writes none. Traffic and
// reloads go on meanwhile: what is read is true of each table, not of all at one moment.
type View struct {
	instance string
	maps     agentMaps
	labels   labels
	sockets  *ebpf.Program // query_socket
	here     bool          // the agent is in the network namespace that is asked for sockets
}

// viewed are the tables that a view reads, by their names.
func viewed(maps *agentMaps) map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		agentMapAcceptances:  &maps.Acceptances,
		agentMapAgentFlows:   &maps.AgentFlows,
		agentMapConnections:  &maps.Connections,
		agentMapLoads:        &maps.Loads,
		agentMapOffers:       &maps.Offers,
		agentMapReasons:      &maps.Reasons,
		agentMapServiceNames: &maps.ServiceNames,
		agentMapSignals:      &maps.Signals,
		agentMapSynAcks:      &maps.SynAcks,
		agentMapVips:         &maps.Vips,
	}
}

// OpenView opens the tables of an instance. Those of a build with another layout are refused. Of sockets it
// tells in the agent's own network namespace alone: that of the thread which calls this, and the methods.
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
	for name, m := range viewed(&v.maps) {
		if *m, err = datapath.OpenTable(filepath.Join(datapath.Dir(instance), name), spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("table %s: %w", name, err)
		}
	}
	refuseReads(spec) // a question acknowledges nothing, which is all that they are for
	if v.sockets, err = ebpf.NewProgram(spec.Programs[agentProgQuerySocket]); err != nil {
		return nil, fmt.Errorf("load program %s: %w", agentProgQuerySocket, err)
	}
	v.here, err = datapath.AttachedHere(instance)
	return v, err
}

// Close closes the tables.
func (v *View) Close() error {
	var errs []error
	if v.sockets != nil {
		errs = append(errs, v.sockets.Close())
	}
	return errors.Join(append(errs, v.maps.Close())...)
}

// view is a View of the data path's own tables, which its owner closes.
func (k *kernel) view() *View {
	return &View{instance: k.instance, maps: k.objects.agentMaps, labels: k.labels, sockets: k.objects.QuerySocket, here: true}
}

// Snapshot is the state of an agent at one moment.
type Snapshot struct {
	datapath.Snapshot
	Services []*ServiceState `json:"services"` // by name
	// Signals and SYNACKs count packets that were to tell a balancer something, and SYN-ACKs, by what became
	// of them.
	Signals map[string]uint64 `json:"signals"`
	SYNACKs map[string]uint64 `json:"syn_acks"`
}

// ServiceState is a service as the data path has it.
type ServiceState struct {
	Name     string          `json:"name"`
	VIP      netip.Addr      `json:"vip"`
	Port     uint16          `json:"port"` // 0: all that no other service of the VIP names
	Protocol config.Protocol `json:"protocol"`
	// Accept is nil where no connection can be offered.
	Accept *AcceptState `json:"accept"`
}

// AcceptState is how a service takes connections.
type AcceptState struct {
	Policy config.AcceptPolicy `json:"policy"`
	// Source is what the policy asks for the load; empty of policies that do not.
	Source string `json:"source,omitempty"`
	// Load is nil while it is not known, or not asked for. The accept queue's is known in the agent's network
	// namespace alone, and only of services of one port that somebody listens on.
	Load *Load `json:"load"`
	// Stale: the load is asked for, and the data path does not know it. What is offered is taken.
	Stale bool `json:"stale"`
	// Threshold is the load from which on connections are passed on, of the policies that have one.
	Threshold *uint32 `json:"threshold"`
	// Offered is the sum of Offers, which are the connections by what became of them.
	Offered uint64            `json:"offered"`
	Offers  map[string]uint64 `json:"offers"`
	// OfferedRate is in connections per second, of an interval.
	OfferedRate *float64 `json:"offered_per_second,omitempty"`
}

// Load is how busy a service is, in units of its source.
type Load struct {
	Busy uint32 `json:"busy"`
	// Capacity is nil where the source knows none.
	Capacity *uint32 `json:"capacity"`
}

// DescribeLoad is the load for people.
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

// DescribeThreshold is the threshold for people.
func (a *AcceptState) DescribeThreshold() string {
	if a.Threshold == nil {
		return "-"
	}
	return strconv.FormatUint(uint64(*a.Threshold), 10)
}

// Snapshot reads everything.
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

// Count is how many packets left an instance's data path for a reason, which may be attached to nothing.
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

// RatesSince fills in the rates since an earlier snapshot of the instance.
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

// services reads the services, by name.
func (v *View) services() ([]*ServiceState, error) {
	services := []*ServiceState{}
	var key agentServiceKey
	var label agentServiceLabel
	labels := v.maps.ServiceNames.Iterate()
	for labels.Next(&key, &label) {
		service := newServiceState(key, label)
		var err error
		if service.Accept, err = v.acceptState(key); err != nil {
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

func newServiceState(key agentServiceKey, label agentServiceLabel) *ServiceState {
	s := &ServiceState{
		Name:     text(label.Name[:]),
		VIP:      netip.AddrFrom16(key.Vip.In6U.U6Addr8).Unmap(),
		Port:     networkOrder(key.Port), // and back
		Protocol: config.TCP,
	}
	if key.Protocol == unix.IPPROTO_UDP {
		s.Protocol = config.UDP
	}
	return s
}

// text is what is in front of the zero that ends it.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}

// acceptState is nil for a service that has no policy.
func (v *View) acceptState(key agentServiceKey) (*AcceptState, error) {
	a, err := v.acceptance(key)
	if a == nil || err != nil {
		return nil, err
	}
	state := &AcceptState{Policy: named(acceptPolicies, a.Policy)}
	if state.Offers, err = v.offerCounters(key); errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil // taken away meanwhile
	} else if err != nil {
		return nil, err
	}
	for _, n := range state.Offers {
		state.Offered += n
	}
	if asksForLoad(a) {
		state.Threshold = &a.Threshold
		load, known, err := v.readLoad(key, a)
		if err != nil {
			return nil, err
		}
		state.setLoad(a, load, known)
	}
	return state, nil
}

// acceptance is how a service takes connections; nil: it has no policy.
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

// asksForLoad tells whether the policy decides by the load.
func asksForLoad(a *agentAcceptance) bool {
	policy := agentAcceptPolicy(a.Policy)
	return policy == agentAcceptPolicyACCEPT_STATIC || policy == agentAcceptPolicyACCEPT_DYNAMIC
}

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

// named is what a configuration file calls a number of the data path.
func named[Name ~string, Number ~uint32](names map[Name]Number, number uint8) Name {
	for name, n := range names {
		if uint8(n) == number {
			return name
		}
	}
	return Name(fmt.Sprint(number))
}

// readLoad is the load that the data path decides by; false where it is not known. That of the accept queue
// of a service of all ports only packets know.
func (v *View) readLoad(key agentServiceKey, a *agentAcceptance) (l agentLoad, known bool, err error) {
	switch agentLoadSource(a.Source) {
	case agentLoadSourceLOAD_CONNECTIONS:
		return v.openConnections(key, a)
	case agentLoadSourceLOAD_ACCEPT_QUEUE:
		return v.listenerLoad(key)
	}
	now, err := monotonic()
	if err != nil {
		return l, false, err
	}
	if err := v.maps.Loads.Lookup(key, &l); errors.Is(err, ebpf.ErrKeyNotExist) {
		return l, false, nil
	} else if err != nil {
		return l, false, fmt.Errorf("read %s: %w", v.maps.Loads, err)
	}
	return l, l.When != 0 && now-int64(l.When) <= int64(a.StaleAfter), nil
}

// openConnections counts those that the server has not closed; they are known while the program that counts
// them is attached.
func (v *View) openConnections(key agentServiceKey, a *agentAcceptance) (l agentLoad, known bool, err error) {
	var open int64
	if err := v.maps.Connections.Lookup(key, &open); errors.Is(err, ebpf.ErrKeyNotExist) {
		return l, false, nil
	} else if err != nil {
		return l, false, fmt.Errorf("read %s: %w", v.maps.Connections, err)
	}
	_, err = os.Stat(filepath.Join(datapath.Dir(v.instance), connectionCountPin))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return l, false, err
	}
	return agentLoad{Busy: uint32(max(open, 0)), Capacity: a.Capacity}, err == nil, nil
}

// listenerLoad is the backlog of the listener that a client's port 0, which none has, would meet.
func (v *View) listenerLoad(key agentServiceKey) (l agentLoad, known bool, err error) {
	vip := netip.AddrPortFrom(netip.AddrFrom16(key.Vip.In6U.U6Addr8).Unmap(), networkOrder(key.Port))
	if vip.Port() == 0 || !v.here {
		return l, false, nil
	}
	nobody := netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	if vip.Addr().Is4() {
		nobody = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	sockets, err := querySockets(v.sockets, nobody, vip)
	if err != nil || !sockets.has(agentSocketKindSOCKET_LISTENING) {
		return l, false, err
	}
	return agentLoad{Busy: sockets.Backlog.Waiting, Capacity: sockets.Backlog.Most}, true, nil
}

// offerCounters are what became of the connections that a service was offered.
func (v *View) offerCounters(key agentServiceKey) (map[string]uint64, error) {
	var perCPU []agentOffers
	if err := v.maps.Offers.Lookup(key, &perCPU); err != nil {
		return nil, fmt.Errorf("read %s: %w", v.maps.Offers, err)
	}
	counters := map[string]uint64{}
	for i, label := range v.labels.offers {
		counters[label] = 0
		for _, c := range perCPU {
			counters[label] += c.Count[i]
		}
	}
	return counters, nil
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

// lookup reads an element of a per-CPU array.
func lookup[T any](m *ebpf.Map, i int) ([]T, error) {
	var perCPU []T
	if err := m.Lookup(uint32(i), &perCPU); err != nil {
		return nil, fmt.Errorf("read counter %d of %s: %w", i, m, err)
	}
	return perCPU, nil
}
