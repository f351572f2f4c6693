// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/srv6"
)

// Snapshot is the state of a balancer at one moment.
type Snapshot struct {
	datapath.Snapshot
	// Inside is where the programs of node.inside run; nil: there are none. Its index is 0 when the interface is
	// gone.
	Inside    *datapath.Attachment `json:"inside"`
	FlowTable FlowTable            `json:"flow_table"`
	Services  []*ServiceState      `json:"services"` // by name
}

// FlowTable is how full the flow table is.
type FlowTable struct {
	// Capacity is how many flows the table is made for: node.limits.flows, rounded up. It has twice as
	// many entries; with more flows than its capacity some find no room.
	Capacity uint64 `json:"capacity"`
	// Flows are those of all servers.
	Flows dataplane.FlowCounts `json:"flows"`
	// HalfOpen are the flows of placement hunt whose client has not answered a server yet. They are in
	// a table of their own.
	HalfOpen uint64 `json:"half_open"`
}

// ServiceState is a service as the data path has it.
type ServiceState struct {
	Name          string               `json:"name"`
	VIP           netip.Addr           `json:"vip"`
	Port          uint16               `json:"port"` // 0: all that no other service of the VIP names
	Protocol      config.Protocol      `json:"protocol"`
	Placement     config.Placement     `json:"placement"`
	Selection     config.Selection     `json:"selection,omitempty"` // of placement hunt
	Persistence   config.Persistence   `json:"persistence"`
	Encapsulation config.Encapsulation `json:"encapsulation"`
	Buckets       uint32               `json:"buckets"` // 0: there is no server to place on
	Candidates    uint8                `json:"candidates"`
	// Ignored are the causes of servers that new flows are placed on all the same, as no server that
	// is not drained is without.
	Ignored []Condition    `json:"ignored"`
	Servers []*ServerState `json:"servers"` // by name

	table uint32
}

// ServerState is a server of a service as the data path has it, with its counters since it was
// configured.
type ServerState struct {
	Name      string    `json:"name"`
	Slot      uint32    `json:"slot"`
	Address   string    `json:"address"` // locator, or the tunnel's far end
	Condition Condition `json:"condition"`
	Checked   bool      `json:"checked"` // it has health checks
	Probed    bool      `json:"probed"`  // its agent is probed
	// Causes are why it is unfit for new flows, the weightiest first. It gets them all the same where
	// its service ignores the cause, and none where it is without causes but drained.
	Causes []Condition `json:"causes"`
	// Share is the part of the buckets whose first candidate it is, 0 to 1.
	Share   float64              `json:"share"`
	NextHop *NextHop             `json:"next_hop"` // nil: not resolved, its packets are dropped
	Flows   dataplane.FlowCounts `json:"flows"`
	Packets uint64               `json:"packets"`
	Bytes   uint64               `json:"bytes"`  // of layer 3, as received
	Placed  uint64               `json:"placed"` // new flows
	// Hunt is nil for servers of services that do not hunt.
	Hunt *HuntCounts `json:"hunt"`
	// Rate and PlacedRate (flows per second) are of an interval.
	Rate       *datapath.Rate `json:"rate,omitempty"`
	PlacedRate *float64       `json:"placed_per_second,omitempty"`
}

// HuntCounts are what a server had to do with hunts, since it was configured.
type HuntCounts struct {
	HalfOpen uint64 `json:"half_open"` // flows now whose SYN it has answered, and whose client has not been heard of since
	Offered  uint64 `json:"offered"`   // SYNs that it was the first to be offered
	Created  uint64 `json:"created"`   // create-stickiness from it
	Removed  uint64 `json:"removed"`   // remove-stickiness from it
	Resets   uint64 `json:"resets"`    // to it, of connections that another server had
}

// NextHop is where the balancer sends the packets for a server.
type NextHop struct {
	MAC     string `json:"mac"`
	Ifindex int    `json:"ifindex"`
	// Interface is its name; empty when it belongs to another network namespace than the reader's.
	Interface string `json:"interface"`
	MTU       int    `json:"mtu"` // bytes of layer 3
}

