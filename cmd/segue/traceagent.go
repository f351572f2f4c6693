// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// agentTrace prints the state of a connection in an agent.
func agentTrace(out io.Writer, instance string, flow dataplane.Flow, o *traceOptions) error {
	if flow.Protocol != desired.TCP {
		return fmt.Errorf("protocol %s: agents trace tcp connections only", flow.Protocol)
	}
	view, err := agent.OpenView(instance)
	if err != nil {
		return err
	}
	defer view.Close()
	t, err := view.Trace(flow.Source, flow.Destination)
	if err != nil {
		return err
	}
	if o.next != "" && t.Socket != "" {
		if t.Next, err = view.FindNext(netip.MustParseAddr(o.next)); err != nil {
			return err
		}
	}
	if o.asJSON {
		err = printJSON(out, t)
	} else {
		err = printAgentTrace(out, t)
	}
	if err == nil && t.Socket == "" {
		err = elsewhere(instance)
	}
	return err
}

// elsewhere tells where an agent can be traced if there is none here.
func elsewhere(instance string) error {
	l, err := datapath.Locate(datapath.Instance{Name: instance, Role: datapath.RoleAgent})
	if err != nil {
		return err
	}
	return unknownHere(&l)
}

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

func printAgentTrace(out io.Writer, t *agent.Trace) error {
	table := newTable(out)
	table.row("connection", fmt.Sprintf("%s -> %s", t.Client, t.VIP))
	table.row("service", describeTraced(t))
	if t.Accept != nil {
		table.row("policy", string(t.Accept.Policy))
		table.row("load", t.Accept.DescribeLoad())
		table.row("threshold", t.Accept.DescribeThreshold())
	}
	table.row("flow", describeAgentFlow(t))
	table.row("socket", describeSocket(t))
	for i := range t.Answers {
		a := &t.Answers[i]
		before := answerOf(t, a.Function, false)
		isSame := a.Last && before != nil && before.Outcome == a.Outcome && before.Offer == a.Offer
		if !isSame && a.Function != srv6.Deliver.String() {
			table.row(describeQuestion(a), describeAnswer(a, t.Accept))
		}
	}
	if n := t.Next; n != nil {
		table.row("next server", describeNext(n))
	}
	return table.Flush()
}

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

func describeSocket(t *agent.Trace) string {
	if t.Socket == "" {
		return "unknown: the agent is in another network namespace"
	}
	return t.Socket
}

func describeQuestion(a *agent.Answer) string {
	if a.Last {
		return a.Function + ", last"
	}
	return a.Function
}

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

// describeAnswer describes what happens to a packet. For an offer it also gives the reason.
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

// joinedTrace is a balancer's trace with the traces of the servers.
type joinedTrace struct {
	*inspect.Trace
	// Agents are the candidates in their order. The flow's server follows, if it is not among
	// them. Null means that no server was asked.
	Agents []askedAgent `json:"agents"`
	// Receiver is the server that the packet reaches. It is empty if the packet reaches none, or
	// if the server is unknown.
	Receiver string `json:"receiver,omitempty"`
	// End is what happens to the packet at the last server that it reaches. It is empty if that is
	// unknown.
	End string `json:"end,omitempty"`
	// Why is the reason why the receiver gets a new connection, for readers. It is empty for other
	// packets, and if the receiver has the connection already.
	Why string `json:"why,omitempty"`
}

// askedAgent is the answer of a server.
type askedAgent struct {
	Server string       `json:"server"`
	Trace  *agent.Trace `json:"trace"`           // null: see Error
	Error  string       `json:"error,omitempty"` // error of the command
	// Offer is what the server does with a new connection at the server's place in the list. It is
	// null if the server is not in the list, or did not answer that.
	Offer *agent.Answer `json:"offer"`
	// Packet is what the server does with the packet if the packet reaches it. It is null if the
	// packet is not for this server, or if the server did not answer that.
	Packet *agent.Answer `json:"packet"`
	// TakenBack is what the server does with the packet when the last candidate hands it back. It
	// is null if that does not happen.
	TakenBack *agent.Answer `json:"taken_back,omitempty"`
	// Reached tells whether the packet comes here.
	Reached bool `json:"reached"`
}

// serverName stands for the name of a server in the command that asks it.
const serverName = "{}"

// askTimeout is the maximum time for the answer of a server.
const askTimeout = 10 * time.Second

// hostNames matches the names of servers that are safe in a command.
var hostNames = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// askAgents runs the command for all servers of the flow at the same time.
func askAgents(ctx context.Context, command string, t *inspect.Trace) ([]askedAgent, error) {
	if t.Service != nil && t.Placement == nil {
		return nil, fmt.Errorf("--ask: no server can be asked about service %s: it does not hunt, and its flow table "+
			"tells the server of a flow", t.Service.Name)
	}
	agents := []askedAgent{}
	for _, name := range serversOf(t) {
		agents = append(agents, askedAgent{Server: name})
	}
	var group sync.WaitGroup
	for i := range agents {
		group.Go(func() {
			a := &agents[i]
			var err error
			if a.Trace, err = askAgent(ctx, command, a.Server, t.Flow, nextOf(t, a.Server)); err != nil {
				a.Error = err.Error()
			}
		})
	}
	group.Wait()
	return agents, nil
}

