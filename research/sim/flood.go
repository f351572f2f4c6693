// SPDX-License-Identifier: Apache-2.0

package sim

// nextFlood schedules the next SYN of Config.Flood.
func (e *engine) nextFlood() {
	e.queue.push(e.now+exponential(e.floodDraws.Uint64())/e.config.Flood, floodSYN, 0)
}

// flood offers a SYN that nobody follows up. The servers' agents decide about it one after the
// other, until one of them accepts it. Nothing else happens.
func (e *engine) flood() {
	e.nextFlood()
	flow := Flow{Key: e.floodDraws.Uint64(), Server: none, transit: none}
	b := e.edgeChoice(flow.Key)
	if b == none {
		return
	}
	var offer Offer
	e.balancers[b].placement.Place(&flow, &offer)
	for offer.At < offer.N {
		s := offer.Servers[offer.At]
		if !e.servers[s].alive { // the SYN is lost, even if the server could pass it on
			return
		}
		offer.Loads[offer.At] = e.load(s)
		next := e.agentOf(s).Decide(offer.Loads[offer.At], &offer)
		if next <= offer.At { // accepted, or sent back to a server that must accept
			return
		}
		offer.At = next
	}
}
