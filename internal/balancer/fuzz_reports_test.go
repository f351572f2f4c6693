// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// slowHalfLife is the exponent of the half-life of reports in openReference: 2^21 jiffies are hours
// or days, of which a run takes no noticeable part. Instead, the reference makes time pass.
const slowHalfLife = 21

// timeStep is the unit of time that the reference makes pass, in jiffies: the 256th part of a
// half-life. That is the least difference of age that changes an estimate. It takes 8 s or more.
const timeStep = 1 << (slowHalfLife - 8)

// slowJiffy is a length of jiffies for which the data path has this half-life.
const slowJiffy = (139 << 20) >> slowHalfLife // ns

// The flows to the services of ordering.
var (
	reports = flowTo(vip6, 87, desired.TCP)
	short   = flowTo(vip4, 87, desired.TCP)
	spares  = flowTo(vip6, 88, desired.TCP)
)

// ordering returns services that order their candidates by load reports: one whose rows have eight
// servers, one that has the given number of servers, and one with spare servers. Each of them has a
// server of weight 0, one behind a link with a small MTU, and one without a next hop.
func ordering(servers uint8) []desired.Service {
	names := []string{"r0", "s1", "drained", "r3", "u", "r5", "r6", "r7", "r8", "r9"}
	all := func(count uint8) (all []desired.Server) {
		for i, name := range names[:count] {
			all = append(all, srv6Server(name, 60+uint8(i), 1))
		}
		*all[2].Weight = 0
		return all
	}
	of := func(name string, at netip.AddrPort, kind desired.Encapsulation, count uint8) desired.Service {
		return serviceOf(name, at.Addr(), desired.Port(at.Port()), desired.TCP, kind, all(count)...)
	}
	eight := of("reports", reports.Destination, desired.SRv6Insert, 10)
	fewer := of("short", short.Destination, desired.SRv6Encap, servers)
	spare := of("spares", spares.Destination, desired.SRv6Encap, 9)
	return []desired.Service{
		huntingOf(eight, desired.SelectReports, 8), huntingOf(fewer, desired.SelectReports, 8),
		huntingOf(spare, desired.SelectSpare, 4),
	}
}

// shortenRows removes servers of the service "short". Its table still has the rows of the former
// servers, so the present rows do not fill their places.
func shortenRows(f *fixture, cfg *desired.Balancer) {
	services := ordering(6)
	cfg.Services = append(services, cfg.Services[len(services):]...)
	f.mustApply(cfg)
	for slot, name := range probedServers {
		svc := services[0].Name
		if got := f.slot(svc, name); got != uint32(slot) {
			f.t.Fatalf("server %s of %s has slot %d, want %d", name, svc, got, slot)
		}
		f.setProbe(probeToken | uint64(slot))
	}
	if got := f.plane.Constants["report_half_life_shift"].(uint32); got != slowHalfLife {
		f.t.Fatalf("the half-life of reports is 2^%d jiffies, want 2^%d", got, slowHalfLife)
	}
}

// probedServers are servers of the service "reports" that have been sent a probe.
var probedServers = []string{"r0", "s1", "drained", "r3"}

// serialBase is the serial before the serials of most captures.
const serialBase = 100_000

// teller makes signals with reports to a service.
type teller struct {
	flow   dataplane.Flow
	kind   desired.Encapsulation
	frames [][]byte
}

// tell adds a signal from the server of a number.
func (c *teller) tell(number uint8, function srv6.Function, flags packet.TCPFlags, r srv6.Report) {
	sender := srv6Server("", 60+number, 1).Locator
	frame := signal(c.kind, sender, c.flow, function, packet.Flags(flags))
	c.frames = append(c.frames, withReport(frame, c.kind, r.Argument()))
}

// answer adds a SYN-ACK from the server of a number.
func (c *teller) answer(number uint8, r srv6.Report) {
	c.tell(number, srv6.CreateStickiness, packet.SYN|packet.ACK, r)
}