// Snapshot reads everything. Of its cost, 64 bytes are read for every four flows of capacity.
func (v *View) Snapshot() (*Snapshot, error) {
	reasons, err := v.tables.CountReasons()
	if err != nil {
		return nil, err
	}
	instance := datapath.Instance{Name: v.tables.Instance, Role: datapath.RoleBalancer}
	common, err := datapath.Inspect(instance, datapath.BalancerProgram, reasons)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Snapshot: *common, FlowTable: FlowTable{Capacity: v.tables.Capacity()}}
	if s.Inside, err = readInside(v.tables.Instance); err != nil {
		return nil, err
	}
	if s.Services, err = v.Services(); err != nil {
		return nil, err
	}
	for _, service := range s.Services {
		if err := v.addShares(service); err != nil {
			return nil, fmt.Errorf("instance %s: service %s: %w", v.tables.Instance, service.Name, err)
		}
	}
	counts, halfOpen := v.tables.Flows.Count(), v.tables.HalfOpen.Count()
	for _, service := range s.Services {
		for _, server := range service.Servers {
			server.Flows = counts.Of(server.Slot)
			if server.Hunt != nil {
				server.Hunt.HalfOpen = halfOpen.Of(server.Slot).Total()
			}
		}
	}
	s.FlowTable.Flows = counts.Total()
	s.FlowTable.HalfOpen = halfOpen.Total().Total()
	return s, nil
}

// readInside tells no interface that is gone from one that there never was by the link alone.
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

// RatesSince fills in the rates since an earlier snapshot of the instance.
func (s *Snapshot) RatesSince(earlier *Snapshot) {
	interval := s.Snapshot.RatesSince(&earlier.Snapshot)
	before := map[serverLabel]*ServerState{}
	for _, service := range earlier.Services {
		for _, server := range service.Servers {
			before[serverLabel{service.Name, server.Name, server.Slot}] = server
		}
	}
	for _, service := range s.Services {
		for _, now := range service.Servers {
			old := before[serverLabel{service.Name, now.Name, now.Slot}]
			if old == nil {
				old = &ServerState{}
			}
			now.Rate = datapath.NewRate(datapath.Growth(now.Packets, old.Packets), datapath.Growth(now.Bytes, old.Bytes), interval)
			placed := datapath.PerSecond(datapath.Growth(now.Placed, old.Placed), interval)
			now.PlacedRate = &placed
		}
	}
}

// serverLabel tells a server of one snapshot from all others of another.
type serverLabel struct {
	service, server string
	slot            uint32
}

// Services reads the services with their servers and counters, but no flows and no shares. It costs a
// small part of what Snapshot does.
func (v *View) Services() ([]*ServiceState, error) {
	names, err := v.tables.ServiceNames()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	byName := map[string]*ServiceState{}
	var services []*ServiceState
	for _, entry := range v.tables.Services.All() {
		// Between two steps of a reload an entry can be without a name.
		name, ok := names[entry.Id]
		if ok && entry.IsService() && byName[name] == nil {
			byName[name] = newServiceState(name, &entry)
			services = append(services, byName[name])
		}
	}
	slices.SortFunc(services, func(a, b *ServiceState) int { return cmp.Compare(a.Name, b.Name) })
	return services, v.addServers(byName)
}

func newServiceState(name string, entry *dataplane.ServiceEntry) *ServiceState {
	vip, port, protocol := entry.Matches()
	placement, selection := entry.Rule.PlacementName()
	return &ServiceState{
		Name:          name,
		VIP:           vip,
		Port:          uint16(port),
		Protocol:      protocol,
		Placement:     placement,
		Selection:     selection,
		Persistence:   entry.Rule.PersistenceName(),
		Encapsulation: entry.Rule.EncapsulationName(),
		Buckets:       entry.Rule.Buckets,
		Candidates:    entry.Rule.Candidates,
		Ignored:       []Condition{},
		Servers:       []*ServerState{},
		table:         entry.Table(),
	}
}

