// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// BenchmarkDrain drains and undrains a server of a balancer, which has few or many services of 50
// servers. The balancer has no data path.
func BenchmarkDrain(b *testing.B) {
	for _, services := range []int{1, 100} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			s := newSite(b)
			s.write(s.file, manyServices(s.Desired().Node.State, services))
			s.load()
			for b.Loop() {
				for _, drained := range []bool{true, false} {
					s.change(Edit{Service: "web0", Server: "s7", Set: desired.Fields{"drained": drained}})
				}
			}
		})
	}
}

// manyServices returns a configuration file with services of 50 servers.
func manyServices(state string, services int) string {
	var file strings.Builder
	fmt.Fprintf(&file, "node: {interface: eth0, addresses: [\"2001:db8::1\"], state: %s, limits: {servers: 10000}}\nservices:\n",
		state)
	for i := range services {
		fmt.Fprintf(&file, "- name: web%d\n  vip: 2001:db8:80::%x\n  port: 80\n  protocol: tcp\n  encapsulation: gre\n  servers:\n",
			i, i+1)
		for server := range 50 {
			fmt.Fprintf(&file, "  - {name: s%d, address: \"2001:db8:1::%x\"}\n", server, server+1)
		}
	}
	return file.String()
}

// manyEdits adds servers to a service, changes each, and removes it.
func manyEdits(n int) (edits []Edit) {
	server := func(i int, e Edit) {
		e.Service, e.Server = "web", fmt.Sprint("n", i)
		edits = append(edits, e)
	}
	for i := range n / 4 {
		server(i, Edit{Add: desired.Fields{"address": "2001:db8:1::3"}})
	}
	for i := range n / 4 {
		server(i, Edit{Set: desired.Fields{"weight": 2}})
		server(i, Edit{Set: desired.Fields{"weight": 3}})
	}
	for i := range n / 4 {
		server(i, Edit{Remove: true})
	}
	return edits
}

// As many edits as a request can have are made in their order.
func TestManyEdits(t *testing.T) {
	edits := manyEdits(100_000)
	d := newDraft(newSite(t).inForce)
	for i, e := range edits {
		testhost.Must(t, d.edit(e))
		if i == len(edits)*3/4-1 && len(d.overrides()) != len(edits)/4 {
			t.Errorf("%d overrides, want %d", len(d.overrides()), len(edits)/4)
		}
	}
	if left := d.overrides(); len(left) > 0 {
		t.Errorf("%d overrides are left", len(left))
	}
}

// BenchmarkEdits makes few and many edits. An edit must not take longer if there are many.
func BenchmarkEdits(b *testing.B) {
	files := newSite(b).inForce
	for _, n := range []int{1000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			edits := manyEdits(n)
			for b.Loop() {
				d := newDraft(files)
				for _, e := range edits {
					testhost.Must(b, d.edit(e))
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/edit")
		})
	}
}
