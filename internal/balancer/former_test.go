// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"math/bits"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// openFormer opens a balancer whose services become stateless after prepare, and so may have former
// flows.
func openFormer(t *testing.T, before, after *desired.Balancer, prepare func(*fixture)) *fixture {
	t.Helper()
	f := open(t, before)
	prepare(f)
	f.mustApply(after)
	f.cfg = after
	return f
}

// enterAt enters a flow of the service "web" into a table: into the preferred entry.
func (f *fixture) enterAt(
	table *dataplane.FlowTable, server string, state dataplane.FlowState, age uint16,
) {
	f.t.Helper()
	place, signature := web.TableHash(f.serviceID(web), &f.identity)
	at := int(bucketNumber(table, place))*dataplane.FlowsPerBucket + f.preferred(web)
	table.Entries[at] = entryOf(signature, f.slot("web", server), state, f.now()-age)
}

// Until all former flows have ended, servers are asked as for former flows, whatever configurations
// are applied meanwhile, and by whichever process. A server without the flow would return a packet
// otherwise, and the balancer would find the same entry again.
func TestFormerFlowsOutliveReloads(t *testing.T) {
	t.Parallel()
	asked := map[desired.Placement]srv6.Function{
		desired.PlacementHash: srv6.Deliver, desired.PlacementHunt: srv6.AckStickiness,
	}
	for placement, function := range asked {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			before := withHints(hunting(desired.SelectConsistent, 3))
			for i := range before.Services {
				if placement == desired.PlacementHash {
					before.Services[i].Placement, before.Services[i].Selection = placement, ""
				}
			}
			syn := frameOf(web, packet.Timestamps(7, 0))
			f := openFormer(t, before, withHints(multilinear(stateless(placement, 3))), func(f *fixture) {
				f.enterAt(f.plane.Flows, f.row(web, "web")[0], stateEstablished, 0)
			})
			server := f.row(web, "web")[0]
			for i, change := range []func(*desired.Balancer){
				f.mustApply, func(next *desired.Balancer) { f.restartAs(next) },
			} {
				f.requireKnown("web")
				next := withHints(multilinear(stateless(placement, 3)))
				next.Node.Instance = f.cfg.Node.Instance
				for j := range next.Services {
					next.Services[j].Timeouts.New += time.Duration(i+1) * time.Second
				}
				change(next)
				f.cfg = next
				f.requireKnown("web")
				f.check(f.offered(syn, web, "web", "forward_known", function, server), f.run(syn))
			}
			f.services.endFormerFlows(nil, time.Now().Add(f.service("web").Timeouts.New))
			f.requireKnown("web")
			if got, want := f.services.byName["web"].knownSID, knownSIDOf(f.service("web"), true); got != want {
				t.Errorf("without former flows, servers are asked by %+v, want %+v", got, want)
			}
		})
	}
}

// requireKnown requires that packets of known flows ask the servers of a service for svc.knownSID.
func (f *fixture) requireKnown(service string) {
	f.t.Helper()
	svc := f.services.byName[service]
	want := uint64(svc.knownSID.Function)<<48 | svc.knownSID.Argument
	for _, m := range svc.members {
		low := atomic.LoadUint64(&f.plane.Directory.Servers[m.slot].KnownSid)
		if got := bits.ReverseBytes64(low); got != want {
			f.t.Errorf("%s is asked by %016x, want %016x", m.Name, got, want)
		}
	}
}

// While services cease to be stateless, each packet is sent as before or as after the change. No
// server is asked to deliver a packet with a cookie without looking for its flow: a misleading
// cookie would end the connection.
func TestPacketsWhileStatelessEnds(t *testing.T) {
	t.Parallel()
	before := func() *desired.Balancer { return withHints(stateless(desired.PlacementHunt, 2)) }
	for name, after := range map[string]func() *desired.Balancer{
		"table": func() *desired.Balancer { return withHints(hunting(desired.SelectConsistent, 2)) },
		"hint":  func() *desired.Balancer { return hinting(desired.PlacementHunt, 2) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := open(t, before())
			ack := frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 1025))
			asked := f.sendAllTheTime(ack)
			for range 5 {
				f.mustApply(after())
				f.mustApply(before())
				f.services.endFormerFlows(nil, time.Now().Add(f.service("web").Timeouts.New))
				f.requireKnown("web")
			}
			got := asked()
			delete(got, srv6.SID{Function: srv6.Steer, Argument: knownSIDOf(f.service("web"), true).Argument})
			delete(got, srv6.SID{Function: srv6.Steer, Argument: srv6.Offer{Cookie: 1}.Argument()})
			delete(got, srv6.SID{Function: srv6.RecoverStickiness})
			if len(got) > 0 {
				t.Errorf("the first server was also asked by %v", got)
			}
		})
	}
}

// sendAllTheTime sends a packet again and again, until the returned function is called. That
// function returns how often the first server was asked by which function and argument.
func (f *fixture) sendAllTheTime(frame []byte) (end func() map[srv6.SID]int) {
	ctx, cancel := context.WithCancel(f.t.Context())
	asked := map[srv6.SID]int{}
	var traffic sync.WaitGroup
	traffic.Go(func() {
		for ctx.Err() == nil {
			options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)}
			if _, err := f.plane.Objects.XdpLb.Run(&options); err != nil {
				f.t.Error(err)
				return
			}
			sid := srv6.Parse(visitedBy(options.DataOut, desired.SRv6Encap)[0])
			asked[srv6.SID{Function: sid.Function, Argument: sid.Argument}]++
		}
	})
	return func() map[srv6.SID]int {
		cancel()
		traffic.Wait()
		return asked
	}
}

// A new flow that has the signature of free entries, on the server in slot 0, leaves the load when
// its entry is removed: such an entry differs from a free one by its state and time only.
func TestForgottenFlowWithSignatureZero(t *testing.T) {
	t.Parallel()
	before, after := hunting(desired.SelectConsistent, 3), stateless(desired.PlacementHash, 3)
	for i := range before.Services {
		before.Services[i].Placement, before.Services[i].Selection = desired.PlacementHash, ""
	}
	f := open(t, before)
	first, flow := f.slots.Server(0), flowTo(vip6, 443, desired.TCP)
	for f.row(flow, first.Service)[0] != first.Server {
		flow = fromPort(flow, flow.Source.Port()+1)
	}
	// The last key is added to the sum of products. It is chosen so that the signature is 0.
	var keys dataplane.FlowKeys
	f.rekey(keys)
	keys[len(keys)-1] = -f.signature(flow) << 30
	f.rekey(keys)
	if signature := f.signature(flow); signature != 0 {
		t.Fatalf("the signature is %#x: nothing is tested", signature)
	}
	f.route()
	f.run(frameOf(flow, packet.Timestamps(7, 0)))
	f.hasLoad(0, load{1, 0})
	server := serverOfName(&after.Services[0], first.Server)
	server.Drained = true
	f.mustApply(after)
	f.run(frameOf(flow, packet.Timestamps(7, 0)))
	f.hasLoad(0, load{})
}
