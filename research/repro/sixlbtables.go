// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
)

// figure5 builds packets and measures the bytes that encapsulations add.
func figure5(_ context.Context, r *run) error {
	var (
		client   = netip.MustParseAddrPort("[2001:db8::1]:40000")
		vip      = netip.MustParseAddrPort("[2001:db8:80::1]:80")
		sender   = netip.MustParseAddr("fd00:6c:0:1::")
		segments = []netip.Addr{
			netip.MustParseAddr("fd00:5:0:1:1::"), netip.MustParseAddr("fd00:5:0:2:1::"),
		}
	)
	frame := packet.TCP(client, vip)
	extra := func(kind desired.Encapsulation, servers int) (float64, error) {
		out, err := packet.Encapsulate(frame, packet.Encap{
			Kind: kind, Sender: sender, Segments: segments[:servers], Whole: true,
			Source: sender, Destination: segments[0],
		})
		return float64(len(out) - len(frame)), err
	}
	var bytes [3][2]float64 // by encapsulation, with two servers (new flow) and with one (pinned)
	for i, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap, desired.GRE} {
		for j, servers := range []int{2, 1} {
			var err error
			if bytes[i][j], err = extra(kind, servers); err != nil {
				return err
			}
		}
	}
	insert, encap, gre := bytes[0], bytes[1], bytes[2]
	gre[0] = 2 * gre[1] // for two servers, the paper adds up two tunnels
	// The paper's SRv6 encapsulation has an outer IPv6 header, and then a header with the whole
	// list: the sender and all servers.
	const ipv6Header = 40
	outer := func(path ...netip.Addr) float64 {
		return float64(ipv6Header + packet.NewSRH(0, path...).Len())
	}
	full := [2]float64{outer(sender, segments[0], segments[1]), outer(sender, segments[0])}

	c := chart.Chart{
		Title: "Bytes that steering adds to a packet",
		X: chart.Axis{
			Label:      "encapsulation",
			Categories: []string{"SRv6 insert", "SRv6 encap", "Segue's encap", "GRE"},
		},
		Y: chart.Axis{Label: "bytes"},
	}
	for i, name := range []string{"new flow", "pinned flow"} {
		c.Series = append(c.Series, chart.Series{
			Name: name, Style: chart.Bars, Points: indexed(insert[i], full[i], encap[i], gre[i]),
		})
	}
	r.draw(c)
	r.remark("All numbers are sums of header sizes, as in the paper. So tests check them, and no " +
		"comparison is made here.")
	r.remark("Segue's encapsulation leaves the sender out of the list, and needs no list for a " +
		"single server; it does not do VXLAN.")
	return nil
}

// indexed returns points at 0, 1, 2 and so on.
func indexed(values ...float64) []chart.Point {
	points := make([]chart.Point, len(values))
	for i, v := range values {
		points[i] = chart.Point{X: float64(i), Y: v}
	}
	return points
}

// figure6 builds the tables of the paper's example with algorithm 3.
func figure6(_ context.Context, r *run) error {
	permutations := []tables.Permutation{
		{Offset: 4, Skip: 1}, {Offset: 1, Skip: 2}, {Offset: 5, Skip: 5}, {Offset: 6, Skip: 1},
	}
	before, err := tables.BuildPermuted(permutations, 7, 2)
	if err != nil {
		return err
	}
	permutations[0] = tables.Permutation{} // removes the server
	after, err := tables.BuildPermuted(permutations, 7, 2)
	if err != nil {
		return err
	}
	for i, panel := range []struct {
		title string
		table *tables.Table
		paper []uint16 // the paper's table: the two candidates of each bucket
	}{
		{"Before the removal of instance 0", before, []uint16{3, 1, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 3, 0}},
		{"After the removal of instance 0", after, []uint16{3, 1, 1, 2, 3, 1, 1, 2, 3, 2, 2, 1, 3, 2}},
	} {
		c := chart.Chart{
			Title: panel.title,
			X:     chart.Axis{Label: "bucket", Categories: []string{"0", "1", "2", "3", "4", "5", "6"}},
			Y:     chart.Axis{Label: "application instance", Min: -0.5, Max: 3.5},
		}
		equal := 0.0
		for choice, name := range []string{"first", "second"} {
			series := chart.Series{Name: name, Style: chart.Marks}
			var paper []chart.Point
			for b := range panel.table.Buckets {
				server, stated := panel.table.Row(b)[choice], panel.paper[2*b+choice]
				series.Points = append(series.Points, chart.Point{X: float64(b), Y: float64(server)})
				paper = append(paper, chart.Point{X: float64(b), Y: float64(stated)})
				if server == stated {
					equal++
				}
			}
			c.Series = append(c.Series, series, printed(name, paper...))
		}
		r.draw(c)
		r.about(fmt.Sprintf("entries of table %c that are the paper's, of 14", 'a'+i), "14", equal,
			stated, "")
	}
	rate, err := tables.FailureRate(before, after)
	if err != nil {
		return err
	}
	r.about("failure rate, %", "10", 100*rate, digits, "1 of 10 flows")
	return nil
}

