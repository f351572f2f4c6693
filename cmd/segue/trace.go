// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// traceOptions are the flags of segue trace.
type traceOptions struct {
	instance, kind, ask string
	next                string // only for an agent
	length              int
	echo                uint32 // TSecr of the packet
	hasEcho             bool   // --echo is given
	connectionID        string // hexadecimal
	asJSON              bool
}

func newTrace() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace tcp|udp SRC:PORT DST:PORT",
		Short: "Show where a packet would go, and why",
		Long: `Trace runs a balancer's data path with a packet of a flow. It shows the service, the
flow's entry in the flow table, the encapsulation and the next hop. For a new flow it
also shows the bucket and the chosen server. It sends nothing and changes nothing. It
needs root.

If there is a switch in front of the balancer, trace first shows the entries of the switch
that the packet matches. If the switch sends the packet to a server, the packet does not
come to the balancer's data path. Trace reads the switch as it is now. The process of the
balancer must run, because it knows the switch.

On a server, trace shows the state of a connection in the agent, the application's
socket, and the verdict on a packet for each SID function. With --next it also shows
whether the server has a route to the next server.

With --ask, trace on a balancer also runs "segue trace" on the servers that the packet
may visit. This is possible if the service has placement hunt or no flow table: then
there can be several such servers. Trace shows which server has the connection, and which
server gets the packet. It splits the command of --ask at spaces, and replaces {} by the
server's name. The command must run in the network namespace of the server's agent. The
last example is for servers in network namespaces of this host.

SRC is the client and DST is the VIP. IPv6 addresses go in brackets. If the flow is
unknown, a TCP packet is a SYN; otherwise it is a later packet of the connection. With
--echo it is a later packet. --packet overrides both. The packet is well-formed, and its
hop limit suffices. --echo gives it TCP timestamps. TSecr is the timestamp of the server
that the client returns. If the service has persistence stateless, the low bits of TSecr
are the cookie. Without --instance, trace uses the only instance on the host, or the only
instance in this network namespace.

--json prints the fields that docs/reference/observability.md describes. The exit code is 1 if
the answer is unknown, for example because a server does not answer.`,
		Example: "  segue trace tcp '[2001:db8:c::2]:40000' '[2001:db8:80::1]:80'\n" +
			"  segue trace --packet later --length 1500 tcp 198.51.100.7:5000 203.0.113.53:53\n" +
			"  segue trace --connection-id 07c4605e4504cc4f udp 198.51.100.7:5000 203.0.113.4:443\n" +
			"  segue trace --ask 'ssh {} segue trace' tcp '[2001:db8:c::2]:40000' '[2001:db8:80::1]:80'\n" +
			"  segue trace --ask 'nsenter --net=/run/netns/{} segue trace' tcp 198.51.100.7:5000 203.0.113.2:80",
		Args: cli.Arguments("tcp|udp", "SRC:PORT", "DST:PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			flow, err := parseFlow(args[0], args[1], args[2])
			if err != nil {
				return err
			}
			o.hasEcho = cmd.Flags().Changed("echo")
			if err := o.check(cmd, flow); err != nil {
				return err
			}
			instance, err := o.choose(cmd)
			if err != nil {
				return err
			}
			if instance.Role == datapath.RoleAgent {
				return agentTrace(cmd.OutOrStdout(), instance.Name, flow, &o)
			}
			return balancerTrace(cmd, instance.Name, flow, &o)
		},
	}
	cmd.Flags().StringVarP(&o.instance, "instance", "i", "", "`name` of the balancer or agent")
	cmd.Flags().StringVar(&o.kind, "packet", "auto", "`kind` of packet: auto, syn or later for TCP, auto or initial for QUIC")
	cmd.Flags().Uint32Var(&o.echo, "echo", 0, "TCP timestamps with this TSecr, a `number` (default: no timestamps)")
	cmd.Flags().IntVar(&o.length, "length", 0, "length of the packet with its IP header, in `bytes` (default: headers only)")
	cmd.Flags().StringVar(&o.connectionID, "connection-id", "",
		"destination connection ID of a QUIC packet, in `hex`")
	cmd.Flags().StringVar(&o.ask, "ask", "", "`command` that runs segue trace on the server {}")
	cmd.Flags().StringVar(&o.next, "next", "", "for an agent: `address` (SID) of the next server")
	cmd.Flags().BoolVar(&o.asJSON, "json", false, "print JSON")
	return cmd
}

