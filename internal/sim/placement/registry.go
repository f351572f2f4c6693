package placement

import (
	"fmt"

	"github.com/segue-lb/segue/internal/sim"
)

// Spec is a placement with its parameters, which are the fields by their yaml names.
type Spec interface {
	// Build checks the parameters, and returns what balancers do and what servers do with offers; nil is
	// that they take all. Errors name the parameter, the value and what it must be.
	Build() (sim.Method, sim.Policy, error)
}

// Named returns a placement with its default parameters.
func Named(name string) (Spec, error) {
	switch name {
	case "sc":
		return &Hash{Candidates: 1, Buckets: 65537}, nil
	case "rr":
		return &RoundRobin{}, nil
	case "lsq":
		return &LSQ{}, nil
	case "gsq":
		return &GSQ{}, nil
	case "oracle":
		return &Oracle{}, nil
	}
	return nil, fmt.Errorf("must be one of sc, rr, lsq, gsq, oracle")
}

// Build implements Spec.
func (h *Hash) Build() (sim.Method, sim.Policy, error) { return h, nil, nil }

// Build implements Spec.
func (m *RoundRobin) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

// Build implements Spec.
func (m *LSQ) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

// Build implements Spec.
func (m *GSQ) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

// Build implements Spec.
func (m *Oracle) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }
