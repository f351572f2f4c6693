// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// storedReport is struct report of bpf/balancer/types.h.
type storedReport struct {
	Heard         uint64
	Serial, Clock uint32
}

const (
	serialMask  = 1<<27 - 1
	serialKnown = 1 << 31
	clockKnown  = 1 << 31
)

// ownReport is what is known by a report that a server has sent itself.
func ownReport(serial uint32, code uint8, when uint64) storedReport {
	return storedReport{Heard: uint64(heardLoad(code))<<32 | when&math.MaxUint32, Serial: serialKnown | serial}
}

// heardLoad is a load in 1/4096 connections per unit of capacity, as it is stored.
func heardLoad(code uint8) uint32 { return accept.Value(code) << 8 }

func (r storedReport) load() uint32 { return uint32(r.Heard >> 32) }

// ticks returns this host's clock as the serial of a report.
func ticks(t testing.TB) uint32 {
	t.Helper()
	var now unix.Timespec
	testhost.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	return uint32(now.Nano()>>22) & serialMask
}

// jiffies returns the clock by which the age of reports is counted.
func (f *fixture) jiffies() (jiffies uint64) {
	f.t.Helper()
	_, err := f.plane.Objects.ReadJiffies.Run(&ebpf.RunOptions{Context: uint64(0), ContextOut: &jiffies})
	f.must(err)
	return jiffies
}

func (f *fixture) storeReport(slot uint32, r storedReport) {
	f.t.Helper()
	*f.reportOf(slot) = r
}

func (f *fixture) report(slot uint32) (r storedReport) {
	f.t.Helper()
	return *f.reportOf(slot)
}

// reportOf returns where the data path stores the report.
func (f *fixture) reportOf(slot uint32) *storedReport {
	return (*storedReport)(unsafe.Pointer(&f.plane.Directory.Reports[slot]))
}

// serviceReports is struct service_reports.
type serviceReports struct{ Mean, Spares uint64 }

func (f *fixture) serviceReports(flow dataplane.Flow) (r serviceReports) {
	f.t.Helper()
	f.must(f.plane.Objects.ServiceReports.Lookup(f.serviceID(flow), &r))
	return r
}

// reportedLoad is what a balancer knows of a server's load.
type reportedLoad struct {
	load uint32 // in 1/4096 connections per unit of capacity; 0: unknown
	age  uint64 // in jiffies
}

// estimate returns the load that a balancer assumes for the candidate at a place of its row, in
// 1/4096 connections per unit of capacity (docs/understand/protocol.md does not prescribe it).
func (r reportedLoad) estimate(place int, mean uint64, shift uint32) uint64 {
	value := int64(r.load)
	if value == 0 {
		return map[bool]uint64{true: 0, false: 507904 << 8}[place == 0]
	}
	age := min(r.age<<8>>shift, 40<<8) // in 1/256 half-lives
	return uint64(int64(mean) + (value-int64(mean))*int64(512-age&0xff)>>(9+age>>8))
}

// ordered returns the servers of a row in the order of their estimates.
func ordered(row []string, loads map[string]reportedLoad, mean uint64, shift uint32) []string {
	out := slices.Clone(row)
	slices.SortStableFunc(out, func(a, b string) int {
		return cmp.Compare(loads[a].estimate(slices.Index(row, a), mean, shift),
			loads[b].estimate(slices.Index(row, b), mean, shift))
	})
	return out
}

// withReport returns the frame of a signal with a report.
func withReport(frame []byte, kind desired.Encapsulation, report uint64) []byte {
	at := ethernetLength + 8 + 8 // the second half of the source
	if kind == desired.SRv6Insert {
		at = ethernetLength + 40 + 8 + 2*16 + 8 // of the list's last entry
	}
	out := slices.Clone(frame)
	binary.BigEndian.PutUint64(out[at:], report)
	return out
}

// reportFrame returns a SYN-ACK of a server with a report.
func (f *fixture) reportFrame(service string, flow dataplane.Flow, server string, report srv6.Report) []byte {
	kind := f.service(service).Encapsulation
	frame := signal(kind, f.locatorOf(service, server), flow, srv6.CreateStickiness, packet.Flags(packet.SYN|packet.ACK))
	return withReport(frame, kind, report.Argument())
}

// reportCounts returns the numbers of a server's reports by their result.
func (f *fixture) reportCounts(slot uint32) map[string]uint64 {
	f.t.Helper()
	tables, err := f.plane.Reader()
	f.must(err)
	defer tables.Close()
	counts, err := tables.ReportCounts(slot)
	f.must(err)
	return counts
}

