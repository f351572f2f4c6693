// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/chart"
)

// shellFigures are the figures of "Stateless Load-Aware Load Balancing in P4". Figure 4 and table II
// measure a card. Figure 5 and table III do so too, but the sizes of programs can be set beside them.
var shellFigures = []Figure{
	{"shell-III", "Size of the programs for switches", "SHELL, section V-B", shellIII},
	{"shell-5", "Work of the parsers for switches, by data offset", "SHELL, section V-B", shell5},
	{"shell-6", "Connections reset after reconfigurations, by depth of the history", "SHELL, section VI", shell6},
	{"shell-7", "Connections reset after reconfigurations, by number of buckets", "SHELL, section VI", shell7},
}

const shellServers, shellCandidates = 500, 2

// churn is the share of the connections that are reset up to each reconfiguration, by the depth of
// the history and the number of the reconfiguration. All connections began at the same time.
type churn struct {
	printed [][]float64 // with the history of algorithm 1 of the paper
	kept    [][]float64 // with a history that keeps unchanged entries, as Segue's does
}

// reconfigure changes the table several times: it removes a random server or inserts a new one.
// For each depth and both histories of a churn, it follows a connection at each place, which is an
// entry of the table. A connection is lost for good when its server is not in the history of its
// place: its next packet is answered by a reset.
func reconfigure(
	ctx context.Context, seed, experiment uint64, buckets, changes int, depths []int,
) (*churn, error) {
	rng := rand.New(rand.NewPCG(seed, experiment))
	// There are names for all servers that are ever inserted.
	servers := resiliencyServers(shellServers+changes, int(experiment))
	for i := shellServers; i < len(servers); i++ {
		servers[i].Weight = 0
	}
	next := shellServers // the server to insert next
	table, err := tables.Build(servers, buckets, shellCandidates)
	if err != nil {
		return nil, err
	}
	first := table
	result := &churn{}
	var kept []*tables.History
	var printed []*printedHistory
	var lostKept, lostPrinted [][]bool // by depth and place: the connection is lost
	for _, depth := range depths {
		h, err := tables.NewHistory(table.Rows, depth)
		if err != nil {
			return nil, err
		}
		kept = append(kept, h)
		printed = append(printed, newPrintedHistory(table, depth))
		lostKept = append(lostKept, make([]bool, len(table.Rows)))
		lostPrinted = append(lostPrinted, make([]bool, len(table.Rows)))
		result.kept = append(result.kept, []float64{0})
		result.printed = append(result.printed, []float64{0})
	}
	for range changes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if rng.IntN(2) == 0 {
			servers[pickPresent(servers, rng)].Weight = 0
		} else {
			servers[next].Weight = 1
			next++
		}
		if table, err = tables.Build(servers, buckets, shellCandidates); err != nil {
			return nil, err
		}
		for i := range depths {
			if err := kept[i].Push(table.Rows); err != nil {
				return nil, err
			}
			printed[i].push(table)
			result.kept[i] = append(result.kept[i], markLost(lostKept[i], first, kept[i].ServersOf))
			result.printed[i] = append(result.printed[i],
				markLost(lostPrinted[i], first, printed[i].column))
		}
	}
	return result, nil
}

// pickPresent returns the index of a random server that is in the table.
func pickPresent(servers []tables.Server, rng *rand.Rand) int {
	for {
		if i := rng.IntN(len(servers)); servers[i].Weight > 0 {
			return i
		}
	}
}

// markLost marks the places whose server in the first table is not in their present history, which
// column returns. It returns the share of the marked places.
func markLost(lost []bool, first *tables.Table, column func(place int) []uint16) float64 {
	n := 0
	for place, server := range first.Rows {
		lost[place] = lost[place] || !slices.Contains(column(place), server)
		if lost[place] {
			n++
		}
	}
	return float64(n) / float64(len(lost))
}

// printedHistory is exactly algorithm 1 of SHELL. At each change of the table, all entries of a
// place move down by one, and the last one is lost. The place's server becomes the first entry. An
// equal entry below it is removed.
type printedHistory struct {
	depth   int
	columns [][]uint16 // by place: its servers, the newest first
}

// newPrintedHistory returns a history that has only the servers of the first table.
func newPrintedHistory(t *tables.Table, depth int) *printedHistory {
	h := &printedHistory{depth: depth}
	for _, server := range t.Rows {
		h.columns = append(h.columns, append(make([]uint16, 0, depth+1), server))
	}
	return h
}

