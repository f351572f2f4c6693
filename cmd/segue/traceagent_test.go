// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// traceOf is an agent's trace of someFlow. offer is the answer to a new connection that the server
// may refuse. isHere tells whether the flow is local.
func traceOf(instance, offer string, isHere bool) *agent.Trace {
	busy, capacity, threshold := uint32(12), uint32(16), uint32(8)
	t := &agent.Trace{
		Instance: instance, Client: someFlow.Source, VIP: someFlow.Destination, Served: true, Service: "web",
		Presence: agent.Presence{VIPPresent: true, Listening: agent.ListeningYes, Condition: agent.ConditionUp},
		Accept: &agent.AcceptState{Policy: desired.AcceptStatic, Source: "shared-memory", Threshold: &threshold,
			Load: &agent.Load{Busy: busy, Capacity: &capacity}, Offered: 9, Accepted: 9, Offers: map[string]uint64{"accepted": 9}},
		Flow: agent.TracedFlow{State: "listen"}, Socket: "listening",
		Answers: []agent.Answer{
			{Function: "connect-avail", Outcome: "deliver", Offer: offer}, {Function: "connect-avail", Last: true, Outcome: "deliver", Offer: "forced"},
			{Function: "connect-force", Last: true, Outcome: "deliver", Offer: "forced"},
			{Function: "ack-stickiness", Last: true, Outcome: "deliver"},
			{Function: "recover-stickiness", Outcome: "next_not_local"}, {Function: "recover-stickiness", Last: true, Outcome: "drop_not_local"},
			{Function: "deliver", Outcome: "deliver"}, {Function: "deliver", Last: true, Outcome: "deliver"},
			{Function: "steer", Outcome: "next_not_local"}, {Function: "steer", Last: true, Outcome: "drop_not_local"},
		},
	}
	if strings.HasPrefix(offer, "refused") {
		t.Answers[0].Outcome = "next_refused"
	}
	if isHere {
		t.Flow = agent.TracedFlow{State: "direct", Balancer: netip.MustParsePrefix("fd00:6c:0:1::/64"), Age: 4.2}
		t.Socket = "established"
		for i := range t.Answers {
			t.Answers[i].Outcome, t.Answers[i].Offer = "deliver", ""
		}
	}
	return t
}

// leastOf is an agent's trace of someFlow with the policy least. The parameter last is the answer
// to a new connection if the server is the last candidate, and offer is its answer otherwise. A
// capacity of 0 means that the load has no capacity.
func leastOf(instance, offer, last string, busy, capacity uint32) *agent.Trace {
	t := traceOf(instance, offer, false)
	t.Accept.Policy, t.Accept.Source, t.Accept.Threshold = desired.AcceptLeast, "shared-memory", nil
	t.Accept.Load = &agent.Load{Busy: busy, Capacity: &capacity}
	if capacity == 0 {
		t.Accept.Source, t.Accept.Load.Capacity = "connections", nil
	}
	t.Answers[1].Offer = last
	return t
}

// drainedOf turns a trace into one of a drained server.
func drainedOf(t *agent.Trace) *agent.Trace {
	t.Accept.Policy, t.Accept.Load = agent.Drained, nil
	return t
}

// neverOf gives a trace the policy never.
func neverOf(t *agent.Trace) *agent.Trace {
	t.Accept.Policy, t.Accept.Threshold = desired.AcceptNever, nil
	return t
}

// goneOf turns a trace into one of a server whose host has lost the VIP.
func goneOf(t *agent.Trace) *agent.Trace {
	t.VIPPresent, t.Condition = false, agent.ConditionNotServed
	return t
}

// stale removes the load from the trace.
func stale(t *agent.Trace) *agent.Trace {
	t.Accept.Load, t.Accept.Stale = nil, true
	return t
}

// withoutPolicy removes the accept policy from the trace.
func withoutPolicy(t *agent.Trace) *agent.Trace {
	t.Accept = nil
	for i := range t.Answers {
		t.Answers[i].Offer = ""
	}
	return t
}

// withoutRoute removes the server's route to the next server from the trace.
func withoutRoute(t *agent.Trace) *agent.Trace {
	t.Next = &agent.NextSegment{SID: netip.MustParseAddr("fd00:5:0:1:2::"), Problem: "no route to fd00:5:0:1:2::: network is unreachable"}
	return t
}

// byDefaultRoute gives the trace's server only the default route to the next server.
func byDefaultRoute(t *agent.Trace) *agent.Trace {
	router := netip.MustParseAddr("2001:db8:1::1")
	t.Next = &agent.NextSegment{SID: netip.MustParseAddr("fd00:5:0:1:2::"), Router: &router}
	return t
}

