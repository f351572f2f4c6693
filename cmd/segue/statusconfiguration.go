// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/rundir"
)

// printConfiguration prints the file, the overrides and the store that the process follows, and
// what is wrong with them. c is nil if no process runs the instance, or if the process has written
// no record.
func printConfiguration(out io.Writer, c *rundir.Configuration) {
	if c == nil {
		return
	}
	fmt.Fprintf(out, "configuration: %s, read %s\n", c.File, c.Read.Format(time.RFC3339))
	if len(c.Overrides) > 0 {
		var names desired.Names
		for _, o := range c.Overrides {
			names = append(names, o.String())
		}
		fmt.Fprintf(out, "overrides: %s\n", names)
	}
	printInvalidOverrides(out, c.InvalidOverrides)
	if c.Store != nil {
		fmt.Fprintf(out, "store: version %s\n", c.Store.Version)
		for _, problem := range c.Store.Problems {
			fmt.Fprintf(out, "  %s\n", problem)
		}
	}
	if c.Refused == nil {
		return
	}
	fmt.Fprintf(out, "RELOAD REFUSED at %s, the earlier configuration stays in force:\n",
		c.Refused.Time.Format(time.RFC3339))
	for _, problem := range c.Refused.Problems {
		fmt.Fprintf(out, "  %s\n", problem)
	}
}

// printInvalidOverrides warns about the overrides that the process leaves out, and prints their
// problems.
func printInvalidOverrides(out io.Writer, invalid []rundir.InvalidOverride) {
	if len(invalid) == 0 {
		return
	}
	fmt.Fprintln(out, "OVERRIDES ARE LEFT OUT, because they are invalid with the configuration file:")
	for _, o := range invalid {
		for _, problem := range o.Problems {
			fmt.Fprintf(out, "  %s: %s\n", describeInvalid(&o.Override), problem)
		}
	}
}

// describeInvalid names an invalid override, or all overrides if their file cannot be read.
func describeInvalid(o *desired.Override) string {
	if o.Service == "" {
		return "all"
	}
	return o.String()
}

// printUnsaved warns if the process of a balancer cannot write to its state directory.
func printUnsaved(out io.Writer, c *rundir.Configuration) {
	if c != nil && c.Unsaved != "" {
		fmt.Fprintf(out, "NOT SAVED: a restart forgets the former servers of services: %s\n", c.Unsaved)
	}
}

// uncheckedLasts is how long status shows that the balancer's host could not make a health check.
// The process records this failure every ten seconds while it lasts.
const uncheckedLasts = time.Minute

// printUnchecked warns if the balancer's host could not make health checks shortly before now.
func printUnchecked(out io.Writer, c *rundir.Configuration, now time.Time) {
	if c == nil || c.Unchecked == nil {
		return
	}
	if age := now.Sub(c.Unchecked.Time); age < uncheckedLasts {
		fmt.Fprintf(out, "CANNOT CHECK SERVERS, %v ago: %s\n", max(0, age).Round(time.Second), c.Unchecked.Reason)
	}
}
