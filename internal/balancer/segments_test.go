// SPDX-License-Identifier: Apache-2.0

package balancer

//go:generate go tool bpf2go -target bpfel segments ../../bpf/test/segments.bpf.c -- -I../../bpf

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/needs"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// maxSegments is MAX_SEGMENTS in bpf/balancer/types.h.
const maxSegments = 10

// Segment lists of all lengths equal those of the reference, byte by byte, in both SRv6
// encapsulations, whole and reduced. For two servers they have 72, 64 and 80 bytes.
func TestSegmentLists(t *testing.T) {
	t.Parallel()
	needs.BPF(t)
	var objects struct {
		segmentsObjects
		Directory *ebpf.Map `ebpf:"directory"`
	}
	spec, err := loadSegments()
	if err != nil {
		t.Fatal(err)
	}
	dataplane.NameDirectory(spec)
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		t.Fatalf("%+v", err)
	}
	defer objects.Close()
	defer objects.Directory.Close()
	mapped, err := dataplane.MapDirectory(objects.Directory, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	defer mapped.Close()
	path := fillServers(mapped)
	for _, version := range []int{4, 6} {
		flow := map[int]dataplane.Flow{4: web4, 6: web}[version]
		for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
			number := dataplane.RuleOf(&desired.Service{Encapsulation: kind}).Encapsulation
			if kind == desired.SRv6Insert && version == 4 {
				continue
			}
			for n := 1; n <= maxSegments; n++ {
				for shape, options := range shapes(version) {
					for _, whole := range []bool{false, true} {
						t.Run(fmt.Sprintf("%s/IPv%d/%d/%s/whole %t", kind, version, n, shape, whole), func(t *testing.T) {
							frame := frameOf(flow, options...)
							last := srv6.Parse(path[n-1])
							last.Function = srv6.ConnectForce
							want, err := packet.Encapsulate(frame, packet.Encap{
								Kind: kind, Sender: node().Locator.Addr(), FlowLabel: 0x12345, Whole: whole,
								Segments: append(path[:n-1:n-1], last.Addr()),
								Own:      packet.MAC{2, 0, 0, 0, 1, 1}, NextHop: packet.MAC{2, 0, 0, 0, 1, 2},
							})
							if err != nil {
								t.Fatal(err)
							}
							got := runSegments(t, &objects.segmentsObjects, number, n, whole, frame)
							if diff := cmp.Diff(want, got); diff != "" {
								t.Errorf("(-want +got):\n%s", diff)
							}
							if overhead := overheadOf(kind, n, whole); len(got)-len(frame) != overhead {
								t.Errorf("%d bytes added, want %d", len(got)-len(frame), overhead)
							}
							if err := packet.Verify(got); err != nil {
								t.Error(err)
							}
						})
					}
				}
			}
		}
	}
}

// overheadOf returns the length of the headers for n servers, in bytes (bpf/balancer/encap.h). With
// whole, an encapsulation keeps the whole list, as for offers.
func overheadOf(kind desired.Encapsulation, n int, whole bool) int {
	switch {
	case kind == desired.SRv6Insert:
		return 8 + 16*(n+2)
	case n > 1 && whole:
		return 40 + 8 + 16*n
	case n > 1:
		return 40 + 8 + 16*(n-1)
	}
	return 40
}

// testColumns are the columns of the servers, as bpf/balancer/segments.h has them: four bits for each
// server, those of the first one lowest. The sixth server has none. Offers have at most eight servers,
// so the others have the bits 0.
const testColumns uint32 = 0xec1a0864

// fillServers writes the servers. It returns their SIDs for connect-avail with their columns, in
// the order of travel.
func fillServers(mapped *dataplane.Directory) (path []netip.Addr) {
	for i := range maxSegments {
		locator := srv6Server("", uint8(i+1), 1).Locator
		column := uint64(testColumns >> (4 * i) & 0xf)
		path = append(path, srv6.SID{Locator: locator, Function: srv6.ConnectAvail, Argument: column << 44}.Addr())
		server := &mapped.Servers[i]
		server.NextHop = wordOf(packet.MAC{2, 0, 0, 0, 1, 2})
		server.Address.In6U.U6Addr8 = locator.Addr().As16()
		server.Source.In6U.U6Addr8 = node().Locator.Addr().As16()
	}
	return path
}

func runSegments(t *testing.T, objects *segmentsObjects, kind uint8, n int, whole bool, frame []byte) []byte {
	t.Helper()
	if err := objects.SegmentCount.Set(uint32(n)); err != nil {
		t.Fatal(err)
	}
	if err := objects.Encapsulation.Set(uint32(kind)); err != nil {
		t.Fatal(err)
	}
	if err := objects.KeepsWhole.Set(whole); err != nil {
		t.Fatal(err)
	}
	if err := objects.Columns.Set(testColumns); err != nil {
		t.Fatal(err)
	}
	run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)}
	verdict, err := objects.XdpSegments.Run(&run)
	if err != nil || verdict != verdictTX {
		t.Fatalf("verdict %d, %v", verdict, err)
	}
	return run.DataOut
}
