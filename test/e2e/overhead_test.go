// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// overhead returns the number of bytes that a service's encapsulation adds to a packet
// (docs/understand/protocol.md). The outer header of the lab's tunnels has the IP version of the
// VIP.
func overhead(t *testing.T, s lab.Service) int {
	t.Helper()
	outer := 40
	if s.VIP.Is4() {
		outer = 20
	}
	switch s.Encapsulation {
	case desired.SRv6Insert:
		return 56
	case desired.SRv6Encap:
		return 40
	case desired.GRE:
		return outer + 4
	case desired.IPIP:
		return outer
	}
	t.Fatalf("service %s: unknown encapsulation %q", s.Name, s.Encapsulation)
	return 0
}
