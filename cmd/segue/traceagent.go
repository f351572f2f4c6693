// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/netip"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// agentTrace prints the state of a connection in an agent. It returns an error if the socket is
// unknown, because the agent is in another network namespace.
func agentTrace(out io.Writer, instance string, flow dataplane.Flow, o *traceOptions) error {
	view, err := agent.OpenView(instance)
	if err != nil {
		return err
	}
	defer view.Close()
	trace := view.Trace
	if flow.Protocol == desired.UDP {
		trace = view.TraceInitial
	}
	t, err := trace(flow.Source, flow.Destination)
	if err != nil {
		return err
	}
	if o.next != "" && t.Socket != "" {
		if t.Next, err = view.FindNext(netip.MustParseAddr(o.next)); err != nil {
			return err
		}
	}
	if o.asJSON {
		err = cli.PrintJSON(out, t)
	} else {
		err = printAgentTrace(out, t)
	}
	if err == nil && t.Socket == "" {
		err = elsewhereError(instance)
	}
	return err
}

// elsewhereError finds an agent whose sockets cannot be seen in this network namespace, and returns
// an error that says where to run the command.
func elsewhereError(instance string) error {
	l, err := datapath.Locate(datapath.Instance{Name: instance, Role: datapath.RoleAgent})
	if err != nil {
		return err
	}
	return unknownHere(&l)
}

// unknownHere returns an error about an agent whose sockets cannot be seen here. It says why, and
// where to run the command.
func unknownHere(l *datapath.Located) error {
	switch {
	case l.Attachment == nil:
		return fmt.Errorf("the answer is unknown: instance %s is not attached to an interface", l.Name)
	case l.Namespace == "":
		return fmt.Errorf("the answer is unknown here: instance %s is in another network namespace, "+
			"whose path was not found; run this command there", l.Name)
	}
	return fmt.Errorf("the answer is unknown here: instance %s is in another network namespace; "+
		"run this command there: nsenter --net=%s segue trace", l.Name, l.Namespace)
}

// printAgentTrace prints what an agent knows about a connection, and what it does with each kind of
// packet.
func printAgentTrace(out io.Writer, t *agent.Trace) error {
	table := newTable(out)
	table.row("connection", fmt.Sprintf("%s -> %s", t.Client, t.VIP))
	table.row("service", describeTraced(t))
	if t.Condition != "" && t.Condition != agent.ConditionUp {
		table.row("condition", string(t.Condition))
	}
	if t.Accept != nil {
		table.row("policy", string(t.Accept.Policy))
		table.row("load", t.Accept.DescribeLoad())
		table.row("threshold", t.Accept.DescribeThreshold())
	}
	table.row("flow", describeAgentFlow(t))
	table.row("socket", describeSocket(t))
	for i := range t.Answers {
		a := &t.Answers[i]
		notLast := answerOf(t, a.Function, false)
		// The table has no line for the last segment if the answer is the same for other segments.
		isRepeated := a.Last && notLast != nil && notLast.Outcome == a.Outcome && notLast.Offer == a.Offer
		if !isRepeated && a.Function != srv6.Deliver.String() {
			table.row(describeQuestion(a), describeAnswer(a, t.Accept))
		}
	}
	if n := t.Next; n != nil {
		table.row("next server", describeNext(n))
	}
	return table.Flush()
}

// describeTraced names the service of a connection.
func describeTraced(t *agent.Trace) string {
	switch {
	case !t.Served:
		return "none: this server does not have the VIP"
	case t.Service == "":
		return "none for this port"
	}
	return t.Service
}

func describeAgentFlow(t *agent.Trace) string {
	if !t.Flow.Balancer.IsValid() {
		return t.Flow.State
	}
	return fmt.Sprintf("%s, balancer %s, for %.0fs", t.Flow.State, t.Flow.Balancer, t.Flow.Age)
}

// describeSocket returns the state of the socket that the application has for a connection.
func describeSocket(t *agent.Trace) string {
	switch {
	case t.LacksVIP():
		return "NONE: the VIP is not an address of this host"
	case t.Socket == "":
		return "unknown: the agent is in another network namespace"
	case t.Socket == "none" && t.Listening == agent.ListeningElsewhere:
		return "none: this host passes connections on"
	}
	return t.Socket
}

// describeQuestion names the function of the SID. "last" follows if the answer is for the last
// segment.
func describeQuestion(a *agent.Answer) string {
	if a.Last {
		return a.Function + ", last"
	}
	return a.Function
}

// describeNext returns the SID of the next server, with a warning if a packet to it may be lost.
func describeNext(n *agent.NextSegment) string {
	if n.Problem != "" {
		return "LOST: " + n.Problem
	}
	if n.Router != nil {
		return fmt.Sprintf("%s by the default route, via %s: LOST unless that router knows the server",
			n.SID, n.Router)
	}
	return n.SID.String()
}

// describeAnswer returns what happens to a packet. If the packet offers a connection, it adds why
// the server accepts or refuses it.
func describeAnswer(a *agent.Answer, accept *agent.AcceptState) string {
	why := map[string]string{
		"accepted": "accepted", "accepted_stale": "accepted: the load is unknown", "forced": "forced",
		"refused": "refused", "refused_down": "refused: no socket listens",
		"accepted_least": "accepted: no candidate has a lower load",
		"returned":       "handed back to a candidate with a lower load",
		"taken_back":     "handed back by the last candidate",
	}[a.Offer]
	if why == "" {
		return a.Outcome
	}
	if accept != nil && accept.Load != nil && (a.Offer == "accepted" || a.Offer == "refused") {
		why += fmt.Sprintf(": load %d", accept.Load.Busy)
		if accept.Threshold != nil {
			why += ", threshold " + accept.DescribeThreshold()
		}
	}
	return fmt.Sprintf("%s (%s)", a.Outcome, why)
}
