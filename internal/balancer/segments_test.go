// SPDX-License-Identifier: Apache-2.0

package balancer

//go:generate go tool bpf2go -target bpfel segments ../../bpf/test/segments.bpf.c -- -I../../bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// fewSegments is FEW_SEGMENTS in bpf/balancer/types.h.
const fewSegments = 6

// listWriter is the test's program, which encapsulates packets for the first servers of the table.
type listWriter struct {
	t       *testing.T
	objects segmentsObjects
	path    []netip.Addr // SIDs of the servers for connect-avail with their columns, in the order of travel
}

func openListWriter(t *testing.T) *listWriter {
	t.Helper()
	testhost.NeedBPF(t)
	var objects struct {
		segmentsObjects
		Directory *ebpf.Map `ebpf:"directory"`
	}
	spec, err := loadSegments()
	testhost.Must(t, err)
	dataplane.NameDirectory(spec)
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { objects.Close() })
	defer objects.Directory.Close()
	mapped, err := dataplane.MapDirectory(objects.Directory, unix.PROT_READ|unix.PROT_WRITE)
	testhost.Must(t, err)
	defer mapped.Close()
	return &listWriter{t: t, objects: objects.segmentsObjects, path: fillServers(mapped)}
}

// want returns the frame, encapsulated for the servers of the path: the last one has to accept.
func (w *listWriter) want(frame []byte, kind desired.Encapsulation, whole bool, path []netip.Addr) []byte {
	w.t.Helper()
	n := len(path)
	last := srv6.Parse(path[n-1])
	last.Function = srv6.ConnectForce
	sent, err := packet.Encapsulate(frame, packet.Encap{
		Kind: kind, Sender: node().Locator.Addr(), FlowLabel: 0x12345, Whole: whole,
		Segments: append(path[:n-1:n-1], last.Addr()),
		Own:      packet.MAC{2, 0, 0, 0, 1, 1}, NextHop: packet.MAC{2, 0, 0, 0, 1, 2},
	})
	testhost.Must(w.t, err)
	return sent
}

// forVersions calls the function for each SRv6 encapsulation of each version of IP.
func forVersions(f func(version int, kind desired.Encapsulation, flow dataplane.Flow)) {
	f(4, desired.SRv6Encap, web4)
	f(6, desired.SRv6Encap, web)
	f(6, desired.SRv6Insert, web)
}

// Segment lists of all lengths equal those of the reference, byte by byte, in both SRv6
// encapsulations, whole and reduced. For two servers they have 72, 64 and 80 bytes.
func TestSegmentLists(t *testing.T) {
	t.Parallel()
	w := openListWriter(t)
	check := func(t *testing.T, kind desired.Encapsulation, n int, whole bool, frame []byte) {
		got := w.run(kind, n, whole, 0, frame)
		if diff := cmp.Diff(w.want(frame, kind, whole, w.path[:n]), got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if overhead := overheadOf(kind, n, whole); len(got)-len(frame) != overhead {
			t.Errorf("%d bytes added, want %d", len(got)-len(frame), overhead)
		}
		if err := packet.Verify(got); err != nil {
			t.Error(err)
		}
	}
	forVersions(func(version int, kind desired.Encapsulation, flow dataplane.Flow) {
		for n := 1; n <= desired.MaxVisited; n++ {
			for shape, options := range shapes(version) {
				for _, whole := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/IPv%d/%d/%s/whole %t", kind, version, n, shape, whole), func(t *testing.T) {
						check(t, kind, n, whole, frameOf(flow, options...))
					})
				}
			}
		}
	})
}

// Drivers leave different numbers of bytes in front of a frame (docs/reference/kernels-and-nics.md).
// Lists for which there is no room are shortened to the first five servers and the last one. If
// there is no room for these either, the packet is dropped.
func TestSegmentListsWithLittleHeadroom(t *testing.T) {
	t.Parallel()
	w := openListWriter(t)
	for _, left := range []int{224, 192, 128, 64} {
		forVersions(func(version int, kind desired.Encapsulation, flow dataplane.Flow) {
			fits := func(n int, whole bool) bool { return overheadOf(kind, n, whole) <= left-kernelHeadroom }
			for n := 1; n <= desired.MaxVisited; n++ {
				for _, whole := range []bool{false, true} {
					frame := frameOf(flow)
					var want []byte
					switch {
					case fits(n, whole):
						want = w.want(frame, kind, whole, w.path[:n])
					case n > fewSegments && fits(fewSegments, whole):
						want = w.want(frame, kind, whole, append(slices.Clone(w.path[:fewSegments-1]), w.path[n-1]))
					}
					got := w.run(kind, n, whole, headroom-left, frame)
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("%d bytes, %s, IPv%d, %d servers, whole %t (-want +got):\n%s",
							left, kind, version, n, whole, diff)
					}
				}
			}
		})
	}
}

// overheadOf returns the length of the headers for n servers, in bytes (bpf/balancer/path/encap.h).
// With whole, an encapsulation keeps the whole list, as for offers.
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

// testColumns are the columns of the servers, as bpf/balancer/segments.h has them: four bits for
// each server, those of the first one lowest. The sixth server has none. Offers have at most eight
// servers, so the others have the bits 0.
const testColumns uint32 = 0xec1a0864

// fillServers writes the servers. It returns their SIDs for connect-avail with their columns, in
// the order of travel.
func fillServers(mapped *dataplane.Directory) (path []netip.Addr) {
	for i := range desired.MaxVisited {
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

// The bytes in front of a frame in a test run, and how many of them the kernel keeps (struct
// xdp_frame of Linux).
const headroom, kernelHeadroom = 256, 40

// run encapsulates a frame for n servers. The frame has metadata of the driver, which takes up some
// bytes of the headroom. The result is nil if the rest is too small.
func (w *listWriter) run(kind desired.Encapsulation, n int, whole bool, metadata int, frame []byte) []byte {
	w.t.Helper()
	for variable, value := range map[*ebpf.Variable]any{
		w.objects.SegmentCount:  uint32(n),
		w.objects.Encapsulation: uint32(dataplane.RuleOf(&desired.Service{Encapsulation: kind}).Encapsulation),
		w.objects.KeepsWhole:    whole,
		w.objects.Columns:       testColumns,
	} {
		testhost.Must(w.t, variable.Set(value))
	}
	input := append(make([]byte, metadata), frame...)
	run := ebpf.RunOptions{
		Data: input, DataOut: make([]byte, 4096),
		Context: &frameContext{Data: uint32(metadata), DataEnd: uint32(len(input))},
	}
	verdict, err := w.objects.XdpSegments.Run(&run)
	if err == nil && verdict == verdictDrop {
		return nil
	}
	if err != nil || verdict != verdictTX {
		w.t.Fatalf("%s, %d servers: verdict %d, %v", kind, n, verdict, err)
	}
	return run.DataOut[metadata:]
}
