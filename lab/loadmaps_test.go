// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// With the load source shared-map, all applications keep their loads in maps, and agents read those.
// Without it, nothing names a map.
func TestLoadMaps(t *testing.T) {
	dir := t.TempDir()
	testhost.Must(t, os.Mkdir(filepath.Join(dir, "modules"), 0o755))
	built := filepath.Join(dir, "modules", "mod_segue_load.so")
	testhost.Must(t, os.WriteFile(built, nil, 0o644))
	topology := DefaultTopology()
	topology.Servers = 3
	topology.Applications = []Application{Emulated, Apache, Nginx}
	topology.Services = topology.Services[:1]
	for _, source := range []desired.LoadSource{desired.LoadSharedMemory, desired.LoadSharedMap} {
		s := &topology.Services[0]
		s.Placement, s.Load = desired.PlacementHunt, desired.Source{Kind: source}
		l, err := newLab(topology, Options{Laboratory: filepath.Join(dir, "segue-lab")})
		testhost.Must(t, err)
		pin := func(server string) string { return "/sys/fs/bpf/segue/lab-demo-@loads/" + server }
		isMap := source == desired.LoadSharedMap
		if got := slices.Contains(l.Process("s1", "emulated").args, pin("s1")); got != isMap {
			t.Errorf("%s: the emulated server has a map: %v", source, got)
		}
		for server, lines := range map[string][]string{
			"s2": {"LoadModule segue_load_module " + built + "\n", "SegueLoad " + pin("s2") + "\n"},
			"s3": {"load_module /usr/lib/nginx/modules/ngx_http_segue_load_module.so;\n", "segue_load " + pin("s3") + ";\n"},
		} {
			template, files := "nginx.conf", any(l.Node(server).nginxFiles())
			if server == "s2" {
				template, files = "apache.conf", l.Node(server).apacheFiles()
			}
			text, err := render(template, files)
			testhost.Must(t, err)
			for _, line := range lines {
				if strings.Contains(string(text), line) != isMap {
					t.Errorf("%s: the configuration of %s has %q: %v, want %v", source, server, line, !isMap, isMap)
				}
			}
			if isMap {
				want := desired.Source{Kind: desired.LoadSharedMap, Path: pin(server)}
				if got := l.Node(server).AgentConfig().Services[0].Load; got != want {
					t.Errorf("%s: the load source is %+v, want %+v", server, got, want)
				}
			}
		}
	}
}
