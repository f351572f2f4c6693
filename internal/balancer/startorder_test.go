// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// sent is what a program does with a frame.
type sent struct {
	verdict uint32
	out     []byte
}

func (s sent) equals(other sent) bool {
	return s.verdict == other.verdict && bytes.Equal(s.out, other.out)
}

func (f *fixture) sentBy(program *ebpf.Program, frame []byte) sent {
	f.t.Helper()
	options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 1024)}
	verdict, err := program.Run(&options)
	f.must(err)
	return sent{verdict, options.DataOut}
}

// A start attaches its programs before it changes the rules of services. The program of the earlier
// process may lack what the new rules need, and would lose flows: it meets only rules that it
// knows, also if the start fails after that. The program of the start finds the flows of the former
// services from the beginning, and takes the signals of their servers.
func TestStartAttachesBeforeItChangesRules(t *testing.T) {
	t.Parallel()
	column1 := packet.Timestamps(9, 1025)
	data := func(options ...packet.Option) []byte {
		return frameOf(web, append(options, packet.Flags(packet.ACK|packet.PSH))...)
	}
	ofTable := func(f *fixture) [][]byte { // not the server on which the flow would be placed
		f.enterAt(f.plane.Flows, f.row(web, "web")[1], stateEstablished, 0)
		return [][]byte{data()}
	}
	ofCookie := func(*fixture) [][]byte { return [][]byte{data(column1)} }
	ofQUIC := func(f *fixture) [][]byte {
		var frames [][]byte
		for i := range f.service("h3").Servers {
			id := issued(f.t, quicForm(), &f.service("h3").Servers[i])
			frames = append(frames, frameOf(h3, packet.Payload(shortHeader(id))))
		}
		return frames
	}
	for name, c := range map[string]struct {
		before, after *desired.Balancer
		known         func(*fixture) [][]byte // enters flows; packets of them, and servers' signals
		stays         bool                    // flows are known after the start, too
	}{
		"table, stateless": {hashing(2), stateless(desired.PlacementHash, 2), ofTable, true},
		"table, hint":      {withHints(hashing(2)), hinting(desired.PlacementHash, 2), ofTable, true},
		"stateless, table": {stateless(desired.PlacementHash, 2), hashing(2), ofCookie, false},
		"quic, quic":       {quicOf(quicForm(), 1, 2, 3), quicOf(quicForm(), 1, 2, 3, 4), ofQUIC, true},
		"signal": {hunting(desired.SelectConsistent, 2), stateless(desired.PlacementHunt, 2),
			func(f *fixture) [][]byte {
				return [][]byte{f.signal(web, "web", f.row(web, "web")[1], srv6.CreateStickiness, synAck)}
			}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := openWith(t, c.before, stoppedClock(t), true)
			frames := c.known(f)
			var want []sent
			former, err := f.plane.Objects.XdpLb.Clone()
			f.must(err)
			defer former.Close()
			for _, frame := range frames {
				want = append(want, f.sentBy(former, frame))
			}
			require := func(when string, program *ebpf.Program) {
				t.Helper()
				for i, frame := range frames {
					if got := f.sentBy(program, frame); !got.equals(want[i]) {
						t.Errorf("%s: packet %d: %+v, want %+v", when, i, got, want[i])
					}
				}
			}
			f.stop()
			c.after.Node.Instance = c.before.Node.Instance
			late := errors.New("late")
			for _, fails := range []bool{true, false} {
				log := slog.New(slog.DiscardHandler)
				b, err := newBalancer(copyOf(c.after), desired.Secrets{}, f.clock, log)
				f.must(err)
				f.must(b.plane.SetHost([]nexthop.Link{{Type: "veth", MAC: ownMAC}}))
				err = datapath.TakeOver(log, func(takeover *datapath.Takeover) error {
					err := b.fill(takeover, func(takeover *datapath.Takeover) error {
						takeover.OnUndo(func() error {
							require("the former program after the failed start", former)
							return nil
						})
						require("the former program", former)
						require("the program of the start", b.plane.Objects.XdpLb)
						return nil
					})
					if fails && err == nil {
						return late
					}
					return err
				})
				if fails && err != late || !fails && err != nil {
					t.Errorf("error %v", err)
				}
				if !fails && c.stays {
					require("after the start", b.plane.Objects.XdpLb)
				}
				f.must(b.Close())
			}
		})
	}
}
