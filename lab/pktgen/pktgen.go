// SPDX-License-Identifier: Apache-2.0

// Package pktgen sends packets of many flows as fast as the kernel can. A BPF program writes each
// frame, and the kernel sends it without a copy (BPF_PROG_TEST_RUN with BPF_F_TEST_XDP_LIVE_FRAMES,
// since Linux 5.18; Documentation/bpf/bpf_prog_run.rst).
package pktgen

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/packet"
)

// Kind is the kind of packets that a generator sends.
type Kind int

// The kinds of packets.
const (
	SYN Kind = iota // opens a TCP connection
	ACK             // a TCP segment of an open connection, without data
	UDP             // an empty datagram
)

// Order is the order in which a generator sends packets of its flows.
type Order int

// The orders of flows.
const (
	Random Order = iota // each packet is of a random flow
	InTurn              // one packet of each flow, then the second packet of each flow, and so on
)

const (
	// MaxBatch is the maximum number of frames that the kernel sends at a time
	// (TEST_XDP_MAX_BATCH).
	MaxBatch = 256
	// portBits is how many bits of the source port differ between flows. PORT_BITS in
	// bpf/pktgen/pktgen.bpf.c has the same value.
	portBits = 15
	// maxHostBits is how many bits of the source address can differ between flows.
	maxHostBits = 32
	// callDuration is about the duration of one system call, which cannot be interrupted. It is
	// long compared to the 20 ms that the kernel needs to prepare the call.
	callDuration = 200 * time.Millisecond
	// firstFrames is the number of frames in the first system call, and maxFrames the largest
	// number in any.
	firstFrames, maxFrames = 1 << 14, 1 << 26
)

// Config is the configuration of a Generator.
type Config struct {
	Kind  Kind
	Order Order
	// Flows is the number of flows, at most 2^15 for each address of Sources. 0 means that each
	// packet is of a random one of all the flows that Sources permits.
	Flows uint32
	// Sources has the source addresses. They are of the destination's family, and differ only in
	// the last 32 bits.
	Sources     netip.Prefix
	Destination netip.AddrPort
	// Ethernet addresses of the frames.
	SourceMAC, DestinationMAC packet.MAC
	// Interface is the index of the interface that sends the frames, in the network namespace of
	// Run's caller. If it is a veth, its peer must run XDP or have GRO on. Otherwise the peer drops
	// all frames.
	Interface int
	// Receive passes the frames to the host's own stack, as if the interface had received them.
	// Nothing is sent.
	Receive bool
	// Batch is the number of frames that the kernel sends at a time, from 1 to MaxBatch. 0 means
	// 64, the kernel's default. A large batch costs less for each packet, but may overflow a queue.
	Batch uint32
	// Rate is the limit in packets per second. 0 means no limit. The CPU is fully busy even with a
	// limit.
	Rate float64
	// Count is the number of packets to send. 0 means no limit: the run ends with its context.
	// Without a rate, up to 2^26 packets are sent in one system call, so that no other packets come
	// between them.
	Count uint64
	// CPU is the CPU on which the generator runs. The kernel also receives the packets of a veth
	// there. A negative number means any CPU.
	CPU int
}

// Result is the result of a run.
type Result struct {
	Sent    uint64        // packets
	Elapsed time.Duration // time in which they were sent
}

// Rate returns the number of packets sent per second.
func (r Result) Rate() float64 { return float64(r.Sent) / r.Elapsed.Seconds() }

// Generator sends packets.
type Generator struct {
	cfg     Config
	objects pktgenObjects
	frame   []byte
}

// New loads a generator. It needs CAP_BPF and CAP_NET_ADMIN.
func New(cfg Config) (*Generator, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("packet generator: %w", err)
	}
	spec, err := loadPktgen()
	if err != nil {
		return nil, err
	}
	frame := cfg.frame()
	for name, value := range cfg.variables(frame) {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("packet generator: set %s: %w", name, err)
		}
	}
	g := &Generator{cfg: cfg, frame: frame}
	if err := spec.LoadAndAssign(&g.objects, nil); err != nil {
		return nil, fmt.Errorf("packet generator: %w", err)
	}
	return g, nil
}

