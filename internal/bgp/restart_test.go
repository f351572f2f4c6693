// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer"
)

// TestRestart follows a balancer through restarts. No message makes a peer remove routes.
func TestRestart(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Ready)
	s := f.router.await(0, routesAre(vip6, vip4))
	s.requireRestart(t, false)
	for family, before := range s.ends {
		if before == 0 {
			t.Errorf("End-of-RIB of %s came before the routes", family)
		}
	}
	f.stop()
	if s = f.router.await(0, isClosed); s.notified != nil {
		t.Errorf("the end of the process sent a notification: %+v", s.notified)
	}
	f.start(true, balancer.Ready, balancer.Unable) // the abilities may have changed meanwhile
	s = f.router.await(1, routesAre(vip4))
	s.requireRestart(t, true)

	// A session that ends by itself is no restart, but the data path is preserved nevertheless.
	f.router.cut()
	s = f.router.await(2, routesAre(vip4))
	s.requireRestart(t, true)
	if p := f.state().Peers[0]; p.Sessions != 2 || !p.IsEstablished() {
		t.Errorf("%+v", p)
	}
}

// TestNoGracefulRestart: a peer that does not keep routes is told that the session ends.
func TestNoGracefulRestart(t *testing.T) {
	f := newFixture(t)
	f.router.supports = false
	f.start(true, balancer.Ready, balancer.Ready)
	f.router.await(0, func(s *received) error {
		if len(s.routes) != 2 {
			return fmt.Errorf("routes %v", s.routes)
		}
		return nil
	})
	if f.state().Peers[0].KeepsRoutes {
		t.Error("a peer without graceful restarts keeps routes")
	}
	f.stop()
	if s := f.router.await(0, isClosed); s.notified == nil {
		t.Error("no notification")
	}
}

// TestSessionThatHangs: a router accepts a connection and says nothing, as when it has lost the
// connection while it was opened. The balancer does not wait for it longer than peers keep routes.
func TestSessionThatHangs(t *testing.T) {
	f := newFixture(t)
	f.attempt = 5 * time.Second // the first connection is tried after 2 s
	f.router.mute = 2
	f.start(true, balancer.Ready, balancer.Ready)
	s := f.router.await(2, routesAre(vip6, vip4))
	s.requireRestart(t, true)
	for i := range f.router.mute {
		if s := f.router.await(i, isClosed); s.notified != nil {
			t.Errorf("session %d ended with %+v", i, s.notified)
		}
	}
	// An established session stays.
	time.Sleep(f.attempt + time.Second)
	if s := f.router.session(2); s.closed || f.router.session(3) != nil {
		t.Error("the session was opened anew")
	}
}

// TestDataPathIsGone: a peer is told to remove the routes when the process ends without a data path.
func TestDataPathIsGone(t *testing.T) {
	f := newFixture(t)
	f.start(false, balancer.Ready, balancer.Ready)
	f.router.await(0, routesAre(vip6, vip4))
	f.works = false
	f.stop()
	f.router.await(0, isClosed).requireCease(t)
	if !strings.Contains(f.log.String(), "level=ERROR msg=\"the data path is gone") {
		t.Error("the log does not say so")
	}
}

// TestDataPathEndsWithProcess: the balancer does not ask peers to keep routes. They remove them
// also when the process is killed.
func TestDataPathEndsWithProcess(t *testing.T) {
	f := newFixture(t)
	f.endsWithProcess = true
	f.start(true, balancer.Ready, balancer.Ready)
	s := f.router.await(0, func(s *received) error {
		if len(s.routes) != 2 {
			return fmt.Errorf("routes %v", s.routes)
		}
		return nil
	})
	if s.restart() != nil {
		t.Error("the balancer supports graceful restarts")
	}
	if f.state().Peers[0].KeepsRoutes {
		t.Error("the peer keeps routes")
	}
	f.stop()
	f.router.await(0, isClosed).requireCease(t)
}
