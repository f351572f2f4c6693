// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// Trace is what a server knows about a connection, and would do with the connection's next packet.
type Trace struct {
	Instance string         `json:"instance"`
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Served   bool           `json:"served"` // the VIP is in the agent's configuration
	// Presence is the same as in a Snapshot. It is empty if no service has the port.
	Presence
	// Service is the service whose policy applies. It is empty if no service has the port.
	Service string `json:"service"`
	// Accept is the same as in a Snapshot. It is nil if the service cannot be offered connections.
	Accept *AcceptState `json:"accept"`
	Flow   TracedFlow   `json:"flow"`
	// Socket is the state of the socket that the packets reach if the host has the VIP: that of the
	// connection, or a listening one, or "none". It is empty outside the agent's network namespace,
	// where the state is unknown.
	Socket string `json:"socket"`
	// Answers is empty outside the agent's network namespace, and if the server has no locator.
	Answers []Answer `json:"answers"`
	// Next is the route to the next server. It is nil if the next server is unknown.
	Next *NextSegment `json:"next,omitempty"`

	protocol desired.Protocol
}

// LacksVIP tells whether a service has the VIP and the port, but the VIP is not an address of the
// host. Then the kernel delivers no packets to the VIP.
func (t *Trace) LacksVIP() bool { return t.Condition != "" && !t.VIPPresent }

// TracedFlow is the agent's entry of a connection, as in table III of the 6LB paper.
// docs/understand/protocol.md describes its states.
type TracedFlow struct {
	State string `json:"state"` // listen (no entry), wait, direct, ending, closing or cookie
	// Balancer is the locator of the balancer that signals go to. It is not valid in state listen.
	Balancer netip.Prefix `json:"balancer,omitzero"`
	Age      float64      `json:"age_seconds,omitempty"` // since the last change of the entry
}

// Answer is what happens to a packet that arrives with an SRv6 function, by a dry run of the
// agent's program. The packet is one that does not return a SYN cookie.
type Answer struct {
	Function string `json:"function"`
	Last     bool   `json:"last"` // no other server is left
	// Outcome is "deliver", or the reason under which the packet would be counted.
	Outcome string `json:"outcome"`
	// Offer is the label under which the connection would be counted as an offer. It is empty if
	// the packet is not an offer or the service has no policy.
	Offer string `json:"offer,omitempty"`
}

// deliver is the Outcome of all deliveries. The data path has a reason for each encapsulation.
const deliver = "deliver"

// tracedFunctions are the functions about connections.
var tracedFunctions = []srv6.Function{
	srv6.ConnectAvail, srv6.ConnectForce, srv6.AckStickiness, srv6.RecoverStickiness, srv6.Deliver, srv6.Steer,
}

// Trace finds out what the agent's program would do with the packets of a client's TCP connection
// to a VIP. Both addresses must have the same IP version.
func (v *View) Trace(client, vip netip.AddrPort) (*Trace, error) {
	return v.traceOf(&Trace{Instance: v.instance, Client: client, VIP: vip, protocol: desired.TCP})
}

// TraceInitial is Trace for an Initial packet of QUIC. The ID that the client has chosen is zeros, so
// no decision about an earlier packet applies, except to packets that name this server (Steer).
func (v *View) TraceInitial(client, vip netip.AddrPort) (*Trace, error) {
	return v.traceOf(&Trace{Instance: v.instance, Client: client, VIP: vip, protocol: desired.UDP})
}

func (v *View) traceOf(t *Trace) (*Trace, error) {
	if err := v.trace(t); err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.instance, err)
	}
	return t, nil
}

// trace fills in a trace of the client and the VIP.
func (v *View) trace(t *Trace) (err error) {
	if t.Served, err = has(v.maps.Vips, t.VIP.Addr().As16()); err != nil {
		return err
	}
	decisions, err := v.decisions(t)
	if err != nil {
		return err
	}
	var flow agentDecision // all decisions are about the same flow
	if len(decisions) > 0 {
		flow = decisions[0]
	}
	t.Flow = tracedFlow(&flow)
	key, err := v.traceService(t, &flow)
	if err != nil {
		return err
	}
	if t.Accept, err = v.acceptState(key); err != nil {
		return err
	}
	if t.Service != "" {
		if t.Presence, err = v.presence(key, localVIPs{}); err != nil {
			return err
		}
	}
	if !v.here {
		t.Answers = nil // they depend on the sockets
		return nil
	}
	if err := v.traceLoad(t, key, decisions); err != nil {
		return err
	}
	t.Socket, err = v.traceSocket(t, &flow)
	return err
}