// resiliencyServers returns n servers. Their names depend on the experiment, and so does their
// table.
func resiliencyServers(n, experiment int) []tables.Server {
	servers := make([]tables.Server, n)
	for i := range servers {
		servers[i] = tables.Server{Name: fmt.Sprintf("server-%d/%d", i, experiment), Weight: 1}
	}
	return servers
}

// withoutSome returns the servers after the removal of k random ones: their weight is 0.
func withoutSome(servers []tables.Server, k int, rng *rand.Rand) []tables.Server {
	rest := slices.Clone(servers)
	for _, i := range rng.Perm(len(rest))[:k] {
		rest[i].Weight = 0
	}
	return rest
}

// The set-up of figure 7 (6LB, section III-B1).
const resilientServers, resilientBuckets, resilientExperiments = 1000, 65537, 20

// failuresOfMultiples returns the failure rates with one choice and with two, when k servers are
// removed. The permutation of a server consists of the multiples of a generator, as in section
// III-A. Each server has its own generator, which the text does not state.
func failuresOfMultiples(
	seed uint64, experiments, k int, generator func(server int, rng *rand.Rand) uint32,
) (rates [2]float64, err error) {
	for i := range 2 * experiments { // each experiment with one candidate, and then with two
		candidates, rng := 1+i%2, rand.New(rand.NewPCG(seed, uint64(i/2)))
		permutations := make([]tables.Permutation, resilientServers)
		for s := range permutations {
			permutations[s].Skip = generator(s, rng)
		}
		before, err := tables.BuildPermuted(permutations, resilientBuckets, candidates)
		if err != nil {
			return rates, err
		}
		for _, s := range rng.Perm(resilientServers)[:k] {
			permutations[s] = tables.Permutation{} // removes the server
		}
		after, err := tables.BuildPermuted(permutations, resilientBuckets, candidates)
		if err != nil {
			return rates, err
		}
		rate, err := tables.FailureRate(before, after)
		if err != nil {
			return rates, err
		}
		rates[candidates-1] += rate / float64(experiments)
	}
	return rates, nil
}

// ascending gives the servers the generators 1, 2, 3 and so on.
func ascending(server int, _ *rand.Rand) uint32 { return uint32(server + 1) }

// anyGenerator gives each server a random generator.
func anyGenerator(_ int, rng *rand.Rand) uint32 { return 1 + rng.Uint32N(resilientBuckets-1) }

