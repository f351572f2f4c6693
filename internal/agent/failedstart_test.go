// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

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
	failFilter = "SEGUE_TEST_FAIL_FILTER" // not empty: the kernel has no tcx
)

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
	files, _, err := config.LoadAgent(os.Getenv(failConfig))
	if err != nil {
		return err
	}
	return datapathtest.StartFailing(func() (end func() error, err error) {
		return startFailing(files.Desired)
	}, unix.SYS_SENDTO) // netlink
}

func startFailing(cfg *desired.Agent) (end func() error, err error) {
	a, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	if os.Getenv(failFilter) != "" {
		a.kernel.loader.AttachTCX = noTCX
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	end = func() error {
		cancel()
		return errors.Join(<-ended, a.Close())
	}
	select {
	case err = <-ended:
		cancel()
		return nil, errors.Join(err, a.Close())
	case <-a.Ready():
		return end, nil
	}
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

// start starts a process whose system call number call fails, as datapathtest.RunFailing does.
func (s *failSite) start(file string, call int) (refusal string, reached bool) {
	s.t.Helper()
	return datapathtest.RunFailing(s.t, s.servers[0].Do, call, failConfig+"="+file, failFilter+"="+s.filter)
}

// state describes the host and the pinned objects without the packet counters, because the host
// sends packets at any time.
func (s *failSite) state() datapathtest.State {
	s.t.Helper()
	state, host := datapathtest.State{}, s.inspect(1, s.instance)
	if host.Pins {
		state = datapathtest.ReadState(s.t, datapath.Dir(s.instance))
	}
	state["host"] = map[string][]byte{"": fmt.Appendf(nil, "%+v", host)}
	for key := range state[agentMapReasons] {
		if key != "map" {
			delete(state[agentMapReasons], key)
		}
	}
	return state
}

// starts are those with two configurations.
func (s *failSite) starts(files [2]string) datapathtest.Starts {
	return datapathtest.Starts{
		Start:  func(number, call int) (string, bool) { return s.start(files[number], call) },
		State:  s.state,
		Check:  func(string, int, bool) {},
		Detach: func() { s.detach(1, s.instance) },
	}
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
// fails; step is the distance between these calls.
func (s *failSite) failAtSteps(files [2]string, step int) {
	s.t.Helper()
	s.serve(1, vip6.Addr())
	s.use(srv6Encap(desired.SRv6Encap, serverSID(1)))
	connection := s.dial(vip6.Addr())
	s.echo(connection, 100)
	s.starts(files).FailAtSteps(s.t, step, 1)
	if refusal, _ := s.start(files[0], 0); refusal != "" { // it may be on the other interface
		s.t.Error(refusal)
	}
	s.echo(connection, 100)
}

// If a first start fails, the host stays unchanged, whichever step fails.
func TestFailedFirstStartLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newFailSite(t, "")
	s.starts(s.configs("eth0")).FailFirst(t, datapathtest.Apart(24))
}
