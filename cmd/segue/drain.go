// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/desired"
)

// drainOptions are the flags of drain and undrain.
type drainOptions struct {
	target
	self         bool // drain the balancer itself, not a server
	untilRestart bool // with self: the drain ends when the balancer's process is restarted
	wait         bool
	timeout      time.Duration
}

func newDrain() *cobra.Command {
	var o drainOptions
	cmd := &cobra.Command{
		Use:   "drain SERVICE/SERVER|SERVICE",
		Short: "Give a server no new connections",
		Long: `Drain gives a server no new connections. Its TCP connections stay with it. Its UDP flows
move to other servers, unless the service has on-drain: keep. The server stays drained until
"segue undrain", also across reloads and restarts of the balancer. The drain is an override:
segue status shows it apart from the configuration file.

With --wait, drain ends when the server has no live flow left in the flow table. Until then
it shows how many are left. A flow that its client has ended is not live. The flows are
counted every five seconds. If only clients can end the flows that are left, drain says so,
and tells what to do. If --timeout passes first, the exit code is 1, and the server stays
drained. If the service has no flow table (persistence stateless, hint or quic), its flows
cannot be counted: --wait drains the server, and then fails. Wait instead until the application
on the server counts no more connections.

Behind a switch, drain returns when the switch has the change, after a minute at most.

Drain speaks with the process of the balancer on this host. Each balancer of a service has
its own overrides. If the balancers share a store, they have the same overrides, so all of
them drain the server.

On a server, drain SERVICE makes the agent refuse the connections that balancers with
placement hunt offer. The server then gets only connections that no other server takes.
With --wait, drain ends when the service has no open connection left on the server. This
takes at least three seconds, because a connection counts only after its handshake.
Balancers with other placements do not ask the server, and still send it new connections:
drain the server at those balancers.

With --self, drain is about the balancer itself. It withdraws the routes of all VIPs, or
with the section l2 it leaves its VIPs to other balancers. It ends when bgp.drain-delay has
passed and no packets have arrived for two seconds. Then the
balancer's process can be stopped, or the host. With --wait=false, drain ends at once. The
balancer stays drained across restarts. With --until-restart, it stays drained until its
process is restarted. Once the unit segue-drain.service is enabled, it makes this drain at
each shutdown of the host.`,
		Example: "  segue drain web/s3\n  segue drain web/s3 --wait --timeout 10m && ssh s3 reboot\n" +
			"  segue drain web --wait && reboot\n" +
			"  segue drain --self --until-restart --timeout 2m && reboot",
		Args: o.arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.timeout < 0:
				return fmt.Errorf("--timeout %s: must not be negative", o.timeout)
			case o.untilRestart && !o.self:
				return errors.New("--until-restart: only with --self")
			}
			ctx, cancel := o.limit(cmd.Context())
			defer cancel()
			if o.self {
				o.wait = o.wait || !cmd.Flags().Changed("wait")
				return drainSelf(ctx, cmd.OutOrStdout(), &o)
			}
			return drain(ctx, cmd.OutOrStdout(), args[0], &o)
		},
	}
	o.addFlags(cmd)
	o.addSelfFlag(cmd)
	cmd.ValidArgsFunction = o.complete
	cmd.Flags().BoolVar(&o.wait, "wait", false,
		"wait until the server has no flow or connection left; with --self, the default: until no packets arrive")
	cmd.Flags().BoolVar(&o.untilRestart, "until-restart", false,
		"with --self: the next process of the balancer is not drained")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "wait at most so long; 0: without limit")
	return cmd
}

// limit returns a context that ends when --timeout has passed.
func (o *drainOptions) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if o.timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, o.timeout)
}

func newUndrain() *cobra.Command {
	var o drainOptions
	cmd := &cobra.Command{
		Use:   "undrain SERVICE/SERVER|SERVICE",
		Short: "Give a drained server new connections again",
		Long: `Undrain gives a server new connections again. If the configuration file drains the server,
undrain makes an override. On a server, undrain SERVICE makes the agent accept connections
by its policy again. With --self, the balancer announces the routes of its VIPs again.`,
		Example: "  segue undrain web/s3\n  segue undrain --self",
		Args:    o.arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.self {
				return undrainSelf(cmd.Context(), cmd.OutOrStdout(), &o)
			}
			return undrain(cmd.Context(), cmd.OutOrStdout(), args[0], &o)
		},
	}
	o.addFlags(cmd)
	o.addSelfFlag(cmd)
	cmd.ValidArgsFunction = o.complete
	return cmd
}

