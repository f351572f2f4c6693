// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/packet"
)

// Verdicts of XDP programs (enum xdp_action of the kernel).
const (
	xdpAborted = 0
	xdpPass    = 2
	xdpTX      = 3
)

// order is the order of the packets. enum order of bpf/bench/host.bpf.c has the same values.
type order uint32

const (
	random      order = iota // each packet is of a random flow
	inTurn                   // a packet of each flow, from flow traffic.first on
	inPairs                  // two packets of each flow
	connections              // the SYN, a later packet and the FIN of each flow
)

// traffic describes the packets for the measurement of a program.
type traffic struct {
	frame       []byte // the packet of flow 0
	flowOffset  uint32 // where in the frame the number of the flow, of 32 bits, is added
	flows       uint32 // if the order is random: the number of flows
	order       order
	first       uint64 // if the order is any other: the number of the first flow
	verdict     uint32 // the verdict that the program is expected to return
	flagsOffset uint32 // where in the frame the TCP flags are, for order connections
}

// connectionPackets is the number of packets of a flow if the order is connections.
// CONNECTION_PACKETS of bpf/bench/host.bpf.c has the same value.
const connectionPackets = 3

// packetsPerFlow returns how many packets of a flow come one after the other, before those of the
// next flow. In random order it is 1.
func (o order) packetsPerFlow() uint64 {
	switch o {
	case inPairs:
		return 2
	case connections:
		return connectionPackets
	}
	return 1
}

// host runs programs under test. Its own BPF program, the host program, writes a packet, calls the
// program under test, and checks the verdict, again and again.
type host struct {
	objects   hostObjects
	frame     []byte        // of the prepared traffic
	underTest *ebpf.Program // nil: the host program runs alone
	cycles    event         // what counts as cycles in measurements: cpuCycles, except in tests
	// quiet contains the interface that the host program is attached to; see keepCallable.
	quiet    *netdev.Namespace
	attached link.Link
}

// newHost loads the host program.
func newHost() (*host, error) {
	h := &host{cycles: cpuCycles}
	if err := loadHostObjects(&h.objects, nil); err != nil {
		return nil, fmt.Errorf("load the host program: %w", err)
	}
	if err := h.keepCallable(); err != nil {
		return nil, errors.Join(fmt.Errorf("attach the host program: %w", err), h.close())
	}
	return h, nil
}

// keepCallable makes test runs start faster: it attaches the host program in a separate network
// namespace, where no packets arrive. The kernel has a table of XDP programs that it calls directly
// (BPF_DISPATCHER). If a program is not attached, the kernel adds it to the table before each test
// run and removes it afterwards. After each of these changes it waits until no CPU uses the old
// table.
func (h *host) keepCallable() (err error) {
	if h.quiet, err = netdev.NewNamespace(); err != nil {
		return err
	}
	return h.quiet.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		h.attached, err = link.AttachXDP(link.XDPOptions{
			Program: h.objects.XdpHost, Interface: lo.Attrs().Index, Flags: link.XDPGenericMode,
		})
		return err
	})
}

func (h *host) close() (err error) {
	if h.attached != nil {
		err = h.attached.Close()
	}
	if h.quiet != nil {
		err = errors.Join(err, h.quiet.Close())
	}
	return errors.Join(err, h.objects.Close())
}

