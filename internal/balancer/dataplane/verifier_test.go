// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// The verifier's work is most of the time of a start, and of the packet tests. It multiplies
// easily: by a loop that is inlined, or by a value that the verifier follows through all that comes
// after it (bpf/net/verifier.h). The kernel refuses a program at one million instructions.
func TestVerifierWork(t *testing.T) {
	t.Parallel()
	testhost.NeedBPF(t)
	hash := desired.Service{Placement: desired.PlacementHash, Persistence: desired.PersistenceTable}
	hunt, stateless, infer, quic := hash, hash, hash, hash
	hunt.Placement, hunt.Selection = desired.PlacementHunt, desired.SelectConsistent
	stateless.Persistence = desired.PersistenceStateless
	quic.Placement, quic.Selection = desired.PlacementHunt, desired.SelectConsistent
	quic.Persistence = desired.PersistenceQUIC
	infer.Placement, infer.Infer = desired.PlacementInfer, &desired.Infer{Among: desired.AmongAll}
	hlb := infer
	hlb.Infer = &desired.Infer{Among: desired.AmongAll, Estimator: desired.EstimateHLB}
	for name, test := range map[string]struct {
		load    func() (*ebpf.CollectionSpec, error)
		program string
		most    uint32 // instructions
	}{
		"default":   {attachedFor(hash), balancerProgXdpLb, 145_000},
		"lab":       {attachedFor(hash, hunt), balancerProgXdpLb, 185_000},
		"stateless": {attachedFor(stateless), balancerProgXdpLb, 115_000},
		"infer":     {attachedFor(infer), balancerProgXdpLb, 170_000},
		"quic":      {attachedFor(hash, quic), balancerProgXdpLb, 210_000},
		"hlb":       {attachedFor(hlb), balancerProgXdpLb, 175_000},
		"whole":     {specWith(FeaturesAll), balancerProgXdpLb, 275_000},
		"dry run":   {wholeDryRun, balancerProgXdpLb, 258_000},
		"sweep":     {usualSweep, sweeperProgSweepFlows, 30_000},
		"copier":    {wholeCopier, copierProgCopyTable, 15_000},
	} {
		spec, err := test.load()
		testhost.Must(t, err)
		objects, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Fatalf("%s: %+v", name, err)
		}
		defer objects.Close()
		info, err := objects.Programs[test.program].Info()
		testhost.Must(t, err)
		verified, ok := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", name, verified)
		if limit := testhost.VerifierLimit(t, test.most); !ok || verified > limit {
			t.Errorf("%s: %d instructions are more than %d", name, verified, limit)
		}
	}
}

// TestEveryMethodLoads loads a program for each placement alone, and for each persistence.
func TestEveryMethodLoads(t *testing.T) {
	testhost.NeedBPF(t)
	programs := map[string]Features{}
	for name, placement := range placements {
		programs[fmt.Sprint(name.Placement, " ", name.Selection)] = placementFeature(placement)
	}
	for among, placement := range inferring {
		programs[fmt.Sprint("infer among ", among)] = placementFeature(placement)
	}
	for name, persistence := range persistences {
		programs[string(name)] = placementFeature(balancerPlacementPLACEMENT_HASH) |
			persistenceFeature(persistence)
	}
	table := persistenceFeature(balancerPersistencePERSISTENCE_TABLE)
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		spec, err := specWith(programs[name] | table)()
		testhost.Must(t, err)
		objects, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Errorf("%s: %+v", name, err)
			continue
		}
		info, err := objects.Programs[balancerProgXdpLb].Info()
		testhost.Must(t, err)
		verified, _ := info.VerifiedInstructions()
		t.Logf("%s: the verifier processes %d instructions", name, verified)
		objects.Close()
	}
}

// attachedFor returns the specification of the attached program for services.
func attachedFor(services ...desired.Service) func() (*ebpf.CollectionSpec, error) {
	return specWith(FeaturesOf(&desired.Balancer{Services: services}))
}

// specWith returns the specification of the attached program with these features, and with hints.
func specWith(features Features) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) {
		spec, _, err := LoadSpec()
		if err != nil {
			return nil, err
		}
		return spec, errors.Join(
			spec.Variables[balancerVarFeatures].Set(uint32(features)),
			spec.Variables[balancerVarHintSetShift].Set(hintSetShift(1<<16)),
		)
	}
}

func wholeDryRun() (*ebpf.CollectionSpec, error) {
	spec, err := loadDryrun()
	if err != nil {
		return nil, err
	}
	NameDirectory(spec)
	return spec, spec.Variables[balancerVarHintSetShift].Set(hintSetShift(1 << 16))
}

// usualSweep returns the specification of the sweep as balancers load it. Its work depends on whether
// there is a slot, and on the shift of the clock.
func usualSweep() (*ebpf.CollectionSpec, error) {
	spec, err := loadSweeper()
	if err != nil {
		return nil, err
	}
	_, err = setSweptSlots(spec, 8192)
	return spec, errors.Join(err, spec.Variables[sweeperVarFlowTickShift].Set(uint32(10)))
}

func wholeCopier() (*ebpf.CollectionSpec, error) {
	spec, err := loadCopier()
	if err != nil {
		return nil, err
	}
	nameCopiedWords(spec)
	return spec, nil
}
