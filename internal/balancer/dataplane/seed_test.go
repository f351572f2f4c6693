// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// TestSecretSeedSpreadsChosenFlows chooses flows that share a bucket under the default seed, as a
// client can. Under any other seed they are spread over all buckets, so a client that does not know
// the seed cannot choose its server.
func TestSecretSeedSpreadsChosenFlows(t *testing.T) {
	const buckets, wanted, chosen = 256, 1024, 7
	public := bucketKeys(0)
	var flows []Flow
	for i := 0; len(flows) < wanted; i++ {
		flow := some4
		address := netip.AddrFrom4([4]byte{192, 0, byte(2 + i>>22), byte(i >> 14)})
		flow.Source = netip.AddrPortFrom(address, uint16(1024+i&0x3fff))
		if flow.Bucket(desired.BucketHashMultilinear, &public, buckets) == chosen {
			flows = append(flows, flow)
		}
	}
	for seed := range uint64(100) {
		keys := bucketKeys(seed<<32 | 0x5e9ce5ee)
		var counts [buckets]int
		most := 0
		for _, flow := range flows {
			bucket := flow.Bucket(desired.BucketHashMultilinear, &keys, buckets)
			counts[bucket]++
			most = max(most, counts[bucket])
		}
		// A bucket has four flows on average. One with more than 20 occurs by chance once in 10^9
		// buckets (Poisson).
		if most > 20 {
			t.Errorf("seed %d: one bucket of %d has %d of %d flows", seed, buckets, most, wanted)
		}
	}
}
