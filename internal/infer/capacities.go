// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Capacities infers two things from a balancer's own flows: how many flows each server can serve
// at once without letting any wait, and how much the flows wait. If a server has c processors and
// n flows, it serves min(n, c) of them at a time. The rate at which flows end is proportional to
// this number. So the rates with 1, 2, 3 and more flows show the most likely c. The speed of the
// processors may differ from server to server, and need not be known. A server that has changed is
// learned anew. docs/research/placement.md shows how well this works.
type Capacities struct {
	servers []learned
	// common[i] is the expected number of servers with the capacity possible[i], by the last
	// estimates. A server about which little is known is assumed to have one of these capacities,
	// with probabilities in proportion to the numbers of servers.
	common [len(possible)]float64
	// contradiction is the constant of this name. Tests change it.
	contradiction float64
}

// learned is what is known about a server.
type learned struct {
	record           // all observations
	recent   record  // the newest ones only
	capacity float64 // see Capacity
	wait     float64 // see Wait
}

// record is observations of a server.
type record struct {
	// having[n] is the time for which the server had n flows, and the flows that ended in it. The
	// last element also contains all higher numbers of flows.
	having [MostServed + 1]tenure
	stays  float64 // duration of all flows together, in seconds
	ends   float64 // number of flows that ended
}

// tenure is a time, and the number of flows that ended in it.
type tenure struct{ seconds, ends float64 }

// possible are the capacities of which the estimate chooses one.
var possible = [...]float64{1, 2, 3, 4, 6, 8, 12, 16, 24, MostServed}

// logs[n] is the logarithm of n processors in use.
var logs = func() (logs [MostServed + 1]float64) {
	for n := range logs {
		logs[n] = math.Log(float64(n))
	}
	return logs
}()

const (
	// MostServed is the largest capacity that can be inferred.
	MostServed = 32
	// memory is the time in seconds after which an observation counts e times less.
	memory = 300
	// recently is the time after which a recent observation (learned.recent) counts e times less.
	recently = 20
	// contradiction is the logarithm of the likelihood ratio from which on recent observations show
	// that a server has changed: 8 is as rare as four standard deviations.
	contradiction = 8
	// alike is the weight of the assumption that the processors of all servers have the same
	// speed. It counts as much as this number of flows with the average duration on each server.
	// Values from 1 to 20 make no difference.
	alike = 4
	// fewest is how many flows must have ended on servers with n > 1 flows before the mean time of
	// a service is estimated from these flows.
	fewest = 10
	// patience is how many flows Wait adds to the observed ones, as if they had not waited. So a
	// server of which little is known seems to have no wait.
	patience = 2
)

// NewCapacities begins with n unknown servers. They are taken to have capacity 1 and no waiting
// flows.
func NewCapacities(n int) *Capacities {
	c := &Capacities{servers: make([]learned, n), contradiction: contradiction}
	for s := range c.servers {
		c.Forget(int32(s))
	}
	return c
}

// Forget removes all observations of a server, for example when another server takes its place.
func (c *Capacities) Forget(server int32) { c.servers[server] = learned{capacity: 1} }

// Had records that a server had a number of flows of this balancer for a time, in seconds.
func (c *Capacities) Had(server int32, flows int, seconds float64) {
	c.servers[server].had(flows, seconds)
	c.servers[server].recent.had(flows, seconds)
}

func (r *record) had(flows int, seconds float64) {
	r.having[min(flows, MostServed)].seconds += seconds
	r.stays += float64(flows) * seconds
}

// Ended records the given number of ends. The server had the given number of flows, 1 or more,
// just before each of them.
func (c *Capacities) Ended(server int32, flows int, ends float64) {
	c.servers[server].ended(flows, ends)
	c.servers[server].recent.ended(flows, ends)
}

func (r *record) ended(flows int, ends float64) {
	r.having[min(flows, MostServed)].ends += ends
	r.ends += ends
}

// Rearrange makes server i the server that was from[i]. If that is -1, server i is a new one.
func (c *Capacities) Rearrange(from []int32) {
	c.servers = rearranged(c.servers, from, func(int) learned { return learned{capacity: 1} })
}

// Capacity returns the most likely capacity of a server, 1 to 32.
func (c *Capacities) Capacity(server int32) float64 { return c.servers[server].capacity }

// Wait returns the mean time that flows of this balancer have waited on a server, for each second
// of service: 0 or more. It shows whether flows of other balancers are on the server.
func (c *Capacities) Wait(server int32) float64 { return c.servers[server].wait }

