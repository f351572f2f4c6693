// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// Snapshot reads the complete state. It does not read the flow tables, which can have gigabytes:
// the numbers of flows are those of the last sweep. Snapshot returns an error if a table cannot be
// read.
func (v *View) Snapshot() (*Snapshot, error) {
	return v.SnapshotOf(func(string) bool { return true })
}

// SnapshotOf reads the complete state of the instance, except for services that are not wanted.
func (v *View) SnapshotOf(wanted func(service string) bool) (*Snapshot, error) {
	s, err := v.Brief(wanted)
	if err != nil {
		return nil, err
	}
	datapath.AddHiddenTags(s.Attachment, s.Inside)
	if slices.ContainsFunc(v.tables.Services.All(), usesHints) {
		counts, err := v.tables.Hints()
		if err != nil {
			return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
		}
		s.Hints = &counts
	}
	for _, service := range s.Services {
		if err := errors.Join(v.addShares(service), v.addForms(service)); err != nil {
			return nil, fmt.Errorf("instance %s: service %s: %w", v.tables.Instance, service.Name, err)
		}
	}
	return s, nil
}

// Brief reads the state of the instance and of the wanted services, without shares, hints, forms of
// connection IDs and hidden tags. It reads no table that has an entry for each bucket or flow.
func (v *View) Brief(wanted func(service string) bool) (*Snapshot, error) {
	reasons, err := v.tables.CountReasons()
	if err != nil {
		return nil, err
	}
	instance := datapath.Instance{Name: v.tables.Instance, Role: datapath.RoleBalancer}
	common, err := datapath.Inspect(instance, datapath.BalancerProgram, reasons)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Snapshot: *common}
	counts := v.tables.FlowCounts.Read()
	if s.FlowTable, err = v.flowTable(counts); err != nil {
		return nil, err
	}
	if s.Inside, err = readInside(v.tables.Instance); err != nil {
		return nil, err
	}
	if s.Services, err = v.services(counts, wanted); err != nil {
		return nil, err
	}
	if s.RemovedVIPs, err = v.removedVIPs(); err != nil {
		return nil, err
	}
	s.addReasons()
	return s, nil
}

// List reads the wanted services and the flow table, without shares and forms of connection IDs.
// The rest of the snapshot is empty.
func (v *View) List(wanted func(service string) bool) (s *Snapshot, err error) {
	s = &Snapshot{}
	counts := v.tables.FlowCounts.Read()
	if s.FlowTable, err = v.flowTable(counts); err != nil {
		return nil, err
	}
	s.Services, err = v.services(counts, wanted)
	return s, err
}

// removedVIPs reads the VIPs that have lost their last service, and their counters.
func (v *View) removedVIPs() ([]RemovedVIP, error) {
	all, err := v.tables.RemovedVIPs()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	removed := make([]RemovedVIP, len(all))
	for i, vip := range all {
		removed[i] = RemovedVIP{vip.VIP, vip.Age.Seconds(), vip.Packets, vip.Bytes}
	}
	return removed, nil
}

// addReasons moves the reasons of conditions from the record of the process to the servers. It
// drops the reason of a condition that the server no longer has.
func (s *Snapshot) addReasons() {
	if s.Configuration == nil {
		return
	}
	type named struct{ service, server string }
	reasons := map[named]map[Condition]string{}
	for _, r := range s.Configuration.Reasons {
		name := named{r.Service, r.Server}
		if reasons[name] == nil {
			reasons[name] = map[Condition]string{}
		}
		reasons[name][Condition(r.Condition)] = r.Reason
	}
	s.Configuration.Reasons = nil
	for _, service := range s.Services {
		for _, server := range service.Servers {
			server.Reasons = reasons[named{service.Name, server.Name}]
			maps.DeleteFunc(server.Reasons, func(c Condition, _ string) bool {
				return !slices.Contains(server.Causes, c)
			})
		}
	}
}