// A report is noted if it is newer than the server's last one, and near its clock. Whether it is
// noted or not, the signal counts.
func TestReportsAreNoted(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectReports, 8))
	for service, flow := range hunted {
		server := f.row(flow, service)[2]
		slot := f.slot(service, server)
		const base = 1000
		for _, c := range []struct {
			name   string
			before storedReport
			serial uint32
			code   uint8
			result string
		}{
			{"the first one", storedReport{}, base, 20, "taken"},
			{"a newer one", ownReport(base, 0, 0), base + 1, 20, "taken"},
			{"of the same moment", ownReport(base, 0, 0), base, 20, "old"},
			{"an older one", ownReport(base, 0, 0), base - 1, 20, "old"},
			{"half a cycle later", ownReport(base, 0, 0), base + 1<<26, 20, "old"},
			{"behind the end of the cycle", ownReport(serialMask, 0, 0), 2, 20, "taken"},
			{"before the end of the cycle", ownReport(2, 0, 0), serialMask, 20, "old"},
			{"of an unknown load", ownReport(base, 0, 0), base + 1, 0, "unknown_load"},
		} {
			t.Run(service+"/"+c.name, func(t *testing.T) {
				f.t = t
				f.storeReport(slot, c.before)
				before, all := f.reportCounts(slot), f.serviceReports(flow)
				frame := f.reportFrame(service, flow, server, srv6.Report{Serial: c.serial, Load: c.code, IsFirst: true})
				from := f.jiffies()
				f.check(f.returned(frame, "return_create"), f.run(frame))
				f.forgetFlows()
				after := f.reportCounts(slot)
				for name, n := range after {
					if got := n - before[name]; (got == 1) != (name == c.result) {
						t.Errorf("%d more reports are %s, want one %s", got, name, c.result)
					}
				}
				got := f.report(slot)
				if c.result == "old" {
					if got != c.before || f.serviceReports(flow) != all {
						t.Errorf("an old report changed %+v to %+v", c.before, got)
					}
					return
				}
				if got.Serial != serialKnown|c.serial || got.load() != heardLoad(c.code) ||
					uint64(uint32(got.Heard)-uint32(from)) > f.jiffies()-from {
					t.Errorf("noted %+v", got)
				}
				mean := all.Mean
				if c.code != 0 {
					mean += uint64((int64(heardLoad(c.code)) - int64(mean)) >> 7)
				}
				if got := f.serviceReports(flow).Mean; got != mean {
					t.Errorf("the mean is %d, want %d", got, mean)
				}
			})
		}
	}
}

// A report must be near the server's clock, which the balancer knows by a probe.
func TestReportsAreOfNow(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectReports, 8))
	service, flow := "insert", insert
	server := f.row(flow, service)[0]
	slot := f.slot(service, server)
	const ahead = 5_000_000 // of the server's clock, in ticks
	before := ticks(t)
	f.probeClock(slot, 1<<31|(before+ahead)&serialMask)
	passed := (ticks(t) - before) & serialMask
	if got := f.report(slot).Clock; got&clockKnown == 0 || (ahead-got)&serialMask > passed {
		t.Fatalf("the clock is %#x", got)
	}
	// Ticks pass during the test: 200 of them are 0.8 s.
	for offset, result := range map[int]string{
		0: "taken", -300: "taken", 300: "taken", -713: "unsynchronised", 1500: "unsynchronised",
		-ahead: "unsynchronised", 1 << 26: "unsynchronised",
	} {
		f.storeReport(slot, storedReport{Clock: f.report(slot).Clock})
		before := f.reportCounts(slot)[result]
		serial := uint32(int(ticks(t))+ahead+offset) & serialMask
		frame := f.reportFrame(service, flow, server, srv6.Report{Serial: serial, Load: 9, IsFirst: true})
		f.check(f.returned(frame, "return_create"), f.run(frame))
		f.forgetFlows()
		if got := f.reportCounts(slot)[result]; got != before+1 {
			t.Errorf("%d ticks from the clock: %v, want one more %s", offset, f.reportCounts(slot), result)
		}
		if noted := f.report(slot).Serial != 0; noted != (result == "taken") {
			t.Errorf("%d ticks from the clock: noted %v", offset, noted)
		}
	}
	// A small correction of the clock keeps the last report. After a restart of the server, it is
	// no measure for the next one.
	last := ownReport(7, 20, 1000)
	requireLast := func(when string, want storedReport) {
		t.Helper()
		if got := f.report(slot); got.Heard != want.Heard || got.Serial != want.Serial || got.Clock == 0 {
			t.Errorf("after %s: %+v, want %+v and a clock", when, got, want)
		}
	}
	f.storeReport(slot, storedReport{last.Heard, last.Serial, f.report(slot).Clock})
	f.probeClock(slot, 1<<31|(ticks(t)+ahead+100)&serialMask)
	requireLast("a small correction", last)
	f.probeClock(slot, 0)
	requireLast("an answer without a clock", last)
	f.probeClock(slot, 1<<31|10)
	requireLast("a restart", storedReport{})
	// A report that came before the first answer may be of another clock. If it is ahead, it would
	// keep newer ones out.
	for _, c := range []struct {
		name   string
		serial uint32
		kept   bool
	}{{"an earlier report", 10, true}, {"a later report", 2000, false}} {
		early := ownReport(c.serial, 20, 1000)
		f.storeReport(slot, early)
		f.probeClock(slot, 1<<31|1000)
		if !c.kept {
			early = storedReport{}
		}
		requireLast("the first answer behind "+c.name, early)
	}
}

