// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/lab"
)

var examples = flag.Int("schemathesis.examples", 20, "requests that TestSchemathesis invents for each operation")

// TestSchemathesis lets Schemathesis invent requests from the documents of a balancer's and an agent's
// API. No request may get an answer of 500, or one that the document does not describe. The data
// path goes on.
func TestSchemathesis(t *testing.T) {
	t.Parallel()
	topology := topology("http6-encap")
	topology.Services[0].Name = "web" // an example in the document
	l := up(t, topology)
	for node, file := range map[string]string{"lb1": "lb1-balancer.yaml", "s1": "s1-agent.yaml"} {
		answers := schemathesis(t, l, node)
		for _, want := range []int{http.StatusOK, http.StatusNotFound, http.StatusConflict, http.StatusPreconditionFailed} {
			if status := fmt.Sprint(want, " ", http.StatusText(want)); answers["/v1/changes"][status] == 0 {
				t.Errorf("%s: no request for a change got the answer %s: %v", node, status, answers)
			}
		}
		if answers["/v1/reload"]["200 OK"] == 0 {
			t.Errorf("%s: no reload succeeded: %v", node, answers)
		}
		// Whatever the requests have changed, the process's own file brings back. What they have
		// drained stays drained.
		command(t, l, node, segue, "apply", "--allow-removals", filepath.Join("/run/segue/lab", l.Name, "conf", file))
	}
	_, err := newClient(l).visit(t.Context(), l.Topology.Services[0], 20)
	must(t, err)
}

// schemathesis tests the API of a node, and returns the statuses of the answers by path.
func schemathesis(t *testing.T, l *lab.Lab, node string) map[string]map[string]int {
	t.Helper()
	tool, err := filepath.Abs("../../.tools/schemathesis")
	must(t, err)
	if _, err := os.Stat(tool); err != nil {
		t.Skipf("needs Schemathesis, which make setup-test installs: %v", err)
	}
	hooks, err := filepath.Abs("testdata")
	must(t, err)
	server, answers := proxyTo(t, rundir.SocketFile(l.Node(node).Instance()))
	run := exec.CommandContext(t.Context(), "python3", "-m", "schemathesis.cli", "run", server.URL+"/openapi.json",
		"--exclude-operation-id", "watch-events", // an answer without an end
		// A schema cannot say which fields a service has: most valid requests are refused.
		"--checks", "all", "--exclude-checks", "positive_data_acceptance", "--max-examples", strconv.Itoa(*examples),
		"--seed", "1", "--generation-database", "none")
	run.Env = append(os.Environ(), "NO_COLOR=1", "SCHEMATHESIS_HOOKS=schemathesis_hooks",
		"NODE_ROLE="+string(l.Node(node).Role),
		"PYTHONPATH="+tool+":"+hooks, "PYTHONDONTWRITEBYTECODE=1")
	run.Dir = t.TempDir()
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", node, err, out)
	}
	server.Close()
	t.Logf("%s: %s\nanswers: %v", node, out, answers)
	return answers
}

// proxyTo serves on a TCP port what a socket serves. It counts the statuses of the answers by path.
func proxyTo(t *testing.T, socket string) (*httptest.Server, map[string]map[string]int) {
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "segue"})
	proxy.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}
	var mu sync.Mutex
	answers := map[string]map[string]int{}
	proxy.ModifyResponse = func(r *http.Response) error {
		mu.Lock()
		defer mu.Unlock()
		path := r.Request.URL.Path
		if answers[path] == nil {
			answers[path] = map[string]int{}
		}
		answers[path][r.Status]++
		return nil
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server, answers
}