// usesHints tells whether an entry is of a service whose packets can follow hints.
func usesHints(entry dataplane.ServiceEntry) bool {
	return entry.IsService() && entry.Rule.PersistenceName().Method().ByColumn
}

// addForms adds the forms of a service's connection IDs.
func (v *View) addForms(s *ServiceState) (err error) {
	if s.Persistence.Method().HasIDs {
		s.QUIC, s.FormerQUIC, err = v.tables.QUICForms(s.number)
	}
	return err
}

// flowTable reads what the last sweep has counted.
func (v *View) flowTable(counts *dataplane.SweptCounts) (FlowTable, error) {
	table := FlowTable{Capacity: v.tables.Capacity()}
	counted, age, ok, err := counts.Total()
	if err != nil {
		return table, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	if ok {
		seconds, halfOpen := age.Seconds(), counted.HalfOpen.Total()
		table.Age, table.Flows, table.HalfOpen = &seconds, &counted.Flows, &halfOpen
	}
	return table, nil
}

// readInside returns the interface of node.inside. If the link of the program exists, but is
// attached to no interface any more, the result is empty. If there is no link, the result is nil.
func readInside(instance string) (*datapath.Attachment, error) {
	pin := filepath.Join(datapath.Dir(instance), datapath.InsidePin)
	attachment, err := datapath.ReadAttachment(pin)
	if attachment != nil || err != nil {
		return attachment, err
	}
	if _, err := os.Stat(pin); err != nil {
		return nil, nil
	}
	return &datapath.Attachment{}, nil
}

// serverLabel identifies a server, to find it in another snapshot.
type serverLabel struct {
	service, server string
	slot            uint32
}

// Services reads the services, their servers and the counters. It does not read the candidate
// tables, so it leaves out shares and costs less than Snapshot. Services returns an error if a
// table cannot be read.
func (v *View) Services() ([]*ServiceState, error) {
	return v.services(v.tables.FlowCounts.Read(), func(string) bool { return true })
}

// services reads the wanted services, without shares. The numbers of flows are those in counts.
func (v *View) services(
	counts *dataplane.SweptCounts, wanted func(service string) bool,
) ([]*ServiceState, error) {
	labels, err := v.tables.ServiceLabels()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	byName := map[string]*ServiceState{}
	var services []*ServiceState
	for _, entry := range v.tables.Services.All() {
		// During a reload, an entry can have no name.
		label, ok := labels[entry.Service()]
		if !ok || !entry.IsService() || !wanted(label.Name) {
			continue
		}
		if byName[label.Name] == nil {
			byName[label.Name] = newServiceState(label, &entry)
			services = append(services, byName[label.Name])
		}
		byName[label.Name].addEntry(&entry)
	}
	sources, err := v.tables.Sources()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	for _, s := range services {
		s.completeEntries()
		s.Sources = sources[s.number]
	}
	slices.SortFunc(services, func(a, b *ServiceState) int { return cmp.Compare(a.Name, b.Name) })
	return services, v.addServers(byName, counts)
}

// newServiceState returns a service without its servers. The label and the entry are those of the
// same service.
func newServiceState(label dataplane.ServiceLabel, entry *dataplane.ServiceEntry) *ServiceState {
	vip, _, protocol := entry.Matches()
	inference := newInferenceState(label, entry.Rule)
	placement, selection := placementOf(entry.Rule, inference)
	state := &ServiceState{
		Inference:     inference,
		Name:          label.Name,
		Protocol:      protocol,
		Placement:     placement,
		Selection:     selection,
		Persistence:   entry.Rule.PersistenceName(),
		Encapsulation: entry.Rule.EncapsulationName(),
		Buckets:       entry.Rule.Buckets(),
		Candidates:    uint8(entry.Rule.Candidates()),
		Generation:    label.Generation,
		Sets:          uint8(entry.Rule.Generations()),
		Digest:        fmt.Sprintf("%08x", label.Digest),
		TakesFlows:    entry.Rule.Flags&dataplane.RuleTakesFlows != 0,
		Ignored:       []Condition{},
		Servers:       []*ServerState{},
		number:        entry.Service(),
		table:         entry.Table(),
	}
	if state.Persistence.Method().HasCookies {
		state.BucketHash = entry.Rule.BucketHash()
	}
	if a := entry.Rule.Affinity(vip); a.IsWanted() {
		state.Affinity = &a
	}
	return state
}

// addEntry adds a VIP and a port to the service, from an entry of it.
func (s *ServiceState) addEntry(entry *dataplane.ServiceEntry) {
	vip, port, _ := entry.Matches()
	if !slices.Contains(s.VIPs, vip) {
		s.VIPs = append(s.VIPs, vip)
	}
	if !slices.Contains(s.Ports, uint16(port)) {
		s.Ports = append(s.Ports, uint16(port))
	}
}

// completeEntries sorts VIPs and ports. It leaves the lists out if they have one item.
func (s *ServiceState) completeEntries() {
	slices.SortFunc(s.VIPs, netip.Addr.Compare)
	slices.Sort(s.Ports)
	s.VIP, s.Port = s.VIPs[0], s.Ports[0]
	if len(s.VIPs) == 1 {
		s.VIPs = nil
	}
	if len(s.Ports) == 1 {
		s.Ports = nil
	}
}

func (v *View) addServers(services map[string]*ServiceState, counts *dataplane.SweptCounts) error {
	interfaces := interfaceNames()
	names, err := v.serverNames(services)
	if err != nil {
		return fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	for slot, name := range names {
		service := services[name.Service]
		if service == nil || !v.tables.Servers.Has(slot) {
			continue
		}
		server, err := v.server(slot, name.Server, service, interfaces, counts)
		if err != nil {
			return fmt.Errorf("instance %s: service %s: server %s: %w", v.tables.Instance, service.Name, name.Server, err)
		}
		service.Servers = append(service.Servers, server)
	}
	for _, service := range services {
		slices.SortFunc(service.Servers, func(a, b *ServerState) int {
			return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Slot, b.Slot))
		})
		service.Ignored = v.ignored(service)
		service.Refuses = !service.TakesFlows && slices.ContainsFunc(service.Servers, isUnfit)
	}
	return nil
}

