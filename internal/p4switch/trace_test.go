// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

func flowFrom(port uint16) dataplane.Flow {
	return dataplane.Flow{
		Protocol: desired.TCP, Source: netip.AddrPortFrom(netip.MustParseAddr("2001:db8:c::2"), port),
		Destination: netip.AddrPortFrom(vip, 80),
	}
}

// serversOf returns the slots of the servers of a course, and checks what they are asked.
func serversOf(t *testing.T, course []inspect.TracedSegment, function srv6.Function) (names []string) {
	t.Helper()
	for _, at := range course {
		names = append(names, at.Server)
		if at.Function != function.String() {
			t.Errorf("%s is asked %s, not %s", at.Server, at.Function, function)
		}
	}
	return names
}

func namesOf(slots []uint16) (names []string) {
	for _, slot := range slots {
		names = append(names, nameOf(slot))
	}
	return names
}

// A trace shows the list of servers from which the entries were made, for all kinds of packets.
func TestTrace(t *testing.T) {
	f := startFake(t)
	c := contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	testhost.Must(t, f.open(1).Sync(t.Context(), c))
	trace := func(p inspect.Packet) *Trace {
		t.Helper()
		p.Length = 80
		got := TracePacket(t.Context(), &desired.Switch{Address: f.address}, p, nameOf)
		if got.Problem != "" || len(got.Segments) != len(got.Course) {
			t.Fatalf("%+v", got)
		}
		return got
	}
	s := c.Services[0]
	l := lists{rows: s.Rows, sets: s.Sets, of: s.Servers, takesFlows: true}
	var several, single int
	for port := range uint16(64) {
		flow := flowFrom(port)
		bucket := flow.Bucket(s.BucketHash, &dataplane.TupleKeys{}, s.Buckets)
		offer := l.offer(bucket)
		if got := serversOf(t, trace(inspect.Packet{Flow: flow, Opens: true, Echo: new(uint32)}).Course, srv6.ConnectAvail); !slices.Equal(got, namesOf(offer.slots)) {
			t.Errorf("a SYN from port %d is offered to %v, not %v", port, got, namesOf(offer.slots))
		}
		if got := serversOf(t, trace(inspect.Packet{Flow: flow, Opens: true}).Course, srv6.ConnectForce); !slices.Equal(got, namesOf(offer.slots[:1])) {
			t.Errorf("a SYN without timestamps from port %d is offered to %v, not %v", port, got, offer.slots[:1])
		}
		for echo, column := range map[uint32]int{0: noColumn, 0xf0: 0, 0xf1: 1} {
			got := serversOf(t, trace(inspect.Packet{Flow: flow, Echo: &echo}).Course, srv6.Steer)
			want := l.visited(bucket, column)
			if !slices.Equal(got, namesOf(want)) {
				t.Errorf("a packet with the echo %#x from port %d visits %v, not %v", echo, port, got, namesOf(want))
			}
			if len(want) > 1 {
				several++
			} else {
				single++
			}
		}
	}
	if several == 0 || single == 0 {
		t.Errorf("%d packets visit several servers, and %d only one", several, single)
	}
}

