// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab/cpulimit"
	"github.com/segue-lb/segue/lab/wiki"
)

// ApacheServers describes the servers with the application apache or mediawiki. Both run Apache's
// MPM prefork, in which each worker is a process.
type ApacheServers struct {
	// Workers is the largest number of connections that a server serves at the same time
	// (MaxRequestWorkers). All workers start with the server.
	Workers int `yaml:"workers" range:"1 to 4096"`
	// Backlog is the length of the kernel's accept queue (ListenBacklog).
	Backlog int `yaml:"backlog" range:"1 to 4096"`
	// CPUs limits the CPU time of each server's application: 0.5 is half of one CPU. 0 means no
	// limit.
	CPUs float64 `yaml:"cpus,omitempty"`
	// Exceptions change settings on single servers.
	Exceptions []ApacheException `yaml:"exceptions,omitempty"`
}

// ApacheException replaces the limit of the CPU time on one server.
type ApacheException struct {
	Server string  `yaml:"server"`
	CPUs   float64 `yaml:"cpus"`
}

// CPUsOf returns the limit of the CPU time of the server with this name, or 0 if there is no limit.
func (a ApacheServers) CPUsOf(server string) float64 {
	i := slices.IndexFunc(a.Exceptions, func(x ApacheException) bool { return x.Server == server })
	if i < 0 {
		return a.CPUs
	}
	return a.Exceptions[i].CPUs
}

// problems calls fail for every setting that is out of range, with the path of the field.
func (a ApacheServers) problems(fail func(path string, value any, format string, args ...any)) {
	inRange := func(path string, value int) {
		if value < 1 || value > 4096 {
			fail(path, value, "must be 1 to 4096")
		}
	}
	inRange("apache.workers", a.Workers)
	inRange("apache.backlog", a.Backlog)
	limit := func(path string, cpus float64) {
		if cpus != 0 && !(cpus >= cpulimit.Min && cpus <= cpulimit.Max) {
			fail(path, cpus, "must be a number from %v to %v, or 0 for no limit", cpulimit.Min, cpulimit.Max)
		}
	}
	limit("apache.cpus", a.CPUs)
	for i, x := range a.Exceptions {
		limit(fmt.Sprintf("apache.exceptions[%d].cpus", i), x.CPUs)
	}
}

// runsApache tells whether Apache serves the application's requests.
func (a Application) runsApache() bool { return a == Apache || a == MediaWiki }

// cpus returns the limit of the CPU time of the node's application, in CPUs, or 0 if there is none.
func (n *Node) cpus() float64 {
	if n.Application.runsApache() {
		return n.lab.Topology.Apache.CPUsOf(n.Name)
	}
	return 0
}

// apacheCommand returns the command that runs the node's Apache.
func (n *Node) apacheCommand() []string {
	return []string{"apache2", "-f", n.configPath("apache.conf"), "-D", "FOREGROUND"}
}

// apacheFiles has the values that the template apache.conf uses.
type apacheFiles struct {
	serverFiles
	ApacheServers
	loadModule
	Scoreboard string
	WorkScript string // uses as much CPU time as a request asks for

	// The following are empty unless the server runs MediaWiki.
	PHPModule string // Apache's module for PHP
	Settings  string // MediaWiki's configuration
	MediaWiki string // the directory of MediaWiki's programs
	WikiPath  string // the path of these programs in URLs
}

// apacheFiles returns the values for the node's Apache. Those of MediaWiki are empty.
func (n *Node) apacheFiles() apacheFiles {
	return apacheFiles{
		serverFiles: n.serverFiles(), ApacheServers: n.lab.Topology.Apache,
		loadModule: n.loadModule("mod_segue_load.so", "/usr/lib/apache2/modules"),
		Scoreboard: n.scoreboard(), WorkScript: n.configPath("work.lua"),
	}
}

// writeApacheConfig writes the files that the node's Apache reads.
func (n *Node) writeApacheConfig() error {
	files := n.apacheFiles()
	if n.Application == MediaWiki {
		module, err := phpModule()
		if err != nil {
			return err
		}
		files.PHPModule, files.Settings = module, n.configPath("LocalSettings.php")
		files.MediaWiki, files.WikiPath = mediaWiki, wiki.Path
	}
	return errors.Join(
		// Workers of Apache run as www-data, and store uploads in this directory.
		os.Chmod(n.lab.path(n.Name, "upload"), 0o777),
		os.WriteFile(n.lab.path(n.Name, "name"), []byte(n.Name+"\n"), 0o644),
		os.WriteFile(n.lab.path(n.Name, "healthz"), []byte("ok\n"), 0o644),
		n.writeConfig("work.lua", files),
		n.writeConfig("apache.conf", files),
	)
}

// scoreboard returns the path of the ScoreBoardFile of the node's Apache.
func (n *Node) scoreboard() string { return n.lab.path(n.Name, "scoreboard") }

// apacheLoad completes a load source of the kind apache-scoreboard. If the path or the number of
// workers is not set, it becomes that of the node's Apache.
func (n *Node) apacheLoad(s desired.Source) desired.Source {
	s.Path = cmp.Or(s.Path, n.scoreboard())
	s.Workers = cmp.Or(s.Workers, uint32(n.lab.Topology.Apache.Workers))
	return s
}

// limitsSet returns the name of a lab's set of control groups. Each group in it has the name of a
// server.
func limitsSet(lab string) string { return "segue-lab-" + lab }

// limitCPUs makes a control group for each server with a limit of CPU time.
func (l *Lab) limitCPUs() error {
	for _, n := range l.Nodes {
		cpus := n.cpus()
		if cpus == 0 {
			continue
		}
		groups, err := cpulimit.Find()
		if err == nil {
			err = groups.Create(limitsSet(l.Name), n.Name, cpus)
		}
		if err != nil {
			return fmt.Errorf("%s: limit the application to %v CPUs: %w", n.Name, cpus, err)
		}
	}
	return nil
}

// removeCPULimits removes the control groups of a lab. It does nothing on a machine without control
// groups.
func removeCPULimits(lab string) error {
	groups, err := cpulimit.Find()
	if errors.Is(err, cpulimit.ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	return groups.Remove(limitsSet(lab))
}

// limited returns a command that runs the given command in the node's control group.
func (n *Node) limited(command []string) ([]string, error) {
	groups, err := cpulimit.Find()
	if err != nil {
		return nil, err
	}
	return groups.Command(limitsSet(n.lab.Name), n.Name, command), nil
}
