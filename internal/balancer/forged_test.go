// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

func everyFlow(dataplane.FlowEntry) bool { return true }

// idleConnections opens connections to a service without agents, under a placement. It returns the
// server of each flow, and a function that sends a packet of a flow and returns its server.
func idleConnections(t *testing.T, placement desired.Placement, flows uint16) (
	f *fixture, servers map[dataplane.Flow]string, send func(dataplane.Flow, packet.TCPFlags) string,
) {
	t.Helper()
	cfg := placingBy(placement, manyServers(9)...)
	if placement == desired.PlacementInfer {
		cfg = inferring(manyServers(9)...)
	}
	cfg.Services[0].Probe = new(false)
	cfg.Services[0].Timeouts = desired.Timeouts{
		New: 10 * time.Second, Established: time.Hour, Closing: 5 * time.Second, Silent: 5 * time.Second,
	}
	cfg.Node.Limits = desired.Limits{Flows: 64 * dataplane.FlowLoad, Servers: 64}
	f = open(t, cfg)
	f.infers(time.Second)
	send = func(flow dataplane.Flow, flags packet.TCPFlags) string {
		return serverOf(f.run(frameOf(flow, packet.Flags(flags))))
	}
	servers = map[dataplane.Flow]string{}
	for port := range flows {
		flow := fromPort(web, 2000+port)
		servers[flow] = send(flow, packet.SYN)
		send(flow, packet.ACK)
	}
	return f, servers, send
}

// A client's FIN or RST may be forged, because any host can send it. It moves no connection: not if
// the connection then is silent for longer than timeouts.closing, not if a SYN follows, and not if
// the connection's bucket is full. Under these placements the bucket does not tell the server, so a
// flow that lost its entry would come to another one.
func TestForgedEnds(t *testing.T) {
	t.Parallel()
	const connections, rate = 20, 10
	for _, placement := range []desired.Placement{
		desired.PlacementLeastQueue, desired.PlacementRoundRobin, desired.PlacementSED, desired.PlacementInfer,
	} {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			f, servers, send := idleConnections(t, placement, connections)
			forge := func(flow dataplane.Flow, flags ...packet.TCPFlags) {
				for range rate {
					for _, flags := range flags {
						if got := send(flow, flags); got != servers[flow] {
							t.Fatalf("%v of %v goes to %s, not to %s", flags, flow, got, servers[flow])
						}
					}
				}
			}
			goOn := func(what string) {
				t.Helper()
				for flow, server := range servers {
					if got := send(flow, packet.ACK); got != server {
						t.Errorf("%s: %v goes to %s, not to %s", what, flow, got, server)
					}
				}
			}
			for _, end := range []packet.TCPFlags{packet.RST, packet.FIN | packet.ACK} {
				for flow := range servers {
					forge(flow, end)
				}
				f.elapseFlows(f.clock.Ticks(time.Hour), everyFlow)
				f.must(f.sweep())
				goOn("after an hour of silence")
				for flow := range servers {
					forge(flow, end)
				}
				f.elapseFlows(flowLinger, everyFlow)
				for flow := range servers {
					forge(flow, packet.SYN, end, packet.SYN)
				}
				goOn("after a SYN")
				for flow := range servers {
					forge(flow, end)
				}
				f.flood(64 * dataplane.FlowsPerBucket * 4)
				goOn("after a flood of other flows")
				f.elapseFlows(flowLinger, everyFlow)
			}
		})
	}
}

// flood sends the first two packets of the given number of flows.
func (f *fixture) flood(flows uint16) {
	f.t.Helper()
	for port := range flows {
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK} {
			f.exec(frameOf(fromPort(web, 20_000+port), packet.Flags(flags)), nil)
		}
	}
}

