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
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// drainOptions are the flags of drain and undrain.
type drainOptions struct {
	target
	self    bool // not a server, but the balancer itself
	wait    bool
	timeout time.Duration
}

func newDrain() *cobra.Command {
	var o drainOptions
	cmd := &cobra.Command{
		Use:   "drain SERVICE/SERVER",
		Short: "Give a server no new connections",
		Long: `Drain gives a server no new connections. Its connections stay with it. This holds until
"segue undrain", also across reloads and restarts of the balancer: it is an override,
which segue status shows apart from the configuration file.

With --wait, drain ends when the server has no flow left in the flow table, and shows how
many are left until then. The flows are counted every five seconds. The exit code is 1 if
--timeout passes first; the server stays drained.

Drain speaks with the process of the balancer on this host. Each balancer of a service
has its own overrides, unless the balancers share a store: then all of them drain the server.

With --self, drain is about the balancer itself. It withdraws the routes of all VIPs, and
ends when no packets have arrived for two seconds, and bgp.drain-delay has passed. The
process can then be stopped, and the host, too. --wait=false ends at once.`,
		Example: "  segue drain web/s3\n  segue drain web/s3 --wait --timeout 10m && ssh s3 reboot\n" +
			"  segue drain --self --timeout 2m && reboot",
		Args: o.arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.timeout < 0 {
				return fmt.Errorf("--timeout %s: must not be negative", o.timeout)
			}
			if o.self {
				o.wait = o.wait || !cmd.Flags().Changed("wait")
				return drainSelf(cmd.Context(), cmd.OutOrStdout(), &o)
			}
			return drain(cmd.Context(), cmd.OutOrStdout(), args[0], &o)
		},
	}
	o.addFlags(cmd)
	o.addSelfFlag(cmd)
	cmd.ValidArgsFunction = o.complete
	cmd.Flags().BoolVar(&o.wait, "wait", false,
		"wait until the server has no flow left; with --self: until no packets arrive, the default")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "wait at most so long; 0: without limit")
	return cmd
}

func newUndrain() *cobra.Command {
	var o drainOptions
	cmd := &cobra.Command{
		Use:   "undrain SERVICE/SERVER",
		Short: "Give a drained server new connections again",
		Long: `Undrain gives a server new connections again, also if the configuration file drains it.
Then it makes an override, as drain does. With --self, the balancer announces the routes
of its VIPs again.`,
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
		return nil
	}
	return arguments("SERVICE/SERVER")(cmd, args)
}

// complete returns the names of all servers for the completion of a shell.
func (o *drainOptions) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return completeNames(cmd.Context(), o.instance, serverNames), cobra.ShellCompDirectiveNoFileComp
}

// clientOf returns a client of a balancer on this host.
func clientOf(instance string) (*api.Client, error) {
	if instance != "" {
		return api.NewClient(instance), nil // also for users who may not read the tables
	}
	found, err := choose("")
	if err != nil {
		return nil, err
	}
	if found.Role != datapath.RoleBalancer {
		return nil, fmt.Errorf("instance %q is an agent: name a balancer with --instance", found.Name)
	}
	return api.NewClient(found.Name), nil
}

// clientOfAny returns a client of a balancer or an agent on this host.
func clientOfAny(instance string) (*api.Client, error) {
	if instance != "" {
		return api.NewClient(instance), nil
	}
	found, err := choose("")
	if err != nil {
		return nil, err
	}
	return api.NewClient(found.Name), nil
}

func drain(ctx context.Context, out io.Writer, name string, o *drainOptions) error {
	client, server, err := o.setDrained(ctx, out, name, true)
	switch {
	case err != nil || o.dryRun:
		return err
	case o.wait && !server.isCounted:
		return fmt.Errorf("%s is drained; its flows cannot be counted, because the service has no "+
			"flow table", name)
	case o.wait:
	case server.state.Flows == nil:
		return nil
	default:
		_, err := fmt.Fprintln(out, describeLeft(server.state.Flows.Live))
		return err
	}
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	return awaitEnd(ctx, out, client, name)
}

func undrain(ctx context.Context, out io.Writer, name string, o *drainOptions) error {
	_, _, err := o.setDrained(ctx, out, name, false)
	return err
}

