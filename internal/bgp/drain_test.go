// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer"
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
	if _, err := os.Stat(DrainedFile(&f.cfg.Node)); !os.IsNotExist(err) {
		t.Errorf("error %v", err)
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
	f.announcer.file = filepath.Join(f.cfg.Node.State, "lb.drained")
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
