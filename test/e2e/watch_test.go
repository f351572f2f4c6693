// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab"
)

// sight is the state of a server in a balancer's tables since a time, as `segue status` shows it.
type sight struct {
	at        time.Time
	condition inspect.Condition
	causes    []inspect.Condition
	used      bool // the server is in the service's table and gets new flows
}

// place is a service of a balancer.
type place struct{ balancer, service string }

// watch records the state of a server in all balancers and services.
type watch struct {
	server string
	views  map[string]*inspect.View // by balancer
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu     sync.Mutex
	sights map[place][]sight // the changes, the oldest first
	err    error
}

// startWatch watches a server until the test ends.
func startWatch(t *testing.T, l *lab.Lab, server string) *watch {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &watch{
		server: server, cancel: cancel,
		views: map[string]*inspect.View{}, sights: map[place][]sight{},
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		view, err := inspect.OpenView(l.Node(name).Instance())
		must(t, err)
		t.Cleanup(func() { view.Close() })
		w.views[name] = view
	}
	w.look()
	w.group.Go(func() { w.run(ctx) })
	t.Cleanup(w.stop)
	return w
}

func (w *watch) run(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.look()
		}
	}
}

// look records the present state of the server in all balancers.
func (w *watch) look() {
	for name, view := range w.views {
		services, err := view.Services()
		if err == nil && w.hasNews(name, services) {
			services, err = sharesOf(view)
		}
		w.note(name, services, err)
	}
}

// sharesOf reads the services with the servers' shares, which takes long.
func sharesOf(view *inspect.View) ([]*inspect.ServiceState, error) {
	snapshot, err := view.Snapshot()
	if err != nil {
		return nil, err
	}
	return snapshot.Services, nil
}

// hasNews tells whether the server may have been added to a service's table, or removed.
func (w *watch) hasNews(name string, services []*inspect.ServiceState) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(services, func(service *inspect.ServiceState) bool {
		server := w.find(service)
		sights := w.sights[place{name, service.Name}]
		return len(sights) == 0 || sights[len(sights)-1].used != isFit(service, server)
	})
}

// fit are the conditions in which a server gets new flows.
var fit = []inspect.Condition{inspect.ServerUp, inspect.ServerUnchecked, inspect.ServerStarting}

// isFit tells whether the server should be in the service's table.
func isFit(service *inspect.ServiceState, server *inspect.ServerState) bool {
	return slices.Contains(fit, server.Condition) ||
		slices.Contains(service.Ignored, server.Condition)
}

// find returns the server's state in a service.
func (w *watch) find(service *inspect.ServiceState) *inspect.ServerState {
	for _, server := range service.Servers {
		if server.Name == w.server {
			return server
		}
	}
	return &inspect.ServerState{Name: w.server, Condition: inspect.ServerRemoved}
}

// note records the changes. For services that were read without shares, it keeps the previous
// servers in the table.
func (w *watch) note(name string, services []*inspect.ServiceState, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.err = fmt.Errorf("%s: %w", name, err)
	}
	for _, service := range services {
		server := w.find(service)
		here := place{name, service.Name}
		sights := w.sights[here]
		now := sight{
			at: time.Now(), condition: server.Condition, causes: server.Causes,
			used: server.Share > 0,
		}
		switch {
		case !hasShares(service) && len(sights) > 0:
			now.used = sights[len(sights)-1].used
		case !now.used && isFit(service, server):
			continue // the table is newer than the condition, and has changed
		}
		if len(sights) == 0 || sights[len(sights)-1].differs(now) {
			w.sights[here] = append(sights, now)
		}
	}
}

func hasShares(service *inspect.ServiceState) bool {
	placed := func(s *inspect.ServerState) bool { return s.Share > 0 }
	return slices.ContainsFunc(service.Servers, placed)
}

func (s sight) differs(other sight) bool {
	return s.condition != other.condition || s.used != other.used ||
		!slices.Equal(s.causes, other.causes)
}

// last returns the current state of the server.
func (w *watch) last(t *testing.T) map[place]sight {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	must(t, w.err)
	all := map[place]sight{}
	for here, sights := range w.sights {
		all[here] = sights[len(sights)-1]
	}
	return all
}

// since returns the changes since a time.
func (w *watch) since(t *testing.T, from time.Time) map[place][]sight {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	must(t, w.err)
	all := map[place][]sight{}
	for here, sights := range w.sights {
		earlier := func(s sight) bool { return s.at.Before(from) }
		all[here] = slices.DeleteFunc(slices.Clone(sights), earlier)
	}
	return all
}

// await waits until all balancers use the server in the services, or until none does.
func (w *watch) await(t *testing.T, used bool, services ...string) {
	t.Helper()
	eventually(t, func() error {
		all := w.last(t)
		for _, here := range slices.SortedFunc(maps.Keys(all), comparePlaces) {
			if slices.Contains(services, here.service) && all[here].used != used {
				return fmt.Errorf("%s: %s is %s in %s",
					here.balancer, w.server, all[here].condition, here.service)
			}
		}
		return nil
	})
}

// awaitStarted waits until the server gets its full share of new flows in all balancers.
func (w *watch) awaitStarted(t *testing.T) {
	t.Helper()
	eventually(t, func() error {
		for here, sight := range w.last(t) {
			if sight.condition == inspect.ServerStarting {
				return fmt.Errorf("%s: %s starts slowly in %s", here.balancer, w.server, here.service)
			}
		}
		return nil
	})
}

func (w *watch) stop() {
	w.cancel()
	w.group.Wait()
}
