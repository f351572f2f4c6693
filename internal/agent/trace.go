// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/srv6"
)

// Trace is what a server knows about a connection, and what it would do with the next packet of it.
type Trace struct {
	Instance string         `json:"instance"`
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Served   bool           `json:"served"`  // the VIP is an address of this server
	Service  string         `json:"service"` // whose policy applies; empty: no service has the port
	// Accept is the same as in a Snapshot. It is nil if the service cannot be offered connections.
	Accept *AcceptState `json:"accept"`
	Flow   TracedFlow   `json:"flow"`
	// Socket is the state of the socket that the packets reach: the connection's own, a listening
	// one, or "none". It is empty outside the agent's network namespace, because the state is
	// unknown there; Answers is empty then, too.
	Socket  string   `json:"socket"`
	Answers []Answer `json:"answers"`
	// Next is the route to the next server, if that is known.
	Next *NextSegment `json:"next,omitempty"`
}

// TracedFlow is the agent's own entry of a connection: table III of the 6LB paper, see
// docs/protocol.md.
type TracedFlow struct {
	State string `json:"state"` // listen (no entry), wait, direct, ending or closing
	// Balancer is the locator of the balancer that signals go to. It is not valid in state listen.
	Balancer netip.Prefix `json:"balancer,omitzero"`
	Age      float64      `json:"age_seconds,omitempty"` // since the last change of state
}

// Answer is what happens to a packet with a function in its segment. It does not consider packets
// that return a SYN cookie.
type Answer struct {
	Function string `json:"function"`
	Last     bool   `json:"last"` // no other server is left
	// Outcome is "deliver", or the reason under which the packet would be counted.
	Outcome string `json:"outcome"`
	// Offer is the label under which the connection would be counted as an offer. It is empty if
	// the packet is not an offer or the service has no policy.
	Offer string `json:"offer,omitempty"`
}

// deliver is an Outcome. The data path counts deliveries under several reasons, by encapsulation.
const deliver = "deliver"

// tracer holds everything that decides about the packets of a connection.
type tracer struct {
	served     bool
	state      agentAgentFlowState
	age        time.Duration // since the state changed
	sockets    socketState
	acceptance *agentAcceptance // nil: no policy
	load       agentLoad
	known      bool // the load is known
}

// Trace reads what the server knows about a client's TCP connection to a VIP.
func (v *View) Trace(client, vip netip.AddrPort) (*Trace, error) {
	t := &Trace{Instance: v.instance, Client: client, VIP: vip}
	if err := v.trace(t); err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.instance, err)
	}
	return t, nil
}

func (v *View) trace(t *Trace) (err error) {
	var with tracer
	if with.served, err = has(v.maps.Vips, t.VIP.Addr().As16()); err != nil {
		return err
	}
	t.Served = with.served
	if with.state, with.age, err = v.traceFlow(t); err != nil {
		return err
	}
	key, err := v.traceService(t)
	if err != nil {
		return err
	}
	if with.acceptance, err = v.acceptance(key); err != nil {
		return err
	}
	if t.Accept, err = v.acceptState(key); err != nil || !v.here {
		return err
	}
	if with.sockets, err = querySockets(v.sockets, t.Client, t.VIP); err != nil {
		return err
	}
	t.Socket = with.sockets.name()
	if err := v.traceLoad(&with, key, t); err != nil {
		return err
	}
	t.Answers = with.answers()
	return nil
}

// has tells whether a table has an element.
func has(m *ebpf.Map, key any) (bool, error) {
	value, err := m.LookupBytes(key) // nil if there is none
	if err != nil {
		return false, fmt.Errorf("read %s: %w", m, err)
	}
	return value != nil, nil
}

// traceService finds the service of the VIP and the port. If there is none, it looks for the
// service of all ports of the VIP.
func (v *View) traceService(t *Trace) (agentServiceKey, error) {
	var key agentServiceKey
	for _, port := range []config.Port{config.Port(t.VIP.Port()), config.AllPorts} {
		key = serviceKey(config.AgentService{VIP: t.VIP.Addr(), Port: port, Protocol: config.TCP})
		var label agentServiceLabel
		err := v.maps.ServiceNames.Lookup(key, &label)
		if err == nil {
			t.Service = text(label.Name[:])
			break
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return key, fmt.Errorf("read %s: %w", v.maps.ServiceNames, err)
		}
	}
	return key, nil
}

// flowStateNames are the names in output of the states of the agent's flows.
var flowStateNames = map[agentAgentFlowState]string{
	agentAgentFlowStateAGENT_FLOW_LISTEN:  "listen",
	agentAgentFlowStateAGENT_FLOW_WAIT:    "wait",
	agentAgentFlowStateAGENT_FLOW_DIRECT:  "direct",
	agentAgentFlowStateAGENT_FLOW_ENDING:  "ending",
	agentAgentFlowStateAGENT_FLOW_CLOSING: "closing",
}

// Lifetimes of entries, as in bpf/agent/flows.h.
const (
	closingLifetime = 10 * time.Second
	repeatLifetime  = 2 * time.Minute
)

