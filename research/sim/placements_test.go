// SPDX-License-Identifier: Apache-2.0

package sim_test

import "github.com/segue-lb/segue/research/sim"

// method makes a method of a function.
type method func(b *sim.Balancer) sim.Placement

func (m method) New(b *sim.Balancer) (sim.Placement, error) { return m(b), nil }

// place is a placement that consists of one function.
type place func(f *sim.Flow, offer *sim.Offer)

func (p place) Place(f *sim.Flow, offer *sim.Offer) { p(f, offer) }

// to offers all flows to the same servers.
func to(servers ...int32) sim.Method {
	return method(func(*sim.Balancer) sim.Placement {
		return place(func(_ *sim.Flow, offer *sim.Offer) { offer.Set(servers...) })
	})
}

// inTurn offers flows to servers by round-robin.
type inTurn struct{}

func (inTurn) New(b *sim.Balancer) (sim.Placement, error) {
	next := 0
	return place(func(_ *sim.Flow, offer *sim.Offer) {
		next = (next + 1) % len(b.Live)
		offer.Set(b.Live[next])
	}), nil
}

// byHash is single choice by hash.
type byHash struct{}

func (byHash) New(b *sim.Balancer) (sim.Placement, error) {
	return place(func(f *sim.Flow, offer *sim.Offer) { offer.Set(b.ECMP(f)) }), nil
}

// policy is an accept policy that consists of one function.
type policy func(own sim.Load, offer *sim.Offer) int32

func (p policy) New(*sim.Host) (sim.Agent, error) { return p, nil }

func (p policy) Decide(own sim.Load, offer *sim.Offer) int32 { return p(own, offer) }
