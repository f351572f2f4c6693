// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// In a table with the highest number of entries, 16,384 services and as many VIPs, all entries can
// be found, and the data path finds the same ones as this process.
func TestFullServiceTable(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s", 1, 1)))
	random := rand.New(rand.NewPCG(1, 2))
	first := f.plane.Services.All()
	entries := first
	for i := range uint32(16383) {
		vip := netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 8: byte(random.Uint32()), 9: byte(random.Uint32()), 14: byte(i >> 8), 15: byte(i)})
		entry := dataplane.ServiceKey(&desired.Service{VIP: vip, Port: desired.PortOf(uint16(random.IntN(1 << 16))), Protocol: desired.UDP})
		entry.Id = i + 1
		entries = append(entries, entry, dataplane.VIPKey(vip))
	}
	f.must(f.plane.Services.Replace(entries, f.plane.Settle))
	for _, entry := range entries {
		if got := f.plane.Services.Find(entry.Key()); got == nil || *got != entry {
			t.Fatalf("found %+v, want %+v", got, entry)
		}
	}
	if got := len(f.plane.Services.All()); got != len(entries) {
		t.Errorf("the table lists %d entries, want %d", got, len(entries))
	}
	absent := dataplane.VIPKey(netip.MustParseAddr("2001:db8::bad"))
	if got := f.plane.Services.Find(absent); got != nil {
		t.Errorf("found %+v, which nobody entered", got)
	}
	f.check(f.forwarded(frameOf(web), web, "web", "s", "forward_new"), f.run(frameOf(web)))
	// The second entries of lines get the rule of the service web. So a packet that finds another
	// entry of the line is not forwarded.
	serving := f.plane.Services.Find(first[slices.IndexFunc(first, func(e dataplane.ServiceEntry) bool { return e.IsService() })].Key())
	lines := &f.plane.Directory.Services[f.plane.Directory.Generation%2]
	for i := range lines {
		second := &lines[i].Entry[1]
		if second.Kind != serving.Kind || second.Id == serving.Id {
			continue
		}
		second.Id, second.Rule = serving.Id, serving.Rule
		flow := flowOf(second)
		if f.run(frameOf(flow)).Servers["web/s"].Packets != 1 {
			t.Fatalf("%v: another entry of the line is found", flow.Destination)
		}
	}
	for i := len(first); i < len(entries); i += 2 * 64 {
		flow := flowTo(vipOf(entries[i]), 7, desired.TCP)
		want := map[string]tally{"drop_no_service": {1, 60, 0}}
		if diff := cmp.Diff(want, f.run(frameOf(flow)).Reasons); diff != "" {
			t.Errorf("%v: (-want +got):\n%s", flow.Destination, diff)
		}
	}
	stranger := flowTo(vipOf(absent), 7, desired.TCP)
	f.check(refused(frameOf(stranger), "pass_not_vip", 60), f.run(frameOf(stranger)))
}

// A table that packets may still use is not changed. If the wait for these packets failed, the next
// change waits first.
func TestServiceTableWaits(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s", 1, 1)))
	table := f.plane.Services
	entries := table.All()
	waits, failure := 0, errors.New("no memory")
	wait := func() error { waits++; return failure }
	if err := table.Replace(entries[:1], wait); !errors.Is(err, failure) {
		t.Errorf("error: %v", err)
	}
	next := &f.plane.Directory.Services[(f.plane.Directory.Generation+1)%2]
	before := *next
	if err := table.Replace(entries, wait); !errors.Is(err, failure) || waits != 2 {
		t.Errorf("%d waits, error: %v", waits, err)
	}
	if *next != before {
		t.Error("a table was written that packets may see")
	}
	var first, second *ebpf.Map
	last := f.plane.Objects.Tables.MaxEntries() - 1
	f.must(f.plane.Settle())
	f.must(f.plane.Objects.Tables.Lookup(last, &first))
	defer first.Close()
	f.must(table.Replace(entries, f.plane.Settle))
	f.must(f.plane.Objects.Tables.Lookup(last, &second))
	defer second.Close()
	if idOf(t, first) == idOf(t, second) {
		t.Error("nothing was replaced that the kernel waits at")
	}
	f.check(f.forwarded(frameOf(web), web, "web", "s", "forward_new"), f.run(frameOf(web)))
}

func idOf(t *testing.T, m *ebpf.Map) ebpf.MapID {
	t.Helper()
	info, err := m.Info()
	testhost.Must(t, err)
	id, _ := info.ID()
	return id
}

// flowOf returns a flow to the service of an entry.
func flowOf(e *dataplane.ServiceEntry) dataplane.Flow {
	vip, port, protocol := e.Matches()
	return flowTo(vip, port.Number(), protocol)
}

func vipOf(e dataplane.ServiceEntry) netip.Addr {
	vip, _, _ := e.Matches()
	return vip
}
