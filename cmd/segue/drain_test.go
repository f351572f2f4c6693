// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestDrainAwaitsOpeningConnections checks that the wait lasts until connections that were accepted
// before the drain have ended their handshakes, because the agent counts them only then.
func TestDrainAwaitsOpeningConnections(t *testing.T) {
	t.Parallel()
	counts := []uint32{0, 0, 1}
	p := startAgentWith(t, func(drained bool) uint32 {
		if !drained || len(counts) == 0 {
			return 0
		}
		first := counts[0]
		counts = counts[1:]
		return first
	})
	out, err := p.segue("drain", "web", "--wait", "--timeout", "1m")
	const want = "web is drained: it refuses the connections that balancers offer\n" +
		"warning: no balancer has offered this server a connection of web: balancers without placement " +
		"hunt do not ask the server; drain it at those balancers\n" +
		"0 connections are left\n1 connection is left\n0 connections are left\n"
	if err != nil || out != want {
		t.Errorf("error %v, output:\n%s\nwant:\n%s", err, out, want)
	}
}

// TestDrainEndedBySomebodyElse checks that drain fails if somebody undrains the service meanwhile,
// even if no connection is left.
func TestDrainEndedBySomebodyElse(t *testing.T) {
	t.Parallel()
	looks := 0
	var p *process
	p = startAgentWith(t, func(drained bool) uint32 {
		if looks++; looks == 3 { // the second look that finds the service drained
			if p.set("web", desired.Fields{"drained": false}); !drained {
				t.Error("not drained at the third look")
			}
		}
		return 0
	})
	out, err := p.segue("drain", "web", "--wait", "--timeout", "1m")
	if err == nil || err.Error() != "somebody else has undrained web" {
		t.Errorf("error %v, output:\n%s", err, out)
	}
}

// TestDrainEndedAtOnce undrains the service before drain has seen the drain in force. Drain fails.
func TestDrainEndedAtOnce(t *testing.T) {
	t.Parallel()
	p, handler := agentWith(t, func(bool) uint32 { return 0 })
	var undrained atomic.Bool
	p.serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r)
		isChange := r.Method == http.MethodPost && r.URL.Query().Get("dry-run") == "false"
		if isChange && !undrained.Swap(true) {
			// The drain has no answer yet. The threshold makes this version differ from all before.
			p.set("web", desired.Fields{"drained": false, "accept": map[string]any{"threshold": 9}})
		}
	}))
	version, err := p.segue("drain", "web", "--dry-run")
	testhost.Must(t, err)
	out, err := p.segue("drain", "web", "--wait", "--timeout", "1m", "--if-version", versions.FindString(version))
	if err == nil || err.Error() != "somebody else has undrained web" {
		t.Errorf("error %v, output:\n%s", err, out)
	}
}

// TestDrainReadsItsServiceOnly checks that drain reads only the state of the server's service.
func TestDrainReadsItsServiceOnly(t *testing.T) {
	t.Parallel()
	p := startBalancer(t)
	for _, command := range []string{"drain", "undrain"} {
		if out, err := p.segue(command, "web/s1"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if want := []string{"web", "web"}; !slices.Equal(p.read, want) {
		t.Errorf("services that were read: %v, want %v", p.read, want)
	}
	if _, err := p.segue("drain", "none/s1"); err == nil || len(p.read) != 2 {
		t.Errorf("service none: error %v, %v were read", err, p.read)
	}
}

// set sets fields of a service by a request of its own, as another operator would.
func (p *process) set(service string, fields desired.Fields) {
	p.t.Helper()
	_, err := api.NewClient(p.instance).Change(p.t.Context(), false,
		api.Edit{Override: api.Override{Service: service, Set: fields}})
	if err != nil {
		p.t.Error(err)
	}
}

// TestDrainOfProcessThatDoesNotAnswer checks that --timeout also limits requests to such a process.
func TestDrainOfProcessThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"drain", "web", "--wait"}, {"drain", "--self"}, {"drain", "--self", "--dry-run"},
	} {
		p, _ := newProcess(t, "{instance: %s, state: %s}")
		p.serve(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		_, err := p.segue(append(args, "--timeout", "100ms")...)
		if want := "the process of instance \"" + p.instance + "\" does not answer"; err == nil || err.Error() != want {
			t.Errorf("%q: error %v, want %s", args, err, want)
		}
	}
}