// serverNames reads the names of all servers, by slot. For a single service, it reads only the
// names of this service's servers, which is faster.
func (v *View) serverNames(services map[string]*ServiceState) (map[uint32]dataplane.ServerName, error) {
	if len(services) == 1 {
		for name, service := range services {
			return v.tables.ServerNamesOf(name, service.number)
		}
	}
	return v.tables.ServerNames()
}

// isUnfit tells whether a server has causes, and would get new flows without them.
func isUnfit(server *ServerState) bool {
	return len(server.Causes) > 0 && server.Condition != ServerRemoved && server.Condition != ServerDrained
}

// ignored returns the causes that a service ignores. It reads them from the slots. The method
// services.ignored of package balancer returns the same causes from the state of the process.
func (v *View) ignored(service *ServiceState) []Condition {
	candidates := slices.DeleteFunc(slices.Clone(service.Servers), func(server *ServerState) bool {
		return server.Condition == ServerRemoved || server.Condition == ServerDrained ||
			v.tables.Servers.Flags(server.Slot)&(dataplane.FlagFailing|dataplane.FlagDrained) != 0
	})
	// If a server has a next hop, those without one get no new flows.
	hasHop := func(server *ServerState) bool { return server.NextHop != nil }
	if slices.ContainsFunc(candidates, hasHop) {
		candidates = slices.DeleteFunc(candidates, func(server *ServerState) bool { return !hasHop(server) })
	}
	ignored := []Condition{}
	for _, condition := range conditionsOf(dataplane.AnyCause) {
		if slices.ContainsFunc(candidates, func(server *ServerState) bool {
			return slices.Contains(server.Causes, condition)
		}) {
			ignored = append(ignored, condition)
		}
	}
	return ignored
}

