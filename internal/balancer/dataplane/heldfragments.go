// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// HeldFragment is a later fragment that came before the first one of its packet, or the news that
// the first one has passed.
type HeldFragment struct {
	Key     FragmentKey
	Ifindex uint32 // of the interface on which the frame arrived
	Frame   []byte // nil: the first fragment has passed
}

// HeldFragments reads the later fragments that the data path gives to user space
// (bpf/balancer/path/hold.h), and sends them through the data path again. One goroutine owns it.
// Others may call SetArrivals and Interrupt.
type HeldFragments struct {
	reader    *ringbuf.Reader
	firsts    *ebpf.Map
	directory *Directory
	sides     []*Side
	arrivals  atomic.Pointer[[]arrival] // of the sides; nil: no program is attached
	record    ringbuf.Record
	socket    packetSocket
}

// arrival is an interface on which fragments arrive, and the mode of XDP on it.
type arrival struct {
	ifindex int
	mode    datapath.Mode
}

// openHeld opens the fragments that the data path of the plane holds.
func (p *Plane) openHeld() (*HeldFragments, error) {
	reader, err := ringbuf.NewReader(p.Objects.HeldFragments)
	if err != nil {
		return nil, fmt.Errorf("read held fragments: %w", err)
	}
	return &HeldFragments{
		reader: reader, firsts: p.Objects.Fragments, directory: p.Directory, sides: p.Sides,
		socket: noSocket,
	}, nil
}

func (h *HeldFragments) close() error {
	if h == nil {
		return nil
	}
	return errors.Join(h.reader.Close(), h.socket.close())
}

// SetArrivals sets the interfaces on which fragments arrive, and the mode of XDP on each, in the
// order of the sides.
func (h *HeldFragments) SetArrivals(ifindexes []int, modes []datapath.Mode) {
	all := make([]arrival, len(ifindexes))
	for i, ifindex := range ifindexes {
		all[i] = arrival{ifindex, modes[i]}
	}
	h.arrivals.Store(&all)
}

// Interrupt makes Read return ringbuf.ErrFlushed, after it has returned all fragments that are
// waiting in the ring buffer.
func (h *HeldFragments) Interrupt() error { return h.reader.Flush() }

// Pending tells whether Read would return at once.
func (h *HeldFragments) Pending() bool { return h.reader.AvailableBytes() > 0 }

// Read returns the next held fragment. If the result has no frame, it is no fragment: it tells that
// the first fragment of a packet has passed. Read waits until the deadline at most, or for ever if
// the deadline is zero. At the deadline it returns os.ErrDeadlineExceeded.
func (h *HeldFragments) Read(deadline time.Time) (HeldFragment, error) {
	h.reader.SetDeadline(deadline)
	if err := h.reader.ReadInto(&h.record); err != nil {
		return HeldFragment{}, err
	}
	const header = int(unsafe.Offsetof(balancerHeldFragment{}.Frame))
	raw := h.record.RawSample
	if len(raw) < header {
		return HeldFragment{}, fmt.Errorf("a held fragment of %d bytes is shorter than its header", len(raw))
	}
	var head balancerHeldFragment
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&head)), header), raw)
	f := HeldFragment{Key: head.Key, Ifindex: head.Ifindex}
	if n := int(head.Length); n > 0 {
		f.Frame = append([]byte(nil), raw[header:min(header+n, len(raw))]...)
	}
	return f, nil
}

// heldSource is the source MAC address of held fragments: HELD_SOURCE in bpf/balancer/path/hold.h.
const heldSource = "\x02held\x00"

// FirstHasPassed tells whether the first fragment of a packet has passed.
func (h *HeldFragments) FirstHasPassed(key FragmentKey) bool {
	var first FragmentFlow
	return h.firsts.Lookup(&key, &first) == nil && first.Seen != 0
}

