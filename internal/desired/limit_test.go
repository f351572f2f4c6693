// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"strings"
	"testing"
)

// servingOf reads servers such as "web: a b -c, dns: d": those with a minus take no new flows.
func servingOf(text string) Serving {
	all := Serving{}
	for part := range strings.SplitSeq(text, ", ") {
		service, servers, _ := strings.Cut(part, ":")
		all[service] = map[string]bool{}
		for _, server := range strings.Fields(servers) {
			name, drained := strings.CutPrefix(server, "-")
			all[service][name] = !drained
		}
	}
	return all
}

func TestCheckLoss(t *testing.T) {
	const ten = "web: a b c d e f g h i j"
	for _, c := range []struct {
		before, after string
		percent       uint32
		want          string
	}{
		{ten, ten, 0, ""},
		{ten, ten + " k", 0, ""},
		{ten, "web: d e f g h i j", 30, ""},
		{ten, "web: e f g h i j", 30, "would remove 4 of 10 servers of web, and the limit is 30 percent"},
		{ten, "web: e f g h i j", 40, ""},
		{ten, "dns: a", 99, "would remove 10 of 10 servers of web, and the limit is 99 percent"},
		{ten, "dns: a", 100, ""},
		{ten, "web: -a -b -c d e f g h i j", 30, ""},
		{ten, "web: -a -b -c -d e f g h i j", 30, "would take out of service 4 of 10 servers of web (drained or of weight 0), and the limit is 30 percent"},
		{ten, "web: -a -b e f g h i j", 30, "would remove or take out of service 4 of 10 servers of web (2 removed, 2 drained or of weight 0), and the limit is 30 percent"},
		// One server may be lost, unless it is the last.
		{"web: a b", "web: a", 0, ""},
		{"web: a b", "web: a -b", 0, ""},
		{"web: a", "web:", 30, "would remove 1 of 1 server of web, and the limit is 30 percent"},
		{"web: a", "web: -a", 30, "would take out of service 1 of 1 server of web (drained or of weight 0), and the limit is 30 percent"},
		{"web: a -b", "web: -b", 30, "would remove 1 of 2 servers of web, the last in service, and the limit is 30 percent"},
		{"web: a -b", "web: -a -b", 30, "would take out of service 1 of 2 servers of web, the last in service (drained or of weight 0), and the limit is 30 percent"},
		{"web: a -b", "web: -a -b c", 30, ""},
		{"web: a -b", "web: a", 30, ""}, // a drained server that goes
		{"web: -a -b", "web: -a", 30, ""},
		{"web: -a -b -c", "web: -a", 30, "would remove 2 of 3 servers of web, and the limit is 30 percent"},
		{"web: a -b", "web: a b", 0, ""},
		{"web:", "dns: a", 0, ""},
		{"a: x, b: x, c: x, d: x, e: x, f: x, g: x", "g: x", 30, "would remove 1 of 1 server of a, 1 of 1 server of b, " +
			"1 of 1 server of c, 1 of 1 server of d, 1 of 1 server of e, and servers of 1 more, and the limit is 30 percent"},
		{": a b c", ": a", 30, "would remove 2 of 3 services, and the limit is 30 percent"}, // of an agent
	} {
		got := ""
		if err := servingOf(c.before).CheckLoss(servingOf(c.after), c.percent); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s -> %s: %q, want %q", c.before, c.after, got, c.want)
		}
	}
}

func TestServing(t *testing.T) {
	zero, one := uint32(0), uint32(1)
	b := &Balancer{Services: []Service{{Name: "web", Servers: []Server{
		{Name: "a", Weight: &one}, {Name: "b", Weight: &zero}, {Name: "c", Weight: &one, Drained: true}, {Name: "d"},
	}}}}
	a := &Agent{Services: []AgentService{{Name: "a"}, {Name: "b", Drained: true}}}
	for _, c := range []struct {
		got  Serving
		want string
	}{
		{b.Serving(), "web: a -b -c d"}, {a.Serving(), ": a -b"}, {b.Serving().WithoutDrains(), "web: a b c d"},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(servingOf(c.want)) {
			t.Errorf("%v, want %s", c.got, c.want)
		}
	}
	for after, want := range map[string]bool{"web: a -b": false, "web: -a b": true, "web: b": false, "dns: -a": false} {
		if servingOf("web: a -b").Drains(servingOf(after)) != want {
			t.Errorf("web: a -b -> %s: drains %t", after, !want)
		}
	}
}
