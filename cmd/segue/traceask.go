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

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
)

// serverName stands for the name of a server in the command that asks it.
const serverName = "{}"

// askTimeout is how long a server may take to answer.
const askTimeout = 10 * time.Second

// hostNames matches the names of servers that are safe in a command.
var hostNames = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// ask runs the command for all servers that the packet may visit, at the same time. If the switch
// sends the packet, its list has all of these servers.
func (j *joinedTrace) ask(ctx context.Context, command string) error {
	if j.Service != nil && j.Placement == nil && !j.isSwitched() {
		return fmt.Errorf("--ask: no server can be asked about service %s: it does not hunt, and its flow table "+
			"tells the server of a flow", j.Service.Name)
	}
	j.Agents = []askedAgent{}
	for _, name := range serversOf(j.Trace) {
		j.Agents = append(j.Agents, askedAgent{Server: name})
	}
	var group sync.WaitGroup
	for i := range j.Agents {
		group.Go(func() {
			a := &j.Agents[i]
			var err error
			if a.Trace, err = askAgent(ctx, command, a.Server, j.Flow, j.nextOf(a.Server)); err != nil {
				a.Error = err.Error()
			}
		})
	}
	group.Wait()
	return nil
}

// nextOf returns the SID to which a server would pass the packet on. It returns an invalid address
// if the server is the last one, or if the next SID is unknown.
func (j *joinedTrace) nextOf(server string) netip.Addr {
	at := slices.IndexFunc(j.Course, func(s inspect.TracedSegment) bool { return s.Server == server })
	switch {
	case at < 0 || at == len(j.Course)-1:
		return netip.Addr{}
	case j.isSwitched():
		return j.Switch.Segments[at+1]
	case j.Encapsulation == nil:
		return netip.Addr{}
	}
	sids := j.Encapsulation.Segments[1:] // the first segment is the balancer
	return sids[at+1]
}

// askAgent runs the command for one server, and returns the server's trace of the flow. If next is
// valid, the command gets it as --next.
func askAgent(
	ctx context.Context, command, server string, flow dataplane.Flow, next netip.Addr,
) (*agent.Trace, error) {
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
	// Processes that the command started can keep its output open. Do not wait for them much longer.
	ask.WaitDelay = time.Second
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

// bounded keeps what is written to it, up to a number of bytes. Then it refuses to keep more, so a
// compromised server cannot fill the memory.
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

// parseAnswer reads an agent's trace of a flow. A compromised server can answer anything. So
// parseAnswer refuses an answer with characters that could control a terminal.
func parseAnswer(answer []byte, flow dataplane.Flow) (*agent.Trace, error) {
	var t agent.Trace
	if err := json.Unmarshal(answer, &t); err != nil {
		return nil, fmt.Errorf("the answer is not a trace: %s", printable(err.Error()))
	}
	if t.Client != flow.Source || t.VIP != flow.Destination {
		return nil, errors.New("the answer is not an agent's trace of this flow")
	}
	plain, err := json.Marshal(t)
	hasControls := string(plain) != printable(string(plain)) || controlEscapes.Match(plain)
	if err != nil || hasControls {
		return nil, errors.New("the answer has control characters")
	}
	return &t, nil
}

// controlEscapes matches the JSON escapes of control characters.
var controlEscapes = regexp.MustCompile(`\\(u00[01]|[bfnrt])`)

// printable replaces the characters of a server's text that could control a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
