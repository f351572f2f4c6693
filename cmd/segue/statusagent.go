// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/segue-lb/segue/internal/agent"
)

// printAgent prints the status of an agent: the instance, the services and the reasons of packets.
func printAgent(out io.Writer, s *agent.Snapshot) error {
	printHeader(out, &s.Snapshot, isAttached(s.Attachment))
	printConfiguration(out, s.Configuration)
	printHiddenTags(out, s.Attachment)
	err := errors.Join(printPresence(out, s.Services), printOffers(out, s.Services), printIDs(out, s.Services))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nsignals: %d create, %d remove; %d did not fit\n",
		s.Signals["create"], s.Signals["remove"], s.Signals["too_long"])
	return printReasons(out, "reason", s.Reasons)
}

// printPresence prints a table of the services: whether the server has the VIP and a socket that
// listens, the condition that the agent tells balancers, and the open connections.
func printPresence(out io.Writer, services []*agent.ServiceState) error {
	if len(services) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("service", "address", "VIP", "listening", "condition", "connections")
	for _, s := range services {
		vip := "yes"
		if !s.VIPPresent {
			vip = "MISSING"
		}
		table.row(s.Name, fmt.Sprintf("%s %s", s.Protocol, addressOf(s.VIP, s.VIPs, s.Port, s.Ports)), vip,
			describeListening(s.Listening), string(s.Condition), describeConnections(s))
	}
	return table.Flush()
}

func describeListening(l agent.Listening) string {
	if l == agent.ListeningNo {
		return "NO"
	}
	return cmp.Or(string(l), "-")
}

// describeConnections formats the number of open connections of an agent's service, and by how much
// it was corrected because the data path had miscounted.
func describeConnections(s *agent.ServiceState) string {
	connections := "-"
	if s.Connections != nil {
		connections = strconv.FormatUint(uint64(*s.Connections), 10)
	}
	if s.Corrected != 0 {
		connections += fmt.Sprintf(" (corrected by %d)", s.Corrected)
	}
	return connections
}

// printOffers prints a table of the services to which balancers can offer connections, if there are
// any.
func printOffers(out io.Writer, services []*agent.ServiceState) error {
	isOffered := func(s *agent.ServiceState) bool { return s.Accept != nil }
	if !slices.ContainsFunc(services, isOffered) {
		return nil
	}
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("service", "policy", "load", "threshold", "offered", "accepted", "of which stale",
		"refused", "refused down", "handed back", "taken back", "forced", "offered/s")
	for _, s := range services {
		a := s.Accept
		if a == nil {
			continue
		}
		rate := "-"
		if a.OfferedRate != nil {
			rate = short(*a.OfferedRate)
		}
		row := append([]string{s.Name, string(a.Policy), a.DescribeLoad(), a.DescribeThreshold()},
			numbers(a.Offered, a.Accepted, a.Offers["accepted_stale"], a.Offers["refused"],
				a.Offers["refused_down"], a.Offers["returned"], a.Offers["taken_back"],
				a.Offers["forced"])...)
		table.row(append(row, rate)...)
	}
	return table.Flush()
}

// printIDs prints the services whose QUIC connection IDs the agent compares with the server ID. A
// table of the results follows each service.
func printIDs(out io.Writer, services []*agent.ServiceState) error {
	for _, s := range services {
		q := s.QUIC
		if q == nil {
			continue
		}
		fmt.Fprintf(out, "\nservice %s: quic-id %s (%s)", s.Name, q.QUICID, q.QUIC)
		if q.FormerQUIC != nil {
			fmt.Fprintf(out, ", former-quic-id %s (%s)", q.FormerQUICID, q.FormerQUIC)
		}
		fmt.Fprintln(out)
		table := newTable(out)
		table.row("connection IDs", "packets", "last")
		for _, result := range slices.Sorted(maps.Keys(q.IDs)) {
			ids := q.IDs[result]
			table.row(result, strconv.FormatUint(ids.Packets, 10), describeLast(ids))
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// describeLast returns the last connection ID that was counted: "-" if there was none, and "empty"
// if it has no octets.
func describeLast(ids agent.IDCount) string {
	if ids.Packets == 0 {
		return "-"
	}
	return cmp.Or(ids.Last, "empty")
}
