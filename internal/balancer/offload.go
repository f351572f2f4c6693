// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"hash/maphash"
	"maps"
	"reflect"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/p4switch"
)

// offload tells a switch what the data path does, so that the switch itself forwards the packets of
// services that it can balance (docs/understand/p4.md). All other packets pass to this host, and
// the data path handles them.
type offload struct {
	contents chan *p4switch.Content // has room for one value
	told     uint64                 // a hash of what the last content follows from; 0: none was told
	seed     maphash.Seed           // of the hash
	words    []byte                 // the input of the hash, whose memory is used again
	rows     map[string]offloadedRows
}

// offloadedRows are the rows of a service, and what they were built from.
type offloadedRows struct {
	from tableInput
	rows *dataplane.Rows
}

// Contents returns the channel with what the switch of the configuration is to contain. It has the
// latest content only. It is nil if the configuration has no switch.
func (b *Balancer) Contents() <-chan *p4switch.Content {
	if b.offload == nil {
		return nil
	}
	return b.offload.contents
}

// newOffload returns the offload to a switch, or nil if there is none.
func newOffload(to *desired.Switch) *offload {
	if to == nil {
		return nil
	}
	return &offload{contents: make(chan *p4switch.Content, 1), seed: maphash.MakeSeed()}
}

// tellSwitch puts the present content into the channel, if it has changed.
func (b *Balancer) tellSwitch() {
	o := b.offload
	if o == nil || !b.attached {
		return
	}
	hash := b.hashOfContent()
	if hash == o.told {
		return
	}
	o.told = hash
	content, err := b.content()
	if err != nil { // the data path has built the same table before
		b.log.Error("tell the switch", "error", err)
		return
	}
	select { // remove a value that was not read; nobody else sends
	case <-o.contents:
	default:
	}
	o.contents <- content
}

// offloaded lists the services that the switch balances, and those whose packets all pass to this
// host, in the order of their names.
func (b *Balancer) offloaded() (services []*service, passed []p4switch.PassedService) {
	var all []*desired.Service
	now := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(b.services.byName)) {
		svc := b.services.byName[name]
		all, now[name] = append(all, svc.Service), svc.whyNotNow()
	}
	why := desired.WhyNotOnSwitch(all, now)
	for _, s := range all {
		if reason := why[s.Name]; reason != "" {
			passed = append(passed, p4switch.PassedService{Name: s.Name, Reason: reason})
		} else {
			services = append(services, b.services.byName[s.Name])
		}
	}
	return services, passed
}

// whyNotNow returns why the switch does not balance a service as long as the state of the service
// stays as it is, or an empty text. Of flows from before the service became stateless, only the flow
// table knows the servers.
func (svc *service) whyNotNow() string {
	switch {
	case svc.rule.Buckets() == 0:
		return "no servers"
	case svc.rule.HasFormerFlows():
		return "flows of its former persistence have not ended"
	}
	return ""
}

// hashOfContent returns a hash of everything that a content follows from. It is computed after each
// event, so it is cheap: a few words for each server.
func (b *Balancer) hashOfContent() uint64 {
	words := b.offload.words[:0]
	add := func(numbers ...uint64) {
		for _, n := range numbers {
			words = binary.NativeEndian.AppendUint64(words, n)
		}
	}
	add(wordOfMAC(b.own[0].MAC))
	services, passed := b.offloaded()
	for _, svc := range services {
		add(uint64(svc.id), uint64(svc.rule.Buckets()), uint64(svc.rule.Row), uint64(svc.rule.Methods),
			uint64(svc.rule.Encapsulation), svc.label.Generation, uint64(svc.label.Digest), uint64(svc.Port))
		words = append(words, svc.VIP.AsSlice()...)
		for _, m := range svc.members {
			mac, port, _ := b.plane.Servers.NextHop(m.slot)
			link := b.hops[target(&m.Server)].Link
			add(uint64(m.slot), uint64(b.plane.Servers.Flags(m.slot)), uint64(port), uint64(link.MTU),
				wordOfMAC(mac), wordOfMAC(link.MAC))
			words = append(words, m.Locator.Addr().AsSlice()...)
			words = append(append(words, m.QUICID...), m.FormerQUICID...)
		}
		for _, form := range []*desired.QUIC{svc.QUIC, svc.FormerQUIC} {
			if form != nil {
				id := form.Config()
				add(uint64(id.Rotation), uint64(id.ServerIDLength), uint64(id.Length()), uint64(dataplane.QUICMask(form)[0]))
			}
		}
	}
	for _, svc := range passed {
		words = append(append(words, svc.Name...), svc.Reason...)
	}
	b.offload.words = words
	return max(maphash.Bytes(b.offload.seed, words), 1)
}

