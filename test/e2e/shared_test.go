// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/lab"
)

// sharedLabs are labs that one test after the other uses. To start a lab takes seconds of CPU time:
// the kernel verifies the program of each agent and balancer.
type sharedLabs struct {
	mu    sync.Mutex
	count int                   // of labs that were made
	free  map[string][]*lab.Lab // by topology
	// release gives the servers of a lab back (reserveServers).
	release map[*lab.Lab]func()
	// before contains what the data paths had counted when the present test began, by instance.
	before map[string]counts
}

var pool = sharedLabs{
	free: map[string][]*lab.Lab{}, release: map[*lab.Lab]func(){}, before: map[string]counts{},
}

// shared returns a lab that other tests have used, or a new one. After the test, the lab gets its
// configurations and next hops back, and its overrides are removed. So the test may change these, and
// may stop, kill and start processes that run again at its end. It must restore all else, such as
// links, routes, sysctls and attached programs. Generations and flows of earlier tests remain.
func shared(t *testing.T, topology lab.Topology) *lab.Lab {
	t.Helper()
	needRoot(t)
	shape, err := json.Marshal(topology)
	must(t, err)
	l := pool.take(string(shape))
	if l == nil {
		release := reserveServers(t, topology.Servers)
		topology.Name = pool.newName()
		if l, err = lab.Up(interrupted, topology, executables(segue)); err != nil {
			release()
			t.Fatal(err)
		}
		pool.keep(l, release)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, l)
		} else if err := restore(l); err != nil {
			t.Errorf("no other test can use lab %s: %v", l.Name, err)
		} else {
			pool.give(string(shape), l)
			return
		}
		must(t, pool.remove(l))
	})
	awaitServers(t, l)
	pool.begin(t, l)
	return l
}

// restore gives all processes of a lab the configurations back with which they have started.
func restore(l *lab.Lab) error {
	if err := l.SetNextHops(nodes(l, lab.RoleBalancer)...); err != nil {
		return err
	}
	for _, p := range l.Processes {
		if _, alive := p.PID(); !alive {
			return fmt.Errorf("%s does not run", p)
		}
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		cfg := l.Node(name).BalancerConfig()
		if err := restoreProcess(l.Process(name, "lb"), cfg.OverridesFile(), l.Node(name).WriteBalancerConfig(cfg)); err != nil {
			return err
		}
	}
	for _, name := range nodes(l, lab.RoleServer) {
		cfg := l.Node(name).AgentConfig()
		if err := restoreProcess(l.Process(name, "agent"), cfg.OverridesFile(), l.Node(name).WriteAgentConfig(cfg)); err != nil {
			return err
		}
	}
	return nil
}

// restoreProcess removes the overrides of a process, whose configuration was written, and reloads it.
func restoreProcess(p *lab.Process, overrides string, written error) error {
	if err := os.Remove(overrides); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if written != nil {
		return written
	}
	return p.Reload(interrupted)
}

func (s *sharedLabs) take(shape string) *lab.Lab {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := s.free[shape]
	if len(free) == 0 {
		return nil
	}
	s.free[shape] = free[1:]
	return free[0]
}

func (s *sharedLabs) give(shape string, l *lab.Lab) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free[shape] = append(s.free[shape], l)
}

// keep notes how to give back the servers of a lab that was made.
func (s *sharedLabs) keep(l *lab.Lab, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release[l] = release
}

// remove takes a lab down and gives its servers back.
func (s *sharedLabs) remove(l *lab.Lab) error {
	if err := l.Down(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release[l]()
	delete(s.release, l)
	return nil
}

// takeDownFree removes the labs that no test uses.
func (s *sharedLabs) takeDownFree() error {
	s.mu.Lock()
	free := slices.Concat(slices.Collect(maps.Values(s.free))...)
	clear(s.free)
	s.mu.Unlock()
	var errs []error
	for _, l := range free {
		errs = append(errs, s.remove(l))
	}
	return errors.Join(errs...)
}

// sharedName returns the name of a shared lab.
func sharedName(i int) string { return fmt.Sprint(labName, "s", i) }

func (s *sharedLabs) newName() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count++
	return sharedName(s.count - 1)
}

// begin notes what the data paths of a lab have counted until now.
func (s *sharedLabs) begin(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, n := range l.Nodes {
		if n.Role == lab.RoleBalancer || n.Role == lab.RoleServer {
			counted := allPacketCounts(t, n)
			s.mu.Lock()
			s.before[n.Instance()] = counted
			s.mu.Unlock()
		}
	}
}

// counted returns what a data path had counted when the present test began.
func (s *sharedLabs) counted(instance string) counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.before[instance]
}

// takeDown removes all shared labs.
func (s *sharedLabs) takeDown() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var group errgroup.Group
	for i := range s.count {
		group.Go(func() error { return takeDownLab(sharedName(i)) })
	}
	return group.Wait()
}
