// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var iperfBytes = flag.String("iperf", "15M", "how many bytes iperf3 transfers in each test of it")

// TestToolsWithoutFlowTable sends requests and bulk data to services without a flow table by
// curl, wrk and iperf3.
func TestToolsWithoutFlowTable(t *testing.T) {
	t.Parallel()
	const iperfPort = 84
	var services []lab.Service
	for i, persistence := range withoutFlowTable {
		for _, s := range huntingServices(4) {
			s.Name, s.Persistence, s.Port = string(persistence)+"-"+s.Name, persistence, desired.Port(80+i)
			services = append(services, s)
			s.Name, s.Port = "iperf-"+s.Name, desired.Port(iperfPort+i)
			services = append(services, s)
		}
	}
	topology := hunting(services...)
	topology.Servers, topology.Applications = 4, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	for _, s := range services {
		if s.Port < iperfPort {
			curl(t, l, s, 100)
			wrk(t, l, s)
		}
	}
	// iperf3 has two connections, which must be at the same server: the only one of each row that
	// takes flows. It listens on the ports of nginx.
	reconfigure(t, l, func(cfg *desired.Balancer) {
		for _, name := range nodes(l, lab.RoleServer)[1:] {
			drain(cfg, name)
		}
	})
	must(t, l.Process("s1", "nginx").Stop())
	for port := iperfPort; port < iperfPort+2; port++ {
		startIPerf(t, l, "s1", port)
	}
	for _, s := range services {
		if s.Port >= iperfPort {
			iperf(t, l, s)
			iperf(t, l, s, "--reverse")
		}
	}
	// A client that ends a download early resets each packet that still arrives. No server has the
	// connection after the first reset.
	requireNoDropsBut(t, l, "drop_rate_limit")
}

// curl makes requests on connections of their own, some at a time. Each must succeed.
func curl(t *testing.T, l *lab.Lab, s lab.Service, requests int) {
	t.Helper()
	url := fmt.Sprintf("http://%s/100kB?[1-%d]", s.Address(), requests)
	out := command(t, l, "client", "curl", "-sS", "--fail", "-H", "Connection: close",
		"-o", "/dev/null", "-w", "%{size_download}\n", url)
	if sizes := strings.Fields(out); len(sizes) != requests || slices.Compact(sizes)[0] != "100000" {
		t.Errorf("%s: curl: %q", s.Name, out)
	}
}

// wrk makes as many requests as it can on 20 connections, for a second. Each must succeed.
func wrk(t *testing.T, l *lab.Lab, s lab.Service) {
	t.Helper()
	out := command(t, l, "client", "wrk", "-t1", "-c20", "-d1s", "--timeout", "30s",
		fmt.Sprintf("http://%s/1kB", s.Address()))
	_, rate, ok := strings.Cut(out, "Requests/sec:")
	if !ok || strings.Contains(out, "errors") || strings.Contains(out, "Non-2xx") {
		t.Errorf("%s: wrk: %s", s.Name, out)
	}
	t.Logf("%s: wrk: requests a second: %s", s.Name, strings.Join(strings.Fields(rate), " "))
}

// startIPerf starts the server of iperf3 on a node, until the test ends.
func startIPerf(t *testing.T, l *lab.Lab, node string, port int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, "iperf3", "-s", "-p", strconv.Itoa(port))
	must(t, l.Node(node).Start(cmd))
	t.Cleanup(func() { cancel(); _ = cmd.Wait() })
	eventually(t, func() error {
		out, err := l.Node(node).Run(t.Context(), "ss", "-Htln", fmt.Sprintf("sport = :%d", port))
		if err == nil && strings.TrimSpace(out) == "" {
			err = fmt.Errorf("iperf3 does not listen on port %d of %s", port, node)
		}
		return err
	})
}

// isBetweenTests tells whether a server of iperf3 refuses a test because it ends the one before: it
// says so, or it closes its listening socket, with the connections that it has not accepted.
func isBetweenTests(err error) bool {
	return strings.Contains(err.Error(), "the server is busy") ||
		strings.Contains(err.Error(), "unable to receive control message")
}

// iperf transfers bytes as fast as it can.
func iperf(t *testing.T, l *lab.Lab, s lab.Service, flags ...string) {
	t.Helper()
	args := []string{"-c", s.VIP.String(), "-p", fmt.Sprint(s.Port), "-n", *iperfBytes, "--json"}
	args = append(args, flags...)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := l.Node("client").Run(ctx, "iperf3", args...)
	for err != nil && isBetweenTests(err) {
		time.Sleep(50 * time.Millisecond) // the server has not ended the test before, whose client has
		out, err = l.Node("client").Run(ctx, "iperf3", args...)
	}
	must(t, err)
	var report struct {
		End struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	must(t, json.Unmarshal([]byte(out), &report))
	rate := report.End.Received.BitsPerSecond
	if rate == 0 {
		t.Errorf("%s: iperf3 %v: nothing is received: %s", s.Name, flags, out)
	}
	t.Logf("%s: iperf3 %v: %.0f Mbit/s", s.Name, flags, rate/1e6)
}