// probeClock lets the agent of a slot's server answer a probe with a clock.
func (f *fixture) probeClock(slot uint32, clock uint32) {
	f.t.Helper()
	token := 0x123456789abc0000 | uint64(slot)
	f.setProbe(token)
	answer := f.answerTo(token)
	binary.BigEndian.PutUint32(answer[len(answer)-4:], clock)
	f.check(refused(answer, "take_probe", layer3(answer)), f.run(answer))
}

// Reports that are forged, from strangers, or with a key that has expired change nothing, and so do
// reports to services that do not order candidates. A tag covers the report.
func TestForgedReports(t *testing.T) {
	t.Parallel()
	cfg := hunting(desired.SelectReports, 8)
	cfg.Node.SignalKey = keyFile(t, newKey)
	f := open(t, cfg)
	for service, flow := range hunted {
		kind, row := f.service(service).Encapsulation, f.row(flow, service)
		report := srv6.Report{Serial: 1000, Load: 5, First: srv6.FirstCandidate{Column: 3, Load: 7}}
		frame := f.reportFrame(service, flow, row[0], report)
		good := taggedReport(frame, newKey, report.Argument())
		other := report
		other.Load = 1
		stranger := signal(kind, srv6Server("", 99, 1).Locator, flow, srv6.CreateStickiness)
		for _, c := range []struct {
			name   string
			frame  []byte
			reason string
		}{
			{"untagged", frame, "drop_tag"},
			{"with an expired key", taggedReport(frame, oldKey, report.Argument()), "drop_tag"},
			{"with another load", withReport(good, kind, other.Argument()), "drop_tag"},
			{"with a tag that does not cover it", withReport(tagged(signal(kind, f.locatorOf(service, row[0]), flow,
				srv6.CreateStickiness, packet.Flags(packet.SYN|packet.ACK)), newKey), kind, report.Argument()), "drop_tag"},
			{"removed from its signal", withReport(good, kind, 0), "drop_tag"},
			{"of a stranger", taggedReport(withReport(stranger, kind, report.Argument()), newKey, report.Argument()), "drop_sender"},
		} {
			t.Run(service+"/"+c.name, func(t *testing.T) {
				f.t = t
				f.check(refused(c.frame, c.reason, layer3(c.frame)), f.run(c.frame))
				for _, server := range row {
					if got := f.report(f.slot(service, server)); got != (storedReport{}) {
						t.Errorf("%s: noted %+v", server, got)
					}
				}
				if got := f.serviceReports(flow); got != (serviceReports{}) {
					t.Errorf("the service has %+v", got)
				}
			})
		}
		f.t = t
		f.check(f.returned(good, "return_create"), f.run(good))
		if got := f.report(f.slot(service, row[0])); got.Serial != serialKnown|1000 || got.load() != heardLoad(5) {
			t.Errorf("%s: the genuine report is noted as %+v", service, got)
		}
	}
}

// The half-life of a report is the power of two in jiffies that is nearest to 139 ms.
func TestReportHalfLife(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectReports, 8))
	jiffy := f.clock.Jiffy
	halfLife := jiffy << f.plane.Constants["report_half_life_shift"].(uint32)
	if halfLife < 98*time.Millisecond || halfLife > 197*time.Millisecond {
		t.Errorf("%v, with jiffies of %v", halfLife, jiffy)
	}
}
