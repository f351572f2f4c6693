// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	stateFree        = dataplane.FlowFree
	stateSilent      = dataplane.FlowSilent
	stateNew         = dataplane.FlowNew
	stateEstablished = dataplane.FlowEstablished
	stateClosing     = dataplane.FlowClosing
	stateClosed      = dataplane.FlowClosed
)

// enter puts a flow into the first entry of its bucket, which must be empty.
func (f *fixture) enter(flow dataplane.Flow, service, server string, state dataplane.FlowState) {
	f.t.Helper()
	bucket := f.bucket(flow)
	clear(bucket)
	bucket[0] = entryOf(f.signature(flow), f.slot(service, server), state, f.now())
}

// otherThanPlaced returns a server of the service that consistent hashing does not select for the
// flow.
func (f *fixture) otherThanPlaced(flow dataplane.Flow, service string) string {
	f.t.Helper()
	placed := f.placed(flow, service)
	for _, s := range f.service(service).Servers {
		if s.Name != placed {
			return s.Name
		}
	}
	f.t.Fatalf("service %s has one server", service)
	return ""
}

// isEntered checks that a flow is the only one in its bucket, with this server and state.
func (f *fixture) isEntered(flow dataplane.Flow, service, server string, state dataplane.FlowState) {
	f.t.Helper()
	entry := f.entry(flow)
	if entry.State() != state || entry.Server() != f.slot(service, server) {
		f.t.Errorf("entry: state %d, slot %d; want state %d, slot %d",
			entry.State(), entry.Server(), state, f.slot(service, server))
	}
	entries := 0
	for _, value := range f.bucket(flow) {
		if dataplane.FlowEntry(value).State() != stateFree {
			entries++
		}
	}
	if entries != 1 {
		f.t.Errorf("%d entries of one flow", entries)
	}
}

// SYNs and datagrams leave a server whose next hop does not answer. Other packets of connections
// stay, because the next hop may be back before the kernel notices.
func TestSilentNextHop(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for flow, name := range map[dataplane.Flow]string{web: "web", dns: "dns"} {
		server := f.placed(flow, name)
		f.enter(flow, name, server, stateEstablished)
		f.silent[server] = true
		f.route()
		trace := mustTrace(t, f.view(), inspect.Packet{Flow: flow, Opens: flow == web, Length: 100})
		// The data path counts the server as failing, because others are well. A connection that may
		// go on leaves it only because of the next hop.
		want := "the server is unreachable"
		if flow == web {
			want = "the server's next hop does not answer"
		}
		if trace.Known.Left != want {
			t.Errorf("%s: trace says that the flow leaves because %q", name, trace.Known.Left)
		}
		if flow == web {
			ack := frameOf(web, packet.Flags(packet.ACK))
			f.check(f.forwarded(ack, web, "web", server, "forward_known"), f.run(ack))
		}
		got := f.run(frameOf(flow))
		if to := serverOf(got); to == name+"/"+server || reasonOf(got) != "forward_new" {
			t.Errorf("%s: %s to %s", name, reasonOf(got), to)
		}
		f.silent[server] = false
		f.route()
	}
}

// resident is an entry of a full bucket. Its age is in ticks.
type resident struct {
	state dataplane.FlowState
	age   int
}

// repeat returns a full bucket of flows in one state. Their ages are the given ones, and then the
// last of these.
func repeat(state dataplane.FlowState, ages ...int) (out [dataplane.FlowsPerBucket]resident) {
	for i := range out {
		out[i] = resident{state, ages[min(i, len(ages)-1)]}
	}
	return out
}

// with returns a bucket with other residents in some places.
func with(bucket [dataplane.FlowsPerBucket]resident, changes map[int]resident) [dataplane.FlowsPerBucket]resident {
	for i, r := range changes {
		bucket[i] = r
	}
	return bucket
}

// Packets write and renew the time in their flow's entry, with a clock that runs.
func TestRenewal(t *testing.T) {
	t.Parallel()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	f := openAt(t, standard(), clock)
	sees := func(flags packet.TCPFlags) {
		t.Helper()
		before := f.now()
		f.run(frameOf(web, packet.Flags(flags)))
		after := f.now()
		seen := seenOf(f.entry(web))
		if passed := (after - before) & dataplane.FlowTimeMask; (seen-before)&dataplane.FlowTimeMask > passed {
			t.Errorf("seen at %d, from %d to %d", seen, before, after)
		}
	}
	sees(packet.SYN)
	for _, age := range []uint16{0, 1, 100, 4000} {
		f.enter(web, "web", "s1", stateEstablished)
		f.elapseFlows(age, func(dataplane.FlowEntry) bool { return true })
		sees(packet.ACK)
	}
}

// If servers have agents, a later TCP packet of an unknown flow visits the servers that may have
// the flow, and gets no entry. So does an ICMP error about a TCP flow. SYNs, UDP packets and ICMP
// errors about UDP flows are placed. Trace agrees.
func TestHashVisitsServersWithAgents(t *testing.T) {
	t.Parallel()
	var servers []desired.Server
	for i := range uint8(5) {
		servers = append(servers, srv6Server(fmt.Sprint("s", i), i+1, 1))
	}
	cfg := balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...),
		serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, servers...),
	)
	for i := range cfg.Services {
		cfg.Services[i].Probe = new(true)
	}
	f := open(t, cfg)
	view := f.view()
	r := newReference(f)
	ack := frameOf(web, packet.Flags(packet.ACK))
	row := r.possible(web, f.service("web"))
	if len(row) != 3 {
		t.Fatalf("the row is %v", row)
	}
	for range 2 {
		f.check(f.offered(ack, web, "web", "forward_recover", srv6.Steer, row...), f.run(ack))
		trace := mustTrace(t, view, inspect.Packet{Flow: web, Length: int(layer3(ack))})
		f.check(f.traced(t, trace, ack), f.run(ack))
	}
	tooBig := packet.ICMPError(routerOf(vip6), 2, 0, 1280, reply(web))
	f.check(f.offered(tooBig, web, "web", "forward_icmp", srv6.Steer, row...), f.run(tooBig))
	tooBig = packet.ICMPError(routerOf(vip6), 2, 0, 1280, reply(dns))
	f.check(f.offered(tooBig, dns, "dns", "forward_icmp", srv6.Deliver, f.placed(dns, "dns")), f.run(tooBig))
	f.check(f.offered(frameOf(dns), dns, "dns", "forward_new", srv6.Deliver, f.placed(dns, "dns")), f.run(frameOf(dns)))
	f.forgetFlows()

	f.via[row[0]] = ""
	f.route()
	r.changed()
	f.check(f.offered(frameOf(web), web, "web", "forward_new", srv6.Deliver, row[1]), f.run(frameOf(web)))
	f.forgetFlows()
	asked := r.possible(web, f.service("web"))
	if len(asked) != 4 || asked[0] != row[1] || asked[3] != row[0] {
		t.Errorf("asked are %v of the row %v", asked, row)
	}
	f.check(f.offered(ack, web, "web", "forward_recover", srv6.Steer, asked...), f.run(ack))
}