// tellAll adds a signal for each exit of the steps that note a report.
func (c *teller) tellAll() {
	serial := uint32(serialBase)
	none := srv6.FirstCandidate{Column: srv6.NoColumn}
	for number, code := range []uint8{8, 16, 17, 30, 5, 0, 60, 255, 1} {
		serial++
		first := srv6.FirstCandidate{Column: number % 8, Load: uint8(5 * number)}
		c.answer(uint8(number), srv6.Report{Serial: serial, Load: code, First: first})
	}
	serial++
	relayed := srv6.FirstCandidate{Column: 1, Load: 9}
	c.answer(1, srv6.Report{Serial: serial, Load: 12, IsFirst: true})
	c.answer(2, srv6.Report{Serial: serial, Load: 12, First: none})
	late := srv6.Report{Serial: serial, Load: 40, First: relayed}
	c.tell(3, srv6.CreateStickiness, packet.ACK, late)
	end := srv6.Report{Serial: serial, Load: 3, First: none}
	c.tell(3, srv6.RemoveStickiness, packet.FIN|packet.ACK, end)
	c.answer(0, srv6.Report{Serial: serialBase - 400, Load: 20, IsFirst: true})
	c.answer(0, srv6.Report{Serial: serialBase + 5000, Load: 20, IsFirst: true})
	sender := srv6Server("", 60, 1).Locator
	c.frames = append(c.frames, signal(c.kind, sender, c.flow, srv6.CreateStickiness, synAck))
}

// reportCaptures returns frames for each step of the data path with load reports.
func reportCaptures() (frames [][]byte) {
	for _, flow := range []dataplane.Flow{reports, short, spares} {
		for port := range uint16(3) {
			frames = append(frames, frameOf(fromPort(flow, port)),
				frameOf(fromPort(flow, port), packet.Payload(make([]byte, 1340))))
		}
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK, packet.FIN | packet.ACK} {
			frames = append(frames, frameOf(flow, packet.Flags(flags)))
		}
		c := teller{flow: flow, kind: desired.SRv6Encap}
		if flow == reports {
			c.kind = desired.SRv6Insert
		}
		c.tellAll()
		frames = append(frames, c.frames...)
	}
	server := netip.MustParseAddr("fd00:5:0:60::")
	for slot := range probedServers {
		for _, clock := range []uint32{0, serialBase + 20, serialBase + 6000} {
			token := probeToken | uint64(slot)
			frame := packet.ProbeAnswer(server, node().Locator.Addr(), token, 1, 1)
			binary.BigEndian.PutUint32(frame[len(frame)-4:], clock|clockKnown)
			frames = append(frames, frame)
		}
	}
	return frames
}

// vary gives the servers random states and loads, in the data path and in the reference, so that
// few frames meet many states. The states follow from the frames.
func (r *reference) vary(frames [][]byte) {
	r.t.Helper()
	random := rand.New(rand.NewPCG(uint64(crc32.ChecksumIEEE(slices.Concat(frames...))), 0))
	r.varyQUIC(random)
	r.clearLoads()
	r.varyColumns(random)
	r.varyTabled(random)
	for i := range r.cfg.Services {
		svc := &r.cfg.Services[i]
		if !svc.OrdersByReports() || random.IntN(4) == 0 {
			continue
		}
		all := r.loads.reportsOf(svc.Name)
		all.mean = uint64(heardLoad(uint8(1 + random.IntN(60))))
		for _, s := range svc.Servers {
			r.varyServer(random, r.loads.reportOf(svc.Name, s.Name))
			if random.IntN(3) == 0 && len(all.spares) < 4 {
				all.spares = append(all.spares, s.Name)
			}
		}
		r.writeLoads(svc)
	}
}

