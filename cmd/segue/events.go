// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/wording"
)

func newEvents() *cobra.Command {
	var instance, since string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print the last events of a balancer or an agent, and new events as they happen",
		Long: `Print the last 100 events of a balancer or an agent, and then new events as they happen, until
Ctrl-C. Examples of events: a server becomes unfit for new connections or fit again, a
server is drained, somebody changes services or servers, a reload is refused, a BGP session
ends, a route is withdrawn.

With --since, print the events since a time instead of the last 100. A process keeps at least
its last 3,000 events. The events of an earlier process are gone. If the process ends, the
command says so on standard error, and waits until the process has started again. The first
event of a process is "started".`,
		Example: "  segue events\n  segue events --since 1h\n  segue events --since 2026-11-26T12:00:00Z\n" +
			"  segue events --json | jq 'select(.kind == \"server_down\")'",
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			from := api.EventsFrom{Last: lastEvents}
			if cmd.Flags().Changed("since") {
				begin, err := parseSince(since, time.Now())
				if err != nil {
					return err
				}
				from = api.EventsFrom{Since: begin}
			}
			client, err := clientOf(instance)
			if err != nil {
				return err
			}
			write := printEvent
			if asJSON {
				write = func(out io.Writer, e *events.Event) error { return json.NewEncoder(out).Encode(e) }
			}
			each := func(e events.Event) error { return write(cmd.OutOrStdout(), &e) }
			return client.Events(cmd.Context(), from, each, func() {
				fmt.Fprintf(cmd.ErrOrStderr(), "the process of the instance %q has ended; waiting until it has "+
					"started again\n", client.Instance())
			})
		},
	}
	instanceFlag(cmd, &instance)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each event as a line of JSON")
	cmd.Flags().StringVar(&since, "since", "",
		"begin with the events since a `time`, such as 2026-11-26T12:00:00Z, or for a duration, such as 1h")
	return cmd
}

// lastEvents is how many of the earlier events the command prints without --since.
const lastEvents = 100

// parseSince reads a time, or a duration before now.
func parseSince(text string, now time.Time) (time.Time, error) {
	if age, err := time.ParseDuration(text); err == nil && age > 0 {
		return now.Add(-age), nil
	}
	for _, form := range []string{time.RFC3339, time.DateOnly, "2006-01-02 15:04", time.DateTime} {
		if at, err := time.ParseInLocation(form, text, time.Local); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("--since %q: must be a duration such as 30m, or a time such as "+
		"2026-11-26T12:00:00Z or \"2026-11-26 12:00\"", text)
}

// printEvent prints an event as a line. If it has several changes, a line for each change follows.
func printEvent(out io.Writer, e *events.Event) error {
	var parts []string
	if e.Service != "" {
		parts = append(parts, strings.TrimSuffix(e.Service+"/"+e.Server, "/"))
	}
	for _, name := range []string{e.Prefix, e.Peer} {
		if name != "" {
			parts = append(parts, name)
		}
	}
	if e.Flows != nil {
		parts = append(parts, wording.Count(int(*e.Flows), "live flow"))
	}
	if e.Reason != "" {
		parts = append(parts, e.Reason)
	}
	if len(e.Changes) == 1 {
		// The event's kind says "changed" already.
		parts = append(parts, strings.TrimSuffix(e.Changes[0], " "+string(events.Changed)))
	}
	if e.By != "" {
		parts = append(parts, "by "+e.By)
	}
	line := e.Time.Format(time.RFC3339) + " " + string(e.Kind)
	if len(parts) > 0 {
		line += " " + strings.Join(parts, ": ")
	}
	if len(e.Changes) > 1 {
		line += "\n    " + strings.Join(e.Changes, "\n    ")
	}
	_, err := fmt.Fprintln(out, line)
	return err
}
