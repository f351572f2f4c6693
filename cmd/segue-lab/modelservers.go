// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/research/model"
)

func newModelServers(f *modelFlags) *cobra.Command {
	limit, servers, percentile := 6*time.Second, 100, "90"
	cmd := &cobra.Command{
		Use:   "servers",
		Short: "Compute the number of servers that keeps response times below a limit",
		Long: `Servers computes equation (11) of 6LB. With single choice, --servers servers can serve a
certain rate of flows until a percentile of the response time reaches the limit. The
output is how many servers are needed with SRc to serve the same rate within the limit.`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			policies, err := f.policies()
			if err != nil {
				return err
			}
			if servers < 1 {
				return fmt.Errorf("--servers %d: must be at least 1", servers)
			}
			x, err := parsePercentiles("--percentile", percentile)
			if err != nil {
				return err
			}
			// policies[0] is single choice, with which the others are compared.
			return f.servers(cmd.OutOrStdout(), policies[1:], x[0], limit, servers)
		},
	}
	f.addTo(cmd)
	cmd.Flags().DurationVar(&limit, "limit", limit,
		"`duration` that the percentile of the response time must not exceed")
	cmd.Flags().StringVar(&percentile, "percentile", percentile,
		"percentile of the response time to which the limit applies, a `number` such as 99.9")
	cmd.Flags().IntVar(&servers, "servers", servers, "`count` of servers with single choice")
	return cmd
}

// serversRow has the number of servers that a policy needs.
type serversRow struct {
	Policy           string  `json:"policy"`
	SingleChoiceLoad float64 `json:"single_choice_load"` // the load that is at the limit with SC
	Load             float64 `json:"load"`               // the load that is at the limit with Policy
	Ratio            float64 `json:"ratio"`              // SingleChoiceLoad divided by Load
	Servers          int     `json:"servers"`
}

// servers prints, for each policy, how many servers it needs to serve the rate of flows that the
// given number of servers can serve with single choice. In both cases, the percentile of the
// response time is at the limit.
func (f *modelFlags) servers(
	out io.Writer, policies []policy, percentile float64, limit time.Duration, servers int,
) error {
	const rounding = 1e-6 // without it, a rounding error could add a server to a whole number
	var rows []serversRow
	for _, p := range policies {
		saving, err := model.CompareServers(
			percentile, limit.Seconds()/f.service.Seconds(), f.cores, p.threshold)
		if err != nil {
			return fmt.Errorf("--limit %v: %w", limit, err)
		}
		rows = append(rows, serversRow{
			Policy: p.name, SingleChoiceLoad: saving.SingleChoiceLoad, Load: saving.Load,
			Ratio:   saving.Ratio,
			Servers: int(math.Ceil(float64(servers)*saving.Ratio - rounding)),
		})
	}
	if f.asJSON {
		return cli.PrintJSON(out, rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\tload with SC\tload\tratio\tservers\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%.4f\t%d\t\n",
			r.Policy, percentage(r.SingleChoiceLoad), percentage(r.Load), r.Ratio, r.Servers)
	}
	return w.Flush()
}