// varyTabled makes servers of some services fail, or drains them. It enters flows of those services
// that have a flow table.
func (r *reference) varyTabled(random *rand.Rand) {
	for _, flow := range []dataplane.Flow{web, web4, dns, dns4, hunt, hunt4, turns, dnsTurns} {
		svc := r.classify(flow)
		if svc == nil {
			continue // the balancer is not that of openReference
		}
		harm := random.IntN(4) // 0: servers fail; 1: they are drained
		for i := range svc.Servers {
			isHit := random.IntN(3) == 0
			r.fail(svc, svc.Servers[i].Name, harm == 0 && isHit)
			r.drain(svc, i, harm == 1 && isHit)
		}
		if svc.FindsByColumn() {
			continue
		}
		for port := range uint16(3) {
			if random.IntN(3) == 0 {
				r.enterAny(random, fromPort(flow, port), svc)
			}
		}
		if random.IntN(3) == 0 {
			r.enterAny(random, flow, svc)
		}
	}
}

// drain drains a server without another candidate table, or ends that.
func (r *reference) drain(svc *desired.Service, server int, drained bool) {
	s := &svc.Servers[server]
	if s.Drained != drained {
		s.Drained = drained
		r.services.byName[svc.Name].member(s.Name).Drained = drained
		r.services.admit(r.services.byName[svc.Name])
	}
}

func (r *reference) varyServer(random *rand.Rand, known *referenceReport) {
	if random.IntN(5) > 0 {
		known.load = heardLoad(uint8(random.IntN(60)))
		known.age = uint64(random.IntN(4 << 8))
	}
	if random.IntN(8) == 0 {
		known.age = uint64(39<<8 + random.IntN(2<<8)) // it has no weight, or will soon have none
	}
	if random.IntN(2) == 0 {
		known.serial = serialKnown | uint32(serialBase-50+random.IntN(100))
	}
	if random.IntN(2) == 0 {
		known.clock, known.at = clockKnown|serialBase, ticks(r.t)
	}
}

// clearLoads removes all loads from the tables of the data path.
func (r *reference) clearLoads() {
	r.loads.slots = map[string]uint32{}
	for slot, key := range r.slots.All() {
		r.storeReport(slot, storedReport{})
		if !r.slots.IsRetired(slot) {
			r.loads.slots[key.Service+"/"+key.Server] = slot
		}
	}
	for _, svc := range r.cfg.Services {
		r.must(r.plane.ForgetReports(r.services.byName[svc.Name].id))
	}
}

// writeLoads writes what the reference knows of the loads of a service into the tables of the data
// path.
func (r *reference) writeLoads(svc *desired.Service) {
	now := r.jiffies()
	for _, s := range svc.Servers {
		known := r.loads.reportOf(svc.Name, s.Name)
		at := (now - known.age*timeStep) & math.MaxUint32
		stored := storedReport{Heard: uint64(known.load)<<32 | at, Serial: known.serial}
		if known.clock&clockKnown != 0 {
			stored.Clock = clockKnown | (known.clock-known.at)&serialMask
		}
		r.storeReport(r.loads.slots[svc.Name+"/"+s.Name], stored)
	}
	all := r.loads.reportsOf(svc.Name)
	stored := serviceReports{all.mean, r.spareSlots(svc, all.spares)}
	r.must(r.plane.Objects.ServiceReports.Put(r.services.byName[svc.Name].id, &stored))
}

// spareSlots returns servers as the data path stores them.
func (r *reference) spareSlots(svc *desired.Service, names []string) (slots uint64) {
	for i, name := range names {
		slots |= uint64(r.loads.slots[svc.Name+"/"+name]^dataplane.NoServer) << (16 * i)
	}
	return slots
}