// setDrained drains a server, or ends that, and tells so. It returns the server as it was before.
func (o *drainOptions) setDrained(
	ctx context.Context, out io.Writer, name string, drained bool,
) (*api.Client, *namedServer, error) {
	client, err := clientOf(o.instance)
	if err != nil {
		return nil, nil, err
	}
	server, err := findServer(ctx, client, name)
	if err != nil {
		return nil, nil, err
	}
	changed, err := client.Change(ctx, o.dryRun, api.Edit{Override: api.Override{
		Service: server.service, Server: server.state.Name, Set: desired.Fields{"drained": drained},
	}})
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintln(out, describeDrained(name, changed, drained, o.dryRun))
	tellWarnings(out, changed.Warnings)
	return client, server, nil
}

func describeDrained(name string, changed *api.Changed, drained, dryRun bool) string {
	what := "gets no new connections"
	if !drained {
		what = "gets new connections"
	}
	if len(changed.Changes) == 0 {
		return fmt.Sprintf("%s %s already", name, what)
	}
	if dryRun {
		var items []string
		for _, change := range changed.Changes {
			items = append(items, change.Items...)
		}
		return "would change: " + strings.Join(items, ", ")
	}
	if !drained {
		return fmt.Sprintf("%s %s again", name, what)
	}
	return fmt.Sprintf("%s is drained: it %s", name, what)
}

// namedServer is a server of a service.
type namedServer struct {
	service   string
	isCounted bool // the service has a flow table
	state     *api.Server
}

// findServer finds the server that is named SERVICE/SERVER. Both names may contain slashes.
func findServer(ctx context.Context, client *api.Client, name string) (*namedServer, error) {
	services, err := client.Services(ctx)
	if err != nil {
		return nil, err
	}
	for i := range services {
		s := &services[i]
		for j := range s.Servers {
			if s.Name+"/"+s.Servers[j].Name == name {
				return &namedServer{s.Name, s.HasFlowTable, &s.Servers[j]}, nil
			}
		}
	}
	if !strings.Contains(name, "/") {
		return nil, fmt.Errorf("%q: must be SERVICE/SERVER, such as web/s1", name)
	}
	return nil, fmt.Errorf("%q: the balancer has no such server; segue status shows all", name)
}

// ageOf returns the time since flows were counted.
func ageOf(f *api.Flows) time.Duration { return time.Duration(f.Age * float64(time.Second)) }

func describeLeft(flows uint64) string {
	if flows == 1 {
		return "1 flow is left"
	}
	return fmt.Sprintf("%d flows are left", flows)
}

// awaitEnd waits until a drained server has no flow left, and prints how many there are whenever the
// number changes. Flows that were counted before the server was drained prove nothing. A balancer
// does not count while it changes its servers, so a later count began later.
//
// A balancer of a fleet may follow the drain later than the store has it.
func awaitEnd(ctx context.Context, out io.Writer, client *api.Client, name string) error {
	var last *uint64
	var drained time.Time // when this balancer was first seen to follow the drain
	for {
		asked := time.Now()
		server, err := findServer(ctx, client, name)
		if err != nil {
			return endedEarly(ctx, err, name, last)
		}
		if drained.IsZero() && server.state.Drained {
			drained = time.Now() // the change may have been made after the request was sent
		}
		if flows := server.state.Flows; flows != nil && !drained.IsZero() && ageOf(flows) < asked.Sub(drained) {
			if last == nil || *last != flows.Live {
				fmt.Fprintln(out, describeLeft(flows.Live))
			}
			if last = &flows.Live; flows.Live == 0 {
				return nil
			}
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return endedEarly(ctx, ctx.Err(), name, last)
		}
	}
}

// endedEarly returns the error of a wait that has ended with flows left.
func endedEarly(ctx context.Context, err error, name string, last *uint64) error {
	if ctx.Err() == nil {
		return err
	}
	left := "its flows were not counted"
	if last != nil {
		left = describeLeft(*last)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("--timeout has passed: %s; %s stays drained", left, name)
	}
	return fmt.Errorf("interrupted: %s; %s stays drained", left, name)
}