// Close unloads the generator.
func (g *Generator) Close() error { return g.objects.Close() }

// check returns an error if a field is out of range.
func (c *Config) check() error {
	source, destination := c.Sources.Masked().Addr(), c.Destination.Addr()
	switch {
	case !source.IsValid() || !destination.IsValid() || source.Is4() != destination.Is4():
		return fmt.Errorf("sources %v and destination %v: not of one family", c.Sources, c.Destination)
	case uint64(c.Flows) > 1<<(portBits+c.hostBits()):
		return fmt.Errorf("%d flows: more than %v can tell apart", c.Flows, c.Sources)
	case c.Batch > MaxBatch:
		return fmt.Errorf("batches of %d: more than %d", c.Batch, MaxBatch)
	case c.Interface <= 0:
		return fmt.Errorf("interface %d: there is none", c.Interface)
	case c.Rate < 0:
		return fmt.Errorf("rate of %v: less than none", c.Rate)
	}
	return nil
}

// hostBits returns how many bits of the source address differ between flows.
func (c *Config) hostBits() int {
	return min(maxHostBits, c.Sources.Addr().BitLen()-c.Sources.Bits())
}

// frame returns the frame of the flow whose port and host bits are zero. The program copies it in
// words of 8 bytes, so its length is padded to a multiple of 8.
func (c *Config) frame() []byte {
	source := netip.AddrPortFrom(c.Sources.Masked().Addr(), 0)
	ethernet := packet.Ethernet(c.SourceMAC, c.DestinationMAC)
	var frame []byte
	switch c.Kind {
	case SYN:
		frame = packet.TCP(source, c.Destination, ethernet, packet.MSS(1440))
	case ACK:
		frame = packet.TCP(source, c.Destination, ethernet, packet.Flags(packet.ACK))
	case UDP:
		frame = packet.UDP(source, c.Destination, ethernet)
	}
	const shortest = 60 // the minimum of Ethernet, without the checksum
	padded := (max(len(frame), shortest) + 7) / 8 * 8
	return append(frame, make([]byte, padded-len(frame))...)
}

// Lengths of headers, and offsets of fields in their headers. Frames have no VLAN tags, IP options
// or extension headers.
const (
	ethernetLength                 = 14
	ipv4Length, ipv6Length         = 20, 40
	ipv4Checksum                   = 10
	ipv4SourceEnd, ipv6SourceEnd   = 16, 24
	tcpChecksum, udpChecksumOffset = 16, 6
)

// variables returns the values of the program's variables, by name.
func (c *Config) variables(frame []byte) map[string]any {
	var words [16]uint64
	for i := range len(frame) / 8 {
		words[i] = binary.NativeEndian.Uint64(frame[8*i:])
	}
	sourceEnd, transport := ethernetLength+ipv6SourceEnd, ethernetLength+ipv6Length
	headerChecksum := 0 // IPv6 has none
	if c.Destination.Addr().Is4() {
		sourceEnd, transport = ethernetLength+ipv4SourceEnd, ethernetLength+ipv4Length
		headerChecksum = ethernetLength + ipv4Checksum
	}
	checksum := transport + tcpChecksum
	if c.Kind == UDP {
		checksum = transport + udpChecksumOffset
	}
	egress := uint32(c.Interface)
	if c.Receive {
		egress = 0 // the program passes the frames to the stack
	}
	return map[string]any{
		pktgenVarPacket:       words,
		pktgenVarPacketWords:  uint32(len(frame) / 8),
		pktgenVarSource:       uint32(sourceEnd - 4), // the last 32 bits of the source address
		pktgenVarPort:         uint32(transport),
		pktgenVarChecksum:     uint32(checksum),
		pktgenVarIpv4Checksum: uint32(headerChecksum),
		pktgenVarHostMask:     uint32(1<<c.hostBits() - 1),
		pktgenVarFlowCount:    c.Flows,
		pktgenVarInTurn:       c.Order == InTurn,
		pktgenVarEgress:       egress,
		pktgenVarInterval:     c.interval(),
	}
}

