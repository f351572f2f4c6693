// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// Environment variables of a process whose start is to fail.
const (
	failConfig = "SEGUE_TEST_FAIL_CONFIG" // the configuration file
	failCall   = "SEGUE_TEST_FAIL_CALL"   // the number of the system call that fails
	failFilter = "SEGUE_TEST_FAIL_FILTER" // not empty: the kernel has no tcx
)

// failed is printed by a process if the system call has failed.
const failed = "failed"

func TestMain(m *testing.M) {
	if os.Getenv(failConfig) != "" {
		if err := failStart(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// failStart is the main function of a process that starts an agent and ends.
func failStart() error {
	call, err := strconv.Atoi(os.Getenv(failCall))
	if err != nil {
		return err
	}
	files, _, err := config.LoadAgent(os.Getenv(failConfig))
	if err != nil {
		return err
	}
	hasFailed, err := datapathtest.FailAt(call, unix.SYS_SENDTO) // netlink
	if err != nil {
		return err
	}
	err = startAndEnd(files.Desired)
	if hasFailed() {
		fmt.Println(failed)
	}
	return err
}

func startAndEnd(cfg *desired.Agent) error {
	a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	if os.Getenv(failFilter) != "" {
		a.kernel.loader.AttachTCX = noTCX
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	select {
	case err = <-ended:
	case <-a.Ready():
		cancel()
		err = <-ended
	}
	return errors.Join(err, a.Close())
}

// failSites counts the servers on which starts fail.
var failSites atomic.Int32

// failSite is a server on which starts fail.
type failSite struct {
	*network
	instance string
	filter   string // value of failFilter for all processes
}

func newFailSite(t *testing.T, filter string) *failSite {
	t.Helper()
	instance := fmt.Sprintf("test-%d-failed%d", os.Getpid(), failSites.Add(1))
	s := &failSite{newNetwork(t, 1), instance, filter}
	testhost.Connect(t, s.servers[0], "eth1", nil, s.router, "second", nil)
	t.Cleanup(func() { s.detach(1, s.instance) })
	return s
}

// configs writes two configurations. The second has another interface, lacks a service, has an
// additional service, and has a service with another accept policy.
func (s *failSite) configs(second string) (files [2]string) {
	s.t.Helper()
	for i, c := range []struct {
		iface, other, vip string
		threshold         int
	}{{"eth0", "going", "2001:db8:80::7", 3}, {second, "coming", "2001:db8:80::8", 5}} {
		files[i] = filepath.Join(s.t.TempDir(), "agent.yaml")
		text := fmt.Sprintf(`
node: {instance: %s, interface: %s, locator: "fd00:5:0:1::/64"}
services:
  - name: web
    vip: %s
    port: 80
    protocol: tcp
    encapsulation: srv6-encap
    accept: {policy: static, threshold: %d}
    load: {source: connections, workers: 8}
  - name: %s
    vip: %s
    port: 80
    protocol: tcp
    encapsulation: srv6-encap
    accept: {policy: always}
`, s.instance, c.iface, vip6.Addr(), c.threshold, c.other, c.vip)
		testhost.Must(s.t, os.WriteFile(files[i], []byte(text), 0o600))
	}
	return files
}

// start starts a process whose system call number call fails. It returns the error of the start,
// which is empty if the start succeeded without the call, and whether the process reached the call.
func (s *failSite) start(file string, call int) (refusal string, reached bool) {
	s.t.Helper()
	var output, problem bytes.Buffer
	cmd := exec.CommandContext(s.t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), failConfig+"="+file, failFilter+"="+s.filter,
		failCall+"="+strconv.Itoa(call))
	cmd.Stdout, cmd.Stderr = &output, &problem
	s.in(s.servers[0], cmd.Start)
	if err := cmd.Wait(); (err != nil) != (problem.Len() > 0) {
		s.t.Fatalf("call %d fails: %v, %q", call, err, &problem)
	}
	return problem.String(), strings.TrimSpace(output.String()) == failed
}

// state describes the pinned objects without the packet counters, because the host sends packets at
// any time.
func (s *failSite) state() datapathtest.State {
	s.t.Helper()
	state := datapathtest.ReadState(s.t, datapath.Dir(s.instance))
	for key := range state[agentMapReasons] {
		if key != "map" {
			delete(state[agentMapReasons], key)
		}
	}
	return state
}

// If a start fails while a data path is running, on the same interface or on another, then maps,
// pins, programs and addresses stay unchanged, and connections continue.
func TestFailedStartChangesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, filter, second string
		step                 int
	}{
		{"tcx", "", "eth0", 18}, {"clsact", "yes", "eth0", 24}, {"other interface", "", "eth1", 24},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newFailSite(t, c.filter)
			files := s.configs(c.second)
			if refusal, _ := s.start(files[0], 0); refusal != "" {
				t.Fatal(refusal)
			}
			s.failAtSteps(files, datapathtest.Apart(c.step))
		})
	}
}

// failAtSteps starts processes while a data path is running. In each process another system call
// fails; step is the distance between these calls. A start that does not reach the call takes over.
// The next process then has the other configuration.
func (s *failSite) failAtSteps(files [2]string, step int) {
	s.t.Helper()
	s.serve(1, vip6.Addr())
	s.use(srv6Encap(desired.SRv6Encap, serverSID(1)))
	connection := s.dial(vip6.Addr())
	s.echo(connection, 100)
	before, host, next, refusals := s.state(), s.inspect(1, s.instance), 1, 0
	for call := 1 + rand.IntN(step); ; call += step {
		refusal, reached := s.start(files[next], call)
		if !reached {
			break
		}
		if refusal == "" {
			// The call may have kept the start from removing a pin. Every later start removes it,
			// also one that fails.
			s.start(files[next], 0)
			next = 1 - next
		} else {
			when := fmt.Sprintf("call %d failed: %s", call, refusal)
			before.RequireSame(s.t, when, s.state())
			if diff := cmp.Diff(host, s.inspect(1, s.instance)); diff != "" {
				s.t.Errorf("%s: the host (-before +after):\n%s", when, diff)
			}
			refusals++
		}
		if s.t.Failed() {
			s.t.FailNow()
		}
		before, host = s.state(), s.inspect(1, s.instance)
	}
	if (refusals+1)*step < 20 { // the first interrupted call is a random one of the first step
		s.t.Errorf("%d starts were refused; there must be more", refusals)
	}
	if refusal, _ := s.start(files[0], 0); refusal != "" { // it may be on the other interface
		s.t.Error(refusal)
	}
	s.echo(connection, 100)
}

// If a first start fails, the host stays unchanged, whichever step fails.
func TestFailedFirstStartLeavesNothing(t *testing.T) {
	t.Parallel()
	step := datapathtest.Apart(24)
	s := newFailSite(t, "")
	file := s.configs("eth0")[0]
	before := s.inspect(1, s.instance)
	for call := 1 + rand.IntN(step); ; call += step {
		refusal, reached := s.start(file, call)
		if !reached {
			break
		}
		if refusal == "" {
			s.detach(1, s.instance)
		}
		if diff := cmp.Diff(before, s.inspect(1, s.instance)); diff != "" {
			t.Fatalf("call %d failed: %s: (-before +after):\n%s", call, refusal, diff)
		}
	}
}
