// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/sim"
)

// must panics if a placement that was built before cannot be built again.
func must(err error) {
	if err != nil {
		panic("placement: " + err.Error()) // Build has accepted the same parameters
	}
}

// oneOf checks a parameter whose value is a word. The first allowed word is the value of a missing
// parameter, so the error does not name it.
func oneOf[T ~string](name string, value T, allowed ...T) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	var words []string
	for _, word := range allowed[1:] {
		words = append(words, string(word))
	}
	return fmt.Errorf("%s %q: must be %s", name, value, strings.Join(words, " or "))
}

// inRange checks a parameter whose value is a number or a time.
func inRange[T int | float64 | time.Duration](name string, value, least, most T) error {
	if value >= least && value <= most {
		return nil
	}
	return fmt.Errorf("%s %v: must be %v to %v", name, value, least, most)
}

func checkCandidates(candidates, least int) error {
	return inRange("candidates", candidates, least, sim.MaxChain)
}

// checkBuckets checks a number of buckets. It accepts 0, which stands for the default.
func checkBuckets(buckets int) error {
	if buckets == 0 {
		return nil
	}
	return tables.ValidBuckets(buckets)
}

func checkInterval(interval time.Duration) error {
	return inRange("interval", interval, time.Millisecond, time.Hour)
}

// defaultInterval is the interval in HLB's section V-C.
const defaultInterval = 500 * time.Millisecond

// equalWeights returns the weight 1 for every server.
func equalWeights(b *sim.Balancer) []float64 {
	return slices.Repeat([]float64{1}, len(b.Servers))
}

// capacities returns the configured capacities of the servers.
func capacities(b *sim.Balancer) []float64 {
	c := make([]float64, len(b.Servers))
	for i := range b.Servers {
		c[i] = b.Servers[i].Capacity()
	}
	return c
}

// homeOrder returns all servers in the order of infer.Order for a balancer, and the number of its
// home servers, which are first. Only live servers have homes. Servers that are not live come
// last.
func homeOrder(b *sim.Balancer, weight []float64) (order []int32, homes int) {
	servers := make([]infer.WeightedServer, len(b.Live))
	live := make([]bool, len(b.Servers))
	for i, s := range b.Live {
		servers[i] = infer.WeightedServer{Name: b.Servers[s].Name, Weight: weight[s]}
		live[s] = true
	}
	balancers := make([]string, len(b.Peers))
	for i, peer := range b.Peers {
		balancers[i] = balancerName(peer)
	}
	home := infer.Homes(servers, balancers)
	self := slices.Index(b.Peers, int32(b.Index))
	for _, i := range infer.Order(servers, balancers, home, self) {
		order = append(order, b.Live[i])
		if int(home[i]) == self {
			homes++
		}
	}
	for s := range live {
		if !live[s] {
			order = append(order, int32(s))
		}
	}
	return order, homes
}

// inverse returns the inverse of a permutation.
func inverse(order []int32) []int32 {
	position := make([]int32, len(order))
	for at, s := range order {
		position[s] = int32(at)
	}
	return position
}

func shuffle(r *sim.Rand, list []int32) {
	for i := len(list) - 1; i > 0; i-- {
		j := r.Intn(i + 1)
		list[i], list[j] = list[j], list[i]
	}
}

// draw fills an empty list with n distinct live servers, or with all if there are fewer. All are
// equally likely.
func draw(b *sim.Balancer, list []int32, n int) []int32 {
	n = min(n, len(b.Live))
	for len(list) < n {
		if s := b.Live[b.Rand.Intn(len(b.Live))]; !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

// bucketTable is a balancer's consistent-hash table. If candidates is 0, there is no table.
type bucketTable struct {
	cache      *tableCache
	b          *sim.Balancer
	buckets    int
	candidates int
	weighted   bool // servers have the weights of TableWeights
	table      *tables.Table
}

// build builds the table for the live servers.
func (t *bucketTable) build() (err error) {
	if t.candidates == 0 {
		return nil
	}
	buckets := t.buckets
	if buckets == 0 {
		buckets = tables.DefaultBuckets
	}
	t.table, err = t.cache.build(t.b, t.weights(), buckets, t.candidates)
	return err
}

// weights returns the weights that the servers have in the table while they are live.
func (t *bucketTable) weights() []uint32 {
	if t.weighted {
		return TableWeights(t.b.Servers)
	}
	return slices.Repeat([]uint32{1}, len(t.b.Servers))
}

// leastWeight is the weight of the smallest server. With 10 instead of 1, whole numbers are closer
// to the proportions of the capacities.
const leastWeight = 10

// TableWeights returns weights of servers in proportion to their capacities, from 10 to 1000.
func TableWeights(servers []sim.Server) (weights []uint32) {
	smallest := math.Inf(1)
	for i := range servers {
		smallest = min(smallest, servers[i].Capacity())
	}
	for i := range servers {
		weight := math.Round(leastWeight * servers[i].Capacity() / smallest)
		weights = append(weights, uint32(min(weight, 1000)))
	}
	return weights
}

// row returns the candidates of a flow's bucket, by their indexes in sim.Config.Servers. It returns
// nil if there is no table or no live server.
func (t *bucketTable) row(f *sim.Flow) []uint16 {
	if t.table == nil || t.table.Candidates == 0 {
		return nil
	}
	return t.table.Row(bucket(t.b.RowKey(f), t.table.Buckets))
}

// offerRow offers a flow to the candidates of its bucket.
func (t *bucketTable) offerRow(f *sim.Flow, offer *sim.Offer) {
	for _, s := range t.row(f) {
		offer.Add(int32(s))
	}
}
