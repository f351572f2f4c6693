// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// inferredLab is a lab of eight servers, of which the last four have twice the processors. Nothing
// in the configuration says so, and the servers need no agents.
func inferredLab(balancers int) lab.Topology {
	t := topology()
	t.Balancers, t.Servers, t.Applications = balancers, 8, []lab.Application{lab.Emulated}
	t.Emulated.Cores = 1
	for i := 5; i <= 8; i++ {
		t.Emulated.Exceptions = append(t.Emulated.Exceptions, lab.EmulatedException{
			Server: fmt.Sprint("s", i), EmulatedServer: lab.EmulatedServer{Cores: 2},
		})
	}
	t.Services = []lab.Service{{
		Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: desired.TCP,
		Encapsulation: desired.SRv6Encap, Placement: desired.PlacementInfer,
	}}
	return t
}

// TestInfer sends requests to servers of two speeds. Within seconds, the fast servers get about
// twice as many as the slow ones, and requests take less time than under hash.
func TestInfer(t *testing.T) {
	t.Parallel()
	for _, balancers := range []int{1, 2} {
		t.Run(fmt.Sprint(balancers), func(t *testing.T) {
			t.Parallel()
			l := up(t, inferredLab(balancers))
			request(t, l, 10*time.Second) // it learns
			infers := request(t, l, 20*time.Second)
			if infers.fast < 1.6 || infers.fast > 2.6 {
				t.Errorf("the fast servers get %.2f times as many requests as the others, want 2", infers.fast)
			}
			requireStatus(t, l)
			reconfigure(t, l, func(cfg *desired.Balancer) {
				cfg.Services[0].Placement = desired.PlacementHash
			})
			hash := request(t, l, 10*time.Second)
			t.Logf("%d balancers: infer %+v, hash %+v", balancers, infers, hash)
			if infers.mean > 0.7*hash.mean {
				t.Errorf("requests take %.3f s, under hash %.3f s", infers.mean, hash.mean)
			}
			requireNoDrops(t, l)
		})
	}
}

// experience is what clients see.
type experience struct {
	fast float64 // requests of a fast server, relative to those of a slow one
	mean float64 // mean latency in seconds
}

// request sends requests that keep three quarters of all processors busy.
func request(t *testing.T, l *lab.Lab, duration time.Duration) experience {
	t.Helper()
	report := generate(t, l, "--rate", "90", "--duration", duration.String(), "--demand",
		"exponential: 100ms", fmt.Sprintf("http://%s/?work={demand}", service(t, l, "web").Address()))
	if report.Succeeded < report.Requests {
		t.Fatalf("%d of %d requests succeeded: %v", report.Succeeded, report.Requests, report.Errors)
	}
	slow, fast := uint64(0), uint64(0)
	for _, server := range report.Servers {
		if server.Name < "s5" {
			slow += server.Responses
		} else {
			fast += server.Responses
		}
	}
	return experience{float64(fast) / float64(max(slow, 1)), report.Latency.Mean}
}

// requireStatus requires that status and trace of each balancer show what it infers.
func requireStatus(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		n := l.Node(name)
		status := command(t, l, name, segue, "status", "-i", n.Instance(), "--interval", "0s")
		if !strings.Contains(status, "placement infer territory-learned, estimated ") {
			t.Errorf("%s: status shows no estimates:\n%s", name, status)
		}
		trace := command(t, l, name, segue, "trace", "-i", n.Instance(), "tcp", "[2001:db8:c::2]:7",
			service(t, l, "web").Address().String())
		if !strings.Contains(trace, "lowest score of all servers (8): s") {
			t.Errorf("%s: a trace shows no scores:\n%s", name, trace)
		}
	}
	requireWatch(t, l.Node(nodes(l, lab.RoleBalancer)[0]))
}

// requireWatch requires that status --watch prints one status after the other into a pipe, and that
// SIGINT ends it without an error.
func requireWatch(t *testing.T, n *lab.Node) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), segue, "status", "-i", n.Instance(), "--watch", "--interval", "100ms")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, n.Start(cmd))
	seen := 0
	for lines := bufio.NewScanner(out); seen < 3 && lines.Scan(); {
		if strings.Contains(lines.Text(), "placement infer territory-learned") {
			seen++
		}
	}
	must(t, cmd.Process.Signal(os.Interrupt))
	_, reading := io.Copy(io.Discard, out)
	if err := errors.Join(reading, cmd.Wait()); err != nil || seen < 3 {
		t.Errorf("%s: watch printed %d statuses, and ended with %v", n.Name, seen, err)
	}
}
