// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestMediaWikiServers reads a topology with MediaWiki. Each server has its own Apache, database
// and cache, which share the limit of CPU time.
func TestMediaWikiServers(t *testing.T) {
	topology, err := ParseTopology([]byte(`
applications: [mediawiki, apache, nginx]
apache: {cpus: 0.5, workers: 16}
mediawiki: {pages: 10, seed: 3}
services:
  - {name: web, vip: "2001:db8::1", port: 80, protocol: tcp, encapsulation: srv6-insert,
     placement: hunt, load: {source: apache-scoreboard}}
`))
	testhost.Must(t, err)
	if titles := topology.Wiki().Titles(); len(titles) != 10 {
		t.Errorf("the wiki has the pages %v, want 10", titles)
	}
	l := testLab(t, topology)
	for server, want := range map[string]string{
		"s1": "mediawiki+ mariadb+ memcached+ agent", "s2": "apache+ agent", "s3": "nginx agent",
		"s4": "mediawiki+ mariadb+ memcached+ agent",
	} {
		var got []string
		for _, p := range l.Processes {
			if p.node.Name != server {
				continue
			}
			name := p.Name
			if p.limited {
				name += "+"
			}
			got = append(got, name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s runs %v, want %s; + marks processes with a limit", server, got, want)
		}
	}
	for _, p := range []string{"mariadb", "memcached"} {
		args := strings.Join(l.Process("s4", p).args, " ")
		if !strings.Contains(args, "127.0.0.1") {
			t.Errorf("%s must not be reachable from other nodes: %s", p, args)
		}
	}
	if load := l.Node("s4").AgentConfig().Services[0].Load; load.Workers != 16 {
		t.Errorf("the load source of s4 is %+v, want 16 workers", load)
	}
	t.Setenv("PATH", t.TempDir())
	missing := fmt.Sprint(topology.checkMediaWiki())
	if !strings.Contains(missing, "`make mediawiki`") || !strings.Contains(missing, `"mariadbd"`) {
		t.Errorf("MediaWiki is not installed: %s, want advice", missing)
	}
	topology.Applications = []Application{Apache}
	if err := topology.checkMediaWiki(); err != nil {
		t.Errorf("a lab without MediaWiki needs it: %v", err)
	}
}

// TestExamples reads the topologies in docs/examples.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../docs/examples/lab/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if _, err := LoadTopology(file); err != nil {
			t.Error(err)
		}
	}
}
