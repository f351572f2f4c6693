package repro

import (
	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/sim"
)

// static is SRc, algorithm 1 of 6LB.
type static struct{ threshold uint32 }

func (s static) New(*sim.Host) (sim.Agent, error) {
	return accepting{accept.Static{Threshold: s.threshold}}, nil
}

// dynamic is SRdyn, algorithm 2, with the paper's parameters.
type dynamic struct{}

func (dynamic) New(*sim.Host) (sim.Agent, error) {
	return accepting{accept.NewDynamic(1, 50, 0.1)}, nil
}

type accepting struct{ policy accept.Policy }

func (a accepting) Decide(own sim.Load, offer *sim.Offer) int32 {
	if offer.Last() {
		return offer.At
	}
	if a.policy.Accepts(accept.Load{Busy: uint32(own.Busy), Capacity: uint32(own.Workers)}) {
		return offer.At
	}
	return offer.At + 1
}