// traceFlow reads the agent's entry and its age, as find_flow in bpf/agent/flows.h does.
func (v *View) traceFlow(t *Trace) (agentAgentFlowState, time.Duration, error) {
	t.Flow.State = flowStateNames[agentAgentFlowStateAGENT_FLOW_LISTEN]
	var flow agentAgentFlow
	err := v.maps.AgentFlows.Lookup(flowKey(t.Client, t.VIP), &flow)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return agentAgentFlowStateAGENT_FLOW_LISTEN, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read %s: %w", v.maps.AgentFlows, err)
	}
	now, err := monotonic()
	if err != nil {
		return 0, 0, err
	}
	state, age := agentAgentFlowState(flow.State), time.Duration(max(0, now-int64(flow.Since)))
	if state == agentAgentFlowStateAGENT_FLOW_CLOSING && age > closingLifetime {
		return agentAgentFlowStateAGENT_FLOW_LISTEN, 0, nil
	}
	var locator [16]byte
	binary.NativeEndian.PutUint64(locator[:], flow.Balancer)
	t.Flow = TracedFlow{
		State:    flowStateNames[state],
		Balancer: netip.PrefixFrom(netip.AddrFrom16(locator), srv6.LocatorBits),
		Age:      age.Seconds(),
	}
	return state, age, nil
}

// traceLoad reads the load on which the policy would decide now. For the accept queue, it is the
// backlog of the listener that the connection would reach.
func (v *View) traceLoad(with *tracer, key agentServiceKey, t *Trace) (err error) {
	a := with.acceptance
	if a == nil || !asksForLoad(a) {
		return nil
	}
	if agentLoadSource(a.Source) == agentLoadSourceLOAD_ACCEPT_QUEUE {
		backlog := with.sockets.Backlog
		with.load, with.known = agentLoad{Busy: backlog.Waiting, Capacity: backlog.Most}, true
	} else if with.load, with.known, err = v.readLoad(key, a); err != nil {
		return err
	}
	if t.Accept != nil {
		t.Accept.Load = nil
		t.Accept.setLoad(a, with.load, with.known)
	}
	return nil
}

// answers returns the answers to all functions about connections.
func (t *tracer) answers() (all []Answer) {
	for _, f := range []srv6.Function{
		srv6.ConnectAvail, srv6.ConnectForce, srv6.AckStickiness, srv6.RecoverStickiness, srv6.Deliver, srv6.Steer,
	} {
		for _, last := range []bool{false, true} {
			a := Answer{Function: f.String(), Last: last}
			a.Outcome, a.Offer = t.answer(f, last)
			all = append(all, a)
		}
	}
	return all
}

// answer does the same as decide in bpf/agent/agent.bpf.c.
func (t *tracer) answer(f srv6.Function, last bool) (outcome, offer string) {
	switch {
	case !t.served && last:
		return "drop_not_served", ""
	case !t.served:
		return "next_segment", ""
	case f == srv6.ConnectAvail || f == srv6.ConnectForce:
		return t.connect(f == srv6.ConnectForce || last)
	case f == srv6.RecoverStickiness || f == srv6.Steer:
		return t.recover(last), ""
	}
	return deliver, ""
}

// connect does the same as connect in bpf/agent/handshake.h.
func (t *tracer) connect(isForced bool) (outcome, offer string) {
	listening := t.sockets.has(agentSocketKindSOCKET_LISTENING)
	wasAccepted := agentSocketKind(t.sockets.Kinds) == agentSocketKindSOCKET_LISTENING &&
		t.state == agentAgentFlowStateAGENT_FLOW_WAIT && t.age <= repeatLifetime
	switch {
	case t.sockets.isLive() || wasAccepted:
		return deliver, ""
	case t.acceptance == nil && isForced:
		return deliver, ""
	case t.acceptance == nil:
		return "next_refused", ""
	case isForced:
		return deliver, "forced"
	case !listening:
		return "next_refused", "refused_down"
	}
	if offer = t.decideOffer(); offer == "refused" {
		return "next_refused", offer
	}
	return deliver, offer
}

// decideOffer does the same as decide_offer in bpf/agent/accept.h.
func (t *tracer) decideOffer() string {
	a := *t.acceptance
	switch agentAcceptPolicy(a.Policy) {
	case agentAcceptPolicyACCEPT_ALWAYS:
		return "accepted"
	case agentAcceptPolicyACCEPT_NEVER:
		return "refused"
	case agentAcceptPolicyACCEPT_DYNAMIC:
		if a.Attempts+1 == a.Window {
			a.adapt(&t.load)
		}
	}
	switch {
	case !t.known:
		return "accepted_stale"
	case t.load.Busy < a.Threshold:
		return "accepted"
	}
	return "refused"
}

// adapt changes the threshold at the end of a window, as adapt in bpf/agent/accept.h does.
func (a *agentAcceptance) adapt(load *agentLoad) {
	if a.Accepted < a.Few {
		if a.Threshold < load.Capacity {
			a.Threshold++
		}
	} else if a.Accepted > a.Many && a.Threshold > 0 {
		a.Threshold--
	}
}

// recover does the same as recover in bpf/agent/handshake.h.
func (t *tracer) recover(last bool) string {
	switch {
	case t.sockets.isLive():
		return deliver
	case !last:
		return "next_not_local"
	case t.sockets.has(agentSocketKindSOCKET_TIME_WAIT):
		return deliver
	case t.acceptance != nil && t.acceptance.Reset != 0:
		return "deliver_not_local"
	}
	return "drop_not_local"
}
