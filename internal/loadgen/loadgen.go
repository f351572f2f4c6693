// SPDX-License-Identifier: Apache-2.0

// Package loadgen sends packets of many flows, as fast as the kernel can: a BPF program writes each
// frame, and the kernel sends it straight from its page (BPF_PROG_TEST_RUN with
// BPF_F_TEST_XDP_LIVE_FRAMES, since Linux 5.18; Documentation/bpf/bpf_prog_run.rst).
package loadgen

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

// Kind is what every packet is.
type Kind int

// The kinds of packets.
const (
	SYN Kind = iota // opens a TCP connection
	ACK             // a TCP segment without data, neither the first nor the last
	UDP             // an empty datagram
)

// Order is how the flows take turns.
type Order int

// The orders of flows.
const (
	Random Order = iota // each packet is of any of the flows
	InTurn              // first one packet of each, then the next of each
)

const (
	// MaxBatch is how many frames the kernel sends at a time, at most (TEST_XDP_MAX_BATCH).
	MaxBatch = 256
	// portBits and maxHostBits are what tells flows from each other; PORT_BITS in bpf/loadgen/loadgen.bpf.c.
	portBits, maxHostBits = 15, 32
	// slice is how long a call of the kernel lasts, about, as it cannot be interrupted; setting one up
	// takes some 20 ms.
	slice = 200 * time.Millisecond
	// The frames of the first call and of the longest.
	firstFrames, maxFrames = 1 << 14, 1 << 26
)

// Config says what a Generator sends.
type Config struct {
	Kind  Kind
	Order Order
	// Flows is their number; 0 means that each packet is of a flow of its own, by chance. At most 2^15
	// for each address of Sources.
	Flows uint32
	// Sources has the addresses that packets come from, of the family of the destination. Only the last
	// 32 bits vary.
	Sources     netip.Prefix
	Destination netip.AddrPort
	// Ethernet addresses of the frames.
	SourceMAC, DestinationMAC packet.MAC
	// Interface is the index of the one that frames leave by, in the namespace of whoever calls Run. If
	// it is a veth, the far end has to run XDP, or have GRO on, or drops all.
	Interface int
	// Receive sends nothing: frames go up the host's own stack, as if the interface had received them.
	Receive bool
	// Batch is how many frames go out at a time, 1 to MaxBatch; 0 means 64, as the kernel does. Large
	// batches cost less a packet, and small ones overflow no queue.
	Batch uint32
	// Rate is the limit in packets per second; 0 means none. The CPU is busy all the same.
	Rate float64
	// Count is how many packets are sent; 0 means that the context alone ends it. With a count and
	// without a rate all go out in one call of the kernel, as far as possible, and none is in between.
	Count uint64
	// CPU is where it runs, and with it whatever the kernel does at once for what it sends; negative:
	// anywhere.
	CPU int
}

// Result is what a generator has done.
type Result struct {
	Sent    uint64        // packets
	Elapsed time.Duration // from the first to the last
}

// Rate is in packets per second.
func (r Result) Rate() float64 { return float64(r.Sent) / r.Elapsed.Seconds() }

// Generator sends packets.
type Generator struct {
	cfg     Config
	objects loadgenObjects
	frame   []byte
}

// New loads a generator. It needs CAP_BPF and CAP_NET_ADMIN.
func New(cfg Config) (*Generator, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("packet generator: %w", err)
	}
	spec, err := loadLoadgen()
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

// hostBits is how many bits of the source address vary.
func (c *Config) hostBits() int {
	return min(maxHostBits, c.Sources.Addr().BitLen()-c.Sources.Bits())
}

// frame is the packet of a flow whose variable bits are zero, padded to whole 64-bit words.
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
	const shortest = 60 // of Ethernet, without the checksum
	return append(frame, make([]byte, (max(len(frame), shortest)+7)/8*8-len(frame))...)
}

// Offsets in frames without VLAN tags, IP options or extension headers.
const (
	ethernetLength                 = 14
	ipv4Length, ipv6Length         = 20, 40
	ipv4Checksum                   = 10
	ipv4SourceEnd, ipv6SourceEnd   = 16, 24
	tcpChecksum, udpChecksumOffset = 16, 6
)

// variables are the program's, by their names.
func (c *Config) variables(frame []byte) map[string]any {
	var words [16]uint64
	for i := range len(frame) / 8 {
		words[i] = binary.NativeEndian.Uint64(frame[8*i:])
	}
	sourceEnd, transport := ethernetLength+ipv6SourceEnd, ethernetLength+ipv6Length
	headerChecksum := 0
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
		egress = 0
	}
	return map[string]any{
		loadgenVarPacket:       words,
		loadgenVarPacketWords:  uint32(len(frame) / 8),
		loadgenVarSource:       uint32(sourceEnd - 4),
		loadgenVarPort:         uint32(transport),
		loadgenVarChecksum:     uint32(checksum),
		loadgenVarIpv4Checksum: uint32(headerChecksum),
		loadgenVarHostMask:     uint32(1<<c.hostBits() - 1),
		loadgenVarFlowCount:    c.Flows,
		loadgenVarInTurn:       c.Order == InTurn,
		loadgenVarEgress:       egress,
		loadgenVarInterval:     c.interval(),
	}
}

// interval is the time from one packet to the next, in nanoseconds.
func (c *Config) interval() uint64 {
	if c.Rate == 0 {
		return 0
	}
	return uint64(float64(time.Second) / c.Rate)
}

// Run sends until Count packets are sent or the context ends, neither of which is an error. It belongs
// on a thread that is in the namespace of the interface and that nobody else uses.
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

// sendUntil sends until so many packets are sent in all, or the context ends.
func (g *Generator) sendUntil(ctx context.Context, limit uint64) error {
	frames := uint32(firstFrames)
	if g.cfg.Count > 0 && g.cfg.Rate == 0 {
		frames = maxFrames
	}
	for ctx.Err() == nil {
		sent, err := g.sent()
		if err != nil || sent >= limit {
			return err
		}
		if g.cfg.Rate == 0 { // else there are frames that are not sent
			frames = uint32(min(uint64(frames), limit-sent))
		}
		start := time.Now()
		if err := g.send(frames); err != nil {
			return err
		}
		if time.Since(start) < slice/2 && frames < maxFrames {
			frames *= 2
		}
	}
	return nil
}

func (c *Config) batch() uint32 {
	if c.Batch == 0 {
		return 64
	}
	return c.Batch
}

// sent is how many packets the program has ever made.
func (g *Generator) sent() (sent uint64, err error) {
	if err := g.objects.Sent.Get(&sent); err != nil {
		return 0, fmt.Errorf("packet generator: read the counter: %w", err)
	}
	return sent, nil
}

// xdpContext is struct xdp_md.
type xdpContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// send gives n frames to the program.
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

// stayOn keeps the calling goroutine's thread on one CPU.
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
		if unix.SchedSetaffinity(0, &before) == nil { // else the thread ends with its goroutine
			runtime.UnlockOSThread()
		}
	}, nil
}
