// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/lab/application"
	"github.com/segue-lb/segue/research/sim/processor"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// EmulatedServers describes all servers with the application emulated.
type EmulatedServers struct {
	EmulatedServer `yaml:",inline"`
	// Exceptions are the differences of single servers.
	Exceptions []EmulatedException `yaml:"exceptions,omitempty"`
}

// EmulatedException replaces settings on one server. Fields that are not set keep the settings of
// all servers.
type EmulatedException struct {
	Server         string `yaml:"server"`
	EmulatedServer `yaml:",inline"`
}

// EmulatedServer describes one server with emulated processors. Each field stands for the flag of
// `segue-lab app` with the same name. If a field has its zero value, the flag's default applies.
type EmulatedServer struct {
	Workers int `yaml:"workers,omitempty" range:"1 to 65536"`
	// Backlog is at most 4096, the default of net.core.somaxconn, which limits backlogs.
	Backlog    int      `yaml:"backlog,omitempty" range:"1 to 4096"`
	Cores      int      `yaml:"cores,omitempty" range:"1 to 1024"`
	Speed      *float64 `yaml:"speed,omitempty"`
	Discipline string   `yaml:"discipline,omitempty"`
	Demand     string   `yaml:"demand,omitempty"`
	// DemandTable is an absolute path. In a topology file it may be relative to that file.
	DemandTable string `yaml:"demand-table,omitempty"`
	Seed        uint64 `yaml:"seed,omitempty"`
	Colocated   string `yaml:"colocated,omitempty"`
}

// withDefaults returns the settings of e. A setting that e does not have is that of defaults.
func (e EmulatedServer) withDefaults(defaults EmulatedServer) EmulatedServer {
	return EmulatedServer{
		Workers:     cmp.Or(e.Workers, defaults.Workers),
		Backlog:     cmp.Or(e.Backlog, defaults.Backlog),
		Cores:       cmp.Or(e.Cores, defaults.Cores),
		Speed:       cmp.Or(e.Speed, defaults.Speed),
		Discipline:  cmp.Or(e.Discipline, defaults.Discipline),
		Demand:      cmp.Or(e.Demand, defaults.Demand),
		DemandTable: cmp.Or(e.DemandTable, defaults.DemandTable),
		Seed:        cmp.Or(e.Seed, defaults.Seed),
		Colocated:   cmp.Or(e.Colocated, defaults.Colocated),
	}
}

// Of returns the settings of the server with this name. A setting that the server's exception does
// not have is that of all servers.
func (e EmulatedServers) Of(server string) EmulatedServer {
	i := slices.IndexFunc(e.Exceptions, func(x EmulatedException) bool { return x.Server == server })
	if i < 0 {
		return e.EmulatedServer
	}
	return e.Exceptions[i].withDefaults(e.EmulatedServer)
}

// problems calls fail for every setting that is out of range, with the name of the field. Settings
// with the zero value are not set, and so never out of range.
func (e EmulatedServer) problems(fail func(field string, value any, problem string)) {
	inRange := func(field string, value, most int) {
		if value < 0 || value > most { // 0 means that the field is not set
			fail(field, value, fmt.Sprintf("must be 1 to %d", most))
		}
	}
	inRange("workers", e.Workers, application.MaxWorkers)
	inRange("backlog", e.Backlog, 4096)
	inRange("cores", e.Cores, processor.MaxCores)
	if e.Speed != nil && !(*e.Speed > 0 && !math.IsInf(*e.Speed, 1)) {
		fail("speed", *e.Speed, "must be a positive number")
	}
	check := func(field, value string, parse func(string) error) {
		if value == "" {
			return
		}
		if err := parse(value); err != nil {
			fail(field, value, err.Error())
		}
	}
	check("discipline", e.Discipline, func(text string) error {
		_, err := processor.ParseDiscipline(text)
		return err
	})
	check("demand", e.Demand, func(text string) error {
		_, err := scenario.ParseDistribution(text, ".")
		return err
	})
	check("demand-table", e.DemandTable, func(path string) error {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("must be an absolute path")
		}
		return nil
	})
	check("colocated", e.Colocated, func(text string) error {
		_, err := application.ParseSchedule(text)
		return err
	})
}

