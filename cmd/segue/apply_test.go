// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli"
)

func TestApply(t *testing.T) {
	p := startBalancer(t)
	services := strings.Replace(balancerOfTest[strings.Index(balancerOfTest, "services:"):], "s2", "s3", 1)
	p.write("other.yaml", services)
	p.write("invalid.yaml", strings.Replace(services, "port: 443", "port: 70000", 1))
	p.write("broken.yaml", "services: [\n")
	p.write("part.yaml", strings.NewReplacer("name: web", "name: other", "2001:db8:80::1", "2001:db8:80::2").Replace(services))
	p.write("bgp.yaml", "metrics: {listen: \"[::1]:9\"}\n"+services)
	p.transcript("apply-balancer.txt", `
diff DIR/segue.yaml
diff DIR/other.yaml
drain web/s1
apply DIR/other.yaml --dry-run
apply DIR/other.yaml
diff DIR/other.yaml
apply DIR/bgp.yaml
apply DIR/invalid.yaml
apply DIR/broken.yaml
apply DIR/none.yaml
apply
apply DIR/segue.yaml
server list
diff DIR/part.yaml
apply DIR/part.yaml --dry-run
apply DIR/part.yaml
apply DIR/part.yaml --allow-removals --dry-run
`)
	for _, test := range []struct{ command, input, want, err string }{
		{"diff", services, "dry run: server web/s3 added\n", errDifferent.Error()},
		{"apply", services, "server web/s3 added\n", ""},
		{"apply", "services: [\n", "", "standard input:2: a value is missing here"},
	} {
		out, err := runSegueWith(t.Context(), test.input, test.command, "-", "--instance", p.instance)
		if !strings.Contains(out, test.want) || (err == nil) != (test.err == "") || !strings.Contains(fmt.Sprint(err), test.err) {
			t.Errorf("%s -: error %v, want %q; output\n%s", test.command, err, test.err, out)
		}
	}
	if _, err := p.segue("apply", p.dir+"/segue.yaml"); err != nil {
		t.Fatal(err)
	}
	if _, err := p.segue("diff", p.write("other.yaml", services)); !errors.Is(err, errDifferent) || cli.ExitCode(err) != exitDifferent {
		t.Errorf("diff: error %v", err)
	}
}

func TestApplyToAgent(t *testing.T) {
	p := startAgent(t)
	p.write("other.yaml", strings.Replace(agentOfTest[strings.Index(agentOfTest, "services:"):], "threshold: 8", "threshold: 9", 1))
	p.write("lb.yaml", fmt.Sprintf(balancerOfTest, "lb", p.dir))
	p.write("one.yaml", "services: [{name: one, vip: \"2001:db8:80::1\", port: 81, protocol: tcp}]\n")
	p.transcript("apply-agent.txt", `
drain web
diff DIR/other.yaml
apply DIR/other.yaml
service list
apply DIR/lb.yaml
apply DIR/segue.yaml
reload
apply DIR/one.yaml
apply DIR/one.yaml --allow-removals
service remove web --allow-removals
`)
}
