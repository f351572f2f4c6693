// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Capacities infers from a balancer's own flows how many of them each server serves at once without
// making any wait, and how much they wait. If a server has c processors, then of n flows min(n, c) are
// served, and ends are as frequent as that: how often they come while there are 1, 2, 3 and more flows
// says what c is most likely. The speed of the processors is the server's own, and need not be known.
// docs/placement.md says what this is worth.
type Capacities struct {
	servers []record
	// common is how many servers are of each of the possible capacities, by the last estimates: what a
	// server is taken for of which little is known.
	common [len(possible)]float64
}

// record is what is remembered of a server.
type record struct {
	having   [mostServed + 1]tenure // so many flows, the last one as many or more
	stays    float64                // seconds of all flows together
	ends     float64
	capacity float64
	wait     float64
}

// tenure is a time and how many flows have ended in it.
type tenure struct{ seconds, ends float64 }

// possible are the capacities that are told apart.
var possible = [...]float64{1, 2, 3, 4, 6, 8, 12, 16, 24, mostServed}

const (
	mostServed = 32
	// memory is the time in seconds in which what was seen comes to count for less, by the factor e.
	memory = 300
	// alike is how far servers' processors are taken to be of one speed: as if so many flows had been
	// seen on each that took as long as the average. From 1 to 20 it makes no difference.
	alike = 4
	// patience is by how many flows without any wait a server's record begins.
	patience = 2
)

// NewCapacities begins with n servers of which nothing is known: their capacity is 1, and nobody waits.
func NewCapacities(n int) *Capacities {
	c := &Capacities{servers: make([]record, n)}
	for s := range c.servers {
		c.Forget(int32(s))
	}
	return c
}

// Forget makes a server one that nothing is known of, as when another takes its place.
func (c *Capacities) Forget(server int32) { c.servers[server] = record{capacity: 1} }

// Had takes in that a server had so many flows of the balancer's for so many seconds.
func (c *Capacities) Had(server int32, flows int, seconds float64) {
	r := &c.servers[server]
	r.having[min(flows, mostServed)].seconds += seconds
	r.stays += float64(flows) * seconds
}

// Ended takes in that one of so many flows, 1 or more, has ended.
func (c *Capacities) Ended(server int32, flows int) {
	r := &c.servers[server]
	r.having[min(flows, mostServed)].ends++
	r.ends++
}

// Capacity is what a server's most likely is, 1 to 32.
func (c *Capacities) Capacity(server int32) float64 { return c.servers[server].capacity }

// Wait is how long flows of the balancer's have waited on a server, in the mean, for each second of
// service, 0 or more: it tells where others' flows are.
func (c *Capacities) Wait(server int32) float64 { return c.servers[server].wait }

// Step makes new estimates, so many seconds after those before. The servers at home, which others leave
// alone as long as they can, tell how long a service takes; without any there are no estimates.
func (c *Capacities) Step(seconds float64, home []int32) {
	var alone tenure
	for _, s := range home {
		alone.seconds += c.servers[s].having[1].seconds
		alone.ends += c.servers[s].having[1].ends
	}
	if alone.ends == 0 {
		return
	}
	service := alone.seconds / alone.ends
	prior := c.common
	c.common = [len(possible)]float64{}
	for s := range c.servers {
		r := &c.servers[s]
		probability := r.probabilities(service, &prior)
		likeliest := 0
		for i, p := range probability {
			c.common[i] += p
			if p > probability[likeliest] {
				likeliest = i
			}
		}
		r.capacity = possible[likeliest]
		r.wait = max(0, (r.stays/service+patience)/(r.ends+patience)-1)
		r.fade(math.Exp(-seconds / memory))
	}
}

// probabilities are those of the possible capacities, by Bayes' rule: for exponential services of an
// unknown rate, of which a gamma distribution around the average is known beforehand, and of common
// capacities. One server more of each makes sure that none is impossible.
func (r *record) probabilities(service float64, common *[len(possible)]float64) (p [len(possible)]float64) {
	highest := math.Inf(-1)
	for i, c := range possible {
		served, logs := 0.0, 0.0
		for n, had := range r.having {
			if n == 0 || had == (tenure{}) {
				continue // which most are: this saves most logarithms
			}
			busy := min(float64(n), c)
			served += had.seconds * busy
			logs += had.ends * math.Log(busy)
		}
		p[i] = math.Log(common[i]+1) + logs - (alike+r.ends)*math.Log(alike*service+served)
		highest = max(highest, p[i])
	}
	sum := 0.0
	for i := range p {
		p[i] = math.Exp(p[i] - highest)
		sum += p[i]
	}
	for i := range p {
		p[i] /= sum
	}
	return p
}

// fade has all that was seen count for less.
func (r *record) fade(factor float64) {
	for n := range r.having {
		r.having[n].seconds *= factor
		r.having[n].ends *= factor
	}
	r.stays *= factor
	r.ends *= factor
}