// check refuses values of flags that no instance accepts for the flow.
func (o *traceOptions) check(cmd *cobra.Command, flow dataplane.Flow) error {
	_, err := o.packet(flow)
	switch {
	case err != nil:
		return err
	case !slices.Contains([]string{"auto", "syn", "later", initialPacket}, o.kind):
		return fmt.Errorf("--packet %q: must be auto, syn, later or initial", o.kind)
	case o.hasEcho && flow.Protocol != desired.TCP:
		return fmt.Errorf("--echo %d: not possible for a udp flow", o.echo)
	case o.kind != "auto" && (o.kind == initialPacket) != (flow.Protocol == desired.UDP):
		return fmt.Errorf("--packet %s: not possible for a %s flow", o.kind, flow.Protocol)
	case o.connectionID != "" && flow.Protocol != desired.UDP:
		return fmt.Errorf("--connection-id %s: not possible for a tcp flow", o.connectionID)
	case cmd.Flags().Changed("next") && !isIPv6(o.next):
		return fmt.Errorf("--next %q: must be an IPv6 address", o.next)
	case cmd.Flags().Changed("ask") && strings.TrimSpace(o.ask) == "":
		return fmt.Errorf("--ask %q: must be a command", o.ask)
	case cmd.Flags().Changed("ask") && !strings.Contains(o.ask, serverName):
		return fmt.Errorf("--ask %q: must contain %s, which stands for the server's name",
			o.ask, serverName)
	}
	return nil
}

func isIPv6(text string) bool {
	address, err := netip.ParseAddr(text)
	return err == nil && address.Is6() && !address.Is4In6() && address.Zone() == ""
}

// choose finds the instance, and refuses flags that do not fit its role.
func (o *traceOptions) choose(cmd *cobra.Command) (datapath.Instance, error) {
	found, err := choose(o.instance)
	if err != nil {
		return found, err
	}
	if found.Role == datapath.RoleBalancer && cmd.Flags().Changed("next") {
		return datapath.Instance{}, fmt.Errorf("--next: %q is a balancer; this flag is for agents only", found.Name)
	}
	if found.Role == datapath.RoleAgent {
		for _, name := range []string{"packet", "length", "echo", "connection-id", "ask"} {
			if cmd.Flags().Changed(name) {
				return datapath.Instance{}, fmt.Errorf("--%s: %q is an agent; this flag is for balancers only",
					name, found.Name)
			}
		}
	}
	return found, nil
}

// parseFlow reads the arguments of the command.
func parseFlow(protocol, source, destination string) (flow dataplane.Flow, err error) {
	flow.Protocol = desired.Protocol(protocol)
	if flow.Protocol != desired.TCP && flow.Protocol != desired.UDP {
		return flow, fmt.Errorf("protocol %q: must be tcp or udp", protocol)
	}
	for _, end := range []struct {
		name, value string
		into        *netip.AddrPort
	}{{"source", source, &flow.Source}, {"destination", destination, &flow.Destination}} {
		if *end.into, err = parseEndpoint(end.value); err != nil {
			return flow, fmt.Errorf("%s %q: %w", end.name, end.value, err)
		}
		if end.into.Addr().Zone() != "" || end.into.Addr().Is4In6() {
			return flow, fmt.Errorf("%s %q: must be a plain IPv4 or IPv6 address", end.name, end.value)
		}
	}
	if flow.Source.Addr().Is4() != flow.Destination.Addr().Is4() {
		return flow, fmt.Errorf("%s and %s: must be of the same IP version", source, destination)
	}
	return flow, nil
}

// longestConnectionID is the greatest length of connection IDs in octets (RFC 9000 section 17.2).
const longestConnectionID = 20

// shortestFirstID is the least length of the first connection ID that a client chooses, in octets
// (RFC 9000 section 7.2).
const shortestFirstID = 8

// The lengths of headers in bytes. ipv4Header and tcpHeader are without options; timestampOption is
// with padding.
const (
	ipv4Header      = 20
	ipv6Header      = 40
	tcpHeader       = 20
	udpHeader       = 8
	timestampOption = 12
)

// initialPacket is the value of --packet for an Initial packet of QUIC.
const initialPacket = "initial"

