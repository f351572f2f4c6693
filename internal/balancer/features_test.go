// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// hashing returns the configuration of the function hunting, with placement hash.
func hashing(candidates int) *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, candidates)
	for i := range cfg.Services {
		cfg.Services[i].Placement, cfg.Services[i].Selection = desired.PlacementHash, ""
	}
	return cfg
}

// inRow returns a service that infers among the candidates of a row.
func inRow(persistence desired.Persistence) *desired.Balancer {
	cfg := inferring(manyServers(8)...)
	svc := &cfg.Services[0]
	svc.Infer.Among, svc.Persistence = desired.AmongCandidates, persistence
	if svc.FindsByColumn() {
		svc.Generations, svc.History = 32, 3
	}
	return withHints(cfg)
}

// estimating sets the estimator of the first service.
func estimating(estimator desired.Estimator, cfg *desired.Balancer) *desired.Balancer {
	cfg.Services[0].Infer.Estimator = estimator
	return cfg
}

// Programs that have only the features that a service needs decide as programs with all features
// do: a dry run, which has all of them, comes before each frame.
func TestNeededFeaturesSuffice(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]*desired.Balancer{
		"hash":                  hashing(2),
		"hash, affinity":        affine(byClient(desired.ScopeService, true), hashing(2)),
		"hash, stateless":       stateless(desired.PlacementHash, 2),
		"hash, multilinear":     multilinear(stateless(desired.PlacementHash, 2)),
		"hunt, multilinear":     multilinear(stateless(desired.PlacementHunt, 4)),
		"hash, hints":           withHints(stateless(desired.PlacementHash, 2)),
		"hash, hint":            hinting(desired.PlacementHash, 4),
		"hunt":                  hunting(desired.SelectConsistent, 2),
		"hunt, reports":         hunting(desired.SelectReports, 8),
		"hunt, spare":           hunting(desired.SelectSpare, 8),
		"hunt, stateless":       stateless(desired.PlacementHunt, 3),
		"hunt, hint":            hinting(desired.PlacementHunt, 4),
		"round-robin":           roundRobin(3),
		"infer":                 inferring(manyServers(4)...),
		"infer, hlb":            estimating(desired.EstimateHLB, inferring(manyServers(4)...)),
		"infer, row, hlb, hint": estimating(desired.EstimateHLB, inRow(desired.PersistenceHint)),
		"infer, row":            inRow(desired.PersistenceTable),
		"infer, row, stateless": inRow(desired.PersistenceStateless),
		"infer, row, hint":      inRow(desired.PersistenceHint),
		"two":                   sampling(desired.AmongTwo, manyServers(4)...),
		"three":                 sampling(desired.AmongThree, manyServers(4)...),
		"four":                  sampling(desired.AmongFour, manyServers(4)...),
		"awcmp":                 placingBy(desired.PlacementAWCMP, manyServers(4)...),
		"weighted-round-robin":  placingBy(desired.PlacementWeightedTurns, manyServers(4)...),
		"gsq2":                  placingBy(desired.PlacementGSQ2, manyServers(4)...),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := openWith(t, cfg, stoppedClock(t), true)
			f.exercise(frameOf(web), func(options ...packet.Option) []byte { return frameOf(web, options...) })
		})
	}
	t.Run("quic", func(t *testing.T) {
		t.Parallel()
		f := openWith(t, quicOf(quicForm(), 1, 2, 3), stoppedClock(t), true)
		f.run(frameOf(h3))
		f.run(packet.ICMPError(router6, 1, 0, 0, reply(h3)))
	})
}