// prepare sets the program under test and its traffic for the next run. If program is nil, the host
// program runs alone.
func (h *host) prepare(program *ebpf.Program, t *traffic) error {
	var frame [256]byte // MAX_FRAME
	if copy(frame[:], t.frame) < len(t.frame) {
		return fmt.Errorf("a frame of %d bytes does not fit the host program", len(t.frame))
	}
	for variable, value := range map[*ebpf.Variable]any{
		h.objects.Frame:       frame,
		h.objects.FrameLength: uint32(len(t.frame)),
		h.objects.FlowOffset:  t.flowOffset,
		h.objects.FirstFlow:   binary.BigEndian.Uint32(t.frame[t.flowOffset:]),
		h.objects.Flows:       t.flows,
		h.objects.Order:       uint32(t.order),
		h.objects.Verdict:     t.verdict,
		h.objects.Position:    t.first * t.order.packetsPerFlow(),
		h.objects.FlagsOffset: t.flagsOffset,
		// One element more than there are packets makes the length a power of two, so that the
		// program can limit the index by a mask.
		h.objects.ConnectionFlags: [connectionPackets + 1]uint8{
			uint8(packet.SYN), uint8(packet.ACK), uint8(packet.FIN | packet.ACK),
		},
		h.objects.Unexpected: uint64(0),
	} {
		if err := variable.Set(value); err != nil {
			return fmt.Errorf("set up the host program: %w", err)
		}
	}
	h.frame = t.frame
	return h.setUnderTest(program)
}

// setUnderTest sets the program under test. It does nothing if the program is set already, because
// a change takes the kernel some milliseconds: it waits for running programs.
func (h *host) setUnderTest(program *ebpf.Program) (err error) {
	if program == h.underTest {
		return nil
	}
	if program == nil {
		err = h.objects.UnderTest.Delete(uint32(0))
	} else {
		err = h.objects.UnderTest.Put(uint32(0), program)
	}
	if err != nil {
		return fmt.Errorf("set the program under test: %w", err)
	}
	h.underTest = program
	return nil
}

// cost is the cost of all packets of a run.
type cost struct {
	time         time.Duration // CPU time
	instructions uint64        // 0 if the processor does not count them
	cycles       uint64        // 0 if the processor does not count them
}

// run runs the prepared program for a number of packets. The time is the CPU time of this thread,
// so other processes affect it only through the caches. It returns an error if a packet got another
// verdict than the expected one.
func (h *host) run(packets uint32) (c cost, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	instructions, cycles := openCounter(cpuInstructions), openCounter(h.cycles)
	defer instructions.close()
	defer cycles.close()
	before, err := threadTime()
	if err != nil {
		return c, err
	}
	if _, err := h.objects.XdpHost.Run(&ebpf.RunOptions{Data: h.frame, Repeat: packets}); err != nil {
		return c, fmt.Errorf("run the host program: %w", err)
	}
	after, err := threadTime()
	if err != nil {
		return c, err
	}
	c = cost{after - before, instructions.read(), cycles.read()}
	var unexpected uint64
	if err := h.objects.Unexpected.Get(&unexpected); err != nil {
		return c, err
	}
	if unexpected > 0 {
		return c, fmt.Errorf("%d packets of %d got another verdict than the one measured",
			unexpected, packets)
	}
	return c, nil
}

func threadTime() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		return 0, fmt.Errorf("read the thread's CPU time: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// event is what a counter counts: the type and the config of a perf_event_attr.
type event struct {
	kind   uint32
	number uint64
}

var (
	cpuInstructions = event{unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_INSTRUCTIONS}
	cpuCycles       = event{unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_CPU_CYCLES}
)

// counter is a descriptor that counts an event of the thread which has opened it, in the kernel and
// in user space. Virtual machines often cannot count instructions and cycles. The counter is then
// noCounter, and read returns 0.
type counter int

const noCounter counter = -1

// openCounter returns a counter that has started to count. It counts all the time: if other users
// have all counters of the processor, it does not take turns with them, but fails, and read returns
// 0.
func openCounter(e event) counter {
	attr := unix.PerfEventAttr{Type: e.kind, Config: e.number, Bits: unix.PerfBitPinned}
	attr.Size = uint32(unsafe.Sizeof(attr))
	fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return noCounter
	}
	return counter(fd)
}

// read returns the number of events since openCounter, or 0 if they cannot be counted.
func (c counter) read() uint64 {
	var value [8]byte
	if c == noCounter {
		return 0
	}
	if n, err := unix.Read(int(c), value[:]); err != nil || n < len(value) {
		return 0
	}
	return binary.NativeEndian.Uint64(value[:])
}

func (c counter) close() {
	if c != noCounter {
		_ = unix.Close(int(c))
	}
}
