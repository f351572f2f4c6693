// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/segue-lb/segue/internal/desired"
)

// placementName is the name of a placement in a configuration.
type placementName struct {
	desired.Placement
	desired.Selection
}

var placements = map[placementName]balancerPlacement{
	{desired.PlacementHash, ""}:                       balancerPlacementPLACEMENT_HASH,
	{desired.PlacementHunt, desired.SelectConsistent}: balancerPlacementPLACEMENT_HUNT,
	{desired.PlacementHunt, desired.SelectRandom}:     balancerPlacementPLACEMENT_HUNT_RANDOM,
	{desired.PlacementHunt, desired.SelectReports}:    balancerPlacementPLACEMENT_HUNT_REPORTS,
	{desired.PlacementHunt, desired.SelectSpare}:      balancerPlacementPLACEMENT_HUNT_SPARE,
	{desired.PlacementRoundRobin, ""}:                 balancerPlacementPLACEMENT_ROUND_ROBIN,
}

// inferring are the placements of services that infer, by the servers that they choose among.
var inferring = map[desired.Among]balancerPlacement{
	desired.AmongAll:        balancerPlacementPLACEMENT_INFER,
	desired.AmongCandidates: balancerPlacementPLACEMENT_INFER_ROW,
	desired.AmongTwo:        balancerPlacementPLACEMENT_INFER_TWO,
	desired.AmongThree:      balancerPlacementPLACEMENT_INFER_THREE,
	desired.AmongFour:       balancerPlacementPLACEMENT_INFER_FOUR,
	desired.AmongWeighted:   balancerPlacementPLACEMENT_WEIGHTED_DRAW,
	desired.AmongTurns:      balancerPlacementPLACEMENT_WEIGHTED_TURN,
}

// estimators are the methods by which services infer, as desired.Service.EstimatorName names them.
var estimators = map[string]balancerEstimator{
	"":                                       balancerEstimatorESTIMATOR_NONE,
	string(desired.EstimateTerritoryLearned): balancerEstimatorESTIMATOR_TERRITORY_LEARNED,
	string(desired.EstimateTerritory):        balancerEstimatorESTIMATOR_TERRITORY,
	string(desired.EstimateHLB):              balancerEstimatorESTIMATOR_HLB,
	string(desired.EstimateHLBFixed):         balancerEstimatorESTIMATOR_HLB_FIXED,
	string(desired.EstimateDurations):        balancerEstimatorESTIMATOR_DURATIONS,
	string(desired.EstimateDurationsFixed):   balancerEstimatorESTIMATOR_DURATIONS_FIXED,
	string(desired.EstimateDurationsMean):    balancerEstimatorESTIMATOR_DURATIONS_MEAN,
	string(desired.PlacementLeastQueue):      balancerEstimatorESTIMATOR_LEAST_QUEUE,
	string(desired.PlacementSED):             balancerEstimatorESTIMATOR_SED,
	string(desired.PlacementAWCMP):           balancerEstimatorESTIMATOR_AWCMP,
	string(desired.PlacementWeightedTurns):   balancerEstimatorESTIMATOR_WEIGHTED_ROUND_ROBIN,
	string(desired.PlacementGSQ2):            balancerEstimatorESTIMATOR_GSQ2,
}

var persistences = map[desired.Persistence]balancerPersistence{
	desired.PersistenceTable:     balancerPersistencePERSISTENCE_TABLE,
	desired.PersistenceStateless: balancerPersistencePERSISTENCE_STATELESS,
	desired.PersistenceHint:      balancerPersistencePERSISTENCE_HINT,
	desired.PersistenceQUIC:      balancerPersistencePERSISTENCE_QUIC,
}

var bucketHashes = map[desired.BucketHash]balancerBucketHash{
	desired.BucketHashMultilinear: balancerBucketHashBUCKET_HASH_MULTILINEAR,
	desired.BucketHashCRC32:       balancerBucketHashBUCKET_HASH_CRC32,
}

var encapsulations = map[desired.Encapsulation]balancerEncapsulation{
	desired.SRv6Insert: balancerEncapsulationENCAP_SRV6INSERT,
	desired.SRv6Encap:  balancerEncapsulationENCAP_SRV6ENCAP,
	desired.GRE:        balancerEncapsulationENCAP_GRE,
	desired.IPIP:       balancerEncapsulationENCAP_IPIP,
}

// RuleOf returns the part of a service's rule that its configuration determines: placement,
// persistence, affinity and encapsulation. Buckets, row and flags are 0.
func RuleOf(svc *desired.Service) ServiceRule {
	placement := placements[placementName{svc.Placement, svc.Selection}]
	if svc.Placement.Infers() && svc.Infer != nil {
		placement = inferring[svc.Infer.Among]
	}
	persistence := persistences[svc.Persistence]
	return ServiceRule{
		Bucketing:     affinityBits(svc),
		Methods:       uint8(placement) | uint8(persistence)<<4, // METHODS in bpf/balancer/types.h
		Encapsulation: uint8(encapsulations[svc.Encapsulation]),
	}
}

// PlacementName returns the name of the rule's placement in a configuration. For each placement
// that infers it is desired.PlacementInfer. For a placement that this build does not know, it
// returns the number.
func (r ServiceRule) PlacementName() (desired.Placement, desired.Selection) {
	number := balancerPlacement(r.Methods & 0xf)
	if _, infers := r.Among(); infers {
		return desired.PlacementInfer, ""
	}
	for name, n := range placements {
		if n == number {
			return name.Placement, name.Selection
		}
	}
	return desired.Placement(fmt.Sprint(uint32(number))), ""
}

// Among tells among which servers the rule's placement chooses. It returns false if the placement
// does not infer.
func (r ServiceRule) Among() (among desired.Among, infers bool) {
	for name, number := range inferring {
		if number == balancerPlacement(r.Methods&0xf) {
			return name, true
		}
	}
	return "", false
}

// PersistenceName returns the name of the rule's persistence in a configuration, or its number if
// this build does not know it.
func (r ServiceRule) PersistenceName() desired.Persistence {
	return nameOf(persistences, balancerPersistence(r.Methods>>4))
}

// EncapsulationName returns the name of the rule's encapsulation in a configuration, or its number
// if this build does not know it.
func (r ServiceRule) EncapsulationName() desired.Encapsulation {
	return nameOf(encapsulations, balancerEncapsulation(r.Encapsulation))
}

// nameOf returns the name of a value in a configuration, or the number if the value is not in
// values.
func nameOf[N ~string, V ~uint32](values map[N]V, value V) N {
	for name, v := range values {
		if v == value {
			return name
		}
	}
	return N(fmt.Sprint(uint32(value)))
}