// addServers gives the services their servers.
func (v *View) addServers(services map[string]*ServiceState) error {
	interfaces := interfaceNames()
	names, err := v.tables.ServerNames()
	if err != nil {
		return fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	for slot, name := range names {
		service := services[name.Service]
		if service == nil || !v.tables.Servers.Has(slot) {
			continue
		}
		server, err := v.server(slot, name.Server, service, interfaces)
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
	}
	return nil
}

// ignored finds what services.ignored does, by what the slots tell.
func (v *View) ignored(service *ServiceState) []Condition {
	candidates := slices.DeleteFunc(slices.Clone(service.Servers), func(server *ServerState) bool {
		return server.Condition == ServerRemoved || server.Condition == ServerDrained ||
			v.tables.Servers.Flags(server.Slot)&dataplane.FlagFailing != 0
	})
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

func (v *View) server(slot uint32, name string, service *ServiceState, interfaces map[int]net.Interface) (*ServerState, error) {
	flags, causes := v.tables.Servers.Flags(slot), v.tables.Servers.Causes(slot)
	server := &ServerState{
		Name:      name,
		Slot:      slot,
		Address:   describeAddress(v.tables.Servers.Address(slot), service.Encapsulation),
		Condition: conditionOf(flags, causes),
		Checked:   flags&dataplane.FlagUnchecked == 0,
		Probed:    flags&dataplane.FlagUnprobed == 0,
		Causes:    conditionsOf(causes),
		NextHop:   v.nextHop(slot, interfaces),
	}
	counter, err := v.tables.ServerCounter(slot)
	if err != nil {
		return nil, err
	}
	total := counter.Total()
	server.Packets, server.Bytes, server.Placed = total.Packets, total.Bytes, counter.Placed()
	if service.Placement != config.PlacementHunt {
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
	return server, nil
}

// describeAddress is the address of a server as its configuration has it.
func describeAddress(address netip.Addr, kind config.Encapsulation) string {
	if kind == config.SRv6Insert || kind == config.SRv6Encap {
		return netip.PrefixFrom(address, srv6.LocatorBits).String()
	}
	return address.String()
}

// nextHop is nil for a server that has none.
func (v *View) nextHop(slot uint32, interfaces map[int]net.Interface) *NextHop {
	mac, number, ok := v.tables.Servers.NextHop(slot)
	if !ok {
		return nil
	}
	port := v.tables.Port(number)
	hop := &NextHop{MAC: net.HardwareAddr(mac[:]).String(), Ifindex: int(port.Ifindex), MTU: int(port.Mtu)}
	// An index says nothing about the namespace; an address as well is a good sign.
	if here := interfaces[hop.Ifindex]; slices.Equal(here.HardwareAddr, port.HardwareAddr()) {
		hop.Interface = here.Name
	}
	return hop
}

// interfaceNames are the interfaces of the reader's network namespace. Names are a courtesy: without
// them indexes are shown.
func interfaceNames() map[int]net.Interface {
	byIndex := map[int]net.Interface{}
	all, _ := net.Interfaces()
	for _, i := range all {
		byIndex[i.Index] = i
	}
	return byIndex
}

// addShares reads the service's table and counts whose buckets they are.
func (v *View) addShares(service *ServiceState) error {
	if service.Buckets == 0 {
		return nil
	}
	table, err := v.tables.Candidates(service.table)
	if err != nil {
		return err
	}
	owned := map[uint32]uint32{}
	for bucket := range service.Buckets {
		position := bucket * uint32(service.Candidates)
		slot, ok := table.At(position)
		if !ok {
			break // the table was replaced by a smaller one since the service was read
		}
		owned[slot]++
	}
	for _, server := range service.Servers {
		server.Share = float64(owned[server.Slot]) / float64(service.Buckets)
	}
	return nil
}
