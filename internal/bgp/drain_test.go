// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/segue-lb/segue/internal/announce"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestDrain: a drain outlasts a restart, until an undrain.
func TestDrain(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.HoldDown = time.Hour // which does not concern drains
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.drain(true)
	f.router.await(0, routesAre())
	f.stop()
	f.start(true, balancer.Ready, balancer.Ready)
	f.router.await(1, routesAre())
	if state := f.state(); state.Drained == nil || state.Routes[0].Reason != Drained {
		t.Errorf("%+v", state)
	}
	f.drain(false)
	f.router.await(1, routesAre(vip6, vip4))
	if _, err := os.Stat(string(announce.DrainFileOf(&f.cfg.Node))); !os.IsNotExist(err) {
		t.Errorf("error %v", err)
	}
}

// TestDrainThatShifts: a drain changes the attributes of the routes instead of withdrawing them. A
// reload during the drain takes effect. When the drained balancer stops, its peers remove the routes.
func TestDrainThatShifts(t *testing.T) {
	f := newFixture(t)
	f.cfg.BGP.Drain = &desired.RouteAttributes{Prepend: new(uint32(2)), MED: new(uint32(100))}
	f.cfg.BGP.Communities = []desired.Community{"64600:1"}
	awaitAttributes := func(session int, path, med int, communities ...uint32) {
		t.Helper()
		f.router.await(session, func(s *received) error {
			for _, vip := range []string{vip4, vip6} {
				gotPath, gotMED := 0, -1
				if a := attribute[*bgp.PathAttributeAsPath](s, vip); a != nil {
					gotPath = len(a.Value[0].GetAS())
				}
				if a := attribute[*bgp.PathAttributeMultiExitDisc](s, vip); a != nil {
					gotMED = int(a.Value)
				}
				var got []uint32
				if a := attribute[*bgp.PathAttributeCommunities](s, vip); a != nil {
					got = a.Value
				}
				if gotPath != path || gotMED != med || !slices.Equal(got, communities) {
					return fmt.Errorf("%s: path of %d, MED %d, communities %v", vip, gotPath, gotMED, got)
				}
			}
			return routesAre(vip6, vip4)(s)
		})
	}
	const own, shutdown = 64600<<16 | 1, 0xffff0000
	f.start(false, balancer.Ready, balancer.Ready)
	awaitAttributes(0, 1, -1, own)
	f.drain(true)
	awaitAttributes(0, 3, 100, own)
	if state := f.state(); state.Drained == nil || !state.DrainShifts || !state.Routes[0].Announced || state.Routes[0].Prepend != 2 {
		t.Errorf("%+v", state)
	}
	f.cfg.BGP = f.with(func(b *desired.BGP) {
		b.Drain = &desired.RouteAttributes{Communities: []desired.Community{"graceful-shutdown"}}
	})
	f.apply()
	awaitAttributes(0, 1, -1, own, shutdown)
	f.stop()
	f.router.await(0, isClosed).requireCease(t)
	f.start(true, balancer.Ready, balancer.Ready)
	awaitAttributes(1, 1, -1, own, shutdown)
	f.drain(false)
	awaitAttributes(1, 1, -1, own)
	f.stop()
	if s := f.router.await(1, isClosed); s.notified != nil {
		t.Errorf("the end of an undrained process sent a notification: %+v", s.notified)
	}
}

// TestDrainUntilRestart drains the balancer until it is restarted. A drain that was wanted for longer
// stays, in whichever order the two come.
func TestDrainUntilRestart(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.drainUntilRestart()
	f.router.await(0, routesAre())
	f.stop()
	f.start(true, balancer.Ready, balancer.Ready)
	f.router.await(1, routesAre(vip6, vip4))
	last := 1 // session
	for _, drains := range [][]func(){
		{func() { f.drain(true) }, f.drainUntilRestart},
		{f.drainUntilRestart, func() { f.drain(true) }},
	} {
		for _, drain := range drains {
			drain()
		}
		f.stop()
		f.start(true, balancer.Ready, balancer.Ready)
		last++
		f.router.await(last, routesAre())
		f.drain(false)
		f.router.await(last, routesAre(vip6, vip4))
	}
}

// TestDrainThatCannotBeStored changes nothing.
func TestDrainThatCannotBeStored(t *testing.T) {
	f := newFixture(t)
	f.cfg.Node.State = filepath.Join(f.cfg.Node.State, "file")
	testhost.Must(t, os.WriteFile(f.cfg.Node.State, nil, 0o644))
	f.cfg.Node.Instance = "../none"
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.announcer.file = announce.DrainFile(filepath.Join(f.cfg.Node.State, "lb.drained"))
	if err := f.announcer.Drain(t.Context(), false); err == nil || f.state().Drained != nil {
		t.Errorf("error %v, %+v", err, f.state())
	}
	f.router.await(0, routesAre(vip6, vip4))
}

func (f *fixture) drain(drained bool) {
	f.t.Helper()
	change := f.announcer.Undrain
	if drained {
		change = func(ctx context.Context) error { return f.announcer.Drain(ctx, false) }
	}
	testhost.Must(f.t, change(f.t.Context()))
}

func (f *fixture) drainUntilRestart() {
	f.t.Helper()
	testhost.Must(f.t, f.announcer.Drain(f.t.Context(), true))
}
