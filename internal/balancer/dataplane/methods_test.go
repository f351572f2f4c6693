// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// TestEachMethodHasAValue checks that the data path has a value for each variant of each placement,
// and for each persistence and estimator, and that the names read back.
func TestEachMethodHasAValue(t *testing.T) {
	for _, m := range desired.PlacementMethods {
		for _, svc := range variants(m) {
			for _, p := range desired.PersistenceMethods {
				svc.Persistence = p.Name
				checkReadsBack(t, &svc)
			}
			if _, ok := estimators[svc.EstimatorName()]; !ok {
				t.Errorf("placement %s: estimator %q has no value", m.Name, svc.EstimatorName())
			}
		}
	}
}

// variants returns a service for each selection, and each among and estimator, of a placement.
func variants(m desired.PlacementMethod) (services []desired.Service) {
	for _, selection := range m.Selections {
		services = append(services, desired.Service{Placement: m.Name, Selection: selection})
	}
	for _, among := range m.Amongs {
		estimators := m.Estimators
		if len(estimators) == 0 {
			estimators = []desired.Estimator{""}
		}
		for _, estimator := range estimators {
			infer := &desired.Infer{Among: among, Estimator: estimator}
			services = append(services, desired.Service{Placement: m.Name, Infer: infer})
		}
	}
	if len(services) == 0 {
		services = []desired.Service{{Placement: m.Name}}
	}
	return services
}

func checkReadsBack(t *testing.T, svc *desired.Service) {
	t.Helper()
	rule := RuleOf(svc)
	placement, selection := rule.PlacementName()
	among, infers := rule.Among()
	if placement != svc.Placement && !svc.Placement.Infers() || selection != svc.Selection {
		t.Errorf("placement %s %s reads back as %s %s", svc.Placement, svc.Selection, placement, selection)
	}
	if infers != svc.Placement.Infers() || infers && among != svc.Infer.Among {
		t.Errorf("placement %s: reads back as inferring: %t, among %q", svc.Placement, infers, among)
	}
	if got := rule.PersistenceName(); got != svc.Persistence {
		t.Errorf("persistence %s reads back as %s", svc.Persistence, got)
	}
}