func wordOfMAC(mac [6]byte) uint64 {
	return uint64(binary.BigEndian.Uint16(mac[:]))<<32 | uint64(binary.BigEndian.Uint32(mac[2:]))
}

// content returns what the switch is to contain.
func (b *Balancer) content() (*p4switch.Content, error) {
	to := b.cfg.Node.Switch
	services, passed := b.offloaded()
	c := &p4switch.Content{
		Network: uint16(to.NetworkPort), Host: uint16(to.HostPort), MAC: b.own[0].MAC,
		Source: b.services.locator.Addr(), Passed: passed,
	}
	rows := map[string]offloadedRows{}
	for _, svc := range services {
		s := b.offloadedService(svc)
		var err error
		if svc.QUIC != nil {
			s.IDs, err = svc.quicServers()
		} else {
			rows[svc.Name], err = b.offloadedRows(svc)
			s.Rows = rows[svc.Name].rows
		}
		if err != nil {
			return nil, err
		}
		c.Services = append(c.Services, s)
		for _, m := range svc.members {
			c.Servers = append(c.Servers, b.offloadedServer(svc, m))
		}
	}
	b.offload.rows = rows
	return c, nil
}

// offloadedRows returns the rows of a service. It builds them only if they have changed.
func (b *Balancer) offloadedRows(svc *service) (offloadedRows, error) {
	built := b.offload.rows[svc.Name]
	if built.rows != nil && reflect.DeepEqual(built.from, svc.builtFrom) {
		return built, nil
	}
	rows, err := b.services.built.build(svc.builtFrom)
	return offloadedRows{from: svc.builtFrom, rows: rows}, err
}

// offloadedService returns a service without what its packets find servers by.
func (b *Balancer) offloadedService(svc *service) *p4switch.Service {
	s := &p4switch.Service{
		Service: svc.Service, Number: uint16(svc.id), Sets: int(svc.rule.Generations()),
		HasHints: svc.QUIC == nil && b.services.hasHints, Servers: map[uint16]p4switch.Condition{},
		Generation: svc.label.Generation, Digest: svc.label.Digest,
	}
	for _, m := range svc.members {
		flags := b.plane.Servers.Flags(m.slot)
		c := p4switch.Condition{
			Takes:     b.plane.Servers.TakesFlows(m.slot),
			Reachable: b.plane.Servers.HasNextHop(m.slot) && flags&dataplane.FlagUnreachable == 0,
			Failing:   flags&dataplane.FlagFailing != 0,
		}
		s.Servers[uint16(m.slot)] = c
	}
	return s
}

// offloadedServer returns a server as the switch reaches it. A server behind another interface than
// the node's has no next hop there, so its packets pass to the host.
func (b *Balancer) offloadedServer(svc *service, m *member) *p4switch.Server {
	s := &p4switch.Server{Service: svc.Name, Name: m.Name, Slot: uint16(m.slot), Locator: m.Locator.Addr()}
	mac, _, ok := b.plane.Servers.NextHop(m.slot)
	link := b.hops[target(&m.Server)].Link
	if ok && link.Index == b.own[0].Index {
		s.Hop = p4switch.NextHop{
			Port: uint16(b.cfg.Node.Switch.NetworkPort), MAC: mac, Own: link.MAC, MTU: uint16(link.MTU),
		}
	}
	return s
}