// figure7 removes k servers from a table, and draws the share of the flows that fail, with one
// choice and with two (section III-B1).
func figure7(ctx context.Context, r *run) error {
	const servers, buckets = resilientServers, resilientBuckets
	experiments := pick(r, 4, resilientExperiments)
	rates := make([][2][mostGone + 1]float64, experiments) // by experiment, candidates - 1 and k
	err := r.each(ctx, 2*experiments, func(ctx context.Context, i int) error {
		experiment, candidates := i/2, 1+i%2
		rng := rand.New(rand.NewPCG(r.Seed, uint64(experiment)))
		all := resiliencyServers(servers, experiment)
		before, err := tables.Build(all, buckets, candidates)
		if err != nil {
			return err
		}
		for k := range mostGone + 1 {
			after, err := tables.Build(withoutSome(all, k, rng), buckets, candidates)
			if err != nil {
				return err
			}
			if rates[experiment][candidates-1][k], err = tables.FailureRate(before, after); err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}

	c := chart.Chart{
		Title: "Flows that fail when servers are removed, N = 1000, M = 65537",
		X:     chart.Axis{Label: "servers removed, k", Max: mostGone},
		Y:     chart.Axis{Label: "failure rate, %"},
		Series: []chart.Series{
			{Name: "1 choice (no SR)", Style: chart.Marked},
			{Name: "2 choices (6LB)", Style: chart.Marked},
		},
	}
	var means [2][mostGone + 1]sim.Estimate
	fewer := make([]float64, mostGone+1) // by k: how many percent fewer flows fail with two choices
	best := 1                            // the k at which fewer is largest
	for k := range mostGone + 1 {
		for i := range 2 { // with one choice, and with two
			var values []float64
			for _, experiment := range rates {
				values = append(values, 100*experiment[i][k])
			}
			means[i][k] = sim.EstimateOf(values)
			series := &c.Series[i]
			series.Points = append(series.Points, estimated(float64(k), means[i][k]))
		}
		if k > 0 {
			fewer[k] = 100 * (1 - means[1][k].Value/means[0][k].Value)
		}
		if fewer[k] > fewer[best] {
			best = k
		}
	}
	const stated, at = 44, 8 // by the paper: percent fewer failures, and the k at which they are
	c.Series = append(c.Series, printed(c.Series[1].Name,
		chart.Point{X: at, Y: means[0][at].Value * (1 - stated/100.)}))
	r.draw(c)
	most := sim.EstimateOf(fewerFailures(rates, best))
	r.about("most fewer failures with 2 choices at any k, %", "44", most.Value,
		sampled(most, experiments, resilientExperiments),
		fmt.Sprintf("at k = %d; at k = 8 it is %.1f", best, fewer[8]))
	r.about("k at which 2 choices help most", "8", float64(best), digits,
		"the maximum is flat: 40 to 45% from k = 4 to 16")
	neighbours, err := failuresOfMultiples(r.Seed, experiments, 8, ascending)
	if err != nil {
		return err
	}
	random, err := failuresOfMultiples(r.Seed, experiments, 8, anyGenerator)
	if err != nil {
		return err
	}
	r.remark("Section III-A suggests the multiples of generators as permutations. With these, "+
		"%.1f%% of the flows fail at k = 8 with one choice, and %.1f%% with two, if the generators "+
		"are 1, 2, 3 and so on. If they are random, %.1f%% and %.1f%% fail. The permutations of "+
		"the chart also have random offsets.",
		100*neighbours[0], 100*neighbours[1], 100*random[0], 100*random[1])
	return nil
}

// mostGone is the largest number of servers that figure 7 removes.
const mostGone = 30

// fewerFailures returns, for each experiment, how many percent fewer flows fail with two choices
// than with one when k servers are removed.
func fewerFailures(rates [][2][mostGone + 1]float64, k int) []float64 {
	fewer := make([]float64, len(rates))
	for i, rate := range rates {
		fewer[i] = 100 * (1 - rate[1][k]/rate[0][k])
	}
	return fewer
}

// The set-up of figure 11d (6LB, section VI-B5). The text does not state the largest number of
// removed servers.
const (
	resetServers, resetBuckets, resetFlows = 48, 4096, 1000
	mostRemoved                            = 16
)

// resets counts the flows that are reset when servers are removed, by the number of removed
// servers. extra are those of them whose server remains.
type resets [mostRemoved + 1]reset

type reset struct{ all, extra float64 }

// countResets lets servers accept long-lived flows with SR8, or with SC if there is one candidate.
// Then it removes k of the servers, for each k separately. Another balancer, which knows no flow,
// must find the flows by its own table. A flow is reset if its server was removed, or if its server
// is not in the new row of the flow's bucket.
func countResets(seed uint64, experiment, candidates int) (r resets, err error) {
	rng := rand.New(rand.NewPCG(seed, uint64(experiment)))
	servers := resiliencyServers(resetServers, experiment)
	before, err := tables.Build(servers, resetBuckets, candidates)
	if err != nil {
		return r, err
	}
	placed := placeLongFlows(before, resetFlows, 8, rng) // by bucket
	for k := range r {
		left := withoutSome(servers, k, rng)
		after, err := tables.Build(left, resetBuckets, candidates)
		if err != nil {
			return r, err
		}
		for bucket, taken := range placed {
			for _, server := range taken {
				switch {
				case left[server].Weight == 0: // removed
					r[k].all++
				case !slices.Contains(after.Row(bucket), server): // the balancer does not find it
					r[k].all++
					r[k].extra++
				}
			}
		}
	}
	return r, nil
}

// figure11d draws the share of long-lived flows that are reset when servers are removed and another
// balancer gets all packets.
func figure11d(ctx context.Context, r *run) error {
	experiments := pick(r, 10, 100)
	counted := make([]resets, 2*experiments) // of each experiment, with SC and then with SR8
	err := r.each(ctx, len(counted), func(_ context.Context, i int) (err error) {
		counted[i], err = countResets(r.Seed, i/2, 1+i%2)
		return err
	})
	if err != nil {
		return err
	}

	c := chart.Chart{
		Title: "Flows reset when x servers go and the balancer changes",
		X:     chart.Axis{Label: "servers removed, x", Max: mostRemoved},
		Y:     chart.Axis{Label: "flows reset, %"},
		Series: []chart.Series{
			{Name: "SC", Style: chart.Marked}, {Name: "SR8", Style: chart.Marked},
			{Name: "unavoidable", Style: chart.Dashed},
		},
	}
	extra := chart.Chart{
		Title: "Of these, flows of servers that are still there", X: c.X, Y: c.Y,
		Series: []chart.Series{{Name: "SC", Style: chart.Marked}, {Name: "SR8", Style: chart.Marked}},
	}
	var largest [2]sim.Estimate // for SC and SR8: the largest share of avoidable resets
	for k := range mostRemoved + 1 {
		x := float64(k)
		for i := range 2 { // SC and SR8
			all := sim.EstimateOf(sharesReset(counted, i, k, func(r reset) float64 { return r.all }))
			avoidable := sim.EstimateOf(sharesReset(counted, i, k, func(r reset) float64 { return r.extra }))
			c.Series[i].Points = append(c.Series[i].Points, estimated(x, all))
			extra.Series[i].Points = append(extra.Series[i].Points, estimated(x, avoidable))
			if avoidable.Value > largest[i].Value {
				largest[i] = avoidable
			}
		}
		c.Series[2].Points = append(c.Series[2].Points, chart.Point{X: x, Y: 100 * x / resetServers})
	}
	mostStated := []string{"4", "2"}
	for i, name := range []string{"SC", "SR8"} {
		extra.Series = append(extra.Series, bound(name, "at most", mustParse(mostStated[i]).Value))
	}
	r.draw(c)
	r.draw(extra)
	for i, name := range []string{"SC", "SR8"} {
		r.atMost("most extra resets with "+name+", %", mostStated[i], largest[i].Value,
			stated, "no more than, says the text")
		r.because("2.3%% rounds to the printed 2%%. The mean of ten experiments, as the paper has, has a " +
			"standard error of 0.2%%")
	}
	return nil
}

// sharesReset returns the share of flows that are reset when k servers are removed, in percent, for
// each experiment. The policy is 0 for SC and 1 for SR8. count selects all resets, or the extra
// ones.
func sharesReset(counted []resets, policy, k int, count func(reset) float64) []float64 {
	var shares []float64
	for i := policy; i < len(counted); i += 2 {
		shares = append(shares, count(counted[i][k])*100/resetFlows)
	}
	return shares
}

// placeLongFlows offers flows that do not end to the candidates of random buckets, by SRc: the
// first candidate takes a flow if it has fewer than threshold flows, otherwise the last one takes
// it. The function returns the servers that took the flows of each bucket.
func placeLongFlows(t *tables.Table, flows, threshold int, rng *rand.Rand) [][]uint16 {
	taken := make([][]uint16, t.Buckets)
	busy := make([]int, len(t.Servers))
	for range flows {
		bucket := rng.IntN(t.Buckets)
		row := t.Row(bucket)
		server := row[len(row)-1]
		if busy[row[0]] < threshold {
			server = row[0]
		}
		busy[server]++
		taken[bucket] = append(taken[bucket], server)
	}
	return taken
}
