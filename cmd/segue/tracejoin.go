// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/srv6"
)

// joinedTrace is a balancer's trace with the traces of the servers.
type joinedTrace struct {
	*inspect.Trace
	// Switch is what the switch in front of the balancer does with the packet. It is nil if there is no
	// switch. If the switch sends the packet to a server, Course and Reason of the trace are those of
	// the switch, and the trace has nothing else of the data path.
	Switch *p4switch.Trace `json:"switch,omitempty"`
	// Agents are the candidates in their order, and then the other servers that the packet may visit.
	// Null means that no server was asked.
	Agents []askedAgent `json:"agents"`
	// Receiver is the server that the packet reaches. It is empty if the packet reaches none, or
	// if the server is unknown.
	Receiver string `json:"receiver,omitempty"`
	// End is what happens to the packet at the last server that it reaches. It is empty if that is
	// unknown.
	End string `json:"end,omitempty"`
	// Why explains in a sentence why the receiver gets a new connection. It is empty if the packet
	// opens no connection, or if the receiver has the connection already.
	Why string `json:"why,omitempty"`

	// whyUnknown explains why End is empty, although a server has told what it does with the packet.
	whyUnknown string
}

// askedAgent is the answer of a server.
type askedAgent struct {
	Server string       `json:"server"`
	Trace  *agent.Trace `json:"trace"`           // null: see Error
	Error  string       `json:"error,omitempty"` // error of the command
	// Offer is what the server does with a new connection at its place among the candidates. It is
	// null if the server is not a candidate, or if its trace has no such answer.
	Offer *agent.Answer `json:"offer"`
	// Packet is what the server does with the packet if the packet reaches it. It is null if the
	// packet's course does not have the server, or if the server's trace has no such answer.
	Packet *agent.Answer `json:"packet"`
	// TakenBack is what the server does with the packet when the last candidate hands it back. It is
	// null if the last candidate does not hand it back to this server.
	TakenBack *agent.Answer `json:"taken_back,omitempty"`
	// Reached tells whether the packet reaches the server.
	Reached bool `json:"reached"`
}

// serversOf returns the candidates of a flow, and then the other servers of the packet's course.
func serversOf(t *inspect.Trace) (names []string) {
	for _, candidate := range candidatesOf(t) {
		names = append(names, candidate.Server)
	}
	for _, segment := range t.Course {
		if !slices.Contains(names, segment.Server) {
			names = append(names, segment.Server)
		}
	}
	return names
}

// candidatesOf returns the segments of the candidates of a new connection, in their order. If the
// packet offers a connection, they are the offers in its course. The course can begin with a server
// that may have the connection already: this server is not a candidate. If the packet is not an
// offer, candidatesOf takes the candidates of the flow's placement.
func candidatesOf(t *inspect.Trace) []inspect.TracedSegment {
	if offers := offersOf(t.Course); offers != nil || t.Placement == nil {
		return offers
	}
	function := srv6.ConnectAvail
	if len(t.Placement.Candidates) == 1 {
		function = srv6.ConnectForce
	}
	var candidates []inspect.TracedSegment
	for _, name := range t.Placement.Candidates {
		candidates = append(candidates, inspect.TracedSegment{Server: name, Function: function.String()})
	}
	return candidates
}

// follow determines what each server of the packet's course does with the packet, which servers the
// packet reaches, and where it ends. A server behind that end gets an answer too: what it would do
// if the packet came. It does not count as reached.
func (j *joinedTrace) follow() {
	back := j.setOffers() // the candidate that gets a connection that is handed back
	if !strings.HasPrefix(j.Reason, "forward_") {
		return
	}
	onItsWay := true // no server before this segment has ended the packet's course
	// Random candidates are unknown. The packet visits them after the last segment of its course.
	isRandom := j.Placement != nil && j.Placement.Random
	for i, segment := range j.Course {
		at := slices.IndexFunc(j.Agents, func(a askedAgent) bool { return a.Server == segment.Server })
		if at < 0 {
			return
		}
		a := &j.Agents[at]
		if a.Reached && !onItsWay {
			continue // the packet has visited this server before, and does not come again
		}
		a.Packet = answerOf(a.Trace, segment.Function, i == len(j.Course)-1 && !isRandom)
		if a.Packet != nil && a.Offer != nil && areForSame(a.Packet, a.Offer) {
			a.Packet = a.Offer // this answer considers the place of the server, and the loads of others
		}
		a.Reached = onItsWay
		if onItsWay {
			onItsWay = j.passesOn(a, back)
		}
	}
}

