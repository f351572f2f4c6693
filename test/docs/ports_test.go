// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// TestPorts checks that docs/operate/ports.md has the default ports and the protocols of the code.
func TestPorts(t *testing.T) {
	page := read(t, "docs/operate/ports.md")
	bgp := regexp.MustCompile(`&p\.Port, (\d+)\)`).FindStringSubmatch(read(t, "internal/desired/defaults.go"))
	if bgp == nil {
		t.Fatal("internal/desired/defaults.go has no default port of BGP")
	}
	want := []string{fmt.Sprintf("UDP %d", desired.DefaultPollPort), "TCP " + bgp[1]}
	for _, e := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap, desired.GRE, desired.IPIP} {
		want = append(want, "| `"+string(e)+"` |")
	}
	for _, text := range want {
		if !strings.Contains(page, text) {
			t.Errorf("docs/operate/ports.md does not have %q", text)
		}
	}
}
