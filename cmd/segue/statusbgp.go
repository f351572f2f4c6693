// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/l2"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/wording"
)

// balancerStatus is the state of a balancer's tables, of its BGP speaker and of its switch.
type balancerStatus struct {
	*inspect.Snapshot
	BGP    *bgp.State       `json:"bgp,omitempty"`    // nil: no process answers, or it does not use BGP
	L2     *l2.LinkState    `json:"l2,omitempty"`     // nil: no process answers, or it does not use layer 2
	Switch *p4switch.Status `json:"switch,omitempty"` // nil: no process answers, or there is no switch
}

// RatesSince sets the rates since an earlier status.
func (s *balancerStatus) RatesSince(earlier *balancerStatus) {
	s.Snapshot.RatesSince(earlier.Snapshot)
	if s.Switch != nil && earlier.Switch != nil {
		s.Switch.RatesSince(earlier.Switch, s.Time.Sub(earlier.Time))
	}
}

// bgpPatience is how long status waits for an answer of the process. The process answers at once,
// unless it hangs or is starting.
const bgpPatience = time.Second

// readAnnouncements asks the process of a balancer how it announces its VIPs. If the process does not
// answer, the result is nil, and status shows the tables alone.
func readAnnouncements(ctx context.Context, instance string) (*bgp.State, *l2.LinkState) {
	ctx, cancel := context.WithTimeout(ctx, bgpPatience)
	defer cancel()
	self, err := api.NewClient(instance).Self(ctx)
	if err != nil {
		return nil, nil
	}
	return self.BGP, self.L2
}

// whyNotAnnounced has a text for each reason that is worth a warning. A drain has its own warning.
var whyNotAnnounced = map[bgp.Reason]string{
	bgp.NotServed: "none of its services can serve",
	bgp.Unchecked: "no server has passed a health check yet",
	bgp.NoPeer:    "no peer takes routes of its family",
	bgp.HeldDown:  "held down after a withdrawal",
}

// printBGP prints warnings, and then tables of the BGP sessions and routes.
func printBGP(out io.Writer, s *bgp.State, now time.Time) error {
	if s == nil {
		return nil
	}
	fmt.Fprintf(out, "\nbgp: AS %d, router ID %s\n", s.ASN, s.RouterID)
	if s.Drained != nil {
		effect := "no route is announced"
		if s.DrainShifts {
			effect = "its routes are less preferred"
		}
		fmt.Fprintf(out, "BALANCER IS DRAINED since %s: %s (segue undrain --self)\n",
			s.Drained.Format(time.RFC3339), effect)
	}
	for _, r := range s.Routes {
		if r.IsAnnouncedToNobody() {
			fmt.Fprintf(out, "ANNOUNCED TO NOBODY: %s: no peer that takes it has a session: %s\n",
				r.Prefix, strings.Join(r.Services, ", "))
		}
		if why := whyNotAnnounced[r.Reason]; why != "" {
			fmt.Fprintf(out, "NOT ANNOUNCED: %s: %s: %s\n", r.Prefix, why, strings.Join(r.Services, ", "))
		}
	}
	ago := func(t time.Time) string { return wholeSeconds(now.Sub(t).Seconds()) }
	table := newTable(out)
	table.row("peer", "AS", "session", "for", "prefixes", "hold time", "keeps routes", "last end")
	for _, p := range s.Peers {
		state, prefixes, holdTime, keeps := strings.ToUpper(p.State), "-", "-", "-"
		if p.IsEstablished() {
			state, prefixes, holdTime = p.State, strconv.FormatUint(p.Prefixes, 10), wholeSeconds(p.HoldTime)
			keeps = "NO"
			if p.KeepsRoutes {
				keeps = "yes"
			}
		}
		address := p.Address
		if p.Neighbor != "" {
			address += " (" + p.Neighbor + ")"
		}
		table.row(address, strconv.FormatUint(uint64(p.ASN), 10), state, ago(p.Since),
			prefixes, holdTime, keeps, p.Reason)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	table = newTable(out)
	table.row("route", "announced", "for", "attributes", "services")
	for _, r := range s.Routes {
		announced := fmt.Sprintf("yes, to %d of %s", r.Established, wording.Count(r.Peers, "peer"))
		if !r.Announced {
			announced = "NO"
		}
		table.row(r.Prefix, announced, ago(r.Since), attributesOf(&r), strings.Join(r.Services, ", "))
	}
	return table.Flush()
}

// attributesOf returns the attributes of a route in one line.
func attributesOf(r *bgp.Route) string {
	var all []string
	if r.Prepend > 0 {
		all = append(all, fmt.Sprintf("prepend=%d", r.Prepend))
	}
	if r.MED != nil {
		all = append(all, fmt.Sprintf("med=%d", *r.MED))
	}
	if r.LocalPref != nil {
		all = append(all, fmt.Sprintf("local-pref=%d", *r.LocalPref))
	}
	all = append(all, r.Communities...)
	return cmp.Or(strings.Join(all, " "), "-")
}