// passesOn tells whether the packet continues to the next segment after a server that it reaches.
// If it does not continue, passesOn notes where it ends. If the server hands a connection back,
// back is the candidate that gets it. back is nil if no candidate has told a lower load.
func (j *joinedTrace) passesOn(a, back *askedAgent) bool {
	switch {
	case a.Packet == nil:
		return false // the end is unknown
	case a.Packet.Offer == returned && back == nil:
		j.whyUnknown = a.Server + " hands the connection back, but no candidate told a lower load"
		return false
	case a.Packet.Offer == returned:
		back.TakenBack = answerOf(back.Trace, srv6.ConnectForce.String(), true)
		j.endAt(back, back.TakenBack)
		return false
	case !strings.HasPrefix(a.Packet.Outcome, "next_"):
		j.endAt(a, a.Packet)
		return false
	}
	if next := a.Trace.Next; next != nil && next.Problem != "" {
		j.End = fmt.Sprintf("lost after %s: %s", a.Server, next.Problem)
		return false
	}
	return true
}

// endAt notes that the packet ends at a server with an answer. If the answer is nil, the end stays
// unknown.
func (j *joinedTrace) endAt(a *askedAgent, answer *agent.Answer) {
	if answer == nil {
		return
	}
	j.End = answer.Outcome
	if a.Trace.LacksVIP() && strings.HasPrefix(j.End, "deliver") {
		j.End = fmt.Sprintf("lost at %s: the VIP is not an address of the host", a.Server)
	}
	if strings.HasPrefix(j.End, "deliver") {
		j.Receiver = a.Server
		j.Why = j.whyTaken(a, answer)
	}
}

// setOffers determines what each candidate does with a new connection. If the last candidate hands
// the connection back to an earlier one, setOffers returns the earlier one. Otherwise it returns
// nil.
//
// An agent's trace knows neither the agent's place among the candidates nor the loads of the other
// candidates. So setOffers corrects the answers that depend on the place or on these loads.
func (j *joinedTrace) setOffers() (back *askedAgent) {
	offers := candidatesOf(j.Trace)
	for i := range offers {
		a, isLast := &j.Agents[i], i == len(offers)-1 // Agents begins with the candidates
		a.Offer = answerOf(a.Trace, offers[i].Function, isLast)
		switch {
		case a.Offer == nil || a.Trace.Accept == nil:
		case !isLast:
			a.Offer = answerAt(i, a.Offer, comparesLoads(a.Trace))
		case mayHandBack(a.Trace):
			back = j.handBack(a)
		}
	}
	return back
}

// handBack compares the load of the last candidate with those that earlier candidates have told. If
// the last candidate hands the connection back, handBack corrects its answer, and returns the
// candidate that gets the connection. Otherwise it returns nil.
func (j *joinedTrace) handBack(last *askedAgent) *askedAgent {
	earlier, loads := j.toldLoads()
	decision, least := accept.Least(knownLoad(last.Trace), loads, accept.Last)
	wouldAccept := last.Offer.Offer == "accepted_least" || last.Offer.Offer == "forced"
	if !wouldAccept || decision != accept.Return {
		return nil
	}
	last.Offer = &agent.Answer{
		Function: last.Offer.Function, Last: true, Outcome: "next_returned", Offer: returned,
	}
	return earlier[least]
}

// answerAt returns the answer of a candidate that is not the last one. place is its place among the
// candidates, counted from 0. answer is what its agent would do as the first candidate. The first
// candidate accepts if it does not know its load. A later candidate refuses in this case if it
// compares loads.
func answerAt(place int, answer *agent.Answer, compares bool) *agent.Answer {
	if place == 0 || !compares || answer.Offer != "accepted_stale" {
		return answer
	}
	return &agent.Answer{Function: answer.Function, Outcome: "next_refused", Offer: "refused"}
}

// returned is the offer label of a connection that the last candidate hands back.
const returned = "returned"

// candidates returns the candidates, which are the first of j.Agents.
func (j *joinedTrace) candidates() []askedAgent { return j.Agents[:len(candidatesOf(j.Trace))] }

