// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// hunted is the JSON output of segue trace --ask.
type hunted struct {
	inspect.Trace
	Agents []struct {
		Server        string
		Trace         *agent.Trace
		Error         string
		Offer, Packet *agent.Answer
		Reached       bool
	}
	Receiver, End string
}

// askServers traces a flow at a balancer, which asks the servers.
func askServers(t *testing.T, l *lab.Lab, node string, flow dataplane.Flow, args ...string) string {
	t.Helper()
	args = append([]string{"trace", "-i", l.Node(node).Instance(),
		"--ask", fmt.Sprintf("%s lab exec --name %s {} -- %s trace", laboratory, l.Name, segue)}, args...)
	return mustCLI(t, segue, append(args, string(flow.Protocol), flow.Source.String(), flow.Destination.String())...)
}

// askHops returns the answer of each server that was asked: its state of the connection, the
// outcome of a new connection, and the outcome of the packet if the packet reaches the server.
func askHops(t *testing.T, l *lab.Lab, node string, flow dataplane.Flow, args ...string) (h hunted, hops []string) {
	t.Helper()
	must(t, json.Unmarshal([]byte(askServers(t, l, node, flow, append(args, "--json")...)), &h))
	for _, a := range h.Agents {
		if a.Trace == nil || a.Offer == nil {
			t.Fatalf("%s did not answer: %s", a.Server, a.Error)
		}
		hop := fmt.Sprintf("%s: %s, %s; new: %s", a.Server, a.Trace.Flow.State, a.Trace.Socket, a.Offer.Outcome)
		if a.Packet != nil && a.Reached {
			hop += fmt.Sprintf("; %s: %s", a.Packet.Function, a.Packet.Outcome)
		}
		hops = append(hops, hop)
	}
	return h, hops
}

// TestTraceAsksServers traces connections of a service whose servers accept only what they must. It
// traces them before they begin, at their balancer, and at the other balancer, to which they then
// move.
func TestTraceAsksServers(t *testing.T) {
	t.Parallel()
	services := huntingServices(2)
	l := up(t, hunting(services[0], services[2]))
	accept(t, l, desired.Accept{Policy: desired.AcceptNever})
	for i, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			must(t, l.SetNextHops("lb1"))
			port := 20001 + i
			source := netip.MustParseAddr("2001:db8:c::2")
			if s.VIP.Is4() {
				source = netip.MustParseAddr("198.51.100.2")
			}
			flow := dataplane.Flow{Protocol: desired.TCP, Source: netip.AddrPortFrom(source, uint16(port)), Destination: s.Address()}

			h, hops := askHops(t, l, "lb1", flow)
			first, last := h.Placement.Candidates[0], h.Placement.Candidates[1]
			require := func(what string, h hunted, hops []string, reason string, want ...string) {
				t.Helper()
				if diff := cmp.Diff(want, hops); diff != "" {
					t.Errorf("%s: the servers say (-want +got):\n%s", what, diff)
				}
				if h.Reason != reason || h.Receiver != last || h.End != "deliver" {
					t.Errorf("%s: %s, the packet goes to %q, %q; want %s, %s, deliver", what, h.Reason, h.Receiver, h.End, reason, last)
				}
			}
			require("before the SYN", h, hops, "forward_hunt",
				first+": listen, listening; new: next_refused; connect-avail: next_refused",
				last+": listen, listening; new: deliver; connect-avail: deliver")

			c, err := dialFrom(t.Context(), l, s, port)
			must(t, err)
			defer c.conn.Close()
			if c.server != last {
				t.Errorf("%s has the connection, and not %s", c.server, last)
			}
			h, hops = askHops(t, l, "lb1", flow)
			require("while it lasts", h, hops, "forward_known",
				first+": listen, listening; new: next_refused",
				last+": direct, established; new: deliver; ack-stickiness: deliver")
			if h.Known == nil || h.Known.Server != last || h.Known.State != "established" {
				t.Errorf("lb1 knows %+v of it, not that it is at %s", h.Known, last)
			}

			h, hops = askHops(t, l, "lb2", flow, "--packet", "later")
			require("at another balancer", h, hops, "forward_recover",
				first+": listen, listening; new: next_refused; recover-stickiness: next_not_local",
				last+": direct, established; new: deliver; recover-stickiness: deliver")
			must(t, l.SetNextHops("lb2"))
			server, err := c.request()
			must(t, err)
			if server != last {
				t.Errorf("by another balancer %s answers, and not %s", server, last)
			}
			if text := askServers(t, l, "lb2", flow); !strings.Contains(text, fmt.Sprintf("the packet goes to: %s, deliver\n", last)) {
				t.Errorf("for people it does not say that the packet goes to %s:\n%s", last, text)
			}
			h, hops = askHops(t, l, "lb2", flow)
			require("after it has moved", h, hops, "forward_known",
				first+": listen, listening; new: next_refused",
				last+": direct, established; new: deliver; ack-stickiness: deliver")
		})
	}
}
