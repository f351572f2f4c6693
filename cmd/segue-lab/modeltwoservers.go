// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/research/model"
)

func newModelTwoServers(asJSON *bool) *cobra.Command {
	speeds, weights := []string{"2", "1"}, []string{"2", "1"}
	load, observed, room := "100%", "100%", 16
	cmd := &cobra.Command{
		Use:   "two-servers",
		Short: "Compute HLB's model of two servers with unequal speeds",
		Long: `Two-servers computes the steady state of two servers behind one balancer, as in
section III of the paper on HLB. The balancer chooses by ECMP, WCMP, LSQ or SED.
"chain" has the results of the Markov chain. "apart" has the results of the equation that
the paper prints for the chain, in which the queues of the servers are independent.
"duration" is the paper's weighted duration of a flow, in units of the time that a
server of speed 1 needs for a flow. "flows" are the mean numbers of flows on the two
servers. "refused" is the share of flows that find no room.`,
		Example: "  segue-lab model two-servers --weights 1,2 --observed 50%",
		Args:    cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			s := model.TwoServers{Room: room}
			if s.Speeds, err = parsePair("--speeds", speeds); err != nil {
				return err
			}
			if s.Weights, err = parsePair("--weights", weights); err != nil {
				return err
			}
			positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 1) }
			if s.Load, err = parseShare("--load", load, "above 0%", positive); err != nil {
				return err
			}
			anyShare := func(v float64) bool { return v >= 0 && v <= 1 }
			s.Observed, err = parseShare("--observed", observed, "from 0% to 100%", anyShare)
			if err != nil {
				return err
			}
			if room < 1 || room > model.MaxRoom {
				return fmt.Errorf("--room %d: must be from 1 to %d", room, model.MaxRoom)
			}
			return twoServers(cmd.Context(), cmd.OutOrStdout(), s, *asJSON)
		},
	}
	cmd.Flags().StringSliceVar(&speeds, "speeds", speeds, "speeds of the servers, two `numbers`")
	cmd.Flags().StringSliceVar(&weights, "weights", weights,
		"speeds that WCMP and SED assume, two `numbers`")
	cmd.Flags().StringVar(&load, "load", load,
		"offered load as a `share` of the capacity of both servers; may exceed 100%")
	cmd.Flags().StringVar(&observed, "observed", observed,
		"`share` of the flows that go through the balancer; it does not see the others")
	cmd.Flags().IntVar(&room, "room", room, "maximum `count` of flows on a server")
	return cmd
}

// parsePair parses the two positive numbers that a flag has.
func parsePair(flag string, words []string) (pair [2]float64, err error) {
	if len(words) != 2 {
		return pair, fmt.Errorf("%s %q: must be two numbers, such as 2,1",
			flag, strings.Join(words, ","))
	}
	for i, word := range words {
		pair[i], err = strconv.ParseFloat(word, 64)
		if err != nil || !(pair[i] > 0) || math.IsInf(pair[i], 1) {
			return pair, fmt.Errorf("%s %q: must be a number above 0", flag, word)
		}
	}
	return pair, nil
}

// twoServersRow has the steady state under one rule of the balancer.
type twoServersRow struct {
	Rule  string            `json:"rule"`
	Chain twoServersFigures `json:"chain"` // by the Markov chain
	Apart twoServersFigures `json:"apart"` // by the equation with independent queues
}

// twoServersFigures has the figures of a steady state.
type twoServersFigures struct {
	Duration float64    `json:"duration"`
	Flows    [2]float64 `json:"flows"`
	Refused  float64    `json:"refused"`
}

// twoServers prints the steady state under each rule.
func twoServers(ctx context.Context, out io.Writer, s model.TwoServers, asJSON bool) error {
	var rows []twoServersRow
	for _, rule := range model.Rules {
		s.Rule = rule
		chain, err := s.Solve(ctx)
		if err != nil {
			return err
		}
		apart, err := s.SolveApart()
		if err != nil {
			return err
		}
		rows = append(rows,
			twoServersRow{s.Rule.String(), twoServersFigures(chain), twoServersFigures(apart)})
	}
	if asJSON {
		return cli.PrintJSON(out, rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "rule\tduration, chain\tapart\tflows, chain\tapart\trefused, chain\tapart\t")
	for _, r := range rows {
		chain, apart := r.Chain, r.Apart
		fmt.Fprintf(w, "%s\t%.3f\t%.3f\t%.2f %.2f\t%.2f %.2f\t%s\t%s\t\n", r.Rule,
			chain.Duration, apart.Duration, chain.Flows[0], chain.Flows[1],
			apart.Flows[0], apart.Flows[1], percentage(chain.Refused), percentage(apart.Refused))
	}
	return w.Flush()
}