// push makes each place's server in the next table the first one of the place. It first moves the
// others down, and then removes the server where it was before.
func (h *printedHistory) push(t *tables.Table) {
	for place, server := range t.Rows {
		column := h.columns[place]
		column = slices.Insert(column[:min(len(column), h.depth-1)], 0, server)
		if i := slices.Index(column[1:], server); i >= 0 {
			column = slices.Delete(column, i+1, i+2)
		}
		h.columns[place] = column
	}
}

func (h *printedHistory) column(place int) []uint16 { return h.columns[place] }

// churns returns the mean churn of several experiments, for each number of buckets. The paper has
// five experiments.
func churns(ctx context.Context, r *run, buckets []int, depths []int) ([]churn, error) {
	experiments, changes := pick(r, 2, 5), pick(r, 60, 200)
	results := make([]*churn, len(buckets)*experiments)
	err := r.each(ctx, len(results), func(ctx context.Context, i int) (err error) {
		experiment := uint64(i % experiments)
		results[i], err = reconfigure(ctx, r.Seed, experiment, buckets[i/experiments], changes, depths)
		return err
	})
	if err != nil {
		return nil, err
	}
	mean := func(of func(*churn) [][]float64, group []*churn) [][]float64 {
		sum := make([][]float64, len(depths))
		for i := range depths {
			sum[i] = make([]float64, changes+1)
			for _, c := range group {
				for n, v := range of(c)[i] {
					sum[i][n] += v / float64(len(group))
				}
			}
		}
		return sum
	}
	var means []churn
	for group := range slices.Chunk(results, experiments) {
		means = append(means, churn{
			printed: mean(func(c *churn) [][]float64 { return c.printed }, group),
			kept:    mean(func(c *churn) [][]float64 { return c.kept }, group),
		})
	}
	return means, nil
}

// reconfigurationRates are ten equally likely numbers of reconfigurations in a minute. They are
// percentiles 5, 15 and so on of the curve "Backend 99th min" of figure 2 of "SilkRoad" (Miao et
// al., SIGCOMM 2017), as far as the drawing can be read. SHELL takes the highest 1% of the rates
// from that figure, with a median of 13.5, and only this curve has such a median.
var reconfigurationRates = []float64{0, 0, 0.5, 4, 10, 14.5, 20.5, 26, 33, 43}

// durations are equally likely durations of connections, relative to their mean.
type durations []float64

// durationsOf returns percentiles 0.5, 1.5 and so on of a distribution.
func durationsOf(quantile func(float64) float64) durations {
	var d durations
	for i := range 100 {
		d = append(d, quantile((float64(i)+0.5)/100))
	}
	floats.Scale(1/stat.Mean(d, nil), d)
	return d
}

// The two distributions of durations. SHELL takes the durations from figure 7a of "Inside the social
// network's (datacenter) network" (Roy et al., SIGCOMM 2015), whose values are not published.
var (
	exponential = durationsOf(distuv.Exponential{Rate: 1}.Quantile)
	heavyTailed = durationsOf(distuv.LogNormal{Sigma: 2}.Quantile)
)

// ending returns, for each number of reconfigurations, the share of the connections that are reset
// up to it, if connections end. infinite are the shares for connections that never end. Durations
// have the given mean, in minutes. While a connection lasts, reconfigurations are a Poisson process
// with one of reconfigurationRates.
func (d durations) ending(infinite []float64, mean float64) []float64 {
	reach := make([]float64, len(infinite)) // share of the connections that see n reconfigurations
	for _, rate := range reconfigurationRates {
		for _, duration := range d {
			expected := rate * duration * mean
			exactly, atLeast := math.Exp(-expected), 1.0
			for n := 1; n < len(reach); n++ {
				atLeast -= exactly
				exactly *= expected / float64(n)
				reach[n] += max(0, atLeast) / float64(len(reconfigurationRates)*len(d))
			}
		}
	}
	out := make([]float64, len(infinite))
	for n := 1; n < len(infinite); n++ {
		out[n] = out[n-1] + reach[n]*(infinite[n]-infinite[n-1])
	}
	return out
}

// shortest finds, by bisection, the mean duration in minutes with which the last share that ending
// returns is the given probability.
func (d durations) shortest(infinite []float64, probability float64) float64 {
	low, high := 0.0, 1000.0
	for range 60 {
		middle := (low + high) / 2
		if f := d.ending(infinite, middle); f[len(f)-1] < probability {
			low = middle
		} else {
			high = middle
		}
	}
	return low
}

