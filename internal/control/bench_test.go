// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// BenchmarkDrain drains a server of a balancer with 10,000 servers, and ends that. The balancer
// itself does nothing.
func BenchmarkDrain(b *testing.B) {
	s := newSite(b)
	var file strings.Builder
	fmt.Fprintf(&file, "node: {interface: eth0, addresses: [\"2001:db8::1\"], state: %s, limits: {servers: 10000}}\nservices:\n",
		s.Desired().Node.State)
	for i := range 10_000 {
		if i%100 == 0 {
			fmt.Fprintf(&file, "- name: web%d\n  vip: 2001:db8:80::%x\n  port: 80\n  protocol: tcp\n  encapsulation: gre\n  servers:\n",
				i/100, i/100+1)
		}
		fmt.Fprintf(&file, "  - {name: s%d, address: \"2001:db8:1::%x\"}\n", i, i+1)
	}
	s.write(s.file, file.String())
	s.load()
	for b.Loop() {
		for _, drained := range []bool{true, false} {
			s.change(Edit{Service: "web50", Server: "s5000", Set: desired.Fields{"drained": drained}})
		}
	}
}