// If the server sends no signal, the entry of a connection that the client has ended lives as long
// as that of an idle one, and counts as closing. A SYN of the same port stays with its server, and
// the next packet begins the next connection.
func TestPortIsUsedAgain(t *testing.T) {
	t.Parallel()
	f, servers, send := idleConnections(t, desired.PlacementLeastQueue, 1)
	for flow, server := range servers {
		send(flow, packet.FIN|packet.ACK)
		f.elapseFlows(f.clock.Ticks(time.Minute), everyFlow)
		f.must(f.sweep())
		if got := f.entry(flow).State(); got != stateClosing {
			t.Fatalf("a minute after the FIN the flow is %v", got)
		}
		slot := f.entry(flow).Server()
		for _, c := range []struct {
			flags packet.TCPFlags
			state dataplane.FlowState
		}{{packet.SYN, stateClosing}, {packet.ACK, stateEstablished}} {
			if got := send(flow, c.flags); got != server || f.entry(flow).State() != c.state {
				t.Errorf("%v: to %s, and then %v; want %s, %v", c.flags, got, f.entry(flow).State(), server, c.state)
			}
		}
		if c := f.plane.Loads.Counters(slot); c.Placed != 2 || c.Answered != 2 || c.Established != 1 {
			t.Errorf("counted are %+v, want two flows of which one is there", c)
		}
		send(flow, packet.FIN|packet.ACK)
		f.elapseFlows(f.clock.Ticks(time.Hour)+1, everyFlow)
		f.must(f.sweep())
		if got := f.entry(flow); got != 0 {
			t.Errorf("after timeouts.established the flow is %v", got.State())
		}
	}
}

// The packets of one flow count as one life, and as one end in two ticks of the flow table's clock,
// however often a client ends the flow and begins it again: so its packets do not show how many
// flows a server can serve, nor for how long.
func TestForgedLives(t *testing.T) {
	t.Parallel()
	const cycles = 1000
	for name, persistence := range map[string]desired.Persistence{
		"in the flow table": desired.PersistenceTable, "observed": desired.PersistenceStateless,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := inferring(manyServers(4)...)
			svc := &cfg.Services[0]
			svc.Persistence, svc.Probe = persistence, new(true)
			if persistence != desired.PersistenceTable {
				svc.Infer.Among, svc.History, svc.Generations = desired.AmongCandidates, 3, 32
			}
			svc.Infer.Estimator = desired.EstimateDurationsMean
			r := openRanked(t, cfg, 1024, 1)
			for _, slot := range r.services.byName["web"].slots() {
				r.plane.SetTiming(slot, infer.TimingEnds)
			}
			frames := map[packet.TCPFlags][]byte{}
			for _, flags := range []packet.TCPFlags{packet.SYN, packet.PSH | packet.ACK, packet.FIN | packet.ACK, packet.RST} {
				frames[flags] = frameOf(r.flows[0], packet.Flags(flags))
			}
			for range cycles {
				for _, flags := range []packet.TCPFlags{
					packet.SYN, packet.PSH | packet.ACK, packet.FIN | packet.ACK,
					packet.SYN, packet.PSH | packet.ACK, packet.RST,
				} {
					r.exec(frames[flags], nil)
				}
			}
			var sum infer.Counters
			durations := 0
			for _, slot := range r.services.byName["web"].slots() {
				c := r.plane.Loads.Counters(slot)
				sum.Placed, sum.Answered = sum.Placed+c.Placed, sum.Answered+c.Answered
				sum.EndedNew += c.EndedNew
				for i, n := range c.Ended {
					sum.Ended[i] += n
				}
				durations += len(r.plane.Loads.Durations(slot, nil))
			}
			want := infer.Counters{Placed: 1, Answered: 1}
			want.Ended[0] = 1
			if sum != want || durations != 1 {
				t.Errorf("after %d cycles: %+v and %d durations, want %+v and 1", cycles, sum, durations, want)
			}
		})
	}
}

// A reset that answers the SYN-ACK of a flood with forged sources makes no entry of the flow table:
// the flow stays half-open. A FIN does, as any other packet of the client.
func TestResetsOfAFlood(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	row := f.row(web, "web")
	f.mustBe("return_create", f.create(web, "web", row[0], packet.SYN))
	f.run(frameOf(web, packet.Flags(packet.RST)))
	if got := f.entry(web); got != 0 {
		t.Errorf("a reset has entered the flow as %v", got.State())
	}
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.forwarded(ack, web, "web", row[0], "forward_new"), f.run(ack))
}
