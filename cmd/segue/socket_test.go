// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/testhost"
)

// process takes the place of the process of a balancer or an agent.
type process struct {
	t        *testing.T
	instance string
	dir      string
	stream   *events.Stream
	read     []string // the services of a balancer whose state was read
}

// started counts the processes of the tests.
var started atomic.Int32

// newProcess returns a process with a configuration file.
func newProcess(t *testing.T, text string) (p *process, file string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can write below /run/segue")
	}
	name := fmt.Sprintf("test-%d-%d", os.Getpid(), started.Add(1))
	p = &process{t: t, instance: name, dir: t.TempDir(), stream: events.NewStream()}
	return p, p.write("segue.yaml", fmt.Sprintf(text, p.instance, p.dir))
}

// write writes a file, and returns its path.
func (p *process) write(name, text string) string { return writeFile(p.t, p.dir, name, text) }

// writeFile writes a file in a directory, and returns its path.
func writeFile(t *testing.T, dir, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(dir, name)
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// serve answers requests until the test ends.
func (p *process) serve(handler http.Handler) {
	p.t.Helper()
	lock, err := rundir.Lock(p.instance)
	testhost.Must(p.t, err)
	socket, err := api.Listen(p.instance, "", slog.New(slog.DiscardHandler))
	testhost.Must(p.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- socket.Run(ctx, handler) }()
	p.t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, rundir.Unlock(lock)); err != nil {
			p.t.Error(err)
		}
	})
}

// segue runs a command about the process.
func (p *process) segue(args ...string) (output string, err error) {
	p.t.Helper()
	return runSegue(p.t.Context(), append(args, "--instance", p.instance)...)
}

// runSegue runs a command in this process.
func runSegue(ctx context.Context, args ...string) (output string, err error) {
	return runSegueWith(ctx, "", args...)
}

// runSegueWith is runSegue with a standard input.
func runSegueWith(ctx context.Context, input string, args ...string) (output string, err error) {
	return clitest.Run(ctx, newRoot(), input, args...)
}

// versions matches versions of desired states. They depend on the directory and the instance.
var versions = regexp.MustCompile(`\b[0-9a-f]{16}\b`)

// transcript runs commands, one in each line, and compares their output with a golden file.
func (p *process) transcript(name, commands string) {
	p.t.Helper()
	var all bytes.Buffer
	for line := range strings.Lines(strings.TrimSpace(commands)) {
		line = strings.TrimSpace(line)
		fmt.Fprintf(&all, "# segue %s\n", line)
		out, err := p.segue(strings.Fields(strings.ReplaceAll(line, "DIR", p.dir))...)
		if err != nil {
			out += fmt.Sprintf("segue: %v\n", err)
		}
		out = strings.NewReplacer(p.dir, "DIR", p.instance, "INSTANCE").Replace(out)
		all.WriteString(versions.ReplaceAllString(out, "VERSION"))
	}
	clitest.Golden(p.t, name, &all)
}

// follower is a data path that follows every state, and loses the flows of removed services and
// servers.
type follower[D interface{ Items() []desired.Item }] struct{ state D }

func (f *follower[D]) Reload(_ context.Context, state D, _ desired.Secrets) error {
	f.state = state
	return nil
}

func (f *follower[D]) Follow(
	ctx context.Context, state D, secrets desired.Secrets, _ serversets.Generations,
) error {
	return f.Reload(ctx, state, secrets)
}

func (f *follower[D]) Losses(_ context.Context, next D) (losses []desired.Loss, err error) {
	kept := map[string]bool{}
	for _, i := range next.Items() {
		kept[i.Service+"/"+i.Server] = true
	}
	for _, i := range f.state.Items() {
		_, isService := i.Value.(desired.Service)
		if !isService && !kept[i.Service+"/"+i.Server] {
			flows := uint64(31)
			losses = append(losses, desired.Loss{
				Service: i.Service, Server: i.Server, Cause: desired.LossRemoved, Flows: &flows,
			})
		}
	}
	return losses, nil
}

const balancerOfTest = `
node: {instance: %s, state: %q, interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, probe: false,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}, {name: s2, locator: "fd00:5:0:2::/64"}]}
- {name: quic, vip: "2001:db8:80::1", port: 443, protocol: udp, probe: false,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}]}
`

// startBalancer starts a balancer. Its servers have three flows each.
func startBalancer(t *testing.T) *process {
	t.Helper()
	p, handler := newBalancerProcess(t)
	p.serve(handler)
	return p
}

// newBalancerProcess returns the process of startBalancer and its handler, which is not served yet.
func newBalancerProcess(t *testing.T) (*process, http.Handler) {
	t.Helper()
	p, file := newProcess(t, balancerOfTest)
	c, _, err := control.LoadBalancer(file)
	testhost.Must(t, err)
	f := &follower[*desired.Balancer]{c.Desired()}
	c.Attach(f, func([]desired.Override, []desired.InvalidOverride) {})
	source := func(wanted func(string) bool) (*inspect.Snapshot, error) {
		age := 0.
		s := &inspect.Snapshot{FlowTable: inspect.FlowTable{Age: &age}}
		for _, service := range f.state.Services {
			if !wanted(service.Name) {
				continue
			}
			p.read = append(p.read, service.Name)
			state := &inspect.ServiceState{Name: service.Name, Persistence: service.Persistence}
			for _, server := range service.Servers {
				state.Servers = append(state.Servers, &inspect.ServerState{
					Name: server.Name, Address: server.Locator.String(), Condition: inspect.ServerUnchecked,
					Flows: &dataplane.FlowCounts{Established: 3},
				})
			}
			s.Services = append(s.Services, state)
		}
		return s, nil
	}
	return p, api.Balancer{Control: c, Source: source, Reload: c.Reload, Events: p.stream}.Handler()
}

const agentOfTest = `
node: {instance: %s, state: %q, interface: eth0, locator: "fd00:5:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, accept: {policy: static, threshold: 8}}
- {name: quic, vip: "2001:db8:80::1", port: 443, protocol: udp}
`

// startAgent starts an agent. A service has two connections, and none when it is drained.
func startAgent(t *testing.T) *process {
	t.Helper()
	return startAgentWith(t, func(drained bool) uint32 {
		if drained {
			return 0
		}
		return 2
	})
}

// startAgentWith starts an agent. The function count returns the connections of each service.
func startAgentWith(t *testing.T, count func(drained bool) uint32) *process {
	t.Helper()
	p, handler := agentWith(t, count)
	p.serve(handler)
	return p
}

// agentWith is startAgentWith without serve: it returns the handler that answers the requests.
func agentWith(t *testing.T, count func(drained bool) uint32) (*process, http.Handler) {
	t.Helper()
	p, file := newProcess(t, agentOfTest)
	c, _, err := control.LoadAgent(file)
	testhost.Must(t, err)
	f := &follower[*desired.Agent]{c.Desired()}
	c.Attach(f, func([]desired.Override, []desired.InvalidOverride) {})
	source := func() (*agent.Snapshot, error) {
		s := &agent.Snapshot{}
		for _, service := range f.state.Services {
			state := &agent.ServiceState{
				Name: service.Name, VIP: netip.MustParseAddr("2001:db8:80::1"), Port: service.Port.Number(),
				Protocol: service.Protocol,
			}
			if service.Hunts() {
				state.Accept = &agent.AcceptState{Policy: service.Accept.Policy}
				connections := count(service.Drained)
				state.Connections = &connections
			}
			s.Services = append(s.Services, state)
		}
		return s, nil
	}
	return p, api.Agent{Control: c, Source: source, Reload: c.Reload, Events: p.stream}.Handler()
}
