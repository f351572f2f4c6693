// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Features are what a program of the data path can do: a mask of the placements and persistences of
// services, and of what else depends on them (bpf/balancer/features.h). The verifier drops the code
// of all other features.
type Features uint32

const (
	// FeaturesAll are the features that any configuration can need: FEATURES_ALL in features.h.
	FeaturesAll Features = 1<<balancerFeatureFEATURE_COUNT - 1

	featureHints       Features = 1 << balancerFeatureFEATURE_HINTS
	featureCRC         Features = 1 << balancerFeatureFEATURE_CRC
	featurePacketTimes Features = 1 << balancerFeatureFEATURE_PACKET_TIMES
	featureSources     Features = 1 << balancerFeatureFEATURE_SOURCES
	featureAffinity    Features = 1 << balancerFeatureFEATURE_AFFINITY
)

// variablesMap is the map of the variables that are not constants.
const variablesMap = ".bss"

// FeaturesOf returns the features that a desired state needs. Tests replace it, to use one program
// for many configurations.
var FeaturesOf = func(cfg *desired.Balancer) (needed Features) {
	for i := range cfg.Services {
		needed |= RuleOf(&cfg.Services[i]).features()
		if cfg.Services[i].BucketHash == desired.BucketHashCRC32 {
			needed |= featureCRC
		}
		if cfg.Services[i].IsPrintedHLB() {
			needed |= featurePacketTimes
		}
		if len(cfg.Services[i].Sources) > 0 {
			needed |= featureSources
		}
	}
	return needed
}

func (r ServiceRule) features() Features {
	persistence := balancerPersistence(r.Methods >> 4)
	needed := placementFeature(balancerPlacement(r.Methods&0xf)) | persistenceFeature(persistence)
	switch persistence {
	case balancerPersistencePERSISTENCE_STATELESS, balancerPersistencePERSISTENCE_HINT:
		needed |= featureHints // without a hint table, the method mask removes it again
	}
	if r.BucketHash() == desired.BucketHashCRC32 {
		needed |= featureCRC
	}
	if r.affinity() != 0 {
		needed |= featureAffinity
	}
	// The flags tell which flows of an earlier method the service may still have.
	if r.HasHalfOpen() {
		needed |= placementFeature(balancerPlacementPLACEMENT_HUNT)
	}
	if r.HasFormerFlows() {
		needed |= persistenceFeature(balancerPersistencePERSISTENCE_TABLE)
	}
	return needed
}

// The feature of a placement has the placement's number. The features of persistences follow.
func placementFeature(placement balancerPlacement) Features { return 1 << placement }

func persistenceFeature(persistence balancerPersistence) Features {
	return 1 << (balancerFeatureFEATURE_PERSISTENCES + balancerFeature(persistence))
}

// featuresInForce returns the features that the services in the directory of an earlier process
// need. A service that changes its method keeps flows of the method before. The directory may be
// nil: there was no earlier process.
func featuresInForce(directory *ebpf.Map) (needed Features, err error) {
	if directory == nil {
		return 0, nil
	}
	mapped, err := MapDirectory(directory, unix.PROT_READ)
	if err != nil {
		return 0, err
	}
	for _, entry := range (&ServiceTable{directory: mapped}).All() {
		if entry.IsService() {
			needed |= entry.Rule.features()
		}
		if entry.HasSources() {
			needed |= featureSources
		}
	}
	return needed, mapped.Close()
}

// mask returns the features as the programs get them, for a hint table of the given number of sets.
func (f Features) mask(hintSets uint32) uint32 {
	if hintSets == 1 { // there is no hint table
		f &^= featureHints
	}
	return uint32(f)
}

// Widen replaces the programs that process packets by programs that can also do what a desired
// state needs. It does nothing if they can already. The desired state must differ from the one of
// Open only in what a reload can change. All tables and variables stay. Programs that can do more
// than is needed stay, too: services that have changed their method keep flows of the method
// before. After an error, the takeover restores the programs.
func (p *Plane) Widen(t *datapath.Takeover, cfg *desired.Balancer) error {
	before := p.features
	if p.features |= FeaturesOf(cfg); p.features == before {
		return nil
	}
	t.OnUndo(func() error {
		p.features = before
		return nil
	})
	spec, err := specFor(p.node)
	if err != nil {
		return err
	}
	if err := datapath.SetVariables(spec, p.outsideVariables(spec)); err != nil {
		return err
	}
	for i := range p.Sides {
		if err := p.widenSide(t, spec, i); err != nil {
			return fmt.Errorf("load a program for the placements and persistences of all services: %w", err)
		}
	}
	if len(p.links) == 0 {
		return nil
	}
	_, err = p.Attach(t, p.links)
	return err
}

// widenSide loads a program for a side with the specification of the outside. The program uses the
// same tables and variables as the one before.
func (p *Plane) widenSide(t *datapath.Takeover, spec *ebpf.CollectionSpec, number int) error {
	if number == 1 { // the inside
		if err := setOutside(spec, false); err != nil {
			return err
		}
	}
	before, shared := p.Sides[number].Objects.XdpLb, p.Objects.Shared()
	shared[variablesMap] = p.Sides[number].Objects.Variables
	var loaded struct {
		XdpLb *ebpf.Program `ebpf:"xdp_lb"`
	}
	if err := datapath.LoadOn(spec, &loaded, shared); err != nil {
		return err
	}
	p.setProgram(number, loaded.XdpLb)
	t.OnUndo(func() error {
		p.setProgram(number, before)
		return loaded.XdpLb.Close()
	})
	t.OnCommit(before.Close)
	return nil
}

// setProgram replaces the XDP program of a side.
func (p *Plane) setProgram(number int, program *ebpf.Program) {
	side := p.Sides[number]
	side.running.Lock()
	defer side.running.Unlock()
	side.Objects.XdpLb = program
	if number == 0 {
		p.Objects.XdpLb = program
	}
}