// serversOf returns the candidates of a flow, and the flow's server.
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

// candidatesOf returns the servers that are offered a new connection, and how, in their order. An
// offer contains them: a holder, which is asked before them, is none of them. For other packets,
// they are those of the flow's placement.
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

// nextOf returns the SID to which a server would pass the packet on. It is not valid if there is
// none, or if it is unknown.
func nextOf(t *inspect.Trace, server string) netip.Addr {
	at := slices.IndexFunc(t.Course, func(s inspect.TracedSegment) bool { return s.Server == server })
	if at < 0 || at == len(t.Course)-1 || t.Encapsulation == nil {
		return netip.Addr{}
	}
	return t.Encapsulation.Segments[at+2] // the balancer is the first segment
}

func askAgent(ctx context.Context, command, server string, flow dataplane.Flow, next netip.Addr) (*agent.Trace, error) {
	if !hostNames.MatchString(server) {
		return nil, fmt.Errorf("server name %q: must be a host name to be used in --ask", server)
	}
	words := strings.Fields(strings.ReplaceAll(command, serverName, server))
	if next.IsValid() {
		words = append(words, "--next", next.String())
	}
	words = append(words, "--json", string(flow.Protocol), flow.Source.String(), flow.Destination.String())
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, complaint := bounded{most: longestAnswer}, bounded{most: longestComplaint}
	ask := exec.CommandContext(ctx, words[0], words[1:]...)
	ask.Stdout, ask.Stderr = &answer, &complaint
	ask.WaitDelay = time.Second // for processes that the command started
	err := ask.Run()
	if ctx.Err() == context.DeadlineExceeded {
		return nil, fmt.Errorf("%s: no answer within %s", words[0], askTimeout)
	}
	if answer.isFull || complaint.isFull {
		return nil, fmt.Errorf("%s: the answer is too long", words[0])
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", words[0], err, printable(strings.TrimSpace(string(complaint.text))))
	}
	t, err := parseAnswer(answer.text, flow)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", words[0], err)
	}
	return t, nil
}

// The longest output and the longest error of a server, in bytes. A trace is much shorter.
const (
	longestAnswer    = 1 << 20
	longestComplaint = 4 << 10
)

// bounded keeps what is written to it, and refuses more than it may keep. So a compromised server
// cannot fill the memory.
type bounded struct {
	text   []byte
	most   int
	isFull bool
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(b.text)+len(p) > b.most {
		b.isFull = true
		return 0, io.ErrShortWrite
	}
	b.text = append(b.text, p...)
	return len(p), nil
}

// parseAnswer reads an agent's trace of a flow. A compromised server can answer anything. So an
// answer with characters that control a terminal is refused.
func parseAnswer(answer []byte, flow dataplane.Flow) (*agent.Trace, error) {
	var t agent.Trace
	if err := json.Unmarshal(answer, &t); err != nil {
		return nil, fmt.Errorf("the answer is not a trace: %s", printable(err.Error()))
	}
	if t.Client != flow.Source || t.VIP != flow.Destination {
		return nil, errors.New("the answer is not an agent's trace of this flow")
	}
	plain, err := json.Marshal(t)
	if err != nil || string(plain) != printable(string(plain)) || controlEscapes.Match(plain) {
		return nil, errors.New("the answer has control characters")
	}
	return &t, nil
}

// controlEscapes matches escapes of JSON that stand for control characters.
var controlEscapes = regexp.MustCompile(`\\(u00[01]|[bfnrt])`)

// printable replaces the characters of a foreign text that could control a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// follow determines how far the packet gets.
func (j *joinedTrace) follow() {
	back := j.offer()
	if !strings.HasPrefix(j.Reason, "forward_") {
		return
	}
	onItsWay := true
	// There are more candidates, which are unknown.
	isRandom := j.Placement != nil && j.Placement.Random
	for i, segment := range j.Course {
		at := slices.IndexFunc(j.Agents, func(a askedAgent) bool { return a.Server == segment.Server })
		if at < 0 {
			return
		}
		a := &j.Agents[at]
		if a.Reached && !onItsWay {
			continue // the packet visits this server twice: it ended here before, or on the way
		}
		a.Packet = answerOf(a.Trace, segment.Function, i == len(j.Course)-1 && !isRandom)
		if a.Packet != nil && a.Offer != nil && *a.Packet != *a.Offer && isSameQuestion(a.Packet, a.Offer) {
			a.Packet = a.Offer // it depends on the place in the list, or on the loads of others
		}
		a.Reached = onItsWay
		if !onItsWay {
			continue
		}
		if a.Packet == nil || !strings.HasPrefix(a.Packet.Outcome, "next_") || a.Packet.Offer == returned {
			onItsWay = false
		} else if next := a.Trace.Next; next != nil && next.Problem != "" {
			onItsWay = false
			j.End = fmt.Sprintf("lost after %s: %s", a.Server, next.Problem)
			continue
		}
		if a.Packet != nil && a.Packet.Offer == returned {
			back.TakenBack = answerOf(back.Trace, srv6.ConnectForce.String(), true)
			j.endAt(back, back.TakenBack)
		} else if !onItsWay {
			j.endAt(a, a.Packet)
		}
	}
}

