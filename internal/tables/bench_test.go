// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"testing"
)

func BenchmarkBuild(b *testing.B) {
	equal := func(int) uint32 { return 1 }
	for _, bench := range []struct {
		servers, buckets, candidates int
		weights                      string
		weight                       func(i int) uint32
	}{
		{1000, 65537, 1, "equal", equal},
		{1000, 65537, 2, "equal", equal},
		{1000, 65536, 2, "equal", equal},
		{1000, 65537, 8, "equal", equal},
		{1000, 65537, 2, "distinct", func(i int) uint32 { return uint32(1000 + i) }},
		{1000, 65537, 2, "one heavy", func(i int) uint32 { return uint32(max(1, 1000-1000*i)) }},
		{2, 65537, 2, "equal", equal},
		{10000, 1000003, 2, "equal", equal},
		{65535, 1000003, 2, "equal", equal},
	} {
		name := fmt.Sprintf("N=%d/M=%d/C=%d/%s", bench.servers, bench.buckets, bench.candidates, bench.weights)
		b.Run(name, func(b *testing.B) {
			servers := numbered(bench.servers)
			for i := range servers {
				servers[i].Weight = bench.weight(i)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Build(servers, bench.buckets, bench.candidates); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkBuildTurns(b *testing.B) {
	for _, bench := range []struct {
		servers, buckets int
		weight           func(i int) uint32
	}{
		{48, DefaultBuckets, func(int) uint32 { return 1 }},
		{1000, DefaultBuckets, func(i int) uint32 { return uint32(1 + i) }},
		{65535, 1000003, func(i int) uint32 { return uint32(1 + i%1000) }},
	} {
		b.Run(fmt.Sprintf("N=%d/M=%d", bench.servers, bench.buckets), func(b *testing.B) {
			servers := numbered(bench.servers)
			for i := range servers {
				servers[i].Weight = bench.weight(i)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := BuildTurns(servers, bench.buckets, MaxCandidates); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
