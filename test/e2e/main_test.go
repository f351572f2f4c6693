// SPDX-License-Identifier: Apache-2.0

// Package e2e tests segue as a whole: real programs and real sockets in labs of network namespaces.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// patience is the limit for everything that should happen soon. It does not measure speed, because
// test machines are busy.
const patience = 60 * time.Second

// mostServers is the number of servers that all labs may have at a time.
const mostServers = 52

// longestTest is how long a test waits for the labs of other tests to be removed.
const longestTest = 15 * time.Minute

var (
	// segue is the executable under test, and laboratory that of the lab.
	segue, laboratory string
	// labName is the name of this process's labs. Tests that run in parallel use other names.
	labName = "e" + strconv.FormatInt(int64(os.Getpid()), 36)
	// freeNames are the names of labs that are not up.
	freeNames = newNames(16)
	// freeServers has a unit for each server that labs can have beside the present ones. The kernel
	// permits 64 programs of agents in a control group. Experiments need some of them.
	freeServers = semaphore.NewWeighted(mostServers)
	// interrupted ends when somebody interrupts the tests.
	interrupted context.Context
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	interrupted = ctx
	dir, err := os.MkdirTemp("", "segue-e2e")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	segue, laboratory = filepath.Join(dir, "segue"), filepath.Join(dir, "segue-lab")
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", dir, "../../cmd/segue", "../../cmd/segue-lab")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build segue and segue-lab: %v\n%s", err, out)
		return 1
	}
	done := make(chan int, 1)
	go func() { done <- m.Run() }()
	select {
	case code := <-done:
		if err := pool.takeDown(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	case <-ctx.Done():
		if err := takeDown(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		return 1
	}
}

// nameOf returns the name of a lab. The first one is labName.
func nameOf(i int) string {
	if i == 0 {
		return labName
	}
	return fmt.Sprint(labName, "n", i)
}

func newNames(count int) chan string {
	names := make(chan string, count)
	for i := range count {
		names <- nameOf(i)
	}
	return names
}

// takeDown removes the labs of interrupted tests. The tests may be removing them at the same time.
func takeDown() error {
	var group errgroup.Group
	for i := range cap(freeNames) {
		group.Go(func() error { return takeDownLab(nameOf(i)) })
	}
	return errors.Join(group.Wait(), pool.takeDown())
}

func takeDownLab(name string) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(patience)
	for {
		err := lab.Down(name)
		if errors.Is(err, lab.ErrNotUp) {
			return nil
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-tick.C
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	testhost.NeedNamespaces(t)
	testhost.NeedAgent(t)
}

// topology returns a lab with two balancers, three servers, and the named services of the built-in
// topology.
func topology(services ...string) lab.Topology {
	t := lab.DefaultTopology()
	t.Name = labName
	t.Servers = 3
	t.Services = slices.DeleteFunc(t.Services, func(s lab.Service) bool { return !slices.Contains(services, s.Name) })
	return t
}

// reserveServers waits until a lab with so many servers can be up beside the others. Shared labs that
// no test uses make room for it.
func reserveServers(t *testing.T, count int) (release func()) {
	t.Helper()
	release = func() { freeServers.Release(int64(count)) }
	if freeServers.TryAcquire(int64(count)) {
		return release
	}
	must(t, pool.takeDownFree())
	ctx, cancel := context.WithTimeout(t.Context(), longestTest)
	defer cancel()
	if err := freeServers.Acquire(ctx, int64(count)); err != nil {
		t.Fatalf("other labs have had too many servers for %v: this one needs %d of %d", longestTest, count, mostServers)
	}
	return release
}

// up builds a lab for the duration of a test. If the test fails, the logs of its processes are
// shown.
func up(t *testing.T, topology lab.Topology) *lab.Lab {
	t.Helper()
	return upWith(t, topology, segue)
}

// executables returns the options of a lab whose balancers and agents are of a build.
func executables(segue string) lab.Options { return lab.Options{Segue: segue, Laboratory: laboratory} }

// upWith builds a lab whose balancers and agents run the executable.
func upWith(t *testing.T, topology lab.Topology, segue string) *lab.Lab {
	t.Helper()
	l := build(t, topology, segue)
	awaitServers(t, l) // on a busy machine, next hops take longer than the lab waits for them
	return l
}

// build does the same as upWith, but does not wait for the servers. The executable may be of
// another build, whose tables this process cannot read.
func build(t *testing.T, topology lab.Topology, segue string) *lab.Lab {
	t.Helper()
	needRoot(t)
	t.Cleanup(reserveServers(t, topology.Servers))
	if topology.Name == labName {
		topology.Name = <-freeNames
		t.Cleanup(func() { giveBack(topology.Name) })
	}
	l, err := lab.Up(interrupted, topology, executables(segue))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, l)
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// giveBack makes the name of a removed lab available to other tests. If the lab cannot be removed,
// the name is not used again, because tests would fail on a lab that is still up.
func giveBack(name string) {
	if err := lab.Down(name); err == nil || errors.Is(err, lab.ErrNotUp) {
		freeNames <- name
	}
}

func showLogs(t *testing.T, l *lab.Lab) {
	for _, p := range l.Processes {
		if text, err := os.ReadFile(p.LogPath()); err == nil && len(text) > 0 {
			t.Logf("%s:\n%s", p, text)
		}
	}
}

// service returns the lab's service with the name.
func service(t *testing.T, l *lab.Lab, name string) lab.Service {
	t.Helper()
	i := slices.IndexFunc(l.Topology.Services, func(s lab.Service) bool { return s.Name == name })
	if i < 0 {
		t.Fatalf("lab %s has no service %s", l.Name, name)
	}
	return l.Topology.Services[i]
}

// nodes returns the names of all nodes with a role.
func nodes(l *lab.Lab, role lab.Role) []string {
	var names []string
	for _, n := range l.Nodes {
		if n.Role == role {
			names = append(names, n.Name)
		}
	}
	return names
}

// command runs a command on a node and returns its output.
func command(t *testing.T, l *lab.Lab, node, name string, args ...string) string {
	t.Helper()
	out, err := l.Node(node).Run(t.Context(), name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Helpers of all tests.
var must, eventually = testhost.Must, testhost.Eventually

// reconfigure writes a changed configuration for every balancer and reloads it.
func reconfigure(t *testing.T, l *lab.Lab, change func(*desired.Balancer)) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		cfg := l.Node(name).BalancerConfig()
		change(&cfg)
		must(t, l.Node(name).WriteBalancerConfig(cfg))
		reload(t, l, name)
	}
}

// awaitServers waits until every balancer places new flows on all of its servers, except for
// drained ones. A server that comes back gets new flows when its next hop is known and its checks
// have passed. While no server has a next hop, all get new flows, which are dropped.
func awaitServers(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		view, err := inspect.OpenView(l.Node(name).Instance())
		must(t, err)
		defer view.Close()
		eventually(t, func() error {
			// Shares are in all of the candidate tables, so they are read last.
			services, err := view.Services()
			if err != nil {
				return err
			}
			err = requireAll(services, func(s *inspect.ServerState) bool { return s.NextHop != nil })
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			state, err := view.Snapshot()
			if err != nil {
				return err
			}
			err = requireAll(state.Services, func(s *inspect.ServerState) bool {
				// If the service infers, no buckets tell who gets flows. If all servers have failed,
				// they get flows nevertheless.
				return (s.Share > 0 || s.Inferred != nil) && len(s.Causes) == 0 &&
					s.Condition != inspect.ServerStarting
			})
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
}

// requireAll returns an error unless all servers meet the condition, except for drained and removed
// ones.
func requireAll(services []*inspect.ServiceState, meets func(*inspect.ServerState) bool) error {
	for _, service := range services {
		for _, s := range service.Servers {
			out := s.Condition == inspect.ServerDrained || s.Condition == inspect.ServerRemoved
			if !out && !meets(s) {
				return fmt.Errorf("no flow of %s is placed on %s, which is %s", service.Name, s.Name, s.Condition)
			}
		}
	}
	return nil
}

// reload makes a balancer or an agent reload its configuration, which must succeed.
func reload(t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	p := l.Process(node, "lb")
	if p == nil {
		p = l.Process(node, "agent")
	}
	before := readLog(t, p)
	must(t, p.Reload(t.Context()))
	if after := readLog(t, p)[len(before):]; !strings.Contains(after, "msg=reloaded") {
		t.Fatalf("%s did not reload: %s", node, after)
	}
}

func readLog(t *testing.T, p *lab.Process) string {
	t.Helper()
	text, err := os.ReadFile(p.LogPath())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text)
}

// keepServers removes all servers except for the named ones from a configuration's services.
func keepServers(cfg *desired.Balancer, names ...string) {
	for i := range cfg.Services {
		s := &cfg.Services[i]
		s.Servers = slices.DeleteFunc(s.Servers, func(s desired.Server) bool { return !slices.Contains(names, s.Name) })
	}
}

// drain drains a server in all services.
func drain(cfg *desired.Balancer, name string) {
	for i := range cfg.Services {
		for j := range cfg.Services[i].Servers {
			if cfg.Services[i].Servers[j].Name == name {
				cfg.Services[i].Servers[j].Drained = true
			}
		}
	}
}

// setWeight sets the weight of a server in all services.
func setWeight(cfg *desired.Balancer, name string, weight uint32) {
	for i := range cfg.Services {
		for j := range cfg.Services[i].Servers {
			if cfg.Services[i].Servers[j].Name == name {
				cfg.Services[i].Servers[j].Weight = &weight
			}
		}
	}
}
