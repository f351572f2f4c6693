// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/p4switch"
)

// switchPatience is how long status waits for the answer of the process, which reads the counters of
// the switch.
const switchPatience = 3 * time.Second

// readSwitch asks the process of a balancer for the state of its switch, with one of its services, or
// with all if the name is empty. It returns nil if the process does not answer, or if there is no
// switch.
func readSwitch(ctx context.Context, instance, service string) *p4switch.Status {
	ctx, cancel := context.WithTimeout(ctx, switchPatience)
	defer cancel()
	s, err := api.NewClient(instance).Switch(ctx)
	if err != nil {
		return nil
	}
	if service != "" {
		s.Services = slices.DeleteFunc(s.Services, func(s p4switch.ServiceStatus) bool { return s.Name != service })
		s.Passed = slices.DeleteFunc(s.Passed, func(s p4switch.PassedService) bool { return s.Name != service })
	}
	return s
}

// printSwitch prints the state of the switch, if there is one: whether it follows, a table of the
// services, and the reasons of its packets.
func printSwitch(out io.Writer, all *balancerStatus) error {
	s := all.Switch
	if s == nil {
		return nil
	}
	fmt.Fprintf(out, "\nswitch %s: device %d, election ID %d, %d entries, %s since %s\n",
		s.Address, s.Device, s.ElectionID, s.Entries, describeFollowing(s), s.Since.Format(time.RFC3339))
	if s.Problem != "" {
		fmt.Fprintf(out, "  %s\n", s.Problem)
	}
	table := newTable(out)
	there := "on the switch"
	if !s.Follows {
		there = "last seen on the switch"
	}
	table.row("service", there, "here", "entries")
	for _, service := range s.Services {
		table.row(service.Name, describeRows(&service), describeOwn(all.Snapshot, service.Name),
			strconv.Itoa(service.Entries))
	}
	for _, service := range s.Passed {
		table.row(service.Name, "passes to this host: "+service.Reason, describeOwn(all.Snapshot, service.Name), "-")
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if s.Uncounted != "" {
		fmt.Fprintf(out, "THE COUNTERS OF THE SWITCH CANNOT BE READ: %s\n", s.Uncounted)
		return nil
	}
	return printReasons(out, "reason of the switch", s.Reasons)
}

func describeFollowing(s *p4switch.Status) string {
	if s.Follows {
		return "follows"
	}
	return "DOES NOT FOLLOW"
}

// describeRows returns the generation whose rows are in force on the switch.
func describeRows(s *p4switch.ServiceStatus) string {
	switch {
	case s.Generation != nil:
		return fmt.Sprintf("generation %d, %s", *s.Generation, s.Digest)
	case s.Entries == 0:
		return "NOTHING"
	}
	return "UNKNOWN ROWS"
}

// describeOwn returns the generation of the balancer's own table.
func describeOwn(s *inspect.Snapshot, name string) string {
	for _, service := range s.Services {
		if service.Name == name {
			return fmt.Sprintf("generation %d, %s", service.Generation, service.Digest)
		}
	}
	return "-"
}