// interval returns the time between two packets in nanoseconds, or 0 without a rate.
func (c *Config) interval() uint64 {
	if c.Rate == 0 {
		return 0
	}
	return uint64(float64(time.Second) / c.Rate)
}

// Run sends packets until it has sent Count, or the context ends. It returns no error in either
// case. The calling goroutine must be locked to a thread in the network namespace of the interface.
func (g *Generator) Run(ctx context.Context) (Result, error) {
	if g.cfg.CPU >= 0 {
		leave, err := stayOn(g.cfg.CPU)
		if err != nil {
			return Result{}, err
		}
		defer leave()
	}
	before, err := g.sent()
	if err != nil {
		return Result{}, err
	}
	// The program stops when it has sent this number of packets since it was loaded.
	limit := uint64(math.MaxUint64)
	if g.cfg.Count > 0 {
		limit = before + g.cfg.Count
	}
	if err := g.objects.Limit.Set(limit); err != nil {
		return Result{}, fmt.Errorf("packet generator: set the limit: %w", err)
	}
	start := time.Now()
	err = g.sendUntil(ctx, limit)
	elapsed := time.Since(start)
	now, errSent := g.sent()
	return Result{Sent: now - before, Elapsed: elapsed}, errors.Join(err, errSent)
}

// sendUntil makes system calls until the program has sent limit packets since it was loaded, or the
// context ends. It doubles the number of frames of a call until a call takes about callDuration.
func (g *Generator) sendUntil(ctx context.Context, limit uint64) error {
	frames := uint32(firstFrames) // in the next call
	if g.cfg.Count > 0 && g.cfg.Rate == 0 {
		frames = maxFrames
	}
	for ctx.Err() == nil {
		sent, err := g.sent()
		if err != nil || sent >= limit {
			return err
		}
		// With a rate, a packet can need several frames: the program drops frames that are early.
		if g.cfg.Rate == 0 {
			frames = uint32(min(uint64(frames), limit-sent))
		}
		start := time.Now()
		if err := g.send(frames); err != nil {
			return err
		}
		if time.Since(start) < callDuration/2 && frames < maxFrames {
			frames *= 2
		}
	}
	return nil
}

// batch returns the number of frames that the kernel sends at a time.
func (c *Config) batch() uint32 {
	if c.Batch == 0 {
		return 64
	}
	return c.Batch
}

// sent returns the number of packets that the program has sent since it was loaded.
func (g *Generator) sent() (sent uint64, err error) {
	if err := g.objects.Sent.Get(&sent); err != nil {
		return 0, fmt.Errorf("packet generator: read the counter: %w", err)
	}
	return sent, nil
}

// xdpContext has the layout of struct xdp_md.
type xdpContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// send makes a system call that runs the program for n frames.
func (g *Generator) send(n uint32) error {
	_, err := g.objects.Generate.Run(&ebpf.RunOptions{
		Data:      g.frame,
		Context:   xdpContext{DataEnd: uint32(len(g.frame)), IngressIfindex: uint32(g.cfg.Interface)},
		Repeat:    n,
		Flags:     unix.BPF_F_TEST_XDP_LIVE_FRAMES,
		BatchSize: min(g.cfg.batch(), n),
	})
	if err != nil {
		return fmt.Errorf("packet generator: send %d frames: %w", n, err)
	}
	return nil
}

// stayOn locks the calling goroutine to its thread, and the thread to one CPU. leave undoes both.
func stayOn(cpu int) (leave func(), err error) {
	var before, one unix.CPUSet
	runtime.LockOSThread()
	defer func() {
		if err != nil {
			runtime.UnlockOSThread()
		}
	}()
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("read the CPUs: %w", err)
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return nil, fmt.Errorf("run on CPU %d: %w", cpu, err)
	}
	return func() {
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread()
		}
		// Otherwise the thread stays locked, so that no other goroutine runs on this CPU only.
	}, nil
}
