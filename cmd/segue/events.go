// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/plural"
)

func newEvents() *cobra.Command {
	var instance string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print the events of a balancer or an agent as they happen",
		Long: `Print the events of a balancer or an agent as they happen, until Ctrl-C: servers that become
unfit for new connections or fit again, drains, changes of services and servers, refused
reloads, and BGP sessions and routes.`,
		Example: "  segue events\n  segue events --json | jq 'select(.kind == \"server_down\")'",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := clientOf(instance)
			if err != nil {
				return err
			}
			write := printEvent
			if asJSON {
				write = func(out io.Writer, e *events.Event) error { return json.NewEncoder(out).Encode(e) }
			}
			return client.Events(cmd.Context(), func(e events.Event) error {
				return write(cmd.OutOrStdout(), &e)
			})
		},
	}
	instanceFlag(cmd, &instance)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each event as a line of JSON")
	return cmd
}

// printEvent prints an event as a line, and a line for each further change.
func printEvent(out io.Writer, e *events.Event) error {
	var parts []string
	if e.Service != "" {
		parts = append(parts, strings.TrimSuffix(e.Service+"/"+e.Server, "/"))
	}
	for _, of := range []string{e.Prefix, e.Peer} {
		if of != "" {
			parts = append(parts, of)
		}
	}
	if e.Flows != nil {
		parts = append(parts, plural.Count(int(*e.Flows), "live flow"))
	}
	if e.Reason != "" {
		parts = append(parts, e.Reason)
	}
	if len(e.Changes) == 1 {
		parts = append(parts, e.Changes[0])
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