// ErrNotForwarded is the error of Send about a fragment that the data path does not forward. The
// data path has counted why.
var ErrNotForwarded = errors.New("the data path does not forward the fragment")

// Send runs the data path with a frame, as if it arrived on the interface. The data path does not
// hold it again. In generic mode, the kernel sends no frames of test runs, so a packet socket sends
// the result, and Send returns ErrNotForwarded if there is none. In native mode, the kernel does
// not tell the verdict, so Send returns no error for a frame that is not forwarded.
func (h *HeldFragments) Send(f HeldFragment) error {
	arrivals := h.arrivals.Load()
	if arrivals == nil {
		return errors.New("no program is attached")
	}
	i, err := sideOf(*arrivals, int(f.Ifindex))
	if err != nil {
		return err
	}
	copy(f.Frame[6:12], heldSource)
	side := h.sides[i]
	side.running.RLock()
	defer side.running.RUnlock()
	program := side.Objects.XdpLb
	if (*arrivals)[i].mode != datapath.Native {
		return h.sendBySocket(program, f)
	}
	_, err = program.Run(&ebpf.RunOptions{
		Data:      f.Frame,
		Context:   xdpContext{DataEnd: uint32(len(f.Frame)), IngressIfindex: f.Ifindex},
		Repeat:    1,
		Flags:     unix.BPF_F_TEST_XDP_LIVE_FRAMES,
		BatchSize: 1,
	})
	return err
}

// sideOf returns the number of the side on which the frames of an interface arrive. XDP of a bond
// in native mode runs on the members, so the interface may be a member.
func sideOf(arrivals []arrival, ifindex int) (int, error) {
	isAt := func(ifindex int) func(arrival) bool {
		return func(a arrival) bool { return a.ifindex == ifindex }
	}
	if i := slices.IndexFunc(arrivals, isAt(ifindex)); i >= 0 {
		return i, nil
	}
	link, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return 0, fmt.Errorf("find interface %d: %w", ifindex, err)
	}
	if i := slices.IndexFunc(arrivals, isAt(link.Attrs().MasterIndex)); i >= 0 {
		return i, nil
	}
	return 0, fmt.Errorf("interface %s has no program", link.Attrs().Name)
}

// sendBySocket makes the program encapsulate a frame, and sends the result through the port of the
// next hop to which it is addressed. It returns ErrNotForwarded if the program does not forward the
// frame, and another error if no next hop has the frame's addresses any more.
func (h *HeldFragments) sendBySocket(program *ebpf.Program, f HeldFragment) error {
	const mostHeaders = 256 // XDP_PACKET_HEADROOM
	run := &ebpf.RunOptions{Data: f.Frame, DataOut: make([]byte, len(f.Frame)+mostHeaders)}
	verdict, err := program.Run(run)
	if err != nil {
		return err
	}
	if verdict != xdpTX && verdict != xdpRedirect {
		return ErrNotForwarded
	}
	ifindex, ok := h.directory.portOf(run.DataOut)
	if !ok {
		return errors.New("the next hop of the server has just changed")
	}
	if err := h.socket.open(); err != nil {
		return err
	}
	return h.socket.send(run.DataOut, ifindex)
}

// portOf returns the interface through which a frame of the data path leaves. It searches for a
// next hop with the frame's destination and source MAC addresses. It returns false if there is
// none.
func (d *Directory) portOf(frame []byte) (ifindex uint32, ok bool) {
	const mask = 1<<48 - 1
	to, from := binary.LittleEndian.Uint64(frame)&mask, binary.LittleEndian.Uint64(frame[6:])&mask
	for i := range d.Servers {
		// A next hop has a MAC address in the low 48 bits, and above them the number of a port.
		hop := atomic.LoadUint64(&d.Servers[i].NextHop)
		if port := d.Ports[hop>>48&0xff]; hop != 0 && hop&mask == to && port.Mac == from {
			return port.Ifindex, true
		}
	}
	return 0, false
}