// emulatedProblems calls fail for every problem of the section emulated.
func (t Topology) emulatedProblems(fail func(path string, value any, format string, args ...any)) {
	failIn := func(section string) func(string, any, string) {
		return func(field string, value any, problem string) {
			fail(section+"."+field, value, "%s", problem)
		}
	}
	t.Emulated.problems(failIn("emulated"))
	for i, e := range t.Emulated.Exceptions {
		section := fmt.Sprintf("emulated.exceptions[%d]", i)
		e.problems(failIn(section))
		same := func(x EmulatedException) bool { return x.Server == e.Server }
		switch {
		case !t.hasServer(e.Server):
			fail(section+".server", e.Server, "is not a server of the lab")
		case t.applicationOf(e.Server) != Emulated:
			fail(section+".server", e.Server, "runs %s, not %s", t.applicationOf(e.Server), Emulated)
		case slices.ContainsFunc(t.Emulated.Exceptions[:i], same):
			fail(section+".server", e.Server, "has an exception already")
		}
	}
}

func (t Topology) applicationOf(server string) Application {
	number, _ := strconv.Atoi(strings.TrimPrefix(server, "s"))
	return t.application(number)
}

// resolve replaces paths of files that are relative to dir by absolute paths.
func (e *EmulatedServers) resolve(dir string) {
	resolve := func(s *EmulatedServer) {
		if s.DemandTable != "" && !filepath.IsAbs(s.DemandTable) {
			s.DemandTable = filepath.Join(dir, s.DemandTable)
		}
	}
	resolve(&e.EmulatedServer)
	for i := range e.Exceptions {
		resolve(&e.Exceptions[i].EmulatedServer)
	}
}

// applicationControl is the address at which an emulated server can be controlled (segue-lab app
// --control), inside its namespace.
const applicationControl = "127.0.0.1:9190"

// emulatedCommand returns the command that runs the node's server with emulated processors.
func (n *Node) emulatedCommand(laboratory string) []string {
	e := n.lab.Topology.Emulated.Of(n.Name)
	args := []string{
		laboratory, "app", "--name", n.Name, "--control", applicationControl, "--load", n.LoadFile(),
		"--files", n.lab.path("content"), "--uploads", n.lab.path(n.Name, "upload"),
		// Tests keep connections open while they rearrange the lab.
		"--idle-timeout", "1h",
	}
	if pin := n.LoadPin(); pin != "" {
		args = append(args, "--load", pin)
	}
	for _, port := range n.httpPorts() {
		args = append(args, "--listen", fmt.Sprintf(":%d", port))
	}
	add := func(flag, value string) {
		if value != "" && value != "0" {
			args = append(args, "--"+flag, value)
		}
	}
	add("workers", strconv.Itoa(e.Workers))
	add("backlog", strconv.Itoa(e.Backlog))
	add("cores", strconv.Itoa(e.Cores))
	if e.Speed != nil {
		add("speed", strconv.FormatFloat(*e.Speed, 'g', -1, 64))
	}
	add("discipline", e.Discipline)
	add("demand", e.Demand)
	add("demand-table", e.DemandTable)
	add("seed", strconv.FormatUint(e.Seed, 10))
	add("colocated", e.Colocated)
	return args
}

// Colocate gives the node's emulated server a schedule of co-located work, which takes shares of
// its cores. The times of the schedule count from now. It replaces the former schedule. An empty
// schedule ends the co-located work.
func (n *Node) Colocate(ctx context.Context, schedule application.Schedule) error {
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return n.dial(ctx, net.Dialer{}, network, address)
		},
		DisableKeepAlives: true,
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPut,
		"http://"+applicationControl+"/colocated", strings.NewReader(schedule.String()))
	if err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("%s: co-located work: %w", n.Name, err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // what is wrong with the schedule
		return fmt.Errorf("%s: co-located work %q: %s: %s", n.Name, schedule, response.Status,
			strings.TrimSpace(string(text)))
	}
	return nil
}

// LoadSource returns a reader of the load that the node's application reports. It returns nil for
// nginx, which reports no load.
func (n *Node) LoadSource() load.Source {
	switch n.Application {
	case Emulated:
		return load.NewSharedMemory(n.LoadFile())
	case Apache, MediaWiki:
		return load.NewApache(n.scoreboard(), uint32(n.lab.Topology.Apache.Workers))
	}
	return nil
}

// LoadFile returns the path of the file in which the node's emulated server reports its load
// (package loadshm).
func (n *Node) LoadFile() string { return n.lab.path(n.Name, "load") }