func (o *drainOptions) addSelfFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&o.self, "self", false, "the balancer itself instead of a server")
}

// arguments requires the name of a server, or none with --self.
func (o *drainOptions) arguments(cmd *cobra.Command, args []string) error {
	if o.self {
		if len(args) > 0 {
			return fmt.Errorf("%q: --self is about the balancer itself, not about a server", args[0])
		}
		if o.ifVersion != "" {
			return errors.New("--if-version cannot be used with --self: the balancer itself has no version")
		}
		return nil
	}
	return cli.Arguments("SERVICE/SERVER, or SERVICE on a server")(cmd, args)
}

// complete returns the names of all servers, or of an agent's services, for shell completion.
func (o *drainOptions) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	k := &serverKind
	if _, role, err := connect(cmd.Context(), o.instance); err == nil && role == api.RoleAgent {
		k = &serviceKind
	}
	return k.complete(cmd.Context(), o.instance), cobra.ShellCompDirectiveNoFileComp
}

// connect returns a client of a balancer or an agent on this host, and its role.
func connect(ctx context.Context, instance string) (client *api.Client, role string, err error) {
	if client, err = clientOf(instance); err != nil {
		return nil, "", err
	}
	self, err := client.Identify(ctx)
	if err != nil {
		return nil, "", err
	}
	return client, self.Role, nil
}

// balancerOn returns a client of a balancer on this host.
func balancerOn(ctx context.Context, instance string) (*api.Client, error) {
	client, role, err := connect(ctx, instance)
	if err == nil && role != api.RoleBalancer {
		return nil, fmt.Errorf("instance %q is an agent: name a balancer with --instance", client.Instance())
	}
	return client, err
}

// clientOf returns a client of a balancer or an agent on this host.
func clientOf(instance string) (*api.Client, error) {
	if instance != "" { // unlike choose, this needs no permission to read the data paths on the host
		return api.NewClient(instance), checkInstance(instance)
	}
	found, err := choose("")
	if err != nil {
		return nil, err
	}
	return api.NewClient(found.Name), nil
}

// drain drains a server or a service. With --wait, it then waits until no flow or connection is
// left. Without --wait, it prints how many there were before the drain, if it knows the number.
// With --dry-run, it only prints what would change.
func drain(ctx context.Context, out io.Writer, name string, o *drainOptions) error {
	client, d, err := o.setDrained(ctx, out, name, true)
	if err != nil || o.dryRun {
		return err
	}
	if !o.wait {
		if d.left != nil {
			_, err = fmt.Fprintln(out, d.describeLeft(*d.left))
		}
		return err
	}
	if !d.isCounted {
		return fmt.Errorf("%s is drained; its %ss cannot be counted, because %s",
			name, d.noun, d.whyUncounted)
	}
	// awaitEnd makes dry runs. They would fail with --if-version, because the drain has changed the
	// version.
	client.IfVersion = ""
	return awaitEnd(ctx, out, client, name)
}

func undrain(ctx context.Context, out io.Writer, name string, o *drainOptions) error {
	_, _, err := o.setDrained(ctx, out, name, false)
	return err
}

