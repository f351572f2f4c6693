// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestConstants compares the constants that Go repeats with the tables whose size they determine in
// C.
func TestConstants(t *testing.T) {
	t.Parallel()
	spec, err := loadBalancer()
	testhost.Must(t, err)
	tables := spec.Maps[TablesMap]
	var directory *DirectoryLayout // only for its types
	for _, c := range []struct {
		name        string
		here, there int
	}{
		{"flows in a bucket", FlowsPerBucket, int(spec.Maps[FlowsMap].ValueSize / 8)},
		{"lines of services", serviceLineCount, len(directory.Services[0])},
		{"services in a line", servicesPerLine, len(directory.Services[0][0].Entry)},
		{"services", desired.MaxServices, int(spec.Maps[balancerMapServiceLabels].MaxEntries)},
		{"removed VIPs, twice", 2 * MaxRemovedVIPs, int(spec.Maps[balancerMapRemovedVips].MaxEntries)},
		{"candidate tables, and one to wait by", 2*desired.MaxServices + 1, int(tables.MaxEntries)},
		{"candidates in a word", candidatesPerWord, int(tables.InnerMap.ValueSize / 2)},
		{"slots for servers", NoServer + 1, int(spec.Maps[balancerMapServerLabels].MaxEntries)},
		{"servers in the directory", NoServer + 1, len(directory.Servers)},
	} {
		if c.here != c.there {
			t.Errorf("%s: %d in Go, %d in C", c.name, c.here, c.there)
		}
	}
}
