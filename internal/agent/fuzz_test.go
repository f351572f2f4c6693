package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// comparison is a data path, on no interface, and its reference.
type comparison struct {
	*kernel
	reference
	seen map[string]int // frames by the reason that they left for
}

// openComparison leaves nothing pinned, for a fuzzing process may be killed at any time.
func openComparison(t testing.TB) *comparison {
	c := &comparison{testKernel(t), newReference(testConfig()), map[string]int{}}
	if err := datapath.RemoveDir(c.instance); err != nil {
		t.Fatal(err)
	}
	return c
}

// captures are frames for each way to be delivered or refused.
func captures() (frames [][]byte) {
	for _, cases := range [][]packetCase{deliveries(), passes(), drops(), nexts()} {
		for _, c := range cases {
			if len(c.frame) >= 14 {
				frames = append(frames, c.frame)
			}
		}
	}
	return frames
}

// synAckCaptures are frames that the host sends.
func synAckCaptures() (frames [][]byte) {
	for _, c := range synAcks() {
		frames = append(frames, c.frame)
	}
	return frames
}

// direction is one of the ways that frames go through the agent: give has both receive a frame, compares
// what comes out, and returns the counter that it changes by how much; "": none.
type direction struct {
	captures [][]byte
	give     func(t *testing.T, frame []byte) (counter string, n agentCounter)
}

func (c *comparison) incoming() direction { return direction{captures(), c.giveIncoming} }

func (c *comparison) outgoing() direction { return direction{synAckCaptures(), c.giveOutgoing} }

// mutantsPerInput is how many frames share a look at the counters.
const mutantsPerInput = 15

// FuzzReceive gives frames to the data path and to the reference: an input is a frame and a seed, from
// which mutants of it and of the captures follow. The verdicts, all bytes and all counters agree.
func FuzzReceive(f *testing.F) {
	c := openComparison(f)
	c.fuzz(f, c.incoming())
}

// FuzzTransmit does the same with frames that the host sends.
func FuzzTransmit(f *testing.F) {
	c := openComparison(f)
	c.fuzz(f, c.outgoing())
}

func (c *comparison) fuzz(f *testing.F, d direction) {
	for i, frame := range d.captures {
		f.Add(frame, uint64(0))
		f.Add(frame, uint64(i+1))
	}
	f.Fuzz(func(t *testing.T, frame []byte, seed uint64) {
		c.compare(t, packettest.Mutants(frame, seed, mutantsPerInput, d.captures), d)
	})
}

// The same for some seconds, with other seeds each time: mutants leave for every reason there is.
func TestMutants(t *testing.T) {
	c := openComparison(t)
	c.mutate(t, "FuzzReceive", c.incoming())
	for _, reason := range c.reasons {
		if c.seen[reason] == 0 && reason != "none" && reason != "drop_rewrite" { // the latter the kernel decides
			t.Errorf("no mutant left as %s: %v", reason, c.seen)
		}
	}
	t.Log(c.seen)
}

// The same for frames that the host sends.
func TestSentMutants(t *testing.T) {
	c := openComparison(t)
	c.mutate(t, "FuzzTransmit", c.outgoing())
	for _, result := range append(c.synAcks, "") {
		if c.seen[result] == 0 {
			t.Errorf("no mutant left as %q: %v", result, c.seen)
		}
	}
	t.Log(c.seen)
}

func (c *comparison) mutate(t *testing.T, fuzzer string, d direction) {
	t.Helper()
	for start := time.Now(); time.Since(start) < 3*time.Second && !t.Failed(); {
		frame, seed := d.captures[rand.IntN(len(d.captures))], rand.Uint64()
		c.compare(t, packettest.Mutants(frame, seed, mutantsPerInput, d.captures), d)
		if t.Failed() {
			t.Logf("as a seed in testdata/fuzz/%s:\ngo test fuzz v1\n[]byte(%q)\nuint64(%d)", fuzzer, frame, seed)
		}
	}
}

// compare gives frames to both; frames do not know of each other here.
func (c *comparison) compare(t *testing.T, frames [][]byte, d direction) {
	t.Helper()
	before, want := counters(t, c.kernel), map[string]agentCounter{}
	for _, frame := range frames {
		if counter, n := d.give(t, frame); counter != "" {
			sum := want[counter]
			want[counter] = agentCounter{Packets: sum.Packets + n.Packets, Bytes: sum.Bytes + n.Bytes}
		}
	}
	got := changed(before, counters(t, c.kernel))
	switch {
	case maps.Equal(want, got):
	case len(frames) > 1 && !t.Failed(): // which of them was it?
		for _, frame := range frames {
			c.compare(t, [][]byte{frame}, d)
		}
	default:
		t.Errorf("%s\ncounters (-want +got):\n%s", explain(frames[len(frames)-1]), cmp.Diff(want, got))
	}
}

func (c *comparison) giveIncoming(t *testing.T, frame []byte) (string, agentCounter) {
	t.Helper()
	reason, out := c.receive(frame)
	c.seen[reason]++
	c.check(t, frame, reason, out)
	return reason, agentCounter{Packets: 1, Bytes: uint64(len(frame) - 14)}
}

func (c *comparison) giveOutgoing(t *testing.T, frame []byte) (string, agentCounter) {
	t.Helper()
	if !hasIPHeader(frame) {
		return "", agentCounter{}
	}
	result, want := c.transmit(frame)
	c.seen[result]++
	if verdict, out := run(t, c.objects.TcAgent, frame); verdict != tcUnspec || !bytes.Equal(want, out) {
		t.Errorf("%s\n%q: verdict %#x, want %#x; (-want +got):\n%s",
			explain(frame), result, verdict, uint32(tcUnspec), cmp.Diff(want, out))
	}
	if result == "" {
		return "", agentCounter{}
	}
	return "syn_ack_" + result, agentCounter{Packets: 1}
}

// hasIPHeader is false where the kernel makes no socket buffer of the frame: what it says it is does not
// fit in.
func hasIPHeader(frame []byte) bool {
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return len(frame) >= 14+20
	case 0x86dd:
		return len(frame) >= 14+40
	}
	return true
}

// check compares the verdict and the frame that comes out, and what tc makes of the one that is to travel on.
func (c *comparison) check(t *testing.T, frame []byte, reason string, want []byte) {
	t.Helper()
	verdict, out := run(t, c.objects.XdpAgent, frame)
	if drop := strings.HasPrefix(reason, "drop_"); drop != (verdict == xdpDrop) || !drop && verdict != xdpPass {
		t.Errorf("%s\nthe verdict is %d for a frame to be counted as %s", explain(frame), verdict, reason)
	}
	if !bytes.Equal(want, out) {
		t.Errorf("%s\n%s: the frame that comes out is other (-want +got):\n%s", explain(frame), reason, cmp.Diff(want, out))
	}
	if reason != "next_segment" {
		return
	}
	next, err := packet.Advance(frame)
	if err != nil {
		t.Fatalf("%s\nit has no next segment: %v", explain(frame), err)
	}
	if verdict, out := run(t, c.objects.TcForward, frame); verdict != tcRedirect || !bytes.Equal(next, out) {
		t.Errorf("%s\non to the next segment: verdict %d, want %d; (-want +got):\n%s",
			explain(frame), verdict, tcRedirect, cmp.Diff(next, out))
	}
}

func explain(frame []byte) string {
	decoded, err := packet.Decode(frame)
	return fmt.Sprintf("%v (%v), %d bytes: %x", decoded, err, len(frame), frame)
}