// server reads the state of the server in a slot. name is the name of the server.
func (v *View) server(
	slot uint32, name string, service *ServiceState, interfaces map[int]net.Interface,
	counts *dataplane.SweptCounts,
) (*ServerState, error) {
	flags, causes := v.tables.Servers.Flags(slot), v.tables.Servers.Causes(slot)
	server := &ServerState{
		Name:       name,
		Slot:       slot,
		Address:    describeAddress(v.tables.Servers.Address(slot), service.Encapsulation),
		Condition:  conditionOf(flags, causes),
		Checked:    flags&dataplane.FlagUnchecked == 0,
		Probed:     flags&dataplane.FlagUnprobed == 0,
		Causes:     conditionsOf(causes),
		TakesFlows: takesFlows(flags),
		NextHop:    v.nextHop(slot, interfaces),
	}
	counter, err := v.tables.ServerCounter(slot)
	if err != nil {
		return nil, err
	}
	total := counter.Total()
	server.Packets, server.Bytes, server.Placed = total.Packets, total.Bytes, counter.Placed()
	flows, counted := counts.Of(slot)
	if counted {
		server.Flows = &flows.Flows
	}
	if service.Inference != nil {
		if server.Inferred, err = v.inferred(slot, service.Inference); err != nil {
			return nil, err
		}
	}
	if !service.Placement.Method().ServersDecide {
		return server, nil
	}
	signals, err := v.tables.ServerSignals(slot)
	if err != nil {
		return nil, err
	}
	server.Hunt = &HuntCounts{
		Offered: counter.Packets(dataplane.ForwardHunt),
		Created: signals.Created, Removed: signals.Removed,
		Resets: counter.Packets(dataplane.ForwardReset),
	}
	if counted {
		halfOpen := flows.HalfOpen.Total()
		server.Hunt.HalfOpen = &halfOpen
	}
	if service.Selection.OrdersByReports() {
		server.Hunt.Reports, err = v.reports(slot)
	}
	return server, err
}

// reports returns the last report of the slot's server, and the numbers of its reports by result.
func (v *View) reports(slot uint32) (*ReportState, error) {
	state, err := v.lastReport(slot)
	if err != nil {
		return nil, err
	}
	state.Counts, err = v.tables.ReportCounts(slot)
	return &state, err
}

// lastReport returns the last report of the slot's server, without the counts. All fields are nil
// if there is no report. Load is also nil if the server has reported that it does not know its
// load.
func (v *View) lastReport(slot uint32) (state ReportState, err error) {
	last, ok, err := v.tables.Report(slot)
	if err != nil {
		return state, err
	}
	if ok {
		age := last.Age.Seconds()
		state.Age = &age
	}
	if last.Load > 0 {
		state.Load = &last.Load
	}
	return state, nil
}

// describeAddress returns the address of a server in the form of the configuration.
func describeAddress(address netip.Addr, kind desired.Encapsulation) string {
	if kind == desired.SRv6Insert || kind == desired.SRv6Encap {
		return netip.PrefixFrom(address, srv6.LocatorBits).String()
	}
	return address.String()
}

// nextHop returns the next hop of a slot's server, or nil if the server has none.
func (v *View) nextHop(slot uint32, interfaces map[int]net.Interface) *NextHop {
	mac, number, ok := v.tables.Servers.NextHop(slot)
	if !ok {
		return nil
	}
	port := v.tables.Port(number)
	hop := &NextHop{MAC: net.HardwareAddr(mac[:]).String(), Ifindex: int(port.Ifindex), MTU: int(port.Mtu)}
	// Indexes are unique only within a network namespace. If the MAC address is the same as well,
	// the interface is probably this one.
	if here := interfaces[hop.Ifindex]; slices.Equal(here.HardwareAddr, port.HardwareAddr()) {
		hop.Interface = here.Name
	}
	return hop
}

