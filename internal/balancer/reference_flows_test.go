// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// referenceEntry is an entry of the reference's flow table.
type referenceEntry struct {
	flow   dataplane.Flow
	server string // "service/server"
	state  dataplane.FlowState
	seen   uint16
}

func (e *referenceEntry) age(now uint16) uint16 { return (now - e.seen) & dataplane.FlowTimeMask }

// isEstablished tells whether a connection has the entry, as far as the balancer can know: only its
// server can end it.
func (e *referenceEntry) isEstablished() bool {
	return e.state == stateEstablished || e.state == stateSilent || e.state == stateClosing
}

// lingers tells whether packets of a flow that has ended may be under way.
func (e *referenceEntry) lingers(now uint16) bool {
	return (e.state == stateClosing || e.state == stateClosed) && e.age(now) < flowLinger
}

// mayBeOver tells whether the connection of the entry has ended for long, as far as its server or
// its client says.
func (e *referenceEntry) mayBeOver(now uint16) bool {
	return (e.state == stateClosing || e.state == stateClosed) && !e.lingers(now)
}

// mayGoOn tells whether the connection of the entry may go on.
func (e *referenceEntry) mayGoOn(now uint16) bool {
	return e.isEstablished() && (e.state != stateClosing || e.lingers(now))
}

// referenceBucket is a bucket of the flow table, as docs/understand/flow-table.md describes it.
type referenceBucket [dataplane.FlowsPerBucket]referenceEntry

// find returns the entry of a service's flow, or nil.
func (b *referenceBucket) find(flow dataplane.Flow, service string) *referenceEntry {
	for i := range b {
		if b[i].state != stateFree && b[i].flow == flow && strings.HasPrefix(b[i].server, service+"/") {
			return &b[i]
		}
	}
	return nil
}

// yielding returns the entry that a new flow takes: a free one, else the oldest new or closed one,
// else the oldest established one that has been idle for more than a minute, else nil. Among equals
// it returns the first one in the flow's order of entries, which begins with the preferred one.
func (b *referenceBucket) yielding(preferred int, now uint16) *referenceEntry {
	var best *referenceEntry
	rank := 0
	for i := range b {
		e := &b[i^preferred]
		r := 1<<13 + int(e.age(now))
		switch {
		case e.state == stateFree:
			r = 1 << 14
		case e.isEstablished() && e.age(now) >= 15:
			r = int(e.age(now))
		case e.isEstablished():
			r = 0
		}
		if r > rank {
			best, rank = e, r
		}
	}
	return best
}

// bucketOf returns the flow's bucket of the reference's flow table.
func (r *reference) bucketOf(flow dataplane.Flow) *referenceBucket {
	number := r.bucketNumber(flow)
	if r.flows[number] == nil {
		r.flows[number] = &referenceBucket{}
	}
	return r.flows[number]
}

// persist returns the server of a known flow if the packet stays with it, else nil.
func (r *reference) persist(p parsed, svc *desired.Service) *desired.Server {
	e := r.bucketOf(p.flow).find(p.flow, svc.Name)
	if e == nil {
		return nil
	}
	server := serverOfName(svc, strings.TrimPrefix(e.server, svc.Name+"/"))
	if server == nil || !r.keepsServer(p, svc, server, e) {
		return nil
	}
	if r.isStale(e, svc) {
		return nil
	}
	r.renew(p, e)
	return server
}

// renew updates the entry of a flow after one of its packets.
func (r *reference) renew(p parsed, e *referenceEntry) {
	now := r.now()
	switch {
	case p.opens() && e.isEstablished():
		return // it may be forged
	case p.opens():
		e.state = stateNew
	case p.ends() && e.isEstablished(), p.ends() && e.state == stateNew && p.flags&packet.RST == 0:
		e.state = stateClosing
	case p.ends():
	case e.lingers(now):
		return // the packet may belong to the end of the connection
	default:
		e.state = stateEstablished
	}
	e.seen = now
}

// isAvoided tells whether a server fails its checks while others do not.
func (r *reference) isAvoided(svc *desired.Service, server *desired.Server) bool {
	isSame := func(s desired.Server) bool { return s.Name == server.Name }
	return r.failing[svc.Name+"/"+server.Name] && !slices.ContainsFunc(r.usable(svc), isSame)
}