// huntTrace is a balancer's trace of someFlow with two candidates.
func huntTrace(opens bool, reason, state string, course ...inspect.TracedSegment) *inspect.Trace {
	t := &inspect.Trace{
		Instance: "lb", Flow: someFlow, Opens: opens, Length: 60, Service: &inspect.TracedService{Name: "web", Exact: true},
		Placement: &inspect.TracedPlacement{Bucket: new(uint32(4711)), Buckets: 65537, Candidates: []string{"s2", "s1"}},
		Course:    course, Reason: reason,
	}
	if state != "" {
		t.Known = &inspect.TracedEntry{Server: course[0].Server, State: state, Idle: 4}
	}
	return t
}

// heldTrace is a balancer's trace of a SYN whose flow has the drained holder s9. Only the course
// tells which servers get the offer: the placement is that of a flow without a holder.
func heldTrace(course ...inspect.TracedSegment) *inspect.Trace {
	t := huntTrace(true, "forward_hunt", "established", course...)
	if len(course) == 2 {
		t.Placement.Candidates = []string{course[1].Server}
	}
	return t
}

func segment(server, function string) inspect.TracedSegment {
	return inspect.TracedSegment{Server: server, Function: function}
}

func TestPrintAgentTrace(t *testing.T) {
	for name, trace := range map[string]*agent.Trace{
		"refuses": traceOf("agent", "refused", false), "has": traceOf("agent", "", true),
		"gone":      goneOf(traceOf("agent", "accepted", false)),
		"elsewhere": {Client: someFlow.Source, VIP: someFlow.Destination, Flow: agent.TracedFlow{State: "listen"}},
	} {
		var output bytes.Buffer
		testhost.Must(t, printAgentTrace(&output, trace))
		clitest.Golden(t, "trace-agent-"+name+".txt", &output)
	}
	var output bytes.Buffer
	testhost.Must(t, cli.PrintJSON(&output, traceOf("agent", "refused", false)))
	clitest.Golden(t, "trace-agent.json", &output)
}

