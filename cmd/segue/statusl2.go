// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/l2"
)

// whyNotAble has a text for each reason that is worth a warning. A drain has its own warning.
var whyNotAble = map[l2.Reason]string{
	l2.NotServed: "none of its services can serve",
	l2.Unchecked: "no server has passed a health check yet",
	l2.HeldDown:  "held down after it was given up",
	l2.LinkDown:  "the interface cannot be used",
}

// printL2 prints warnings, and then tables of the balancers and VIPs of the link.
func printL2(out io.Writer, s *l2.LinkState, now time.Time) error {
	if s == nil {
		return nil
	}
	fmt.Fprintf(out, "\nl2: on %s with %s, lease %s\n", s.Interface, cmp.Or(s.MAC, "no MAC address"),
		wholeSeconds(s.Lease))
	if s.Drained != nil {
		fmt.Fprintf(out, "BALANCER IS DRAINED since %s: it answers for no VIP (segue undrain --self)\n",
			s.Drained.Format(time.RFC3339))
	}
	if s.Problem != "" {
		fmt.Fprintf(out, "OTHER BALANCERS UNKNOWN: VIPs stay where they are: %s\n", s.Problem)
	}
	for _, v := range s.VIPs {
		names := strings.Join(v.Services, ", ")
		if v.Leader == "" {
			fmt.Fprintf(out, "NOT ANSWERED: %s: no balancer answers for it: %s\n", v.Address, names)
		}
		if why := whyNotAble[v.Reason]; why != "" {
			fmt.Fprintf(out, "NOT ABLE TO ANSWER: %s: %s: %s\n", v.Address, why, names)
		}
	}
	table := newTable(out)
	table.row("balancer", "MAC", "able", "VIPs")
	for _, b := range s.Balancers {
		table.row(b.Name, cmp.Or(b.MAC, "-"), strconv.Itoa(b.Able), strconv.Itoa(b.VIPs))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	table = newTable(out)
	table.row("VIP", "leader", "answers", "for", "services")
	for _, v := range s.VIPs {
		answers := "no"
		if v.Answers {
			answers = "yes"
		}
		table.row(v.Address, cmp.Or(v.Leader, "NONE"), answers, wholeSeconds(now.Sub(v.Since).Seconds()),
			strings.Join(v.Services, ", "))
	}
	return table.Flush()
}