// keepsServer implements the table of docs/understand/packet-path.md for flows whose server is
// configured. Packets leave a server that fails its checks, or that is drained, only if there are
// other servers.
func (r *reference) keepsServer(p parsed, svc *desired.Service, server *desired.Server, e *referenceEntry) bool {
	all, fails := r.usable(svc), r.isAvoided(svc, server)
	isDrained := !server.Takes() || r.isUnproven(svc, server)
	hasPassed := func(s desired.Server) bool { return !r.awaitsCheck(svc, s.Name) }
	leaving := !server.Takes() && svc.OnDrain == desired.OnDrainMoveUDP && slices.ContainsFunc(all, hasPassed)
	now := r.now()
	isAsked := svc.Placement.Method().ServersDecide
	isActive := p.opens() && e.mayGoOn(now) && e.age(now) < flowMinIdle
	switch {
	case p.mayMove() && (fails && !isActive || !r.reaches(server.Name)):
		return false
	case svc.Protocol == desired.UDP && leaving:
		return false
	case p.opens() && e.mayBeOver(now) && (e.state == stateClosed || isAsked):
		return false
	case p.opens() && isDrained:
		return e.mayGoOn(now) && !isAsked
	}
	return true
}

// remember stores a flow that was placed, in its own entry if it has one. It returns the reason
// under which the packet is counted.
func (r *reference) remember(p parsed, svc *desired.Service, server *desired.Server) string {
	bucket := r.bucketOf(p.flow)
	e, now := bucket.find(p.flow, svc.Name), r.now()
	if e == nil {
		e = bucket.yielding(r.preferred(p.flow), now)
	}
	if e == nil {
		return "forward_no_room"
	}
	*e = referenceEntry{p.flow, svc.Name + "/" + server.Name, stateNew, now}
	if p.flow.Protocol == desired.TCP && !p.opens() {
		return "forward_recover"
	}
	return "forward_new"
}

// sweep frees the entries whose timeout has passed, and those of removed servers. Established flows
// become silent.
func (r *reference) sweep() {
	for _, bucket := range r.flows {
		for i := range bucket {
			e := &bucket[i]
			if e.state != stateFree && !r.keeps(e) {
				*e = referenceEntry{}
			} else if e.state == stateEstablished && e.age(r.now()) > r.silence(e) ||
				e.state == stateClosing && e.age(r.now()) >= endedTicks {
				e.state = stateSilent
			}
		}
	}
}

// silence returns the age up to which an established flow counts as a load, in ticks.
func (r *reference) silence(e *referenceEntry) uint16 {
	name, _, _ := strings.Cut(e.server, "/")
	i := slices.IndexFunc(r.cfg.Services, func(s desired.Service) bool { return s.Name == name })
	return r.clock.Ticks(r.cfg.Services[i].Timeouts.Silent)
}

// keeps tells whether a sweep keeps an entry.
func (r *reference) keeps(e *referenceEntry) bool {
	name, server, _ := strings.Cut(e.server, "/")
	i := slices.IndexFunc(r.cfg.Services, func(s desired.Service) bool { return s.Name == name })
	if i < 0 || serverOfName(&r.cfg.Services[i], server) == nil {
		return false
	}
	timeout := r.cfg.Services[i].Timeouts.Established
	switch e.state {
	case stateNew:
		timeout = r.cfg.Services[i].Timeouts.New
	case stateClosed:
		return e.age(r.now()) <= r.clock.EndedTicks(r.cfg.Services[i].Timeouts.Closing)
	}
	return e.age(r.now()) <= r.clock.Ticks(timeout)
}

// elapse makes time pass in both flow tables. Flows that have been idle for hours do not become
// older, so that the clock does not wrap around.
func (r *reference) elapse(ticks uint16) {
	now := r.now()
	old := func(age uint16) bool { return age > 1000 }
	for _, bucket := range r.flows {
		for i := range bucket {
			if e := &bucket[i]; !old(e.age(now)) {
				e.seen = (e.seen - ticks) & dataplane.FlowTimeMask
			}
		}
	}
	r.elapseFlows(ticks, func(e dataplane.FlowEntry) bool { return !old(ageOf(e, now)) })
}

// explainEntries describes the buckets of both tables of flows whose entries differ from those of the
// reference by their servers and states.
func (r *reference) explainEntries() string {
	var s strings.Builder
	for _, of := range []struct {
		name  string
		table *dataplane.FlowTable
		want  map[uint32]*referenceBucket
	}{{"flows", r.plane.Flows, r.flows}, {"half-open flows", r.plane.HalfOpen, r.halfOpen}} {
		for number, bucket := range of.want {
			want, got := map[string]int{}, map[string]int{}
			for i, e := range bucket {
				if e.state != stateFree {
					want[fmt.Sprint(e.server, " ", e.state)]++
				}
				if e := dataplane.FlowEntry(of.table.Entries[number*dataplane.FlowsPerBucket+uint32(i)]); e != 0 {
					key := r.slots.Server(e.Server())
					got[fmt.Sprint(key.Service, "/", key.Server, " ", e.State())]++
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				fmt.Fprintf(&s, "bucket %d of %s (-want +got):\n%s", number, of.name, diff)
			}
		}
	}
	return s.String()
}