// endAt notes that the packet ends at a server. The answer is nil if it is unknown.
func (j *joinedTrace) endAt(a *askedAgent, answer *agent.Answer) {
	if answer == nil {
		return
	}
	j.End = answer.Outcome
	if strings.HasPrefix(j.End, "deliver") {
		j.Receiver = a.Server
		j.Why = j.whyTaken(a, answer)
	}
}

// offer determines what the candidates do with a new connection. The last one may hand it back to
// an earlier one, which offer returns. Otherwise offer returns nil.
func (j *joinedTrace) offer() (back *askedAgent) {
	offers := candidatesOf(j.Trace)
	for i := range offers {
		a, isLast := &j.Agents[i], i == len(offers)-1
		a.Offer = answerOf(a.Trace, offers[i].Function, isLast)
		if a.Offer == nil || !comparesLoads(a.Trace) {
			continue
		}
		if !isLast {
			a.Offer = answerAt(i, a.Offer)
			continue
		}
		candidates, loads := j.told()
		answer, least := accept.Least(knownLoad(a.Trace), loads, accept.Last)
		isOffer := a.Offer.Offer == "accepted_least" || a.Offer.Offer == "forced"
		if isOffer && answer == accept.Return {
			back = candidates[least]
			a.Offer = &agent.Answer{Function: a.Offer.Function, Last: true, Outcome: "next_returned", Offer: returned}
		}
	}
	return back
}

// answerAt returns the answer of a candidate that compares loads, at its place in the list. The
// agent's own answer is that of the first candidate, which accepts if it does not know its load.
func answerAt(place int, answer *agent.Answer) *agent.Answer {
	if place == 0 || answer.Offer != "accepted_stale" {
		return answer
	}
	return &agent.Answer{Function: answer.Function, Outcome: "next_refused", Offer: "refused"}
}

// returned is the offer label of a connection that the last candidate hands back.
const returned = "returned"

// candidates returns the candidates among the servers.
func (j *joinedTrace) candidates() []askedAgent { return j.Agents[:len(candidatesOf(j.Trace))] }

// told returns the candidates that pass a new connection on with their loads.
func (j *joinedTrace) told() (candidates []*askedAgent, loads []accept.Load) {
	all := j.candidates()
	for i := range all {
		a := &all[i]
		if a.Offer != nil && a.Offer.Offer == "refused" && comparesLoads(a.Trace) {
			candidates, loads = append(candidates, a), append(loads, knownLoad(a.Trace))
		}
	}
	return candidates, loads
}

// comparesLoads tells whether the server tells its load to other candidates, and compares theirs.
func comparesLoads(t *agent.Trace) bool {
	return t != nil && t.Accept != nil && t.Accept.Policy == desired.AcceptLeast
}

// knownLoad returns the load by which a server decides.
func knownLoad(t *agent.Trace) accept.Load {
	switch l := t.Accept.Load; {
	case l == nil || t.Accept.Stale:
		return accept.Unknown
	case l.Capacity == nil:
		return accept.Load{Busy: l.Busy, Capacity: accept.NoCapacity}
	default:
		return accept.Load{Busy: l.Busy, Capacity: *l.Capacity}
	}
}

func isSameQuestion(a, b *agent.Answer) bool { return a.Function == b.Function && a.Last == b.Last }

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

// describeTold lists the loads that are compared: those of the candidates that pass the connection
// on, and that of the last candidate.
func (j *joinedTrace) describeTold() string {
	candidates, _ := j.told()
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
			fmt.Fprintf(out, "%s: the packet takes the default route, via %s: LOST unless that router knows the next server\n",
				j.Agents[i].Server, router)
		}
	}
	fmt.Fprintf(out, "\nthe packet goes to: %s\n", describeEnd(j))
	if j.Why == "" {
		return nil
	}
	_, err := fmt.Fprintf(out, "why: %s\n", j.Why)
	return err
}

// router returns the router to which the server passes the packet on, if the server has only the
// default route to the next server. It is nil if the packet does not come here, or stays here.
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

// describePassage describes what happens to the packet at a server, if the packet reaches the
// server.
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

// unknown returns the reason why it is unknown what happens to the packet, if servers were asked.
func (j *joinedTrace) unknown() error {
	switch {
	case j.Agents == nil || j.End != "" || !strings.HasPrefix(j.Reason, "forward_"):
		return nil
	case j.Placement != nil && j.Placement.Random:
		return errors.New("the candidates are random")
	}
	return errors.New("not all servers on the packet's path have answered")
}
