// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

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
