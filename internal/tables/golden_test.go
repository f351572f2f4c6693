// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

var update = flag.Bool("update", false, "write testdata/golden.txt anew, for a new Version")

const goldenFile = "testdata/golden.txt"

// goldenSets are sets of servers whose tables must not change. The servers are in an order that a
// file could have, and not in the order of names: server-10 comes before server-2.
var goldenSets = []struct {
	name   string
	weight func(i int) uint32
}{
	{"equal weights", func(int) uint32 { return 1 }},
	// Servers of different weights have turns at the same time.
	{"weights 1, 2, 3, 1, 2, 3 ...", func(i int) uint32 { return uint32(1 + i%3) }},
	{"weights 1, 2, 3, 4 ...", func(i int) uint32 { return uint32(1 + i) }},
	{"weights 0, 1, 1000 and the largest", func(i int) uint32 {
		return []uint32{1, 0, 1000, 1, math.MaxUint32, 1000}[i%6]
	}},
}

// goldenSizes are primes and powers of two. The numbers of servers range from 2, which is less
// than most numbers of candidates, to those of real services.
var goldenSizes = []struct{ servers, buckets int }{
	{2, 7}, {12, 251}, {12, 256}, {120, DefaultBuckets}, {120, 65536},
}

// TestGolden compares with tables of other builds of the same Version. They must be equal, because
// balancers of different builds share flows.
func TestGolden(t *testing.T) {
	golden, err := os.ReadFile(goldenFile)
	if err != nil && !*update {
		t.Fatal(err)
	}
	header := fmt.Appendf(nil, "Candidate tables of version %d\n", Version)
	sameVersion := bytes.HasPrefix(golden, header)
	if !sameVersion && !*update {
		first, _, _ := bytes.Cut(golden, []byte("\n"))
		t.Fatalf("%s begins with %q, want %q: after a raise of Version run this test with -update",
			goldenFile, first, header)
	}
	text := string(header) + goldenText(t)
	diff := cmp.Diff(strings.Split(string(golden), "\n"), strings.Split(text, "\n"))
	switch {
	case diff == "":
	case sameVersion:
		t.Errorf("The tables of version %d have changed. Balancers of this build and of others would place "+
			"flows on different servers. Undo the change, or raise Version (-want +got):\n%s", Version, diff)
	default:
		testhost.Must(t, os.WriteFile(goldenFile, []byte(text), 0o644))
	}
}

// goldenText returns the first rows of each table, and the hash of all rows.
func goldenText(t *testing.T) string {
	var out strings.Builder
	for _, set := range goldenSets {
		for _, size := range goldenSizes {
			servers := numbered(size.servers)
			for i := range servers {
				servers[i].Weight = set.weight(i)
			}
			for candidates := 1; candidates <= MaxCandidates; candidates++ {
				fmt.Fprintf(&out, "\n%d servers of %s, %d buckets, %d candidates\n",
					size.servers, set.name, size.buckets, candidates)
				writeTable(&out, mustBuild(t, servers, size.buckets, candidates))
			}
		}
	}
	return out.String()
}

// writeTable writes a table's first rows, and the SHA-256 of all rows in the same form: a line for
// each bucket, with its number and the names of its candidates.
func writeTable(out *strings.Builder, table *Table) {
	const shown = 3
	var rows []byte
	for b := range table.Buckets {
		rows = fmt.Append(rows, b)
		for _, server := range table.Row(b) {
			rows = append(append(rows, ' '), table.Servers[server].Name...)
		}
		rows = append(rows, '\n')
		if b == shown-1 {
			out.Write(rows)
		}
	}
	fmt.Fprintf(out, "sha256 %x\n", sha256.Sum256(rows))
}

// TestGoldenColumns compares tables that are filled column by column with those of other builds of
// the same Version, by the SHA-256 of their rows.
func TestGoldenColumns(t *testing.T) {
	const version = 1
	if Version != version {
		t.Fatalf("the hashes are those of version %d", version)
	}
	for _, c := range []struct {
		servers, buckets, candidates int
		weight                       func(i int) uint32
		want                         string
	}{
		{10, 251, 3, func(int) uint32 { return 1 }, "ea270de37df89724"},
		{100, 65537, 3, func(int) uint32 { return 1 }, "cc290769e97698e6"},
		{100, 65536, 8, func(i int) uint32 { return uint32(i%7 + 1) }, "64b873ebafd453dd"},
	} {
		servers := numbered(c.servers)
		for i := range servers {
			servers[i].Weight = c.weight(i)
		}
		table, err := BuildColumns(servers, c.buckets, c.candidates)
		testhost.Must(t, err)
		rows := make([]byte, 0, 2*len(table.Rows))
		for _, server := range table.Rows {
			rows = binary.LittleEndian.AppendUint16(rows, server)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(rows))[:16]; got != c.want {
			t.Errorf("%d servers, %d buckets, %d candidates: %s, want %s", c.servers, c.buckets, c.candidates, got, c.want)
		}
	}
}
