// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/health/probe"
)

const (
	// probeFrame is the length of the longest frame that xdp_probe encapsulates, in bytes: an
	// Ethernet header, an IPv6 header and struct probe_request.
	probeFrame = 14 + 40 + 16
	// probeBatch is the highest number of frames that the kernel sends at a time
	// (TEST_XDP_MAX_BATCH).
	probeBatch = 256
)

// ProbeTable sends the probes of bpf/balancer/signal/prober.h and reads the answers of agents. One
// goroutine owns the ProbeTable. The data path writes the answers.
type ProbeTable struct {
	memory, turnMemory []byte
	probes             []balancerProbe // by slot
	turns              []uint64        // the slots that the next run probes, in order
	program            *ebpf.Program
	turn               *ebpf.Variable
	directory          *Directory
	socket             packetSocket
}

// mapProbes maps the tables for the probes that leave through a side.
func (p *Plane) mapProbes(side *Side) (*ProbeTable, error) {
	t := &ProbeTable{
		program: side.Objects.XdpProbe, turn: side.Objects.ProbeTurn, directory: p.Directory, socket: noSocket,
	}
	var err error
	if t.memory, t.probes, err = mapArray[balancerProbe](p.Objects.Probes); err != nil {
		return nil, fmt.Errorf("map the probes: %w", err)
	}
	if t.turnMemory, t.turns, err = mapArray[uint64](p.Objects.ProbeTurns); err != nil {
		return nil, errors.Join(fmt.Errorf("map the turns of probes: %w", err), t.close())
	}
	return t, nil
}

// mapArray maps an array map for reading and writing. The size of its elements must be a multiple
// of eight bytes.
func mapArray[E any](m *ebpf.Map) (memory []byte, elements []E, err error) {
	return mapArrayFor[E](m, unix.PROT_READ|unix.PROT_WRITE)
}

// mapArrayFor does the same as mapArray, but with the given protection.
func mapArrayFor[E any](m *ebpf.Map, protection int) (memory []byte, elements []E, err error) {
	size := int(m.MaxEntries()) * int(m.ValueSize())
	memory, err = unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return memory, unsafe.Slice((*E)(unsafe.Pointer(unsafe.SliceData(memory))), m.MaxEntries()), nil
}

func (t *ProbeTable) close() error {
	var errs []error
	for _, memory := range [][]byte{t.memory, t.turnMemory} {
		if memory != nil {
			errs = append(errs, unix.Munmap(memory))
		}
	}
	return errors.Join(append(errs, t.socket.close())...)
}

// Set prepares the next probe of a server. The low 16 bits of the token must be the server's slot.
func (t *ProbeTable) Set(r probe.Request) {
	p := &t.probes[r.Target.Slot]
	p.Vip = in6(r.Target.VIP)
	p.Encapsulation = uint8(encapsulations[r.Target.Encapsulation])
	p.Protocol, p.Port = r.Target.Protocol.Number(), bits.ReverseBytes16(r.Target.Port)
	atomic.StoreUint64(&p.Token, r.Token)
}

// Forget makes the data path drop answers of the slot's server until the next Set.
func (t *ProbeTable) Forget(slot uint32) {
	atomic.StoreUint64(&t.probes[slot].Token, 0)
}

// Token returns the token that an answer of the slot's server must contain. If it is 0, the data
// path accepts no answer.
func (t *ProbeTable) Token(slot uint32) uint64 {
	if int(slot) >= len(t.probes) {
		return 0
	}
	return atomic.LoadUint64(&t.probes[slot].Token)
}

// Answer returns the answer to the last probe of the slot's server. It returns false if there is
// none yet.
func (t *ProbeTable) Answer(slot uint32) (probe.Answer, bool) {
	p := &t.probes[slot]
	if atomic.LoadUint64(&p.Answered) != t.Token(slot) {
		return probe.Answer{}, false
	}
	flags := balancerProbeFlag(p.Flags)
	return probe.Answer{
		Version: p.Version,
		Serves:  flags&balancerProbeFlagPROBE_SERVED != 0,
		Refuses: flags&balancerProbeFlagPROBE_REFUSING != 0,
	}, true
}

// send probes the servers of the slots. In native mode, XDP sends the probes as it sends clients'
// packets, with ifindex as the interface on which they arrive. In generic mode, send uses a packet
// socket: like frames of XDP in generic mode, its frames leave as the host's own frames do.
func (t *ProbeTable) send(slots []uint32, ifindex int, mode datapath.Mode) error {
	if len(slots) == 0 {
		return nil
	}
	if mode != datapath.Native {
		return t.sendBySocket(slots)
	}
	for i, slot := range slots {
		t.turns[i] = uint64(slot)
	}
	if err := t.turn.Set(uint32(0)); err != nil {
		return fmt.Errorf("start the turns of probes: %w", err)
	}
	_, err := t.program.Run(&ebpf.RunOptions{
		Data:      make([]byte, probeFrame),
		Context:   xdpContext{DataEnd: probeFrame, IngressIfindex: uint32(ifindex)},
		Repeat:    uint32(len(slots)),
		Flags:     unix.BPF_F_TEST_XDP_LIVE_FRAMES,
		BatchSize: min(uint32(len(slots)), probeBatch),
	})
	if err != nil {
		return fmt.Errorf("send probes: %w", err)
	}
	return nil
}

// xdpContext is struct xdp_md of Linux.
type xdpContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// sendBySocket sends probes by a packet socket. It makes the program encapsulate each frame, and
// sends the frame through the port of the server's next hop.
func (t *ProbeTable) sendBySocket(slots []uint32) error {
	if err := t.socket.open(); err != nil {
		return err
	}
	for _, slot := range slots {
		frame, err := t.Frame(slot)
		if err != nil {
			return err
		}
		if frame == nil {
			continue
		}
		port := t.directory.Ports[t.directory.Servers[slot].NextHop>>48&0xff]
		// An error of an interface is ignored: the probe then counts as lost, and the others are
		// sent.
		_ = t.socket.send(frame, port.Ifindex)
	}
	return nil
}

// Frame returns the probe of the slot's server as it leaves the data path. It returns nil if the
// server has no next hop. Frame returns an error if the program cannot be run.
func (t *ProbeTable) Frame(slot uint32) ([]byte, error) {
	t.turns[0] = uint64(slot)
	if err := t.turn.Set(uint32(0)); err != nil {
		return nil, fmt.Errorf("start the turns of probes: %w", err)
	}
	out := make([]byte, 2*probeFrame+256) // more than any encapsulation needs
	run := &ebpf.RunOptions{Data: make([]byte, probeFrame), DataOut: out}
	verdict, err := t.program.Run(run)
	if err != nil {
		return nil, fmt.Errorf("make a probe: %w", err)
	}
	if verdict != xdpTX && verdict != xdpRedirect {
		return nil, nil
	}
	return run.DataOut, nil
}

// These are the verdicts of XDP programs that send the frame.
const (
	xdpTX       = 3
	xdpRedirect = 4
)
