package balancer

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// openReference is a balancer with every encapsulation and every kind of service and server, and its
// reference. Nothing of it is pinned, for a fuzzing process may be killed at any time.
func openReference(t testing.TB) *reference {
	t.Helper()
	cfg := standard()
	for i, w := range ways {
		cfg.Services = append(cfg.Services, w.serviceBy(uint8(i), config.TCP), w.serviceBy(uint8(i), config.UDP))
	}
	f := open(t, cfg)
	f.must(Detach(cfg.Node.Instance))
	f.via["u"], f.via["n"], f.via["h"] = "", "narrow", "bridge"
	f.route()
	return newReference(f)
}

// captures are valid packets to every service, and a frame for each way to be refused.
func captures() (frames [][]byte) {
	for _, v := range visits {
		frames = append(frames, v.frame)
	}
	for i, w := range ways {
		for _, protocol := range []config.Protocol{config.TCP, config.UDP} {
			svc := w.serviceBy(uint8(i), protocol)
			flow := flowTo(svc.VIP, uint16(svc.Port), svc.Protocol)
			all := shapes(w.inner)
			for _, shape := range slices.Sorted(maps.Keys(all)) {
				frames = append(frames, flow.frame(all[shape]...))
			}
			if protocol == config.TCP {
				for _, flags := range []packet.TCPFlags{packet.ACK, packet.FIN | packet.ACK, packet.RST} {
					frames = append(frames, flow.frame(packet.Flags(flags)))
				}
			}
		}
	}
	for _, flow := range []Flow{dns, dns4} { // many, so that mutants of one packet's pieces meet
		for range 5 {
			frames = append(frames, packet.Fragments(flow.frame(large), 64, 7)...)
		}
	}
	for _, sum := range []uint16{0, 0xfeff, 0xffff} { // checksums that carry
		frames = append(frames, set(web4.frame(), 10, sum))
	}
	for seed := range 20 {
		frame := packettest.Frame(4 + 2*(seed%2)).Example(seed)
		frames = append(frames, packet.SetMACs(frame, packet.MAC{2, 0, 0, 0, 0, 1}, ownMAC))
	}
	return slices.DeleteFunc(frames, func(frame []byte) bool { return len(frame) > packettest.MaxFrame })
}

// mutantsPerInput is how many frames share a flow table: enough for flows to live a life in it.
const mutantsPerInput = 15

// FuzzDataPath gives frames to the data path and to the reference: an input is a frame and a seed, from
// which mutants of it and of the captures follow. The verdicts, all bytes and all counters agree.
func FuzzDataPath(f *testing.F) {
	r := openReference(f)
	others := captures()
	for i, frame := range others {
		f.Add(frame, uint64(0))
		f.Add(frame, uint64(i+1))
	}
	f.Fuzz(func(t *testing.T, frame []byte, seed uint64) {
		r.t = t
		frames := packettest.Mutants(frame, seed, mutantsPerInput, others)
		if text := r.disagreement(frames); text != "" {
			t.Fatal(text)
		}
	})
}

// The same for some seconds, with other seeds each time: mutants leave for every reason there is.
func TestMutants(t *testing.T) {
	r := openReference(t)
	others := captures()
	seen := map[string]int{}
	r.seen = func(o outcome) { seen[reasonOf(o)]++ }
	for start := time.Now(); time.Since(start) < 3*time.Second; {
		frame, seed := others[rand.IntN(len(others))], rand.Uint64()
		if text := r.disagreement(packettest.Mutants(frame, seed, mutantsPerInput, others)); text != "" {
			t.Fatalf("%s\nas a seed in testdata/fuzz/FuzzDataPath:\ngo test fuzz v1\n[]byte(%q)\nuint64(%d)", text, frame, seed)
		}
	}
	for reason := range reasonNumbers() {
		switch reason {
		case "none", "forward_no_room", "drop_no_headroom", "drop_rate_limit":
			// TestTableFollowsReference, TestNoHeadroom and TestAnswerRate
			continue
		}
		if seen[reason] == 0 {
			t.Errorf("no mutant left as %s: %v", reason, seen)
		}
	}
	t.Log(seen)
}

// disagreement gives frames one after the other to the data path and the reference, whose flow tables
// are empty before. It describes the first frame of which they disagree; "": there is none. The
// counters are read once for all frames, which is most of the time saved, and after each frame only
// where that finds something.
func (r *reference) disagreement(frames [][]byte) (text string) {
	r.t.Helper()
	r.inOneTick(func(now uint16) {
		text = ""
		if !r.agrees(frames, now) {
			text = r.firstDisagreement(frames, now)
		}
	})
	return text
}

func (r *reference) agrees(frames [][]byte, now uint16) bool {
	r.t.Helper()
	r.forget()
	before, want := r.counters(), counters{map[string]tally{}, map[string]tally{}}
	for _, frame := range frames {
		o := r.receive(frame, now)
		if r.seen != nil {
			r.seen(o)
		}
		if verdict, out := r.exec(frame, nil); verdict != o.Verdict || !bytes.Equal(out, o.Frame) {
			return false
		}
		add(want.reasons, o.Reasons)
		add(want.servers, o.Servers)
	}
	after := r.counters()
	return maps.Equal(want.reasons, difference(before.reasons, after.reasons)) &&
		maps.Equal(want.servers, difference(before.servers, after.servers))
}

func add(sum, more map[string]tally) {
	for name, m := range more {
		s := sum[name]
		sum[name] = tally{s.Packets + m.Packets, s.Bytes + m.Bytes, s.Flows + m.Flows}
	}
}

func (r *reference) firstDisagreement(frames [][]byte, now uint16) string {
	r.t.Helper()
	r.forget()
	for i, frame := range frames {
		if want, got := r.receive(frame, now), r.run(frame); !same(want, got) {
			return fmt.Sprintf("frame %d of %d: %s", i+1, len(frames), explain(frame, want, got))
		}
	}
	return "the frames fare other than the reference says, but not when the counters are read between them"
}

var verdicts = map[uint32]string{
	verdictDrop: "drop", verdictPass: "pass", verdictTX: "transmit", verdictRedirect: "redirect",
}

// explain says in words what is other than wanted.
func explain(frame []byte, want, got outcome) string {
	var s strings.Builder
	decoded, err := packet.Decode(frame)
	fmt.Fprintf(&s, "%v (%v), %d bytes: %x\n", decoded, err, len(frame), frame)
	if want.Verdict != got.Verdict {
		fmt.Fprintf(&s, "the verdict is %s, want %s\n", verdicts[got.Verdict], verdicts[want.Verdict])
	}
	if !bytes.Equal(want.Frame, got.Frame) {
		at := 0
		for at < min(len(want.Frame), len(got.Frame)) && want.Frame[at] == got.Frame[at] {
			at++
		}
		fmt.Fprintf(&s, "the frame that comes out is other from byte %d on: %d bytes, want %d\ngot  %x\nwant %x\n",
			at, len(got.Frame), len(want.Frame), got.Frame, want.Frame)
	}
	for _, counters := range []struct {
		kind      string
		want, got map[string]tally
	}{{"reason", want.Reasons, got.Reasons}, {"server", want.Servers, got.Servers}} {
		if !maps.Equal(counters.want, counters.got) {
			fmt.Fprintf(&s, "counted by %s is %+v, want %+v\n", counters.kind, counters.got, counters.want)
		}
	}
	return s.String()
}