// TestUnknownHere checks that the error tells where an agent can be traced.
func TestUnknownHere(t *testing.T) {
	elsewhere := &datapath.Attachment{Ifindex: 2}
	for _, c := range []struct {
		attachment      *datapath.Attachment
		namespace, want string
	}{
		{nil, "", "the answer is unknown: instance s1 is not attached to an interface"},
		{elsewhere, "", "the answer is unknown here: instance s1 is in another network namespace, " +
			"whose path was not found; run this command there"},
		{elsewhere, "/run/netns/s1", "the answer is unknown here: instance s1 is in another network " +
			"namespace; run this command there: nsenter --net=/run/netns/s1 segue trace"},
	} {
		s1 := datapath.Instance{Name: "s1", Role: datapath.RoleAgent}
		err := unknownHere(&datapath.Located{Instance: s1, Attachment: c.attachment, Namespace: c.namespace})
		if got := err.Error(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// askCase is a balancer's trace, the answers of the servers, and the path of the packet that
// follows from them.
type askCase struct {
	name     string
	trace    *inspect.Trace
	says     map[string]*agent.Trace // servers without an item do not answer
	receiver string
	end      string // empty if a server on the path does not answer
}

var (
	offersCourse = []inspect.TracedSegment{
		segment("s2", "connect-avail"), segment("s1", "connect-avail"),
	}
	recoversCourse = []inspect.TracedSegment{
		segment("s2", "recover-stickiness"), segment("s1", "recover-stickiness"),
	}
	// seeksCourse is the course of a packet whose entry was idle for long.
	seeksCourse = append(recoversCourse[:2:2], segment("s2", "ack-stickiness"))
	// heldCourse is the course of a SYN with the holder s9. Behind the holder, it has more candidates
	// than an offer without a holder, in another order.
	heldCourse = []inspect.TracedSegment{
		segment("s9", "steer"), segment("s1", "connect-avail"), segment("s2", "connect-avail"),
		segment("s3", "connect-avail"),
	}
)

// randomTrace is a balancer's trace of a SYN that is offered to random candidates. The drained
// server s9 is asked before them.
func randomTrace() *inspect.Trace {
	t := huntTrace(true, "forward_hunt", "established", segment("s9", "steer"))
	t.Placement = &inspect.TracedPlacement{Buckets: 65537, Random: true}
	return t
}

// offerCases are SYNs to servers that do not compare their loads.
var offerCases = []askCase{
	{"refused", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "refused", false), "s2": traceOf("s2", "refused", false)}, "s1", "deliver"},
	{"accepted", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "refused", false), "s2": traceOf("s2", "accepted", false)}, "s2", "deliver"},
	{"no route", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": withoutRoute(traceOf("s2", "refused", false))}, "", "lost after s2: no route to fd00:5:0:1:2::: network is unreachable"},
	{"default route", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": byDefaultRoute(traceOf("s2", "refused", false))}, "s1", "deliver"},
	{"default route not taken", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": byDefaultRoute(traceOf("s2", "accepted", false))}, "s2", "deliver"},
	{"drained has", randomTrace(), map[string]*agent.Trace{"s9": traceOf("s9", "", true)}, "s9", "deliver"},
	{"drained has not", randomTrace(), map[string]*agent.Trace{"s9": traceOf("s9", "accepted", false)}, "", ""},
	{"without the VIP", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": goneOf(traceOf("s2", "accepted", false))}, "", "lost at s2: the VIP is not an address of the host"},
	{"silent", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false)}, "", ""},
	{"stuck", huntTrace(true, "drop_no_next_hop", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": traceOf("s2", "accepted", false)}, "", ""},
}

// leastCases are SYNs to servers that compare their loads.
var leastCases = []askCase{
	{"least free", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "accepted", "accepted", 1, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2)}, "s1", "deliver"},
	{"least back", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 4, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2)}, "s2", "deliver"},
	{"least tie", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 2, 2), "s2": leastOf("s2", "refused", "accepted_least", 5, 4)}, "s1", "deliver"},
	{"least without capacity", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 6, 0), "s2": leastOf("s2", "refused", "accepted_least", 5, 0)}, "s2", "deliver"},
	{"least stale", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": stale(leastOf("s1", "refused", "forced", 0, 2)), "s2": leastOf("s2", "refused", "accepted_least", 9, 1)}, "s2", "deliver"},
	{"drained last", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": drainedOf(leastOf("s1", "refused", "forced", 0, 2)), "s2": leastOf("s2", "refused", "accepted_least", 9, 1)}, "s2", "deliver"},
	{"drained first", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 9, 1), "s2": drainedOf(leastOf("s2", "refused", "forced", 0, 2))}, "s1", "deliver"},
	{"least stale in the middle", huntTrace(true, "forward_hunt", "", heldCourse[1:]...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 4, 2), "s2": stale(leastOf("s2", "accepted_stale", "forced", 0, 2)),
		"s3": leastOf("s3", "refused", "accepted_least", 3, 2)}, "s3", "deliver"},
	{"least behind static", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 9, 1), "s2": traceOf("s2", "refused", false)}, "s2", "deliver"},
	{"least behind never", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 9, 1), "s2": neverOf(traceOf("s2", "refused", false))}, "s1", "deliver"},
	{"least back to nobody", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "returned", 1, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2)}, "", ""},
	{"least back behind a silent server", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "returned", 1, 2)}, "", ""},
	{"static behind least", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "refused", false), "s2": leastOf("s2", "refused", "accepted_least", 3, 2)}, "s1", "deliver"},
	{"static down behind static", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "refused_down", false), "s2": traceOf("s2", "refused", false)}, "s2", "deliver"},
	{"drained behind static", huntTrace(true, "forward_hunt", "", offersCourse...), map[string]*agent.Trace{
		"s1": drainedOf(traceOf("s1", "refused", false)), "s2": traceOf("s2", "refused", false)}, "s2", "deliver"},
}

