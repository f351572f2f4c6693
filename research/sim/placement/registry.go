// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/research/sim"
)

// Spec is a placement. Its fields are the placement's parameters, with their names in YAML.
type Spec interface {
	// Build checks the parameters. It returns the method of the balancers and the policy of the
	// servers. The policy is nil if servers take all offers. Errors name the parameter, the value
	// and the allowed values.
	Build() (sim.Method, sim.Policy, error)
}

// specs contains the placements by name, with their default parameters. docs/research/placement.md
// describes them.
var specs = map[string]func() Spec{
	"hash":                 func() Spec { return &Hash{Candidates: 1} },
	"ecmp":                 func() Spec { return &ECMP{} },
	"wcmp":                 func() Spec { return &WCMP{} },
	"awcmp":                func() Spec { return &AWCMP{Polled: polled()} },
	"round-robin":          func() Spec { return &RoundRobin{} },
	"weighted-round-robin": func() Spec { return &WeightedRoundRobin{Polled: polled()} },
	"sr":                   func() Spec { return &SR{Hunt: Hunt{Candidates: 2}, Threshold: 4} },
	"srdyn":                func() Spec { return &SRDyn{Hunt: Hunt{Candidates: 2}, Window: 50, Epsilon: 0.1, Initial: 1} },
	// hunt has the defaults of a balancer and of an agent.
	"hunt": func() Spec {
		return &Least{Hunt: Hunt{Candidates: desired.SelectConsistent.DefaultCandidates()}}
	},
	"least": func() Spec { return &Least{Hunt: Hunt{Candidates: 2}} },
	"least-reports": func() Spec {
		return &Least{Hunt: Hunt{Candidates: 8}, Chain: 3, Reports: true, Age: 200 * time.Millisecond}
	},
	"least-spare": func() Spec {
		return &Least{Hunt: Hunt{Candidates: 8}, Chain: 3, Reports: true, Age: 200 * time.Millisecond, Spare: 16}
	},
	"least-queue":      func() Spec { return &LeastQueue{} },
	"least-queue2":     func() Spec { return &LeastQueue{Own: Own{Choices: 2}} },
	"least-queue-home": func() Spec { return &LeastQueue{Own: Own{Ties: TiesHome}} },
	"sed":              func() Spec { return &SED{} },
	"sed2":             func() Spec { return &SED{Own: Own{Choices: 2}} },
	"gsq":              func() Spec { return &GSQ{} },
	"gsq2":             func() Spec { return &GSQ{Queues{Truth: Truth{Choices: 2}}} },
	"gsed":             func() Spec { return &GSED{} },
	"hlb":              func() Spec { return hlbDefaults(0) },
	"hlb2":             func() Spec { return hlbDefaults(2) },
	"hlb-fix": func() Spec {
		spec := hlbDefaults(0)
		spec.FixedNoise = true
		return spec
	},
	"territory":         func() Spec { return &Territory{} },
	"territory-learned": func() Spec { return &Territory{Learned: true, Interval: defaultInterval} },
	"infer":             func() Spec { return inferDefaults() },
	"oracle":            func() Spec { return &Oracle{} },
	"oracle2":           func() Spec { return &Oracle{Truth: Truth{Choices: 2}} },
	"prequal":           func() Spec { return prequalDefaults() },
	"twos":              func() Spec { return &Twos{} },
	"twf":               func() Spec { return &TWF{Polled: polled()} },
}

func polled() Polled { return Polled{Interval: defaultInterval} }

// hlbDefaults returns HLB. For each flow, it compares the given number of random servers, or all
// servers if choices is 0. Ties are broken at random, because the paper does not say how.
func hlbDefaults(choices int) *HLB {
	return &HLB{Own: Own{Choices: choices, Ties: TiesRandom}, Weights: Weights{Interval: defaultInterval}}
}

// Named returns a placement with its default parameters. A placement of real balancers
// has the same name as in their configuration. For an unknown name, the error lists all names.
func Named(name string) (Spec, error) {
	if spec, ok := specs[name]; ok {
		return spec(), nil
	}
	return nil, fmt.Errorf("must be one of %s", strings.Join(Names(), ", "))
}

// Names returns the names of all placements, sorted.
func Names() []string { return slices.Sorted(maps.Keys(specs)) }