// toldLoads returns the candidates that refuse a new connection and tell the later candidates their
// loads. It also returns these loads.
func (j *joinedTrace) toldLoads() (candidates []*askedAgent, loads []accept.Load) {
	all := j.candidates()
	for i := range all {
		a := &all[i]
		if a.Offer != nil && a.Offer.Offer == "refused" && tellsLoad(a.Trace) {
			candidates, loads = append(candidates, a), append(loads, knownLoad(a.Trace))
		}
	}
	return candidates, loads
}

// comparesLoads tells whether the server compares its load with those of other candidates.
func comparesLoads(t *agent.Trace) bool {
	return t != nil && t.Accept != nil && t.Accept.Policy == desired.AcceptLeast
}

// tellsLoad tells whether the server tells later candidates its load when it refuses a connection.
func tellsLoad(t *agent.Trace) bool {
	return t.Accept != nil && slices.Contains(loadPolicies, t.Accept.Policy)
}

// loadPolicies are the accept policies that decide by the load.
var loadPolicies = []desired.AcceptPolicy{
	desired.AcceptLeast, desired.AcceptStatic, desired.AcceptDynamic,
}

// mayHandBack tells whether the server, as the last candidate, would hand a connection back if an
// earlier candidate had a lower load. For a server that is drained, or on which no application
// listens, each known load counts as lower.
func mayHandBack(t *agent.Trace) bool {
	return comparesLoads(t) || t.Accept.Policy == agent.Drained || isDown(t)
}

// isDown tells whether no application of the service listens on the server.
func isDown(t *agent.Trace) bool {
	answer := answerOf(t, srv6.ConnectAvail.String(), false)
	return answer != nil && answer.Offer == "refused_down"
}

// knownLoad returns the load by which a server decides. It is unknown if it is stale, or if no
// application listens.
func knownLoad(t *agent.Trace) accept.Load {
	switch l := t.Accept.Load; {
	case l == nil || t.Accept.Stale || isDown(t):
		return accept.Unknown
	case l.Capacity == nil:
		return accept.Load{Busy: l.Busy, Capacity: accept.NoCapacity}
	default:
		return accept.Load{Busy: l.Busy, Capacity: *l.Capacity}
	}
}

// areForSame tells whether two answers are for the same function, and both are of the last
// candidate or both are not.
func areForSame(a, b *agent.Answer) bool { return a.Function == b.Function && a.Last == b.Last }

// whyTaken tells why a server takes a new connection. The text is empty if the packet is not an
// offer, or if the server has the connection already.
func (j *joinedTrace) whyTaken(a *askedAgent, answer *agent.Answer) string {
	load := "-"
	if a.Trace.Accept != nil {
		load = a.Trace.Accept.DescribeLoad()
	}
	isLeast := comparesLoads(a.Trace)
	switch {
	case a.TakenBack != nil:
		return fmt.Sprintf("%s has the lowest load of those that the last candidate compared: %s",
			a.Server, j.describeTold())
	case answer.Offer == "accepted" && isLeast:
		return fmt.Sprintf("%s is the first candidate with free capacity: load %s", a.Server, load)
	case answer.Offer == "accepted" && a.Trace.Accept != nil && a.Trace.Accept.Threshold != nil:
		return fmt.Sprintf("%s is the first candidate whose load is below its threshold: load %s, threshold %s",
			a.Server, load, a.Trace.Accept.DescribeThreshold())
	case answer.Offer == "accepted":
		return fmt.Sprintf("%s is the first candidate that accepts by its policy", a.Server)
	case answer.Offer == "accepted_stale":
		return fmt.Sprintf("%s is the first candidate, and does not know its load", a.Server)
	case answer.Offer == "accepted_least":
		return fmt.Sprintf("%s is the last candidate, and none before it has told a lower load: %s",
			a.Server, j.describeTold())
	case answer.Offer == "forced":
		return fmt.Sprintf("%s is the last candidate, and must accept", a.Server)
	}
	return ""
}

// describeTold lists the loads that the last candidate compares: those that earlier candidates have
// told, and its own.
func (j *joinedTrace) describeTold() string {
	candidates, _ := j.toldLoads()
	all := j.candidates()
	last := &all[len(all)-1]
	if comparesLoads(last.Trace) && !slices.Contains(candidates, last) {
		candidates = append(candidates, last)
	}
	var loads []string
	for _, a := range candidates {
		loads = append(loads, a.Server+" "+a.Trace.Accept.DescribeLoad())
	}
	return strings.Join(loads, ", ")
}