// packet returns the packet that the flags describe. Without --length, it has the shortest possible
// length.
func (o *traceOptions) packet(flow dataplane.Flow) (inspect.Packet, error) {
	id, err := hex.DecodeString(o.connectionID)
	if err != nil || len(id) > longestConnectionID {
		return inspect.Packet{}, fmt.Errorf(
			"--connection-id %q: must be an even number of hexadecimal digits, "+
				"at most %d octets", o.connectionID, longestConnectionID)
	}
	p := inspect.Packet{Flow: flow, Length: o.length, ConnectionID: id, Opens: o.kind == initialPacket}
	if p.Opens && len(id) == 0 {
		p.ConnectionID = make([]byte, shortestFirstID)
	}
	shortest := ipv6Header
	if flow.Source.Addr().Is4() {
		shortest = ipv4Header
	}
	if flow.Protocol == desired.TCP {
		shortest += tcpHeader
	} else {
		shortest += udpHeader
	}
	if p.Opens || len(id) > 0 {
		shortest += len(packet.QUICHeader(p.Opens, p.ConnectionID))
	}
	if o.hasEcho {
		p.Echo = &o.echo
		shortest += timestampOption
	}
	switch {
	case o.length == 0:
		p.Length = shortest
	case o.length < shortest || o.length > 65535:
		return inspect.Packet{}, fmt.Errorf("--length %d: must be from %d to 65535", o.length, shortest)
	}
	return p, nil
}

// describeCookie returns the column that a packet's cookie names.
func describeCookie(c *inspect.TracedCookie) string {
	if c.Column == nil {
		return "none"
	}
	return fmt.Sprintf("column %d", *c.Column)
}

// describeHint returns the column that a flow's hint names, and what the data path does with the
// hint.
func describeHint(h *inspect.TracedHint) string {
	if h.Use == "none" || h.Use == "shared" {
		return h.Use
	}
	return fmt.Sprintf("column %d, %s", h.Column, h.Use)
}

// balancerTrace prints the trace of a packet through a balancer and, with --ask, through the
// servers. It returns an error if servers were asked and it stays unknown where the packet ends.
func balancerTrace(cmd *cobra.Command, instance string, flow dataplane.Flow, o *traceOptions) error {
	packet, err := o.packet(flow)
	if err != nil {
		return err
	}
	joined, err := trace(cmd.Context(), instance, packet, o.kind)
	if err != nil {
		return err
	}
	if o.ask != "" {
		if err = joined.ask(cmd.Context(), o.ask); err != nil {
			return err
		}
		joined.follow()
	}
	if err := printJoined(cmd.OutOrStdout(), joined, o.asJSON); err != nil {
		return err
	}
	return joined.unknown()
}

// printJoined prints a trace as text or as JSON, with the traces of the servers if they were asked.
func printJoined(out io.Writer, j *joinedTrace, asJSON bool) error {
	if asJSON {
		return cli.PrintJSON(out, j)
	}
	if j.Switch != nil {
		if err := printSwitchTrace(out, j); err != nil {
			return err
		}
	}
	if !j.isSwitched() {
		if err := printTrace(out, j.Trace); err != nil {
			return err
		}
	}
	if j.Agents == nil {
		return nil
	}
	return printAgents(out, j)
}

// trace runs the data path of a balancer with a packet. A TCP packet of kind auto is a later packet
// if it has TCP timestamps, or if the data path has an entry or a hint for the flow. Otherwise it
// is a SYN. If there is a switch in front of the balancer, trace also finds what the switch does with
// the packet.
func trace(ctx context.Context, instance string, packet inspect.Packet, kind string) (*joinedTrace, error) {
	view, err := inspect.OpenView(instance)
	if err != nil {
		return nil, err
	}
	defer view.Close()
	packet.Opens = kind == "syn" || kind == initialPacket
	t, err := view.Trace(packet)
	if err != nil {
		return nil, err
	}
	if kind == "auto" && packet.Flow.Protocol == desired.TCP && !isLater(t) {
		packet.Opens = true
		if t, err = view.Trace(packet); err != nil {
			return nil, err
		}
	}
	joined := &joinedTrace{Trace: t}
	to, err := findSwitch(instance)
	if to != nil {
		ctx, cancel := context.WithTimeout(ctx, tracePatience)
		defer cancel()
		joined.passSwitch(p4switch.TracePacket(ctx, to, packet, view.ServerName))
	}
	return joined, err
}

