// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tables"
)

// TestBucketsOfOtherBuilds keeps the hash that selects a flow's bucket as it is. Balancers of
// different builds share services, so the hash may change only with tables.Version.
func TestBucketsOfOtherBuilds(t *testing.T) {
	const version = 1 // the version of these hashes
	if tables.Version != version {
		t.Fatalf("tables are of version %d: write down its hashes here, in the place of those of version %d",
			tables.Version, version)
	}
	flow := func(source, destination string, protocol desired.Protocol) Flow {
		return Flow{
			Protocol: protocol,
			Source:   netip.MustParseAddrPort(source), Destination: netip.MustParseAddrPort(destination),
		}
	}
	for _, test := range []struct {
		seed uint64
		flow Flow
		want uint32
	}{
		{0, flow("[2001:db8:c::2]:40000", "[2001:db8:80::1]:80", desired.TCP), 0xa50e8f6e},
		{0, flow("[2001:db8:c::2]:40000", "[2001:db8:80::1]:80", desired.UDP), 0x8c0d12ca},
		{0, flow("192.0.2.2:40000", "198.51.100.1:80", desired.TCP), 0x3f2289ab},
		{0, flow("192.0.2.2:40001", "198.51.100.1:80", desired.TCP), 0xe9c4a9c5},
		{1 << 63, flow("[2001:db8:c::2]:40000", "[2001:db8:80::1]:80", desired.TCP), 0x882977aa},
		{1 << 63, flow("192.0.2.2:40000", "198.51.100.1:443", desired.UDP), 0x7f478e6b},
	} {
		keys := bucketKeys(test.seed)
		if got := test.flow.Hash(&keys); got != test.want {
			t.Errorf("seed %d, %+v: hash %#08x, want %#08x", test.seed, test.flow, got, test.want)
		}
	}
	// The hash, as a fraction of 2^32, is the position of the bucket among all buckets.
	keys, first := bucketKeys(0), flow("[2001:db8:c::2]:40000", "[2001:db8:80::1]:80", desired.TCP)
	if got := first.Bucket(desired.BucketHashMultilinear, &keys, tables.DefaultBuckets); got != 42255 {
		t.Errorf("bucket %d, want 42255", got) // 0xa50e8f6e * 65537 / 2^32
	}
	// By CRC, the bucket is in the highest bits of the CRC-32 of addresses and ports.
	if got := first.Bucket(desired.BucketHashCRC32, &keys, 1<<16); got != 0x3c28 {
		t.Errorf("bucket %#x of an IPv6 flow by CRC, want 0x3c28", got)
	}
	second := flow("192.0.2.2:40001", "198.51.100.1:80", desired.TCP)
	if got := second.Bucket(desired.BucketHashCRC32, &keys, 1<<8); got != 0x27 {
		t.Errorf("bucket %#x of an IPv4 flow by CRC, want 0x27", got)
	}
}
