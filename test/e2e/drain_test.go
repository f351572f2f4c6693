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

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/lab"
)

// TestDrain drains a server that has a connection, on all balancers. No new connection goes there.
// The command waits until the connection has ended. The server stays drained when a balancer starts
// again, until it is undrained. Without BGP, a balancer itself cannot be drained.
func TestDrain(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-encap")) // no other test has left flows, which --wait would wait for
	s := l.Topology.Services[0]
	kept := &http.Transport{DialContext: l.Node("client").Dial}
	server, _, err := (&client{l, http.Client{Transport: kept, Timeout: patience}}).get(t.Context(), s, "/")
	must(t, err)
	name := s.Name + "/" + server
	balancers := nodes(l, lab.RoleBalancer)
	waits := make([]*exec.Cmd, len(balancers))
	outputs := make([]sharedFile, len(balancers))
	for i, balancer := range balancers {
		waits[i] = exec.CommandContext(t.Context(), segue, "drain", name, "--wait", "--timeout", patience.String())
		waits[i].Stdout, waits[i].Stderr = &outputs[i], &outputs[i]
		must(t, l.Node(balancer).Start(waits[i]))
	}
	eventually(t, func() error { // one balancer has the connection
		all := ""
		for i := range outputs {
			all += outputs[i].String()
		}
		if strings.Count(all, "is drained") < len(outputs) || !strings.Contains(all, "1 live flow is left") {
			return fmt.Errorf("%s", all)
		}
		return nil
	})
	visits, err := newClient(l).visit(t.Context(), s, 100)
	must(t, err)
	if visits[server] > 0 {
		t.Errorf("%d of 100 new connections went to %s, which is drained", visits[server], server)
	}
	kept.CloseIdleConnections()
	for i := range waits {
		if err := waits[i].Wait(); err != nil || !strings.HasSuffix(outputs[i].String(), "0 live flows are left\n") {
			t.Errorf("%s: %v: %s", balancers[i], err, &outputs[i])
		}
	}
	restart(t, l.Process("lb1", "lb"))
	eventually(t, func() error {
		for _, state := range balancerStatus(t, l.Node("lb1")).Services[0].Servers {
			if state.Name == server && state.Condition != inspect.ServerDrained {
				return fmt.Errorf("%s is %s after a restart", server, state.Condition)
			}
		}
		return nil
	})
	for _, balancer := range balancers {
		if out := command(t, l, balancer, segue, "undrain", name); !strings.Contains(out, "gets new connections again") {
			t.Errorf("%s: %s", balancer, out)
		}
	}
	visits, err = newClient(l).visit(t.Context(), s, 100)
	must(t, err)
	if visits[server] == 0 {
		t.Errorf("no new connection went to %s: %v", server, visits)
	}
	out, err := l.Node("lb1").Run(t.Context(), segue, "drain", "--self")
	if err == nil || !strings.Contains(out, "has no section bgp") {
		t.Errorf("a drain of the balancer itself: error %v: %s", err, out)
	}
}

// TestServerCommands changes the servers of a running balancer by commands. Changes hold until they
// are reset, also across a restart, and a file can be applied whole.
func TestServerCommands(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-encap", "http6-insert")) // a balancer has at least one service
	s := l.Topology.Services[0]
	balancers := nodes(l, lab.RoleBalancer)
	onAll := func(want string, args ...string) {
		t.Helper()
		for _, balancer := range balancers {
			if out := command(t, l, balancer, segue, args...); !strings.Contains(out, want) {
				t.Fatalf("segue %s: %s, want %s", strings.Join(args, " "), out, want)
			}
		}
	}
	requireVisits := func(server string, some bool) {
		t.Helper()
		visits, err := newClient(l).visit(t.Context(), s, 100)
		must(t, err)
		if visits[server] > 0 != some {
			t.Errorf("of 100 new connections, %d went to %s", visits[server], server)
		}
	}
	name := s.Name + "/s1"
	locator := l.Node("s1").Locator.String()

	var log sharedFile
	watch := exec.CommandContext(t.Context(), segue, "events")
	watch.Stdout, watch.Stderr = &log, &log
	must(t, l.Node("lb2").Start(watch))
	onAll("dry run: server "+name+" removed", "server", "remove", name, "--dry-run")
	onAll("removed", "server", "remove", name)
	requireVisits("s1", false)
	restart(t, l.Process("lb1", "lb"))
	onAll("nothing to change", "server", "reset", s.Name+"/s2")
	requireVisits("s1", false)
	onAll("added", "server", "reset", name)
	requireVisits("s1", true)

	// The same server with another name.
	onAll("removed", "server", "remove", name)
	onAll("added", "server", "add", s.Name+"/new", "locator="+locator, "weight=2")
	requireVisits("s1", true)
	onAll("new (weight 2 to 0)", "server", "set", s.Name+"/new", "weight=0")
	requireVisits("s1", false)
	onAll("new (weight 0 to 2)", "server", "set", s.Name+"/new", "weight=2")

	for _, event := range []string{
		"changed server " + name + " removed", "changed server " + name + " added",
		"server_draining " + s.Name + "/new", "server_undrained " + s.Name + "/new",
	} {
		eventually(t, func() error {
			if !strings.Contains(log.String(), event) {
				return fmt.Errorf("no event %q in\n%s", event, &log)
			}
			return nil
		})
	}
	// Agents have the same socket.
	if out := command(t, l, "s2", segue, "reload"); !strings.Contains(out, "has reloaded") {
		t.Errorf("segue reload on a server: %s", out)
	}
	out := command(t, l, "s2", "curl", "-sS", "--unix-socket",
		rundir.SocketFile(l.Node("s2").Instance()), "http://agent/v1/services")
	if !strings.Contains(out, `"name":"`+s.Name+`"`) {
		t.Errorf("services of an agent: %s", out)
	}
	must(t, watch.Process.Signal(os.Interrupt))
	must(t, watch.Wait())

	// The balancer's own file ends all overrides.
	for _, balancer := range balancers {
		file := filepath.Join("/run/segue/lab", l.Name, "conf", balancer+"-balancer.yaml")
		_, err := l.Node(balancer).Run(t.Context(), segue, "diff", file)
		if err == nil {
			t.Error("diff finds no difference")
		}
		if out := command(t, l, balancer, segue, "apply", file); !strings.Contains(out, "server "+name+" added") {
			t.Errorf("apply: %s", out)
		}
		if out := command(t, l, balancer, segue, "diff", file); !strings.HasPrefix(out, "nothing to change\n") {
			t.Errorf("diff: %s", out)
		}
	}
	requireVisits("s1", true)
	// The same service with another name, and one server.
	onAll("removed", "service", "remove", s.Name)
	onAll("added", "service", "add", "web", "vip="+s.VIP.String(), fmt.Sprint("port=", s.Port), "protocol=tcp",
		"encapsulation="+string(s.Encapsulation), "placement="+string(s.Placement), "timeouts.new=30s")
	onAll("added", "server", "add", "web/only", "locator="+locator)
	visits, err := newClient(l).visit(t.Context(), s, 20)
	must(t, err)
	if visits["s1"] != 20 {
		t.Errorf("a service that was added: connections went to %v, want s1", visits)
	}
	onAll("removed", "service", "remove", "web")
	onAll("added", "service", "reset", s.Name)
	onAll("", "reload")
	onAll(name, "server", "list")
	onAll("http6-encap", "service", "list")
}