// laterCases are packets of connections that a server may have.
var laterCases = []askCase{
	{"recovered", huntTrace(false, "forward_recover", "", recoversCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "", true), "s2": traceOf("s2", "accepted", false)}, "s1", "deliver"},
	{"nowhere", huntTrace(false, "forward_recover", "", recoversCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": traceOf("s2", "accepted", false)}, "", "drop_not_local"},
	{"half-open", huntTrace(false, "forward_new", "half-open", segment("s9", "ack-stickiness")), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": traceOf("s2", "accepted_stale", false), "s9": traceOf("s9", "", true)}, "s9", "deliver"},
	{"idle", huntTrace(false, "forward_recover", "established", seeksCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": traceOf("s2", "", true)}, "s2", "deliver"},
	{"moved", huntTrace(false, "forward_recover", "established", seeksCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "", true), "s2": traceOf("s2", "accepted", false)}, "s1", "deliver"},
	{"lost", huntTrace(false, "forward_recover", "established", seeksCourse...), map[string]*agent.Trace{
		"s1": traceOf("s1", "accepted", false), "s2": traceOf("s2", "accepted", false)}, "s2", "deliver"},
}

// heldCases are SYNs of flows with a drained holder. The packet then visits servers that compare
// their loads.
var heldCases = []askCase{
	{"held by the holder", heldTrace(heldCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "accepted", "accepted", 1, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2),
		"s3": leastOf("s3", "accepted", "accepted", 1, 2), "s9": traceOf("s9", "", true)}, "s9", "deliver"},
	{"held and handed back", heldTrace(heldCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 4, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2),
		"s3": leastOf("s3", "refused", "accepted_least", 9, 2), "s9": traceOf("s9", "accepted", false)}, "s2", "deliver"},
	{"held and taken by the last", heldTrace(heldCourse...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 4, 2), "s2": leastOf("s2", "refused", "accepted_least", 3, 2),
		"s3": leastOf("s3", "refused", "accepted_least", 2, 2), "s9": traceOf("s9", "accepted", false)}, "s3", "deliver"},
	{"held and no policy", heldTrace(heldCourse...), map[string]*agent.Trace{
		"s1": withoutPolicy(traceOf("s1", "refused", false)), "s2": leastOf("s2", "refused", "accepted_least", 3, 2),
		"s3": leastOf("s3", "refused", "accepted_least", 2, 2), "s9": traceOf("s9", "accepted", false)}, "s3", "deliver"},
	{"held and one candidate", heldTrace(heldCourse[:2]...), map[string]*agent.Trace{
		"s1": leastOf("s1", "refused", "accepted_least", 4, 2), "s9": traceOf("s9", "accepted", false)}, "s1", "deliver"},
}

// TestAskAgents asks servers by a command, and checks where the packet ends.
func TestAskAgents(t *testing.T) {
	for _, c := range slices.Concat(offerCases, leastCases, laterCases, heldCases) {
		t.Run(c.name, c.check)
	}
}

func (c *askCase) check(t *testing.T) {
	dir := c.answers(t)
	joined := joinedTrace{Trace: c.trace}
	testhost.Must(t, joined.ask(t.Context(), "sh "+script(t, dir)+" {}"))
	joined.follow()
	if joined.Receiver != c.receiver || joined.End != c.end {
		t.Errorf("goes to %q and ends %q, want %q and %q", joined.Receiver, joined.End, c.receiver, c.end)
	}
	if err, isUnknown := joined.unknown(), c.end == "" && c.name != "stuck"; (err != nil) != isUnknown {
		t.Errorf("error %v, want one: %v", err, isUnknown)
	}
	var output bytes.Buffer
	testhost.Must(t, printAgents(&output, &joined))
	text := bytes.ReplaceAll(output.Bytes(), []byte(dir), []byte("DIR"))
	clitest.Golden(t, "trace-hunt-"+strings.ReplaceAll(c.name, " ", "-")+".txt", bytes.NewBuffer(text))
}

// answers returns a directory that contains a file with the answer of each server.
func (c *askCase) answers(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for server, trace := range c.says {
		answer, err := json.Marshal(trace)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, server), answer, 0o600)
		}
		testhost.Must(t, err)
	}
	return dir
}

// script returns the path of a shell script that prints the file in dir with the name of a server,
// if its other arguments are those of a trace of someFlow.
func script(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "ask")
	text := fmt.Sprintf("[ \"$2 $3 $4 $5\" = '--json tcp %s %s' ] && cat %s/$1\n", someFlow.Source, someFlow.Destination, dir)
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// TestAskNobody checks that only the name of a host becomes part of a command, and that an invalid
// answer is an error.
func TestAskNobody(t *testing.T) {
	for _, c := range []struct{ command, server, want string }{
		{"echo {}", "-oProxyCommand=true", `server name "-oProxyCommand=true": must be a host name`},
		{"echo {}", "s1 s2", `server name "s1 s2": must be a host name`},
		{"echo {}", "s1", "echo: the answer is not a trace"},
		{"echo {} {}", "{}", "must be a host name to be used in --ask"},
		{"sh -c echo${IFS}{}>&2;exit${IFS}3", "s1", "sh: exit status 3: s1"},
		{"sh -c echo${IFS}{}", "s1", "sh: the answer is not a trace"},
		{"sh -c echo${IFS}null", "s1", "sh: the answer is not an agent's trace of this flow"},
		{"/nonexistent {}", "s1", "no such file"},
	} {
		if _, err := askAgent(context.Background(), c.command, c.server, someFlow, netip.Addr{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s for %s: error %v, want %s", c.command, c.server, err, c.want)
		}
	}
	hash := &joinedTrace{Trace: &inspect.Trace{Service: &inspect.TracedService{Name: "web"}}}
	if err := hash.ask(context.Background(), "echo {}"); err == nil || !strings.Contains(err.Error(), "service web: it does not hunt") {
		t.Errorf("of a service that does not hunt: error %v", err)
	}
}

// TestAskWithoutName checks that --ask needs a command with {}.
func TestAskWithoutName(t *testing.T) {
	for ask, want := range map[string]string{"": "must be a command", "ssh s1 segue trace": "must contain {}"} {
		_, err := runSegue(t.Context(), "trace", "--ask", ask,
			"tcp", "[2001:db8:c::2]:40000", "[2001:db8:80::1]:80")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("--ask %q: error %v, want %q", ask, err, want)
		}
	}
}