// exercise runs the data path with packets of a connection of the service "web".
func (f *fixture) exercise(syn []byte, with func(...packet.Option) []byte) {
	f.t.Helper()
	server := f.service("web").Servers[0].Name
	if f.service("web").FindsByColumn() {
		server = f.row(web, "web")[0]
	}
	signals := func(function srv6.Function, flags packet.TCPFlags) {
		f.run(f.signal(web, "web", server, function, packet.Flags(flags)))
	}
	f.run(with(packet.Flags(packet.ACK))) // the flow is unknown
	f.run(syn)
	f.run(with(packet.Timestamps(7, 0)))
	signals(srv6.CreateStickiness, packet.SYN|packet.ACK)
	if f.service("web").Persistence == desired.PersistenceHint && f.plane.Hints.Count().Idle == 0 {
		f.t.Error("the server's signal has entered no hint")
	}
	for range 2 {
		f.run(with(packet.Flags(packet.ACK|packet.PSH), packet.Timestamps(9, 1025)))
		f.run(with(packet.Flags(packet.ACK)))
	}
	f.run(packet.ICMPError(router6, 1, 0, 0, reply(web)))
	for _, fragment := range packet.Fragments(with(packet.Flags(packet.ACK), large), 64, 7) {
		f.run(fragment)
	}
	f.run(with(packet.Flags(packet.FIN | packet.ACK)))
	signals(srv6.RemoveStickiness, packet.FIN|packet.ACK)
	f.run(syn)
}

// A reload that needs more features replaces the program. Flows, tables and counters stay. A reload
// that needs less keeps the program.
func TestReloadWidensProgram(t *testing.T) {
	t.Parallel()
	before, after := withHints(hashing(2)), withHints(hunting(desired.SelectConsistent, 2))
	after.Services[0].Persistence = desired.PersistenceHint
	after.Services[0].Generations, after.Services[0].History = 32, 3
	f := openWith(t, before, stoppedClock(t), true)
	f.run(frameOf(web))
	data := frameOf(web, packet.Flags(packet.ACK))
	f.run(data)
	want := f.run(data)
	number, counted, entry := datapathtest.ProgramNumber(t, f.plane.Objects.XdpLb), f.counters().reasons, f.entry(web)

	f.mustApply(after)
	f.cfg = after
	widened := datapathtest.ProgramNumber(t, f.plane.Objects.XdpLb)
	if widened == number {
		t.Fatal("the program is the one before the reload")
	}
	if now := f.counters().reasons; !maps.Equal(now, counted) {
		t.Errorf("the counters are %v after the reload, and %v before", now, counted)
	}
	if now := f.entry(web); now != entry {
		t.Errorf("the flow's entry is %+v after the reload, and %+v before", now, entry)
	}
	if got := f.run(data); !maps.Equal(got.Servers, want.Servers) {
		t.Errorf("the flow goes to %v after the reload, and to %v before", got.Servers, want.Servers)
	}
	offer := f.run(frameOf(insert))
	f.check(f.offered(frameOf(insert), insert, "insert", "forward_hunt", srv6.ConnectAvail, f.row(insert, "insert")...), offer)

	f.mustApply(before)
	f.cfg = before
	if datapathtest.ProgramNumber(t, f.plane.Objects.XdpLb) != widened {
		t.Error("a reload that needs less has replaced the program")
	}
}

// A reload that needs more features replaces the attached programs, and their links stay. The data
// path then works as after a start.
func TestReloadWidensAttachedPrograms(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			interfaces := []string{"eth0", "eth1"}
			n := newFabricOf(t, hashing(2), way, interfaces...)
			n.stop()
			narrowed.Store(n.cfg.Node.Instance, true)
			n.start()
			links, running := n.xdpLinks(), n.xdpPrograms()
			after := hunting(desired.SelectConsistent, 2)
			after.Node = n.cfg.Node
			n.in(n.near, func() error { return (&Rehearsal{n.balancer}).Apply(after) })
			n.wantPrograms(interfaces...)
			if diff := cmp.Diff(links, n.xdpLinks()); diff != "" {
				t.Errorf("links of XDP (-before +after):\n%s", diff)
			}
			for i, side := range n.balancer.plane.Sides {
				ifindex := uint32(n.own[i].Index)
				loaded := datapathtest.ProgramNumber(t, side.Objects.XdpLb)
				if now := n.xdpPrograms()[ifindex]; now != loaded || now == running[ifindex] {
					t.Errorf("%s runs program %d, loaded is %d, and %d ran before", interfaces[i], now, loaded, running[ifindex])
				}
			}
			for service := range hunted {
				n.requireReturn(service)
			}
		})
	}
}