// alone returns the mean time of a flow while it is a server's only one, or 0 if none has ended.
func (c *Capacities) alone(server int32) float64 {
	had := c.servers[server].having[1]
	if had.ends == 0 {
		return 0
	}
	return had.seconds / had.ends
}

// Step computes new estimates. Its argument is the time since the last step, in seconds. The home
// servers, which other balancers avoid as long as they can, show how long a service takes. As long
// as no flow has ended on a home server, there are no new estimates.
func (c *Capacities) Step(seconds float64, home []int32) {
	service := c.service(home)
	if service == 0 {
		return
	}
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
		// The mean duration of flows, divided by that of a service, less 1.
		r.wait = max(0, (r.stays/service+patience)/(r.ends+patience)-1)
		if r.ratio() > c.contradiction {
			r.record, r.recent = record{}, record{} // both contain outdated observations
		}
		r.fade(math.Exp(-seconds / memory))
		r.recent.fade(math.Exp(-seconds / recently))
	}
}

// probabilities returns the probabilities of the possible capacities by Bayes' rule. The times of
// services are exponential with an unknown rate. The prior of the rate is a gamma distribution
// around 1/service, where service is the mean time of a service. This prior has the weight of 4
// observed flows (alike). The prior of the capacity is in proportion to common (Capacities.common),
// with one additional server of each capacity, so that none is impossible.
func (r *record) probabilities(service float64, common *[len(possible)]float64) (p [len(possible)]float64) {
	highest := math.Inf(-1)
	above := r.above()
	below, logsBelow, n := 0.0, 0.0, 1
	for i, c := range possible {
		// With n flows, min(n, c) processors are in use. served is the time of all of them, and
		// busy the sum of the logarithms of their numbers at the ends of flows.
		most := int(c)
		for ; n <= most; n++ {
			below += r.having[n].seconds * float64(n)
			logsBelow += r.having[n].ends * logs[n]
		}
		served := below + above[most].seconds*c
		busy := logsBelow + above[most].ends*logs[most]
		p[i] = math.Log(common[i]+1) + busy - (alike+r.ends)*math.Log(alike*service+served)
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

// service returns the mean time of a service, or 0 if it is not known. It is the mean duration of
// flows that are alone on a home server. Servers that are never idle have no such flows. Then
// service takes the smallest number of flows that home servers had while enough flows ended. It
// assumes that a server serves this number at once.
func (c *Capacities) service(home []int32) float64 {
	for n := 1; n <= MostServed; n++ {
		var had tenure
		for _, s := range home {
			had.seconds += c.servers[s].having[n].seconds
			had.ends += c.servers[s].having[n].ends
		}
		if had.ends >= fewest || n == 1 && had.ends > 0 {
			return had.seconds / had.ends * float64(n)
		}
	}
	return 0
}

// ratio tells how much the recent observations contradict the earlier ones. It assumes that flows
// end as a Poisson process, at a rate for each processor in use. It compares two hypotheses: the
// recent rate differs from the earlier one, or both are the same. ratio returns the logarithm of
// their likelihood ratio.
func (l *learned) ratio() float64 {
	all, recent := l.served(l.capacity), l.recent.served(l.capacity)
	before := tenure{all.seconds - recent.seconds, all.ends - recent.ends}
	return before.logLikelihood() + recent.logLikelihood() - all.logLikelihood()
}

// served returns how long processors were in use, summed over all, and how many flows ended.
func (r *record) served(capacity float64) (sum tenure) {
	for n, had := range r.having {
		sum.seconds += had.seconds * min(float64(n), capacity)
	}
	sum.ends = r.ends
	return sum
}

// logLikelihood returns the logarithm of the likelihood of the most likely rate, without terms that
// do not depend on the rate.
func (t tenure) logLikelihood() float64 {
	if t.seconds <= 0 || t.ends <= 0 {
		return 0
	}
	return t.ends * math.Log(t.ends/t.seconds)
}

// above returns, for each n, the sum of the tenures with more than n flows. It adds from the top,
// because a difference from the total would not be exact. Capacities above all observed numbers of
// flows must get exactly equal probabilities.
func (r *record) above() (sums [MostServed + 1]tenure) {
	for n := MostServed; n > 0; n-- {
		sums[n-1].seconds = sums[n].seconds + r.having[n].seconds
		sums[n-1].ends = sums[n].ends + r.having[n].ends
	}
	return sums
}

// fade reduces the weight of all earlier observations.
func (r *record) fade(factor float64) {
	for n := range r.having {
		r.having[n].seconds *= factor
		r.having[n].ends *= factor
	}
	r.stays *= factor
	r.ends *= factor
}
