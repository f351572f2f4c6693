package balancer

import (
	"testing"
	"unsafe"

	"github.com/segue-lb/segue/internal/config"
)

// TestConstants compares what Go repeats of the C side with the tables that the C side describes.
func TestConstants(t *testing.T) {
	spec, err := loadBalancer()
	if err != nil {
		t.Fatal(err)
	}
	services, tables := spec.Maps[balancerMapServices].InnerMap, spec.Maps[balancerMapTables]
	for _, c := range []struct {
		name        string
		here, there int
	}{
		{"flows in a bucket", flowsPerBucket, int(spec.Maps[balancerMapFlows].ValueSize / 8)},
		{"lines of services", serviceLines, int(services.MaxEntries)},
		{"services in a line", servicesPerLine, int(services.ValueSize) / int(unsafe.Sizeof(balancerServiceEntry{}))},
		{"services", config.MaxServices, int(spec.Maps[balancerMapServiceLabels].MaxEntries)},
		{"candidate tables", 2 * config.MaxServices, int(tables.MaxEntries)},
		{"candidates in a word", candidatesPerWord, int(tables.InnerMap.ValueSize / 2)},
		{"slots for servers", mostSlots, int(spec.Maps[balancerMapServerLabels].MaxEntries)},
		{"ports", len(ports{}.known), int(spec.Maps[balancerMapPorts].MaxEntries)},
	} {
		if c.here != c.there {
			t.Errorf("%s: %d in Go, %d in C", c.name, c.here, c.there)
		}
	}
}
