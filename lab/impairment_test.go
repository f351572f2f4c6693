// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// arrivals counts the datagrams of a numbered stream that arrived.
type arrivals struct {
	distinct, copies uint64
	// late is the number of datagrams that arrived after one with a higher number. RFC 4737,
	// section 3.3, calls these datagrams reordered.
	late uint64
}

const endOfStream = math.MaxUint64

// stream sends n datagrams from the client to a server's own address as fast as possible. It calls
// settle when all are sent, and returns the arrivals after settle.
func stream(t *testing.T, l *Lab, server string, n uint64, settle func()) arrivals {
	t.Helper()
	sender, result := streamTo(t, l, server)
	start := time.Now()
	onOneCPU(t, func() error { return sendNumbers(sender, 0, n) })
	t.Logf("%.0f datagrams a second", float64(n)/time.Since(start).Seconds())
	settle()
	onOneCPU(t, func() error { return sendNumbers(sender, endOfStream, 1) })
	return await(t, "the end of the stream to "+server, result)
}

// await returns the next value of a channel.
func await[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(time.Minute):
		t.Fatalf("waited a minute for %s", what)
		return *new(T)
	}
}

// streamTo makes a connection from the client to a server's own address. It returns the arrivals of
// the stream that is sent there.
func streamTo(t *testing.T, l *Lab, server string) (net.Conn, <-chan arrivals) {
	t.Helper()
	to := netip.AddrPortFrom(l.Node(server).IPv6, 7777).String()
	receiver, err := l.Node(server).ListenPacket(t.Context(), "udp", to)
	testhost.Must(t, err)
	t.Cleanup(func() { receiver.Close() })
	largeBuffer(t, receiver.(*net.UDPConn))
	sender, err := l.Node("client").Dial(t.Context(), "udp", to)
	testhost.Must(t, err)
	t.Cleanup(func() { sender.Close() })
	result := make(chan arrivals, 1)
	go func() {
		got := receiveStream(receiver)
		receiver.Close() // the next stream has the same address
		result <- got
	}()
	return sender, result
}

// largeBuffer makes a socket buffer large enough for everything that a test sends.
func largeBuffer(t *testing.T, conn *net.UDPConn) {
	t.Helper()
	raw, err := conn.SyscallConn()
	testhost.Must(t, err)
	var errSet error
	errControl := raw.Control(func(fd uintptr) {
		errSet = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 512<<20)
	})
	testhost.Must(t, errors.Join(errControl, errSet))
}

// sendNumbers sends a datagram with each of the n numbers from first on.
func sendNumbers(conn net.Conn, first, n uint64) error {
	var datagram [8]byte
	for i := range n {
		binary.BigEndian.PutUint64(datagram[:], first+i)
		if _, err := conn.Write(datagram[:]); err != nil {
			return err
		}
	}
	return nil
}

// stragglers is how long datagrams may still arrive after the end of their stream. Packets that
// were kept back are sent on another CPU, and the end does not wait for that CPU's queue.
const stragglers = 200 * time.Millisecond

// receiveStream reads the datagrams of a stream until the socket is closed, or until no more arrive
// after its end.
func receiveStream(conn net.PacketConn) (a arrivals) {
	seen := make(map[uint64]bool)
	highest := uint64(0)
	var datagram [8]byte
	for {
		if _, _, err := conn.ReadFrom(datagram[:]); err != nil {
			return a
		}
		number := binary.BigEndian.Uint64(datagram[:])
		switch {
		case number == endOfStream:
			if err := conn.SetReadDeadline(time.Now().Add(stragglers)); err != nil {
				return a
			}
			continue
		case seen[number]:
			a.copies++
			continue
		case number < highest:
			a.late++
		}
		a.distinct++
		seen[number], highest = true, max(highest, number)
	}
}

// onOneCPU runs f on a thread that stays on its CPU. A thread that moves to another CPU can
// overtake its own packets in the first CPU's queue.
func onOneCPU(t *testing.T, f func() error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	err := unix.SchedGetaffinity(0, &before)
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	err = errors.Join(err, unix.SchedSetaffinity(0, &one), f(), unix.SchedSetaffinity(0, &before))
	testhost.Must(t, err)
}

// impair impairs packets, but first lets the client reach each server, so that all neighbours are
// resolved. If a neighbour solicitation were dropped, the packets of the next second would wait, or
// be lost before they reach the fabric.
func impair(t *testing.T, l *Lab, i Impairment) {
	t.Helper()
	if i.Reorder.some() {
		testhost.NeedTUN(t)
	}
	testhost.Must(t, l.Impair(t.Context(), Impairment{}))
	for _, s := range l.Topology.specs(RoleServer) {
		exchange(t, l.Node("client"), netip.AddrPortFrom(s.IPv6, 9000), "hello")
	}
	testhost.Must(t, l.Impair(t.Context(), i))
}