// pass makes time pass after a frame: less than a half-life of a report, and sometimes so much that
// the hint table is swept. The time follows from the frame. The argument took is how long the
// reference and the data path took for the frame.
func (r *reference) pass(frame []byte, took time.Duration) {
	r.slowest = max(r.slowest, took)
	sum := crc32.ChecksumIEEE(frame)
	if sum>>8%16 == 0 {
		r.plane.Hints.Sweep()
		r.sweepHints()
	}
	steps := uint64(sum % 200)
	for name, known := range r.loads.servers {
		known.age += steps
		report := r.reportOf(r.loads.slots[name])
		at := uint32(report.Heard) - uint32(steps*timeStep)
		report.Heard = report.Heard&^math.MaxUint32 | uint64(at)
	}
}

// explainLoads describes the differences between the loads that the data path knows and those that
// the reference knows.
func (r *reference) explainLoads() string {
	var s strings.Builder
	now, clock := uint32(r.jiffies()), ticks(r.t)
	for i := range r.cfg.Services {
		svc := &r.cfg.Services[i]
		all := r.loads.reportsOf(svc.Name)
		got, want := serviceReports{}, serviceReports{all.mean, r.spareSlots(svc, all.spares)}
		r.must(r.plane.Objects.ServiceReports.Lookup(r.services.byName[svc.Name].id, &got))
		if got != want {
			fmt.Fprintf(&s, "service %s has the loads %x, want %x\n", svc.Name, got, want)
		}
		for _, server := range svc.Servers {
			name := svc.Name + "/" + server.Name
			stored, known := r.report(r.loads.slots[name]), r.loads.reportOf(svc.Name, server.Name)
			s.WriteString(known.explain(name, stored, now))
			s.WriteString(known.explainClock(name, stored.Clock, clock))
		}
	}
	return s.String()
}

// explain compares the load and the serial of a server with the stored ones. The argument now is
// the present time in jiffies.
func (known *referenceReport) explain(name string, stored storedReport, now uint32) string {
	got := referenceReport{load: stored.load(), serial: stored.Serial}
	want := referenceReport{load: known.load, serial: known.serial}
	if known.load != 0 {
		got.age, want.age = uint64(now-uint32(stored.Heard))/timeStep, known.age
	}
	if got == want {
		return ""
	}
	return fmt.Sprintf("the load of %s is %+v, want %+v\n", name, got, want)
}

// explainClock compares the clock of a server with the stored one. The argument now is the clock of
// this host.
func (known *referenceReport) explainClock(name string, stored, now uint32) string {
	want := known.clock + now - known.at
	late := serialDifference(want, stored+now)
	isSame := late >= 0 && late <= int(clockSlack/srv6.ReportTick)
	if known.clock&clockKnown == stored&clockKnown && (stored == 0 || isSame) {
		return ""
	}
	return fmt.Sprintf("the clock of %s is %#x, want %#x\n", name, stored+now, want)
}

// resultNames is enum report_result of bpf/balancer/signal/reports.h.
var resultNames = []string{"taken", "unknown_load", "old", "unsynchronised", "relayed"}

// loadCounts returns the counters of the data path that newReferenceLoads has in counts.
func (f *fixture) loadCounts() map[string]uint64 {
	f.t.Helper()
	counts := map[string]uint64{}
	results := lookupAll[[5]uint64](f, f.plane.Objects.ReportCounters)
	answered := lookupAll[uint64](f, f.plane.Objects.AnsweredOffers)
	for slot, key := range f.slots.All() {
		name := key.Service + "/" + key.Server + " "
		for _, core := range results(slot) {
			for i, result := range resultNames {
				counts[name+result] += core[i]
			}
		}
		for _, core := range answered(slot) {
			counts[name+"answered"] += core
		}
	}
	return counts
}

// explainLoadCounts describes the differences between these counters and those of the reference.
// The argument before has the counters from before the frames.
func (r *reference) explainLoadCounts(before map[string]uint64) string {
	var s strings.Builder
	for name, count := range r.loadCounts() {
		if got, want := count-before[name], r.loads.counts[name]; got != want {
			fmt.Fprintf(&s, "%d reports are counted as %s, want %d\n", got, name, want)
		}
	}
	return s.String()
}