// TestDrainSaysWhyItDoesNotEnd checks that drain says why flows may stay for ever, and what to do.
// The three flows of a server of this balancer never end.
func TestDrainSaysWhyItDoesNotEnd(t *testing.T) {
	t.Parallel()
	const (
		kept = "flows of UDP stay while their clients send, because on-drain of service quic is keep: " +
			"set it to move-udp"
		noTaker = "flows of UDP stay while their clients send, because no other server of service quic gets new " +
			"connections: add or undrain one"
		tcp = "connections of TCP stay until a client or the server ends them: end them at the server"
	)
	for _, test := range []struct {
		name, server, onDrain string
		atOnce                bool
		want                  string
	}{
		{"kept", "quic/s1", "keep", true, kept},
		{"no other server", "quic/s1", "move-udp", true, noTaker},
		{"connections", "web/s1", "keep", false, tcp},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p := startBalancer(t)
			p.set("quic", desired.Fields{"on-drain": test.onDrain})
			out, err := p.segue("drain", test.server, "--wait", "--timeout", "1500ms")
			if said := strings.Contains(out, test.want+"\n"); said != test.atOnce {
				t.Errorf("output:\n%s\nsaid at once %v, want %v: %s", out, said, test.atOnce, test.want)
			}
			if strings.Contains(out, "limit the wait") {
				t.Errorf("the wait has a limit; output:\n%s", out)
			}
			end := "--timeout has passed: 3 live flows are left (" + test.want + "); " + test.server + " stays drained"
			if err == nil || err.Error() != end {
				t.Errorf("error %v, want %s", err, end)
			}
		})
	}
}

// TestDrainThatEnds checks that drain warns of no endless wait if UDP flows move to other servers.
func TestDrainThatEnds(t *testing.T) {
	t.Parallel()
	for _, takes := range []bool{true, false} {
		s := staysOf(&api.Service{Name: "quic", Protocol: "udp", OnDrain: "move-udp", TakesFlows: takes})
		if isEnding := s == (stay{}); isEnding != takes {
			t.Errorf("others take flows %v: %+v", takes, s)
		}
		var out bytes.Buffer
		if s.print(t.Context(), &out); (out.Len() == 0) != takes {
			t.Errorf("others take flows %v: drain prints %q", takes, &out)
		}
	}
}

// TestDrainSaysThatConnectionsStay checks that drain explains once why connections do not end.
func TestDrainSaysThatConnectionsStay(t *testing.T) {
	t.Parallel()
	counts := []uint32{2, 2, 1} // drain ignores the first count, which may be older than the drain
	var waits atomic.Bool
	p := startAgentWith(t, func(bool) uint32 {
		if !waits.Load() || len(counts) == 0 {
			return 0
		}
		first := counts[0]
		counts = counts[1:]
		return first
	})
	p.set("web", desired.Fields{"drained": true})
	var out bytes.Buffer
	client := &drainClient{api.NewClient(p.instance), api.RoleAgent, 0}
	waits.Store(true)
	err := awaitEnd(t.Context(), &out, client, "web")
	const want = "2 connections are left\n" +
		"connections stay until a client or the application ends them: end them in the application, or limit " +
		"the wait by --timeout\n1 connection is left\n0 connections are left\n"
	if err != nil || out.String() != want {
		t.Errorf("error %v, output:\n%s\nwant:\n%s", err, &out, want)
	}
}