// has tells whether a table has an element with the key.
func has(m *ebpf.Map, key any) (bool, error) {
	value, err := m.LookupBytes(key) // nil if there is none
	if err != nil {
		return false, fmt.Errorf("read %s: %w", m, err)
	}
	return value != nil, nil
}

// decisions makes dry runs of the agent's program, for each function and with or without another
// server left. It returns the decisions, and sets the answers of the trace. If the server has no
// locator, there are neither decisions nor answers.
func (v *View) decisions(t *Trace) (all []agentDecision, err error) {
	if v.dry == nil {
		if v.dry, err = newDryRun(v.program); err != nil {
			return nil, err
		}
	}
	for _, function := range tracedFunctions {
		for _, last := range []bool{false, true} {
			frame, ok, err := v.dry.frame(question{t.protocol, t.Client, t.VIP, function, last})
			if !ok { // the server has no locator, or the frame cannot be made
				return nil, err
			}
			decision, err := v.dry.decide(frame)
			if err != nil {
				return nil, err
			}
			all = append(all, decision)
			t.Answers = append(t.Answers, v.labels.answer(function, last, &decision))
		}
	}
	return all, nil
}

// answer describes a decision.
func (l *labels) answer(function srv6.Function, last bool, d *agentDecision) Answer {
	a := Answer{Function: function.String(), Last: last, Outcome: l.reasons[d.Reason]}
	if strings.HasPrefix(a.Outcome, "deliver_") && a.Outcome != "deliver_not_local" {
		a.Outcome = deliver
	}
	if d.IsOffer != 0 {
		a.Offer = l.offers[d.Offer]
	}
	return a
}

// traceService finds the service whose accept policy applies, and sets its name. If no policy
// applies, it looks for the service of the VIP and the port, and then for the service of all ports
// of the VIP. It returns the key of the service, or the last key that it has tried.
func (v *View) traceService(t *Trace, flow *agentDecision) (key agentServiceKey, err error) {
	keys := []agentServiceKey{flow.service()}
	if keys[0].Protocol == 0 { // no policy applies
		service := desired.AgentService{VIP: t.VIP.Addr(), Port: desired.PortOf(t.VIP.Port()), Protocol: t.protocol}
		exact := serviceKey(service)
		service.Port = desired.AllPorts
		keys = []agentServiceKey{exact, serviceKey(service)}
	}
	for _, key = range keys {
		if key, err = firstKey(v.maps.FirstKeys, key); err != nil {
			return key, err
		}
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
	agentAgentFlowStateAGENT_FLOW_COOKIE:  "cookie",
}

// tracedFlow returns the agent's entry as the program found it.
func tracedFlow(d *agentDecision) TracedFlow {
	state := agentAgentFlowState(d.FlowState)
	flow := TracedFlow{State: flowStateNames[state]}
	if state != agentAgentFlowStateAGENT_FLOW_LISTEN {
		flow.Balancer = locatorPrefix(d.Balancer)
		flow.Age = time.Duration(max(0, int64(d.Age))).Seconds()
	}
	return flow
}

// traceLoad replaces the load in the trace by the one that the program used for a decision. They
// can differ: the program uses the backlog of the listening socket that this connection would
// reach. If no decision has used a load, the trace keeps its load.
func (v *View) traceLoad(t *Trace, key agentServiceKey, decisions []agentDecision) error {
	for i := range decisions {
		d := &decisions[i]
		if d.AskedLoad == 0 || t.Accept == nil {
			continue
		}
		a, err := v.acceptance(key)
		if a == nil || err != nil {
			return err
		}
		t.Accept.Load = nil // setLoad sets it only if the load is known
		t.Accept.setLoad(a, agentLoad{Busy: d.Busy, Capacity: d.Capacity}, d.LoadKnown != 0)
		return nil
	}
	return nil
}

// traceSocket returns the state of the socket that the program found. If the program has looked for
// none, traceSocket looks itself. That is so if packets with functions do not reach the agent: it
// has no locator, or its interface leads out of the domain.
func (v *View) traceSocket(t *Trace, flow *agentDecision) (string, error) {
	if flow.HasFlow != 0 {
		return socketName(uint32(flow.Socket)), nil
	}
	sockets, err := querySockets(v.sockets, t.protocol.Number(), t.Client, t.VIP)
	return socketName(sockets.State), err
}