// setDrained drains or undrains a server or a service, and prints the result. It returns the client
// that it used, and the state before the change.
func (o *drainOptions) setDrained(
	ctx context.Context, out io.Writer, name string, drained bool,
) (*drainClient, *drainable, error) {
	client, role, err := connect(ctx, o.instance)
	if err != nil {
		return nil, nil, err
	}
	c := &drainClient{client, role, patience}
	d, err := c.find(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	if err := o.setTerms(ctx, client); err != nil {
		return nil, nil, err
	}
	changed, err := client.Change(ctx, o.dryRun, d.edit(drained))
	if err != nil {
		return nil, nil, err
	}
	if o.dryRun {
		printChanged(out, changed, true)
		return c, d, nil
	}
	fmt.Fprintln(out, describeDrained(d, changed, drained))
	if drained && d.isUnasked {
		fmt.Fprintf(out, "warning: no balancer has offered this server a connection of %s: balancers without placement "+
			"hunt do not ask the server; drain it at those balancers\n", name)
	}
	tellWarnings(out, changed.Warnings)
	if role == api.RoleBalancer {
		err = awaitSwitch(ctx, out, client, switchWait)
	}
	return c, d, err
}

// describeDrained tells what a drain or an undrain has changed.
func describeDrained(d *drainable, changed *api.Changed, drained bool) string {
	name := strings.TrimSuffix(d.service+"/"+d.server, "/")
	what := d.ifDrained
	if !drained {
		what = d.ifUndrained
	}
	if len(changed.Changes) == 0 && drained {
		return fmt.Sprintf("%s is drained already: it %s", name, what)
	}
	if len(changed.Changes) == 0 {
		return fmt.Sprintf("%s is not drained: it %s", name, what)
	}
	if !drained {
		return fmt.Sprintf("%s %s again", name, what)
	}
	return fmt.Sprintf("%s is drained: it %s", name, what)
}

// drainable is a server of a balancer's service, or a service of an agent.
type drainable struct {
	service, server string
	noun            string // "live flow" or "connection"
	ifDrained       string // what it does when it is drained
	ifUndrained     string // what it does when it is not drained
	isCounted       bool   // the remaining flows or connections can be counted
	whyUncounted    string // if they cannot be counted: why
	drained         bool
	isUnasked       bool          // no balancer has offered a connection: the drain may have no effect
	left            *uint64       // how many flows or connections it has; nil: not counted yet
	age             time.Duration // how long ago they were counted
	opening         time.Duration // longest time from when a connection is accepted until it is counted
	stays           stay
}

// stay is the reason why a wait for the end of a drain may never end.
type stay struct {
	why       string // empty: there is no reason
	isEndless bool   // the wait cannot end by itself: say so at once, and not only after a while
}

// staysOf tells why a drained server of a balancer's service may keep flows. The result is empty if
// its flows move to other servers.
func staysOf(s *api.Service) stay {
	switch {
	case s.Protocol != string(desired.UDP):
		return stay{why: "connections of TCP stay until a client or the server ends them: end them at the server"}
	case s.OnDrain == string(desired.OnDrainKeep):
		return stay{isEndless: true, why: fmt.Sprintf("flows of UDP stay while their clients send, because "+
			"on-drain of service %s is %s: set it to %s",
			s.Name, desired.OnDrainKeep, desired.OnDrainMoveUDP)}
	case !s.TakesFlows:
		return stay{isEndless: true, why: fmt.Sprintf("flows of UDP stay while their clients send, because "+
			"no other server of service %s gets new connections: add or undrain one", s.Name)}
	}
	return stay{}
}

// edit returns the change that drains or undrains d.
func (d *drainable) edit(drained bool) api.Edit {
	return api.Edit{Override: api.Override{
		Service: d.service, Server: d.server, Set: desired.Fields{"drained": drained},
	}}
}

func (d *drainable) describeLeft(n uint64) string {
	if n == 1 {
		return fmt.Sprintf("1 %s is left", d.noun)
	}
	return fmt.Sprintf("%d %ss are left", n, d.noun)
}

// patience is how long drain waits before it says why the wait may never end. If stay.isEndless is
// true, it says so at once.
const patience = time.Minute

// drainClient finds what a process can drain: servers if it is a balancer, services if it is an
// agent.
type drainClient struct {
	*api.Client
	role     string
	patience time.Duration
}

// isUndrained tells whether the desired state does not drain d. A balancer of a fleet may follow
// the desired state only later. isUndrained makes a dry run of a drain: if the drain would change
// something, d is not drained. If the dry run fails, for example because the store does not answer,
// the result is false.
func (c *drainClient) isUndrained(ctx context.Context, d *drainable) bool {
	changed, err := c.Change(ctx, true, d.edit(true))
	return err == nil && len(changed.Changes) > 0
}

func (c *drainClient) find(ctx context.Context, name string) (*drainable, error) {
	if c.role == api.RoleAgent {
		return findService(ctx, c.Client, name)
	}
	return findServer(ctx, c.Client, name)
}

// findServer finds the server that is named SERVICE/SERVER.
func findServer(ctx context.Context, client *api.Client, name string) (*drainable, error) {
	wantedService, wantedServer, err := parseServerName(name)
	if err != nil {
		return nil, err
	}
	s, err := client.Service(ctx, wantedService)
	if err != nil {
		return nil, err
	}
	if s == nil {
		return nil, noServer(name)
	}
	for _, server := range s.Servers {
		if server.Name != wantedServer {
			continue
		}
		d := &drainable{
			service: s.Name, server: server.Name, noun: "live flow", drained: server.Drained,
			ifDrained: "gets no new connections", ifUndrained: "gets new connections",
			isCounted: s.HasFlowTable, whyUncounted: "the service has no flow table", stays: staysOf(s),
		}
		if f := server.Flows; f != nil {
			d.left, d.age = &f.Live, time.Duration(f.Age*float64(time.Second))
		}
		return d, nil
	}
	return nil, noServer(name)
}

func noServer(name string) error {
	return fmt.Errorf("%q: the balancer has no such server; segue status shows all", name)
}

// openingTime is how long the handshake of an accepted connection may take. An agent counts the
// connection when the handshake has ended. The kernel repeats a SYN-ACK after one second (RFC 6298
// section 2). Two more seconds are for the client's answer.
const openingTime = 3 * time.Second

// findService finds a service of an agent.
func findService(ctx context.Context, client *api.Client, name string) (*drainable, error) {
	services, err := client.AgentServices(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range services {
		if s.Name != name {
			continue
		}
		d := &drainable{
			service: name, noun: "connection", drained: s.Drained, opening: openingTime,
			isUnasked:   s.Accept != nil && s.Accept.Offered == 0,
			ifDrained:   "refuses the connections that balancers offer",
			ifUndrained: "accepts connections by its policy",
			isCounted:   s.Connections != nil, whyUncounted: "no control groups, version 2, are mounted",
			stays: stay{why: "connections stay until a client or the application ends them: end them in the " +
				"application"},
		}
		if s.Connections != nil {
			left := uint64(*s.Connections)
			d.left = &left
		}
		return d, nil
	}
	return nil, fmt.Errorf("%q: the agent has no such service; segue service list shows all", name)
}

// awaitEnd waits until a drained server or service has no flow or connection left. It prints their
// number each time the number changes. It returns an error if a request fails, if the context ends,
// or if somebody undrains the server or service meanwhile.
//
// awaitEnd ignores a count that ended before the drain. A count that ended after the drain has also
// begun after the drain, because a balancer does not count while it changes its servers. The number
// 0 ends the wait only if the count ended more than d.opening after the drain. By then, each
// connection that was accepted before the drain is counted.
//
// A balancer of a fleet may follow the drain some time after the store has it. Until then, awaitEnd
// asks for the desired state to learn whether the drain still holds.
func awaitEnd(ctx context.Context, out io.Writer, client *drainClient, name string) error {
	var last *uint64           // the number that was printed last
	var drainedSince time.Time // when the process was first seen to follow the drain; zero: not yet
	var d *drainable
	said := "" // the reason for a wait without end that was printed last
	for {
		asked := time.Now()
		found, err := client.find(ctx, name)
		if err != nil {
			return d.endedEarly(ctx, err, name, last)
		}
		d = found
		wasDrained := !drainedSince.IsZero()
		switch {
		case d.drained && !wasDrained:
			drainedSince = time.Now() // not asked: the drain may have begun after the request was sent
		case !d.drained && (wasDrained || client.isUndrained(ctx, d)):
			return fmt.Errorf("somebody else has undrained %s", name)
		}
		drainedFor := asked.Sub(drainedSince) // has no meaning unless d.drained
		isCountNewer := d.left != nil && d.age < drainedFor
		if d.drained && isCountNewer {
			if last == nil || *last != *d.left {
				fmt.Fprintln(out, d.describeLeft(*d.left))
			}
			last = d.left
			if *last == 0 && d.age+d.opening < drainedFor {
				return nil
			}
			isTimeToSay := d.stays.isEndless || drainedFor >= client.patience
			if *last > 0 && isTimeToSay && d.stays.why != said {
				said = d.stays.why
				d.stays.print(ctx, out)
			}
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return d.endedEarly(ctx, ctx.Err(), name, last)
		}
	}
}

// print prints why a wait may not end. It prints nothing if the wait will end.
func (s stay) print(ctx context.Context, out io.Writer) {
	if s.why != "" {
		fmt.Fprintln(out, s.why+orLimit(ctx))
	}
}

// orLimit returns the end of a message about a wait: advice to limit it, if it has no limit.
func orLimit(ctx context.Context) string {
	if _, isLimited := ctx.Deadline(); isLimited {
		return ""
	}
	return ", or limit the wait by --timeout"
}

// endedEarly returns the error of a wait that err has ended. If the context has ended, the error
// says what was left at the last count. last is nil if nothing was counted; d may be nil then.
func (d *drainable) endedEarly(ctx context.Context, err error, name string, last *uint64) error {
	if ctx.Err() == nil {
		return err
	}
	left := "nothing was counted"
	if last != nil {
		left = d.describeLeft(*last)
	}
	if last != nil && *last > 0 && d.stays.why != "" {
		left += " (" + d.stays.why + ")"
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("--timeout has passed: %s; %s stays drained", left, name)
	}
	return fmt.Errorf("interrupted: %s; %s stays drained", left, name)
}