// TestNextOf checks to which SID a server would pass the packet on.
func TestNextOf(t *testing.T) {
	trace := huntTrace(true, "forward_hunt", "", segment("s2", "connect-avail"), segment("s1", "connect-avail"))
	var segments []netip.Addr
	for _, text := range []string{"fd00:6c:0:1::", "fd00:5:0:2:1::", "fd00:5:0:1:1:2000::", "2001:db8:80::1"} {
		segments = append(segments, netip.MustParseAddr(text))
	}
	trace.Encapsulation = &inspect.TracedEncapsulation{Segments: segments}
	joined := joinedTrace{Trace: trace}
	for server, want := range map[string]netip.Addr{"s2": segments[2], "s1": {}, "s9": {}} {
		if got := joined.nextOf(server); got != want {
			t.Errorf("%s: next is %s, want %s", server, got, want)
		}
	}
	trace.Encapsulation = nil
	if got := joined.nextOf("s2"); got.IsValid() {
		t.Errorf("next is %s without segments", got)
	}
}

// TestAnswersOfACompromisedServer checks that an answer can neither control the terminal nor fill
// the memory.
func TestAnswersOfACompromisedServer(t *testing.T) {
	honest := agent.Trace{Client: someFlow.Source, VIP: someFlow.Destination, Service: "web"}
	escaping := honest
	escaping.Service = "\x1b]0;owned\x07"
	file := filepath.Join(t.TempDir(), "answer")
	for _, c := range []struct {
		name   string
		answer agent.Trace
		script string
		want   string // part of the error
	}{
		{"honest", honest, "cat " + file, ""},
		{"escapes", escaping, "cat " + file, "control characters"},
		{"escapes in an error", honest, `printf '\033[2Jowned\n' >&2; exit 1`, "\ufffd[2Jowned"},
		{"endless", honest, "cat /dev/zero", "the answer is too long"},
		{"endless error", honest, "cat /dev/zero >&2", "the answer is too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := json.Marshal(c.answer)
			testhost.Must(t, err)
			ask := filepath.Join(t.TempDir(), "ask")
			testhost.Must(t, errors.Join(os.WriteFile(file, text, 0o600), os.WriteFile(ask, []byte(c.script), 0o600)))
			_, err = askAgent(t.Context(), "sh "+ask+" {}", "s1", someFlow, netip.Addr{})
			if message := fmt.Sprint(err); !strings.Contains(message, c.want) || (err != nil) != (c.want != "") ||
				strings.ContainsAny(message, "\x1b\x00") {
				t.Errorf("error %q, want %q", message, c.want)
			}
		})
	}
}

// FuzzAgentAnswer reads any bytes as the answer of a server's agent. If parseAnswer accepts them,
// the output has no characters that control a terminal.
func FuzzAgentAnswer(f *testing.F) {
	for _, c := range slices.Concat(offerCases, leastCases) {
		for _, trace := range c.says {
			text, err := json.Marshal(trace)
			testhost.Must(f, err)
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		var ends struct{ Client, VIP netip.AddrPort }
		_ = json.Unmarshal(answer, &ends)
		trace, err := parseAnswer(answer, dataplane.Flow{Protocol: desired.TCP, Source: ends.Client, Destination: ends.VIP})
		if err != nil {
			return
		}
		joined := joinedTrace{Trace: huntTrace(true, "forward_hunt", "", segment("s1", "connect-avail"))}
		joined.Agents = []askedAgent{{Server: "s1", Trace: trace}}
		joined.follow()
		var output bytes.Buffer
		testhost.Must(t, printAgents(&output, &joined))
		for _, line := range strings.Split(output.String(), "\n") {
			if line != printable(line) {
				t.Errorf("%q", line)
			}
		}
	})
}
