// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"
)

// A drain on a server does not end while the handshake of a connection lasts that was accepted before:
// such a connection is counted only when it is established.
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
		"0 connections are left\n1 connection is left\n0 connections are left\n"
	if err != nil || out != want {
		t.Errorf("error %v, output:\n%s\nwant:\n%s", err, out, want)
	}
}

// --timeout bounds also the requests to a process that does not answer.
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
