// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// referenceReport is what the reference knows of the load of a server, and of its clock.
type referenceReport struct {
	load   uint32 // in 1/4096 connections per unit of capacity; 0: unknown
	age    uint64 // since the load was heard, in steps of time
	serial uint32 // of the last report of its own; serialKnown is set if there is one
	// clock is the server's clock in ticks, when this host's clock was at. clockKnown is set if the
	// clock is known.
	clock, at uint32
}

// referenceReports is what the reference knows by all reports of a service.
type referenceReports struct {
	mean   uint64   // of the loads, as those of the servers; 0: no report yet
	spares []string // servers that had free capacity, the last one that was heard first
}

// referenceLoads is the part of the reference about load reports.
type referenceLoads struct {
	servers  map[string]*referenceReport // by "service/server"
	services map[string]*referenceReports
	counts   map[string]uint64 // of results and of answered offers, by "service/server result"
	slots    map[string]uint32 // by "service/server"; those of the fixture
}

func newReferenceLoads() referenceLoads {
	return referenceLoads{
		servers: map[string]*referenceReport{}, services: map[string]*referenceReports{},
		counts: map[string]uint64{}, slots: map[string]uint32{},
	}
}

// reportOf returns what is known of a server. The caller may change it.
func (l *referenceLoads) reportOf(service, server string) *referenceReport {
	name := service + "/" + server
	if l.servers[name] == nil {
		l.servers[name] = &referenceReport{}
	}
	return l.servers[name]
}

// reportsOf returns what is known of a service. The caller may change it.
func (l *referenceLoads) reportsOf(service string) *referenceReports {
	if l.services[service] == nil {
		l.services[service] = &referenceReports{}
	}
	return l.services[service]
}

func (r *reference) count(service, server, result string) {
	r.loads.counts[service+"/"+server+" "+result]++
	r.results[result]++
}

// takeReport notes the report of a signal, and which server was offered the flow first.
func (r *reference) takeReport(h heard, svc *desired.Service, sender *desired.Server) {
	report, ok := reportIn(h)
	var first *desired.Server
	if h.flags&packet.SYN != 0 {
		first = r.firstOffered(h, svc, sender)
	}
	if first != nil {
		r.count(svc.Name, first.Name, "answered")
	}
	if !ok || !svc.OrdersByReports() || !r.noteReport(report, svc, sender) {
		return
	}
	if first == nil || first == sender || report.First.Load == 0 {
		return
	}
	r.noteLoad(svc, first, report.First.Load)
	r.count(svc.Name, first.Name, "relayed")
}

// reportIn returns the report of a signal. A segment with a function has none.
func reportIn(h heard) (report srv6.Report, ok bool) {
	if h.report>>48 != 0 {
		return report, false
	}
	return srv6.ParseReport(h.report)
}

// firstOffered returns the server that was offered the flow of a SYN-ACK first, or nil if it is not
// known. A report tells the server. Without reports, the order is that of the row.
func (r *reference) firstOffered(
	h heard, svc *desired.Service, sender *desired.Server,
) *desired.Server {
	if !svc.Placement.Method().ServersDecide || svc.Selection == desired.SelectRandom {
		return nil
	}
	if !svc.OrdersByReports() {
		return r.place(h.flow, svc)
	}
	report, ok := reportIn(h)
	row := r.row(svc, 0, r.bucket(h.flow, svc))
	switch {
	case !ok || report.IsFirst:
		return sender
	case report.First.Column == srv6.NoColumn || report.First.Column >= len(row):
		return nil
	}
	return serverOfName(svc, row[report.First.Column])
}

// noteReport notes a report of a server. It returns false if the report is refused.
func (r *reference) noteReport(
	report srv6.Report, svc *desired.Service, sender *desired.Server,
) bool {
	known := r.loads.reportOf(svc.Name, sender.Name)
	near, _ := r.isNear(known, report.Serial)
	switch {
	case !near:
		r.count(svc.Name, sender.Name, "unsynchronised")
		return false
	case known.serial&serialKnown != 0 && serialDifference(report.Serial, known.serial) <= 0:
		r.count(svc.Name, sender.Name, "old")
		return false
	}
	known.serial = serialKnown | report.Serial
	r.noteLoad(svc, sender, report.Load)
	result := "taken"
	if report.Load == 0 {
		result = "unknown_load"
	}
	r.count(svc.Name, sender.Name, result)
	return true
}

// noteLoad notes the load of a server, by the code of a report.
func (r *reference) noteLoad(svc *desired.Service, server *desired.Server, code uint8) {
	load := heardLoad(code)
	known, all := r.loads.reportOf(svc.Name, server.Name), r.loads.reportsOf(svc.Name)
	known.load, known.age = load, 0
	all.spares = without(all.spares, server.Name)
	if code != 0 && accept.Value(code) <= accept.ValueOfOne && r.takes(svc, server.Name) {
		all.spares = slices.Insert(all.spares, 0, server.Name)
		all.spares = all.spares[:min(4, len(all.spares))]
	}
	switch {
	case code == 0:
	default: // by 1/128 of the difference, rounded down
		all.mean += uint64((int64(load) - int64(all.mean)) >> 7)
	}
}

