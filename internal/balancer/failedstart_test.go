// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// crashFails is the environment variable that makes the call fail instead of killing the process.
const crashFails = "SEGUE_TEST_CRASH_FAILS"

// failStart is a process that starts a balancer and ends.
func failStart() error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	return datapathtest.StartFailing(func() (end func() error, err error) {
		b, ended, err := startCrash(ctx)
		return func() error {
			stop()
			return errors.Join(<-ended, b.Close())
		}, err
	})
}

// fail starts a process with the configuration of the number, and with node.inside of the other
// one, as datapathtest.RunFailing does. So both differ from those of the process before.
func (s *crashSite) fail(number, call int) (refusal string, reached bool) {
	s.t.Helper()
	return datapathtest.RunFailing(s.t, s.ns.Do, call, crashFails+"=1", crashInstance+"="+s.instance,
		crashFirst+"="+strconv.Itoa(number), crashInside+"="+s.inside[1-number])
}

// stateOf describes the pinned state of an instance. It omits the table of services and the lines
// of rankings that are not in force. It also omits the counters of packets that do not go to
// servers, because the host can send such packets at any time.
func stateOf(t *testing.T, instance string) datapathtest.State {
	t.Helper()
	state := datapathtest.ReadState(t, datapath.Dir(instance))
	for _, element := range state[dataplane.DirectoryMap] {
		var directory *dataplane.DirectoryLayout
		if len(element) < int(unsafe.Sizeof(*directory)) {
			continue
		}
		directory = (*dataplane.DirectoryLayout)(unsafe.Pointer(unsafe.SliceData(element)))
		clear(directory.Services[1-directory.Generation%2][:])
	}
	leaveOutFormerRankings(state)
	for key := range state[dataplane.ReasonsMap] {
		number, err := hex.DecodeString(key)
		const forwards = uint32(len(dataplane.ServerCounter{}.Forwarded))
		if err == nil && binary.NativeEndian.Uint32(number)-dataplane.FirstForward >= forwards {
			delete(state[dataplane.ReasonsMap], key)
		}
	}
	return state
}

// leaveOutFormerRankings omits the lines that no ranking has.
func leaveOutFormerRankings(state datapathtest.State) {
	const perLine = 8
	used := map[string]bool{"map": true}
	for _, ranking := range state["rankings"] {
		if len(ranking) < 8 {
			continue // the ID of the map
		}
		first, nodes := binary.NativeEndian.Uint32(ranking), binary.NativeEndian.Uint32(ranking[4:])
		for nodes > 0 {
			nodes = (nodes + perLine - 1) / perLine
			for range nodes {
				used[fmt.Sprint(first)] = true
				first++
			}
			if nodes == 1 {
				break
			}
		}
	}
	for key := range state["rank_lines"] {
		if !used[key] {
			delete(state["rank_lines"], key)
		}
	}
}

// failAtSteps starts processes over a data path that is in use. In each process another system call
// fails; the calls are step apart.
func failAtSteps(t *testing.T, step int, inside [2]string) {
	s := newCrashSite(t, inside)
	s.run(0, 0) // the process reloads configuration 1
	s.remember()
	datapathtest.Starts{
		Start: s.fail,
		State: func() datapathtest.State { return stateOf(t, s.instance) },
		Check: func(when string, next int, tookOver bool) {
			if tookOver {
				s.check(when)
				s.awaitDetached(next)
			}
			s.checkSides(next)
		},
	}.FailAtSteps(t, step, 0)
	s.check("after all")
}

// A start that fails leaves all maps, pins and programs as they were. This holds also if the
// interfaces exchange their roles, or if the second one comes or goes.
func TestFailedStartChangesNothing(t *testing.T) {
	t.Parallel()
	for inside, step := range map[[2]string]int{
		{}: 24, {"eth1", "eth0"}: 36, {"eth1", ""}: 36, {"", "eth1"}: 36,
	} {
		t.Run(fmt.Sprintf("%q", inside), func(t *testing.T) {
			t.Parallel()
			failAtSteps(t, datapathtest.Apart(step), inside)
		})
	}
}

// A start that fails also restores state that only few starts change: the flows and counters of a
// removed server whose slot is needed for another one. It also removes the pin of a table that the
// earlier build did not have.
func TestFailedStartRestoresReclaimedSlot(t *testing.T) {
	t.Parallel()
	s1, s2, s3 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)
	for name, placed := range map[string]func(...desired.Server) *desired.Balancer{
		"hash": webOf,
		"hunt": func(servers ...desired.Server) *desired.Balancer {
			cfg := webOf(servers...)
			cfg.Services[0] = huntingOf(cfg.Services[0], desired.SelectConsistent, 2)
			return cfg
		},
		"infer": func(servers ...desired.Server) *desired.Balancer {
			cfg := inferring(servers...)
			cfg.Services[0].Infer.Estimator = desired.EstimateDurations // it has durations
			return cfg
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := placed(s1, s2)
			cfg.Node.Limits.Servers = 2 // 4 slots
			f := open(t, cfg)
			for port := range uint16(liveFlows) {
				flow := fromPort(web, 10000+port)
				f.run(frameOf(flow))
				f.run(frameOf(flow, packet.Flags(packet.ACK)))
				f.run(signal(desired.SRv6Encap, s2.Locator, flow, srv6.CreateStickiness, synAck))
			}
			f.must(f.sweep()) // the slot has counts of flows
			f.infers(time.Second)
			after := placed(s1, s3)
			after.Node = cfg.Node
			f.mustApply(after)
			// Flows of other servers stay, even if no timeout is as long as their age.
			staying := f.slot("web", "s1")
			f.elapseFlows(4063, func(e dataplane.FlowEntry) bool { return e.Server() == staying })
			f.stop()
			f.must(os.Remove(filepath.Join(datapath.Dir(cfg.Node.Instance), dataplane.FragmentsMap)))
			before := stateOf(t, cfg.Node.Instance)
			next := placed(srv6Server("s4", 4, 1), srv6Server("s5", 5, 1))
			next.Node = cfg.Node
			next.Node.Seed++
			b, err := newBalancer(next, desired.Secrets{}, f.clock, slog.New(slog.DiscardHandler))
			f.must(err)
			late := errors.New("late")
			err = datapath.TakeOver(b.log, func(takeover *datapath.Takeover) error {
				f.must(b.fill(takeover, withoutPrograms))
				flows, slots := b.plane.Saved()
				if flows < liveFlows/4 || slots != 1 {
					t.Errorf("%d flows and the counters of %d slots are swept", flows, slots)
				}
				return late
			})
			if err != late {
				t.Errorf("error %v", err)
			}
			f.must(b.Close())
			before.RequireSame(t, "after the start", stateOf(t, cfg.Node.Instance))
		})
	}
}