func churnChart(title string, log bool) chart.Chart {
	return chart.Chart{
		Title: title,
		X:     chart.Axis{Label: "reconfigurations, n"},
		Y:     chart.Axis{Label: "probability of a reset", Log: log},
	}
}

// against returns a series of values against the number of reconfigurations.
func against(name string, style chart.Style, values []float64) chart.Series {
	return chart.Series{Name: name, Style: style, Points: indexed(values...)}
}

// shell6 draws the share of reset connections for several depths of the history: for connections
// that never end and for those that end, and with a history that keeps unchanged entries.
func shell6(ctx context.Context, r *run) error {
	depths := []int{1, 2, 3, 4, 5}
	means, err := churns(ctx, r, []int{35591}, depths)
	if err != nil {
		return err
	}
	c := means[0]
	infinite := churnChart("Infinite connections, B = 35591", false)
	kept := churnChart("Infinite connections, history of what changed", false)
	bounded := churnChart("Connections that end", true)
	mean := exponential.shortest(c.printed[0], 0.05)
	var last []float64
	for i, depth := range depths {
		name := fmt.Sprintf("h = %d", depth)
		infinite.Series = append(infinite.Series, against(name, chart.Line, c.printed[i]))
		kept.Series = append(kept.Series, against(name, chart.Line, c.kept[i]))
		f := exponential.ending(c.printed[i], mean)
		bounded.Series = append(bounded.Series, against(name, chart.Line, f))
		last = append(last, f[len(f)-1])
	}
	bounded.Series = append(bounded.Series, bound(bounded.Series[1].Name, "at most", 0.01))
	r.draw(infinite)
	r.draw(bounded)
	r.draw(kept)
	for i, depth := range depths[1:] {
		r.atMost(fmt.Sprintf("resets of connections that end, h = %d", depth), "0.01", last[i+1],
			stated, "with the shortest durations that agree with the paper's 5% for h = 1")
		r.because("algorithm 1 loses the oldest server of a place at every reconfiguration. If it " +
			"dropped duplicates before it moves entries, the row would be inside (third chart)")
	}
	end := func(d durations, history [][]float64, depth int) float64 { // in percent
		f := d.ending(history[depth-1], d.shortest(history[0], 0.05))
		return 100 * f[len(f)-1]
	}
	r.remark("The paper takes reconfigurations from figure 2 of SilkRoad, and durations from a figure "+
		"whose values are not published. Here, rates are those of SilkRoad's backends. Durations are "+
		"exponential, and their mean of %.0f s is the shortest with which h = 1 loses 5%%, as the "+
		"paper states. Longer ones lose more. So a row outside is outside for all longer durations.",
		60*mean)
	r.remark("The form of the distribution matters little: with lognormal durations whose logarithm "+
		"has the deviation 2, h = 2 loses %.2f%%, and h = 3 %.2f%%.",
		end(heavyTailed, c.printed, 2), end(heavyTailed, c.printed, 3))
	r.remark("Algorithm 1 of the paper loses the oldest server of a place at every "+
		"reconfiguration, whether the place changed or not, since it drops duplicates only "+
		"after it moved all entries down. The third chart drops duplicates first, as Segue "+
		"does. Then %.2f%% of the connections that end are reset with h = 2.",
		end(exponential, c.kept, 2))
	return nil
}

// shell7 draws the share of reset connections for several numbers of buckets, with a history of
// depth 3. Connections last as long as in shell6.
func shell7(ctx context.Context, r *run) error {
	buckets := []int{4093, 8191, 16381, 35591, 65537}
	const depth, named = 3, 35591
	means, err := churns(ctx, r, buckets, []int{1, depth})
	if err != nil {
		return err
	}
	infinite := churnChart("Infinite connections, h = 3", false)
	bounded := churnChart("Connections that end, h = 3", true)
	mean := exponential.shortest(means[slices.Index(buckets, named)].printed[0], 0.05)
	for i, c := range means {
		name := fmt.Sprintf("B = %d", buckets[i])
		infinite.Series = append(infinite.Series, against(name, chart.Line, c.printed[1]))
		f := exponential.ending(c.printed[1], mean)
		bounded.Series = append(bounded.Series, against(name, chart.Line, f))
	}
	r.draw(infinite)
	r.draw(bounded)
	r.remark("The text states only B = %d, which figure 6 also has. The other numbers of buckets "+
		"are ours.", named)
	return nil
}