// interfaceNames returns the interfaces of the reader's network namespace, by index. It ignores
// errors, because output can show indexes instead of names.
func interfaceNames() map[int]net.Interface {
	byIndex := map[int]net.Interface{}
	all, _ := net.Interfaces()
	for _, i := range all {
		byIndex[i.Index] = i
	}
	return byIndex
}

// addShares sets the share of each server of the service: the part of the buckets whose new flows
// it gets, or is offered first. Services that infer, or that have no candidate table, have no
// shares.
func (v *View) addShares(service *ServiceState) error {
	if service.Buckets == 0 || service.Inference != nil {
		return nil
	}
	table, err := v.tables.Candidates(service.table)
	if err != nil {
		return err
	}
	owned := make([]uint32, dataplane.NoServer)
	takers := v.firstTakers(service, table)
	for _, slot := range takers {
		owned[slot]++
	}
	for _, server := range service.Servers {
		server.Share = float64(owned[server.Slot]) / float64(max(len(takers), 1))
	}
	return nil
}

// firstTakers returns, for each bucket, the slot of the first server of its row that takes new
// flows (list_taking in bpf/balancer/tables/candidates.h). For a row without such a server, the
// result depends on the service:
//
//   - usually it contains the server of the next row that has one;
//   - if flows must stay in their rows, it contains the first server of the row that can be reached
//     (list_own_row), or lacks the row if there is none;
//   - under round-robin, where a row is a turn, it lacks the row.
//
// The result is empty if no server takes new flows.
func (v *View) firstTakers(service *ServiceState, table dataplane.Candidates) []uint32 {
	const none = dataplane.NoServer
	takes, reachable := v.takers(service)
	isTurn := service.Placement.Method().TakesTurns()
	tried := uint32(service.Candidates)
	if isTurn {
		tried = 1
	}
	firstOf := func(bucket uint32, wanted []bool) uint32 {
		start := bucket * uint32(service.Candidates) * uint32(service.Sets)
		for i := range tried {
			// After the service was read, a smaller table may have replaced this one.
			if slot, ok := table.At(start + i); ok && wanted[slot] {
				return slot
			}
		}
		return none
	}
	first := make([]uint32, service.Buckets)
	staysInRow := (&desired.Service{Persistence: service.Persistence}).FindsByColumn()
	for bucket := range service.Buckets {
		first[bucket] = firstOf(bucket, takes)
		if first[bucket] == none && staysInRow && service.TakesFlows {
			first[bucket] = firstOf(bucket, reachable)
		}
	}
	if isTurn || staysInRow {
		return slices.DeleteFunc(first, func(slot uint32) bool { return slot == none })
	}
	// A bucket without a taker gets that of the next bucket. The loop begins with the last bucket,
	// and runs twice, because the first bucket follows the last one.
	next := uint32(none)
	for range 2 {
		for i := range service.Buckets {
			bucket := service.Buckets - 1 - i
			if first[bucket] == none {
				first[bucket] = next
			}
			next = first[bucket]
		}
	}
	if next == none {
		return nil
	}
	return first
}

// takesFlows tells whether a server with these flags gets new flows, also if it rests at the moment
// because it starts slowly.
func takesFlows(flags dataplane.ServerFlags) bool {
	return flags&dataplane.FlagInUse != 0 &&
		(flags&(dataplane.FlagDrained|dataplane.FlagFailing) == 0 || flags&dataplane.FlagStarting != 0)
}

// takers tells for each slot, and for NoServer, whether it has a server of the service that takes
// new flows, and one that can be reached.
func (v *View) takers(service *ServiceState) (takes, reachable []bool) {
	takes, reachable = make([]bool, dataplane.NoServer+1), make([]bool, dataplane.NoServer+1)
	for _, server := range service.Servers {
		flags := v.tables.Servers.Flags(server.Slot)
		if flags&dataplane.FlagInUse == 0 {
			continue
		}
		takes[server.Slot] = takesFlows(flags)
		reachable[server.Slot] = flags&dataplane.FlagUnreachable == 0 &&
			v.tables.Servers.HasNextHop(server.Slot)
	}
	return takes, reachable
}
