package agent

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

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

// FuzzReceive gives frames to the data path and to the reference.
func FuzzReceive(f *testing.F) {
	packettest.Fuzz(f, captures(), openComparison(f).compare)
}

// The same for a while, with other frames each time: mutants leave for every reason there is.
func TestMutants(t *testing.T) {
	c := openComparison(t)
	packettest.TryMutants(t, "FuzzReceive", captures(), c.compare, func() []string {
		return slices.DeleteFunc(slices.Clone(c.reasons), func(reason string) bool {
			return c.seen[reason] > 0 || reason == "none" || reason == "drop_rewrite" // which the kernel decides
		})
	})
	t.Log(c.seen)
}

// compare gives frames to both; frames do not know of each other here. The verdicts, all bytes and all
// counters agree.
func (c *comparison) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	before, want := counters(t, c.kernel), map[string]agentCounter{}
	for _, frame := range frames {
		reason, out := c.receive(frame)
		c.seen[reason]++
		sum := want[reason]
		want[reason] = agentCounter{Packets: sum.Packets + 1, Bytes: sum.Bytes + uint64(len(frame)-14)}
		c.check(t, frame, reason, out)
	}
	got := changed(before, counters(t, c.kernel))
	if maps.Equal(want, got) {
		return
	}
	if len(frames) > 1 && !t.Failed() { // which of them was it?
		for _, frame := range frames {
			c.compare(t, [][]byte{frame})
		}
	}
	if !t.Failed() || len(frames) == 1 {
		t.Errorf("%d frames, the last of them %s\ncounters (-want +got):\n%s",
			len(frames), explain(frames[len(frames)-1]), cmp.Diff(want, got))
	}
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