// settled returns the counts when all packets that were kept back have been sent again.
func settled(t *testing.T, l *Lab) map[string]ImpairmentCounts {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		all, err := l.ImpairmentCounts()
		testhost.Must(t, err)
		var sum ImpairmentCounts
		for _, c := range all {
			sum.Reordered += c.Reordered
			sum.Returned += c.Returned
		}
		if sum.Reordered == sum.Returned {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("packets that were kept back are missing: %+v", all)
		}
	}
}

// requireShare fails the test unless a count is within six standard deviations of a share of all.
func requireShare(t *testing.T, what string, count, all uint64, share Share) {
	t.Helper()
	p, err := share.chance()
	testhost.Must(t, err)
	mean, deviation := p*float64(all), math.Sqrt(float64(all)*p*(1-p))
	if math.Abs(float64(count)-mean) > 6*deviation {
		t.Errorf("%s: %d of %d packets, want %s: %.0f ± %.0f", what, count, all, share, mean, deviation)
	}
}

// requireNear fails the test unless two counts differ by at most tolerance.
func requireNear(t *testing.T, what string, got, want, tolerance uint64) {
	t.Helper()
	if max(got, want)-min(got, want) > tolerance {
		t.Errorf("%s: %d, want %d ± %d", what, got, want, tolerance)
	}
}

func TestImpairedLinks(t *testing.T) {
	const n = 100_000
	l := up(t, bareTopology())
	i := Impairment{Drop: "5%", Duplicate: "2%", Reorder: "5%"}
	impair(t, l, i)
	var counts ImpairmentCounts
	got := stream(t, l, "s1", n, func() {
		counts = settled(t, l)["s1"]
		impair(t, l, Impairment{})
	})
	t.Logf("%+v; arrived: %+v", counts, got)
	requireShare(t, "dropped", counts.Dropped, counts.Packets, i.Drop)
	requireShare(t, "duplicated", counts.Duplicated, counts.Packets, i.Duplicate)
	requireShare(t, "reordered", counts.Reordered, counts.Packets, i.Reorder)
	// A few packets are of neighbour discovery, and not of the stream.
	others := counts.Packets - n
	if counts.Packets < n || others > 100 {
		t.Fatalf("%d packets were to be impaired, want little more than %d", counts.Packets, n)
	}
	requireNear(t, "datagrams that arrived", got.distinct, n-counts.Dropped, others)
	requireNear(t, "second copies", got.copies, counts.Duplicated, others)
	// If the machine stood still while a packet was kept back, no packet overtook it.
	requireNear(t, "late datagrams", got.late, counts.Reordered, others+counts.Reordered/10)

	counted, err := l.ImpairmentCounts()
	if err != nil || len(counted) != 0 {
		t.Errorf("counts without an impairment: %v, %v", counted, err)
	}
	got = stream(t, l, "s1", n, func() {})
	if want := (arrivals{distinct: n}); got != want {
		t.Errorf("without an impairment: %+v arrived, want %+v", got, want)
	}
}

// TestKeptBackPacketsAreNotLost ends an impairment while packets are kept back. All of them must
// arrive.
func TestKeptBackPacketsAreNotLost(t *testing.T) {
	const n = 50 // they may return in one burst; veths drop part of longer bursts
	l := up(t, bareTopology())
	stream(t, l, "s1", 1, func() {}) // a host queues few packets while it resolves a neighbour
	impair(t, l, Impairment{Reorder: "100%"})
	got := stream(t, l, "s1", n, func() { impair(t, l, Impairment{}) })
	if got.distinct != n || got.copies != 0 {
		t.Errorf("%+v arrived, want %d datagrams", got, n)
	}
}