// isLater tells whether a packet of a traced flow is more likely a later one than a SYN.
func isLater(t *inspect.Trace) bool {
	hasHint := t.Hint != nil && t.Hint.Use != "none"
	return t.Known != nil || t.Echo != nil || hasHint
}

// describeServer names a server. The causes for which it may not answer follow, in capitals.
func describeServer(s *inspect.TracedServer) string {
	text := fmt.Sprintf("%s, %s, slot %d", s.Name, s.Address, s.Slot)
	for _, cause := range s.Causes {
		text += ", " + strings.ToUpper(string(cause))
	}
	return text
}

// printTrace prints the steps of the data path in their order, and the verdict. It leaves out the
// steps that the packet did not reach.
func printTrace(out io.Writer, t *inspect.Trace) error {
	table := newTable(out)
	table.row("packet", describePacket(t))
	if s := t.Service; s != nil {
		match := "exact port"
		if !s.Exact {
			match = "all ports"
		}
		table.row("service", s.Name+", "+match)
		if t.Known != nil || (t.Cookie == nil && t.Hint == nil) {
			table.row("flow table", describeEntry(t.Known))
		}
		if t.Cookie != nil {
			table.row("cookie", describeCookie(t.Cookie))
		}
		if t.Hint != nil {
			table.row("hint", describeHint(t.Hint))
		}
	}
	if p := t.Placement; p != nil {
		table.row("placement", describePlacing(p, t.Course))
		if p.Scores != nil {
			for i := range p.Scores.Servers {
				table.row("", describeScored(&p.Scores.Servers[i], p.Scores.Among))
			}
		}
		if p.Order != nil {
			table.row("loads", describeMean(p.Order))
			for i := range p.Order.Servers {
				table.row("", describeOrdered(&p.Order.Servers[i]))
			}
		}
	}
	if offers := describeOffers(t.Course); offers != "" {
		table.row("offered to", offers)
	}
	if s := t.Server; s != nil {
		table.row("server", describeServer(s))
	}
	if e := t.Encapsulation; e != nil {
		table.row("encapsulation", describeEncapsulation(e))
		table.row("outer header", fmt.Sprintf("%s -> %s", e.Source, e.Destination))
		if len(e.Segments) > 0 {
			table.row("segments", describeSegments(e.Segments))
		}
	}
	if t.Server != nil {
		table.row("next hop", describeHop(t.NextHop))
	}
	table.row("verdict", describeVerdict(t))
	return table.Flush()
}

// describePlacing names the candidates of a new flow, the server whose turn it is, or the server
// with the best score. If the candidates are random, they are unknown. Then it names only the
// server that the packet visits before them, if there is one.
func describePlacing(p *inspect.TracedPlacement, course []inspect.TracedSegment) string {
	if p.Random {
		candidates := fmt.Sprintf("the candidates of a random bucket of %d", p.Buckets)
		if len(course) == 0 {
			return candidates
		}
		return fmt.Sprintf("%s (%s), then %s", course[0].Server, course[0].Function, candidates)
	}
	if p.Scores != nil {
		return describeScores(p)
	}
	if p.InTurn {
		return fmt.Sprintf("in turn: %s, unless another new flow comes first", strings.Join(p.Candidates, ", "))
	}
	return describeBucket(p) + ": " + strings.Join(p.Candidates, ", ")
}

// describeBucket names the bucket, and the clients that it belongs to under affinity.
func describeBucket(p *inspect.TracedPlacement) string {
	text := fmt.Sprintf("bucket %d of %d", *p.Bucket, p.Buckets)
	if p.Client != nil {
		text += " of clients " + p.Client.String()
	}
	return text
}

// describeScores names the server that gets the flow, and says how it is chosen.
func describeScores(p *inspect.TracedPlacement) string {
	name, method := strings.Join(p.Candidates, ", "), p.Scores.Among.Method()
	if equal := p.Scores.Equal; equal > 0 {
		name += fmt.Sprintf(" (as low: %d others)", equal)
	}
	choice := fmt.Sprintf(method.Choice, len(p.Scores.Servers)+p.Scores.Others)
	text := fmt.Sprintf("%s: %s, unless %s", choice, name, method.Unless)
	if method.InRow {
		return describeBucket(p) + ": " + text
	}
	return text
}