// A trace shows each entry that the packet looks for, and why it passes to the host.
func TestTraceShowsEntries(t *testing.T) {
	f := startFake(t)
	c := contentOf(t, []uint16{1, 2})
	c.Servers[1].Hop.Port = 0
	testhost.Must(t, f.open(1).Sync(t.Context(), c))
	to := &desired.Switch{Address: f.address}
	reason := func(want string, change func(*inspect.Packet)) *Trace {
		t.Helper()
		p := inspect.Packet{Flow: flowFrom(1), Length: 80}
		change(&p)
		got := TracePacket(t.Context(), to, p, nameOf)
		if got.Reason != want || got.Problem != "" || !got.Forwards() && got.Course != nil {
			t.Errorf("want %s: %+v", want, got)
		}
		return got
	}
	reason("pass_protocol", func(p *inspect.Packet) { p.Flow.Protocol, p.Length = desired.UDP, 64 })
	reason("pass_no_service", func(p *inspect.Packet) { p.Flow.Protocol, p.Length = desired.UDP, 65 })
	reason("pass_no_service", func(p *inspect.Packet) { p.Flow.Destination = netip.AddrPortFrom(vip, 81) })
	reaches := func(slot uint16, p *inspect.Packet) {
		s := c.Services[0]
		for s.Rows.Candidates(p.Flow.Bucket(s.BucketHash, &dataplane.TupleKeys{}, s.Buckets), 0)[0] != slot {
			p.Flow.Source = netip.AddrPortFrom(p.Flow.Source.Addr(), p.Flow.Source.Port()+1)
		}
	}
	reason("pass_no_server", func(p *inspect.Packet) { reaches(2, p); p.Opens = true })
	reason("pass_too_big", func(p *inspect.Packet) { reaches(1, p); p.Echo, p.Length = new(uint32(2)), 1461 })
	fits := reason("forward_known", func(p *inspect.Packet) { reaches(1, p); p.Echo, p.Length = new(uint32(2)), 1460 })
	bucket := fits.Lookups[1].Key[2].Value
	if diff := cmp.Diff([]Lookup{
		{"services", []Field{{"vip", "2001:db8:80::1"}, {"protocol", "6"}, {"port", "80"}}, "set_service", []Field{
			{"number", "7"}, {"tables", "0"}, {"bucket_mask", "0xf0000000"}, {"candidates", "2"}, {"cookie_width", "1"},
			{"hunts", "1"}, {"has_hints", "0"}, {"encapsulation", "1"}}},
		{"columns", []Field{{"service", "7"}, {"tables", "0"}, {"bucket", bucket}, {"column", "0"}}, "go_to",
			[]Field{{"slot", "1 (s01)"}}},
		{"next_hops", []Field{{"slot", "1 (s01)"}}, "set_next_hop", []Field{
			{"port", "1"}, {"mac", "02:01:00:00:00:01"}, {"own_mac", "00:00:00:00:00:00"}, {"mtu", "1500"}}},
		{"server0.locators", []Field{{"slot", "1 (s01)"}}, "set_locator", []Field{{"locator", "fd00:5:0:1::/64"}}},
	}, fits.Lookups); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !regexp.MustCompile("^0x[0-9a-f]0000000$").MatchString(bucket) || fits.Segments[0] != netip.MustParseAddr("fd00:5:0:1:6:200::") {
		t.Errorf("bucket %s, segments %v", bucket, fits.Segments)
	}
	f.config.Cookie.Cookie++
	for _, want := range []string{"does not run the program of this build", "connect"} {
		if got := TracePacket(t.Context(), to, inspect.Packet{Flow: flowFrom(1)}, nameOf); got.Reason != "" || !strings.Contains(got.Problem, want) {
			t.Errorf("want the problem %q: %+v", want, got)
		}
		f.stop()
	}
}

// A packet of QUIC goes to the server that its connection ID names.
func TestTraceOfQUIC(t *testing.T) {
	f := startFake(t)
	c := contentOf(t, []uint16{1, 2})
	form := &desired.QUIC{Form: desired.QUICLB21, Rotation: 1, ServerIDLength: 2, NonceLength: 6}
	prefix, err := dataplane.QUICPrefixOf(9, form, []byte("s2"))
	testhost.Must(t, err)
	c.Services = append(c.Services, &Service{
		Service: &desired.Service{
			Name: "h3", VIP: vip, Port: 443, Protocol: desired.UDP, Placement: desired.PlacementHash,
			Persistence: desired.PersistenceQUIC, Encapsulation: desired.SRv6Encap, Candidates: 4, Buckets: 251, QUIC: form,
		},
		Number: 9, IDs: map[dataplane.QUICPrefix]uint32{prefix: 2}, Generation: 4,
	})
	s := f.open(1)
	testhost.Must(t, s.Sync(t.Context(), c))
	for id, want := range map[string]string{
		"\x28s2nonce0": "forward_known", "\x28s3nonce0": "pass_no_server_id", "\x48s2nonce0": "pass_no_server_id",
	} {
		p := inspect.Packet{Flow: flowFrom(1), Length: 100, ConnectionID: []byte(id)}
		p.Flow.Protocol, p.Flow.Destination = desired.UDP, netip.AddrPortFrom(vip, 443)
		got := TracePacket(t.Context(), &desired.Switch{Address: f.address}, p, nameOf)
		if got.Reason != want || got.Forwards() && serversOf(t, got.Course, srv6.Deliver)[0] != "s02" {
			t.Errorf("ID %q: %+v, want %s", id, got, want)
		}
	}
	if found := s.sums()[9]; found.entries != 2 || found != s.inForce[9].sum {
		t.Errorf("the sum of the IDs is %v, not %v", found, s.inForce[9].sum)
	}
}

// The reasons have the names and numbers of the program.
func TestReasonsAreThoseOfTheProgram(t *testing.T) {
	text, err := os.ReadFile("../../p4/core/headers.p4")
	testhost.Must(t, err)
	_, enum, _ := strings.Cut(string(text), "enum bit<8> reason_t {")
	enum, _, _ = strings.Cut(enum, "\n}")
	var names []string
	for i, match := range regexp.MustCompile(`(?m)^    ([A-Z_]+) = ([0-9]+)`).FindAllStringSubmatch(enum, -1) {
		names = append(names, strings.ToLower(match[1]))
		if match[2] != fmt.Sprint(i) {
			t.Errorf("%s has the number %s, not %d", match[1], match[2], i)
		}
	}
	if !slices.Equal(names, reasons[:]) {
		t.Errorf("the program has %v, not %v", names, reasons)
	}
}