// refusal is a start that is refused before its first step.
type refusal struct {
	want    string // a part of the error
	prepare func(*fabric, *desired.Balancer)
	at      string // the router whose namespace the process runs in; empty: the balancer
}

var refusals = map[string]refusal{
	"no such interface": {want: "there is no such interface",
		prepare: func(n *fabric, _ *desired.Balancer) { n.own[0] = nexthop.Link{} }},
	"no Ethernet": {want: "no Ethernet address",
		prepare: func(n *fabric, _ *desired.Balancer) { n.own[0].MAC = packet.MAC{} }},
	"another network namespace": {want: "works in another network namespace", at: "eth0",
		prepare: func(n *fabric, _ *desired.Balancer) { n.own[0] = n.routers["eth0"].link }},
	"another program": {want: "it runs program",
		prepare: func(n *fabric, _ *desired.Balancer) { n.own[0] = n.linkOf(n.near, "eth2") }},
	"other limits": {want: "other limits",
		prepare: func(_ *fabric, cfg *desired.Balancer) { cfg.Node.Limits.Flows *= 4 }},
	"too many servers": {want: "node.limits.servers",
		prepare: func(_ *fabric, cfg *desired.Balancer) {
			web := &cfg.Services[0]
			for i := range 2 * cfg.Node.Limits.Servers {
				web.Servers = append(web.Servers, srv6Server(fmt.Sprint("more", i), byte(100+i), 1))
			}
		}},
	"too many services": {want: "new services need",
		prepare: func(_ *fabric, cfg *desired.Balancer) {
			for i := range 16384 {
				cfg.Services = append(cfg.Services, desired.Service{Name: fmt.Sprint("more", i)})
			}
		}},
}

// A start that is certain to fail changes nothing.
func TestRefusedStartBeginsNothing(t *testing.T) {
	t.Parallel()
	n := newFabric(t, "tcx", "eth0")
	n.stop()
	blocker := n.block("eth2")
	defer blocker.Close()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	before := stateOf(t, n.cfg.Node.Instance)
	for name, c := range refusals {
		t.Run(name, func(t *testing.T) {
			n := *n
			n.own = slices.Clone(n.own)
			cfg := hunting(desired.SelectRandom, 3)
			cfg.Node = n.cfg.Node
			c.prepare(&n, cfg)
			at := n.near
			if c.at != "" {
				at = n.routers[c.at].ns
			}
			b, err := newBalancer(cfg, desired.Secrets{}, clock, slog.New(slog.DiscardHandler))
			if err == nil {
				hops := (&Rehearsal{b}).hopsBy(nexthop.Hop{MAC: ownMAC, Link: n.own[0]})
				err = at.Do(func() error {
					return b.follow(nexthop.Update{Own: n.own, Hops: hops})
				})
				if len(b.services.members()) > 0 {
					t.Error("servers have slots already")
				}
				if err := b.Close(); err != nil {
					t.Error(err)
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %s", err, c.want)
			}
			before.RequireSame(t, name, stateOf(t, n.cfg.Node.Instance))
		})
	}
}

// block attaches a program that is not Segue's to an interface.
func (n *fabric) block(name string) (blocker link.Link) {
	n.t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "blocker", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdictPass), asm.Return()},
	})
	testhost.Must(n.t, err)
	defer program.Close()
	n.in(n.near, func() (err error) {
		on := n.routers[name].index
		blocker, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: on})
		return err
	})
	return blocker
}

// A first start that fails leaves no pin and no program, whichever step fails.
func TestFailedFirstStartLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newCrashSite(t, [2]string{"eth1", "eth1"})
	datapathtest.Starts{Start: s.fail, State: s.left, Detach: func() { s.must(dataplane.Detach(s.instance)) }}.
		FailFirst(t, datapathtest.Apart(48))
}

// left describes what an instance has left: its directory, and XDP programs.
func (s *crashSite) left() datapathtest.State {
	left := datapathtest.State{}
	if _, err := os.Stat(datapath.Dir(s.instance)); !errors.Is(err, os.ErrNotExist) {
		left["directory"] = map[string][]byte{"": fmt.Append(nil, err)}
	}
	s.must(s.ns.Do(func() error {
		for _, name := range s.interfaces() {
			device, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if xdp := device.Attrs().Xdp; xdp != nil && xdp.Attached {
				left[name] = map[string][]byte{"": fmt.Appendf(nil, "%+v", xdp)}
			}
		}
		return nil
	}))
	return left
}