// TestImpairmentsChangeWithoutLoss adds and removes impairments that lose nothing, under traffic.
func TestImpairmentsChangeWithoutLoss(t *testing.T) {
	testhost.NeedTUN(t)
	const changes = 40
	l := up(t, bareTopology())
	stream(t, l, "s1", 1, func() {}) // a host queues few packets while it resolves a neighbour
	sender, result := streamTo(t, l, "s1")
	done, sent := make(chan struct{}), make(chan uint64)
	go func() {
		defer close(sent)
		pace := time.NewTicker(100 * time.Microsecond) // so that no queue overflows
		defer pace.Stop()
		for n := uint64(0); ; n++ {
			select {
			case <-pace.C:
			case <-done:
				sent <- n
				return
			}
			if err := sendNumbers(sender, n, 1); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for i := range changes {
		impairment := Impairment{}
		if i%2 == 0 {
			impairment.Reorder = "50%"
		}
		if err := l.Impair(t.Context(), impairment); err != nil {
			t.Error(err)
		}
	}
	close(done)
	n := await(t, "the sender", sent)
	onOneCPU(t, func() error { return sendNumbers(sender, endOfStream, 1) })
	got := await(t, "the end of the stream", result)
	t.Logf("sent: %d; arrived: %+v", n, got)
	if got.distinct != n || got.copies != 0 {
		t.Errorf("%d datagrams are missing, %d came twice", n-got.distinct, got.copies)
	}
}

// TestImpairedLinksOfANode impairs the packets between one server and others.
func TestImpairedLinksOfANode(t *testing.T) {
	l := up(t, bareTopology())
	impair(t, l, Impairment{Drop: "50%", Links: []string{"s2"}})
	const n = 2000
	if got := stream(t, l, "s1", n, func() {}); got != (arrivals{distinct: n}) {
		t.Errorf("s1 is not impaired, and of %d datagrams arrived: %+v", n, got)
	}
	got := stream(t, l, "s2", n, func() { impair(t, l, Impairment{Drop: "0%"}) })
	requireShare(t, "datagrams to s2", got.distinct, n, "50%")
	if got.late != 0 || got.copies != 0 {
		t.Errorf("%+v arrived at s2, want all in order", got)
	}
}

// TestImpairmentIsReplaced replaces an impairment from another process, and replaces a damaged one.
func TestImpairmentIsReplaced(t *testing.T) {
	topology := bareTopology()
	topology.Impair = Impairment{Drop: "5%", Reorder: "5%"}
	before := readMachine(t, topology.Name)
	l := up(t, topology)
	requireStatus(t, l.Name, "5 of 5 processes running", "delay (", "Impaired: 5% dropped, 5% reordered between all nodes")
	testhost.Must(t, l.delay.Kill())
	requireStatus(t, l.Name, "4 of 5 processes running", "delay (NOT RUNNING")

	other, err := Open(l.Name, Options{})
	testhost.Must(t, err)
	impair(t, other, Impairment{Duplicate: "100%", Links: []string{"s1"}})
	requireStatus(t, l.Name, "4 of 4 processes running", "Impaired: 100% duplicated to and from s1")
	const n = 1000
	if got := stream(t, l, "s1", n, func() {}); got.distinct != n || got.copies != n {
		t.Errorf("%+v arrived, want %d datagrams twice", got, n)
	}
	impair(t, other, Impairment{Reorder: "1%"})
	pid, _ := other.delay.PID()
	const refusal = `impair.links[0] "client": must be one of edge, lb1, lb2, s1, s2`
	err = l.Impair(t.Context(), Impairment{Links: []string{"client"}})
	if err == nil || err.Error() != refusal {
		t.Errorf("impairment of the client's link: %v", err)
	}
	requireStatus(t, l.Name, "5 of 5 processes running", "Impaired: 1% reordered")
	testhost.Must(t, other.Down())
	if _, err := startTime(pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the process that delays packets still runs: %v", err)
	}
	if diff := cmp.Diff(before, readMachine(t, l.Name)); diff != "" {
		t.Errorf("machine (-before +after):\n%s", diff)
	}
}

// requireStatus fails the test unless the lab's status contains all of these texts.
func requireStatus(t *testing.T, name string, texts ...string) {
	t.Helper()
	l, err := Open(name, Options{})
	testhost.Must(t, err)
	status, err := l.Status()
	testhost.Must(t, err)
	var out bytes.Buffer
	testhost.Must(t, status.Write(&out))
	for _, text := range texts {
		if !strings.Contains(out.String(), text) {
			t.Errorf("status without %q:\n%s", text, out.String())
		}
	}
}

// TestImpairmentsFollowFromTheSeed compares the program's decisions with SplitMix64 in Go.
func TestImpairmentsFollowFromTheSeed(t *testing.T) {
	needRoot(t)
	const n = 1000        // packets
	const to, from = 1, 7 // interface indices: that of the loopback interface, and any other
	for _, seed := range []uint64{0, 1} {
		i := Impairment{Drop: "30%", Seed: seed}
		objects, err := i.load(nil)
		testhost.Must(t, err)
		defer objects.Close()
		for _, port := range []uint32{to, from} {
			testhost.Must(t, objects.Ports.Put(port, i.port("s1")))
		}
		var got, want [n]bool
		for k := range uint64(n) {
			got[k] = dropped(t, objects.Impair, from, to)
			// The program computes the same number (chance in impair.bpf.c).
			want[k] = float64(splitMix64(seed, k<<12|to)>>32) < 0.3*(1<<32)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("decisions by seed %d (-want +got):\n%s", seed, diff)
		}
	}
	// The second output of the published generator with state 0.
	if got := splitMix64(0, 2); got != 0x6e789e6aa1b965f4 {
		t.Errorf("SplitMix64: %#x", got)
	}
}

// splitMix64 returns the nth output of the generator, from 1.
func splitMix64(seed, n uint64) uint64 {
	z := seed + n*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// dropped tells whether the program drops a packet from one port to another.
func dropped(t *testing.T, program *ebpf.Program, from, to uint32) bool {
	t.Helper()
	context := struct { // the beginning of struct __sk_buff
		_                       [9]uint32
		IngressIfindex, Ifindex uint32
	}{IngressIfindex: from, Ifindex: to}
	verdict, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64), Context: context})
	testhost.Must(t, err)
	const ok, shot = 0, 2 // TC_ACT_OK, TC_ACT_SHOT
	if verdict != ok && verdict != shot {
		t.Fatalf("verdict %d", verdict)
	}
	return verdict == shot
}
