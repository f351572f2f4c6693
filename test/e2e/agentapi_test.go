// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestDrainOnServer drains a server that has a connection, by its agent. No new connection goes there,
// because balancers offer each connection to several servers. The command waits until the connection
// has ended. The server stays drained when its agent is killed and starts again, until it is
// undrained.
func TestDrainOnServer(t *testing.T) {
	t.Parallel()
	l := shared(t, hunting(huntingServices(2)...))
	s := l.Topology.Services[1]
	kept := &http.Transport{DialContext: l.Node("client").Dial}
	server, _, err := (&client{l, http.Client{Transport: kept, Timeout: patience}}).get(t.Context(), s, "/")
	must(t, err)
	requireVisits := func(some bool) {
		t.Helper()
		visits, err := newClient(l).visit(t.Context(), s, 100)
		must(t, err)
		if visits[server] > 0 != some {
			t.Errorf("of 100 new connections, %d went to %s: %v", visits[server], server, visits)
		}
	}
	drain := exec.CommandContext(t.Context(), segue, "drain", s.Name, "--wait", "--timeout", patience.String())
	var output sharedFile
	drain.Stdout, drain.Stderr = &output, &output
	must(t, l.Node(server).Start(drain))
	eventually(t, func() error {
		if out := output.String(); !strings.Contains(out, "is drained") || !strings.Contains(out, "1 connection is left") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	requireVisits(false)
	kept.CloseIdleConnections()
	if err := drain.Wait(); err != nil || !strings.HasSuffix(output.String(), "0 connections are left\n") {
		t.Errorf("%v: %s", err, &output)
	}
	restart(t, l.Process(server, "agent"))
	if got, want := fmt.Sprint(status(t, l.Node(server)).Configuration.Overrides), "["+s.Name+" (drained)]"; got != want {
		t.Errorf("after a restart, overrides %s, want %s", got, want)
	}
	requireVisits(false)
	if out := command(t, l, server, segue, "undrain", s.Name); !strings.Contains(out, "accepts connections by its policy again") {
		t.Error(out)
	}
	requireVisits(true)
}

// TestAgentCommands changes the services of a running agent by commands. Files with errors change
// nothing: not the agent that runs, and not the data path when the agent cannot start.
func TestAgentCommands(t *testing.T) {
	t.Parallel()
	l := up(t, hunting(huntingServices(1)...)) // with one candidate, servers must accept
	s, other := l.Topology.Services[1], l.Topology.Services[2]
	n, agent := l.Node("s1"), l.Process("s1", "agent")
	require := func(want string, args ...string) {
		t.Helper()
		if out := command(t, l, "s1", segue, args...); !strings.Contains(out, want) {
			t.Errorf("segue %s: %s, want %s", strings.Join(args, " "), out, want)
		}
	}
	requireOverrides := func(want string) {
		t.Helper()
		if got := fmt.Sprint(status(t, n).Configuration.Overrides); got != want {
			t.Errorf("overrides %s, want %s", got, want)
		}
	}
	visit := func() {
		t.Helper()
		if _, err := newClient(l).visit(t.Context(), s, 60); err != nil {
			t.Error(err)
		}
	}
	var log sharedFile
	watch := exec.CommandContext(t.Context(), segue, "events")
	watch.Stdout, watch.Stderr = &log, &log
	must(t, n.Start(watch))
	require("dry run: service "+s.Name+" (accept) changed", "service", "set", s.Name, "accept.policy=never", "--dry-run")
	requireOverrides("[]")
	require("changed", "service", "set", s.Name, "accept.policy=never")
	require("(accept) changed", "service", "set", s.Name, "accept.policy=static", "accept.threshold=7")
	requireOverrides("[" + s.Name + " (accept)]")
	require("removed", "service", "remove", other.Name)
	restart(t, agent)
	// The reader gets each event once, from the start of both processes on.
	eventually(t, func() error {
		text := log.String()
		for part, want := range map[string]int{
			" started version ": 2, "has ended; waiting": 1, "(accept): by root (uid 0)": 2,
			"changed service " + other.Name + " removed: by root (uid 0)": 1,
		} {
			if got := strings.Count(text, part); got != want {
				return fmt.Errorf("%d times %q, want %d: %s", got, part, want, text)
			}
		}
		return nil
	})
	must(t, watch.Process.Signal(os.Interrupt))
	must(t, watch.Wait())
	requireOverrides("[" + s.Name + " (accept) " + other.Name + " (removed)]")
	require("static", "service", "list")
	visit()

	// A reload refuses invalid overrides, and a start leaves them out.
	cfg := n.AgentConfig()
	path := cfg.OverridesFile()
	stored, err := os.ReadFile(path)
	must(t, err)
	file := filepath.Join("/run/segue/lab", l.Name, "conf", "s1-agent.yaml")
	must(t, os.WriteFile(path, []byte("overrides:\n- {service: "+s.Name+", server: s1, set: {weight: 1}}\n"), 0o644))
	must(t, agent.Reload(t.Context()))
	problem := path + ":2: " + s.Name + "/s1: services of an agent have no servers"
	requireRefused(t, n, file, problem)
	requireOverrides("[" + s.Name + " (accept) " + other.Name + " (removed)]")
	visit()
	must(t, agent.Kill())
	must(t, agent.Start(t.Context()))
	requireOverrides("[]")
	left := "OVERRIDES ARE LEFT OUT, because they are invalid with the configuration file:\n  " +
		s.Name + "/s1 (weight 1): " + problem + "\n"
	require(left, "status")
	visit()
	must(t, os.WriteFile(path, stored, 0o644))
	must(t, agent.Reload(t.Context()))
	requireOverrides("[" + s.Name + " (accept) " + other.Name + " (removed)]")

	// The agent's own file ends all overrides.
	if _, err := n.Run(t.Context(), segue, "diff", file); err == nil {
		t.Error("diff finds no difference")
	}
	require("service "+other.Name+" added", "apply", file)
	require("nothing to change", "diff", file)
	requireOverrides("[]")
	if _, err := newClient(l).visit(t.Context(), other, 20); err != nil {
		t.Error(err)
	}
}
