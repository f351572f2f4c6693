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

// TestBucketsOfClients checks which part of a flow selects its bucket under affinity. The bucket is
// that of a flow that has only this part, and balancers of different builds find the same.
func TestBucketsOfClients(t *testing.T) {
	keys := bucketKeys(7)
	flow := func(source, destination string, protocol desired.Protocol) Flow {
		return Flow{
			Protocol: protocol,
			Source:   netip.MustParseAddrPort(source), Destination: netip.MustParseAddrPort(destination),
		}
	}
	bucket := func(f Flow, port desired.Port, a desired.Affinity) int {
		a.By = desired.AffinityClient
		svc := desired.Service{VIP: f.Destination.Addr(), Port: port, Affinity: &a}
		return f.BucketOf(&svc, &keys, tables.MaxBuckets)
	}
	const vip4, vip6 = "198.51.100.1:80", "[2001:db8:80::1]:80"
	for _, test := range []struct{ client, vip, part string }{
		{"192.0.2.129:40000", vip4, "192.0.2.128:0"},                  // a /25
		{"[2001:db8:1:12ff::2]:40000", vip6, "[2001:db8:1:12f0::]:0"}, // a /60
	} {
		a := desired.Affinity{Scope: desired.ScopeService, PrefixIPv4: 25, PrefixIPv6: 60}
		for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
			want := flow(test.part, test.vip, protocol).Bucket(desired.BucketHashMultilinear, &keys, tables.MaxBuckets)
			if got := bucket(flow(test.client, test.vip, protocol), 80, a); got != want {
				t.Errorf("%s %s to %s has bucket %d, want that of %s, %d", protocol, test.client, test.vip, got, test.part, want)
			}
		}
	}
	// Services that share their affinity have the same bucket, and so has a service of all ports.
	shared := desired.Affinity{Scope: desired.ScopeVIP, PrefixIPv4: 32, PrefixIPv6: 128}
	own := desired.Affinity{Scope: desired.ScopeService, PrefixIPv4: 32, PrefixIPv6: 128}
	http, dns := flow("192.0.2.2:40000", vip4, desired.TCP), flow("192.0.2.2:50000", "198.51.100.1:53", desired.UDP)
	want := bucket(http, 80, shared)
	if got := []int{bucket(dns, 53, shared), bucket(http, desired.AllPorts, own), bucket(dns, desired.AllPorts, own)}; got[0] != want || got[1] != want || got[2] != want {
		t.Errorf("services that share have the buckets %d, want %d", got, want)
	}
	if a, b := bucket(http, 80, own), bucket(dns, 53, own); a == b || a == want {
		t.Errorf("services of their own have the buckets %d and %d, those that share %d", a, b, want)
	}
}

// TestAffinityOfRules checks that a rule keeps its affinity beside any number of buckets.
func TestAffinityOfRules(t *testing.T) {
	for _, vip := range []string{"198.51.100.1", "2001:db8:80::1"} {
		for _, a := range []*desired.Affinity{
			nil,
			{By: desired.AffinityNone, PrefixIPv4: 24, PrefixIPv6: 56},
			{By: desired.AffinityClient, Scope: desired.ScopeService, PrefixIPv4: 32, PrefixIPv6: 128},
			{By: desired.AffinityClient, Scope: desired.ScopeVIP, PrefixIPv4: 8, PrefixIPv6: 16},
		} {
			svc := desired.Service{VIP: netip.MustParseAddr(vip), Port: 80, Affinity: a}
			rule := RuleOf(&svc)
			for _, buckets := range []uint32{0, 2, tables.MaxBuckets} {
				rule.SetBuckets(buckets)
				if got, want := rule.Affinity(svc.VIP), svc.ClientAffinity(); got != want || rule.Buckets() != buckets {
					t.Errorf("VIP %s, affinity %+v, %d buckets: the rule has %+v and %d", vip, want, buckets, got, rule.Buckets())
				}
			}
			if has := rule.features()&featureAffinity != 0; has != svc.ClientAffinity().IsWanted() {
				t.Errorf("VIP %s, affinity %+v: needs the feature: %t", vip, a, has)
			}
		}
	}
}