// answerOf returns a server's answer to a packet with a function in its segment. last tells whether
// the segment is the last one. The result is nil if the trace has no such answer.
func answerOf(t *agent.Trace, function string, last bool) *agent.Answer {
	if t == nil {
		return nil
	}
	for i := range t.Answers {
		if a := &t.Answers[i]; a.Function == function && a.Last == last {
			return a
		}
	}
	return nil
}

// printAgents prints a table of the servers that were asked, and where the packet ends.
func printAgents(out io.Writer, j *joinedTrace) error {
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("server", "flow", "socket", "load", "threshold", "new connection", "this packet")
	for i := range j.Agents {
		a := &j.Agents[i]
		if a.Trace == nil {
			table.row(a.Server, "UNKNOWN", "-", "-", "-", "-", "-")
			continue
		}
		load, threshold := "-", "-"
		if a.Trace.Accept != nil {
			load, threshold = a.Trace.Accept.DescribeLoad(), a.Trace.Accept.DescribeThreshold()
		}
		table.row(a.Server, a.Trace.Flow.State, describeSocket(a.Trace), load, threshold,
			describeOffer(a), describePassage(a))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for i := range j.Agents {
		if a := &j.Agents[i]; a.Error != "" {
			fmt.Fprintf(out, "%s: %s\n", a.Server, a.Error)
		}
		if router := j.Agents[i].router(); router != nil {
			fmt.Fprintf(out, "%s: the packet takes the default route, via %s: "+
				"LOST unless that router knows the next server\n", j.Agents[i].Server, router)
		}
	}
	fmt.Fprintf(out, "\nthe packet goes to: %s\n", describeEnd(j))
	if j.Why == "" {
		return nil
	}
	_, err := fmt.Fprintf(out, "why: %s\n", j.Why)
	return err
}

// router returns the router of the server's default route, if the server passes the packet on and
// has no other route to the next server. Otherwise it returns nil.
func (a *askedAgent) router() *netip.Addr {
	if !a.Reached || a.Packet == nil || a.Trace.Next == nil || !strings.HasPrefix(a.Packet.Outcome, "next_") {
		return nil
	}
	return a.Trace.Next.Router
}

func describeOffer(a *askedAgent) string {
	if a.Offer == nil {
		return "-"
	}
	return describeAnswer(a.Offer, a.Trace.Accept)
}

// describePassage returns what happens to the packet at a server.
func describePassage(a *askedAgent) string {
	switch {
	case a.Packet == nil:
		return "-"
	case !a.Reached:
		return "not reached"
	}
	text := fmt.Sprintf("%s: %s", a.Packet.Function, a.Packet.Outcome)
	if a.TakenBack != nil {
		text += fmt.Sprintf(", then %s: %s", a.TakenBack.Function, a.TakenBack.Outcome)
	}
	return text
}

// describeEnd returns where the packet ends.
func describeEnd(j *joinedTrace) string {
	err := j.unknown()
	switch {
	case err != nil:
		return "UNKNOWN: " + err.Error()
	case j.Receiver != "":
		if slices.ContainsFunc(j.Agents, func(a askedAgent) bool { return a.router() != nil }) {
			return fmt.Sprintf("%s, %s, unless it is LOST on the default route", j.Receiver, j.End)
		}
		return fmt.Sprintf("%s, %s", j.Receiver, j.End)
	case j.End != "":
		return "nowhere, " + j.End
	}
	return "no server: " + j.Reason
}

// unknown returns an error if it is unknown what the switch does, or if servers were asked, and it is
// still unknown where the packet ends.
func (j *joinedTrace) unknown() error {
	switch {
	case j.Switch != nil && j.Switch.Problem != "":
		return fmt.Errorf("switch %s: %s", j.Switch.Address, j.Switch.Problem)
	case j.Agents == nil || j.End != "" || !strings.HasPrefix(j.Reason, "forward_"):
		return nil
	case j.Placement != nil && j.Placement.Random:
		return errors.New("the candidates are random")
	case j.whyUnknown != "":
		return errors.New(j.whyUnknown)
	}
	return errors.New("not all servers on the packet's path have answered")
}