// describeScored returns the numbers that decide how likely a server gets the flow. It leaves out
// the expected delay if servers are chosen by weights alone.
func describeScored(s *inspect.ScoredServer, among desired.Among) string {
	text := s.Server + ": "
	if !among.Method().ByWeights {
		text += fmt.Sprintf("expected delay %s, ", short(s.Delay))
	}
	text += fmt.Sprintf("%d new and %d established flows", s.New, s.Established)
	if s.Away {
		text += ", another balancer prefers it"
	}
	return text
}

// describeMean returns the mean load of the reports. The estimate for a server without a recent
// report approaches this mean.
func describeMean(o *inspect.TracedOrder) string {
	if o.Mean == 0 {
		return "no server has reported its load yet"
	}
	return "mean of the reports: " + short(o.Mean)
}

// describeOrdered returns what the balancer knows about a server's load, and whether it offers the
// connection to the server.
func describeOrdered(s *inspect.OrderedServer) string {
	text := fmt.Sprintf("%s: reported %s", s.Server, describeReport(&s.Report))
	if s.Estimate != nil {
		text += ", estimate " + short(*s.Estimate)
	}
	switch {
	case s.Spare:
		text += ": offered as the spare server"
	case s.Offered:
		text += ": offered"
	}
	return text
}

// describeOffers names the servers to which the packet offers a connection, with their columns. The
// text is empty if the packet is not an offer.
func describeOffers(course []inspect.TracedSegment) string {
	var offers []string
	for _, at := range offersOf(course) {
		column := "no column"
		if at.Column != nil {
			column = fmt.Sprintf("column %d", *at.Column)
		}
		offers = append(offers, fmt.Sprintf("%s (%s)", at.Server, column))
	}
	return strings.Join(offers, ", ")
}

// offersOf returns the segments of a course that offer the server a connection.
func offersOf(course []inspect.TracedSegment) (offers []inspect.TracedSegment) {
	for _, at := range course {
		if at.Function == srv6.ConnectAvail.String() || at.Function == srv6.ConnectForce.String() {
			offers = append(offers, at)
		}
	}
	return offers
}

func describePacket(t *inspect.Trace) string {
	kind := string(t.Flow.Protocol)
	switch {
	case t.Opens:
		kind = "tcp SYN"
	case t.Flow.Protocol == desired.TCP:
		kind = "tcp, not a SYN"
	}
	return fmt.Sprintf("%s -> %s, %s, %d bytes", t.Flow.Source, t.Flow.Destination, kind, t.Length)
}

// describeEntry returns the server, the state and the age of a flow's entry. If the packet does not
// go to the server of the entry, describeEntry adds why.
func describeEntry(e *inspect.TracedEntry) string {
	if e == nil {
		return "unknown flow"
	}
	known := fmt.Sprintf("%s, %s, idle for %.0fs", e.Server, e.State, e.Idle)
	if e.Left != "" {
		known += "; but " + e.Left
	}
	return known
}

func describeEncapsulation(e *inspect.TracedEncapsulation) string {
	text := string(e.Kind)
	if u := e.Underlay; u != nil {
		text += fmt.Sprintf(" in UDP from %s to %s", u.Source, u.Destination)
	}
	text += fmt.Sprintf(", adds %d bytes", e.Added)
	if e.MaxLength > 0 {
		text += fmt.Sprintf(", packets up to %d bytes fit", e.MaxLength)
	}
	return text
}

func describeSegments(segments []netip.Addr) string {
	texts := make([]string, len(segments))
	for i, s := range segments {
		texts[i] = s.String()
	}
	return strings.Join(texts, " -> ")
}

// describeVerdict returns the reason, and explains the verdict. The verdict is the first word of
// the reason.
func describeVerdict(t *inspect.Trace) string {
	verdict, why, _ := strings.Cut(t.Reason, "_")
	isRejected := verdict == "answer" && strings.HasPrefix(why, "no_") // no_service or no_server
	if isRejected && t.Flow.Protocol == desired.TCP {
		return t.Reason + ": DROPPED, and the client gets a TCP reset"
	}
	text := map[string]string{
		"pass":    "passed to the host's own network stack",
		"forward": "sent to the server",
		"answer":  "DROPPED, and the client gets an ICMP error",
		"drop":    "DROPPED",
	}[verdict]
	return t.Reason + ": " + text
}