// takes tells whether a server gets new flows.
func (r *reference) takes(svc *desired.Service, server string) bool {
	isThis := func(s desired.Server) bool { return s.Name == server }
	return slices.ContainsFunc(r.usable(svc), isThis)
}

// serialDifference returns by how many ticks serial a is later than b, modulo 2^27.
func serialDifference(a, b uint32) int { return int(int32((a-b)<<5) >> 5) }

// The largest difference of a serial from the server's clock, in ticks: 2.1 s.
const nearTicks = 512

// isNear tells whether a serial is near a server's clock. The answer is certain if it does not
// depend on when the data path handles the frame: up to clockSlack from now.
func (r *reference) isNear(known *referenceReport, serial uint32) (near, certain bool) {
	if known.clock&clockKnown == 0 {
		return true, true
	}
	difference := serialDifference(serial, known.clock+ticks(r.t)-known.at)
	near = difference <= nearTicks && difference >= -nearTicks
	slack := int(clockSlack / srv6.ReportTick)
	return near, near == (difference-slack <= nearTicks && difference+slack >= -nearTicks) &&
		near == (difference+slack <= nearTicks && difference-slack >= -nearTicks)
}

// clockSlack is the longest time for which the reference may be ahead of the data path.
const clockSlack = 400 * time.Millisecond

// noteClock notes the clock of the server that has answered a probe. After a jump, and if the last
// report is ahead of the clock, the last report is no measure for the next one.
func (r *reference) noteClock(answer []byte) {
	clock := binary.BigEndian.Uint32(answer[12:])
	if clock&clockKnown == 0 {
		return
	}
	service, server := r.prober(answer)
	known := r.loads.reportOf(service, server)
	near, _ := r.isNear(known, clock)
	if !near || known.serial&serialKnown != 0 && serialDifference(known.serial, clock) > nearTicks {
		*known = referenceReport{}
	}
	known.clock, known.at = clock, ticks(r.t)
}

// prober returns the server to which a token belongs. The token is that of a probe.
func (r *reference) prober(answer []byte) (service, server string) {
	key := r.slots.Server(uint32(binary.NativeEndian.Uint64(answer) & 0xffff))
	return key.Service, key.Server
}

// dependsOnMoment tells whether the moment at which the data path handles a frame decides whether a
// serial in it is near a clock.
func (r *reference) dependsOnMoment(frame []byte) bool {
	if !r.isSignal(frame) || r.guards() {
		return false
	}
	if functionOf(frame) == srv6.Probe {
		answer, reason := r.answerIn(frame)
		if reason != "take_probe" {
			return false
		}
		service, server := r.prober(answer)
		clock := binary.BigEndian.Uint32(answer[12:])
		_, certain := r.isNear(r.loads.reportOf(service, server), clock)
		return !certain
	}
	h, ok := hear(frame[ethernetLength:])
	report, reports := reportIn(h)
	if !ok || !reports {
		return false
	}
	svc, sender := r.senderOf(h)
	if sender == nil {
		return false
	}
	_, certain := r.isNear(r.loads.reportOf(svc.Name, sender.Name), report.Serial)
	return !certain
}

// order returns the servers that a flow is offered to, if they are ordered by the loads that they
// have reported, and the spare server among them. The names are the servers of the row that get new
// flows.
func (r *reference) order(svc *desired.Service, names []string) (offered []string, spare string) {
	all := r.loads.reportsOf(svc.Name)
	loads := map[string]reportedLoad{}
	for _, name := range names {
		known := r.loads.reportOf(svc.Name, name)
		loads[name] = reportedLoad{known.load, known.age * timeStep}
	}
	offered = ordered(names, loads, all.mean, slowHalfLife)
	offered = offered[:min(3, len(offered))]
	if svc.Selection != desired.SelectSpare {
		return offered, ""
	}
	for _, name := range all.spares {
		if r.takes(svc, name) && r.reaches(name) && !slices.Contains(offered, name) {
			r.results["spare server"]++
			return append(offered[:min(2, len(offered))], name), name
		}
	}
	return offered, ""
}

// asking returns stages of an offer that ask for load reports. The spare server is asked as one in
// no column of the row.
func asking(all []stage, spare string) []stage {
	for i := range all {
		if !all[i].function.IsOffer() {
			continue
		}
		offer := srv6.ParseOffer(all[i].argument)
		offer.WantsReport = true
		if all[i].server == spare {
			offer.Column = srv6.NoColumn
		}
		all[i].argument = offer.Argument()
	}
	return all
}
