// SPDX-License-Identifier: Apache-2.0

// Package lab builds a data centre in network namespaces of one machine: a client, an edge router
// that distributes packets over the balancers by ECMP, balancers, and servers that run nginx,
// Apache, MediaWiki or an emulated application. Edge router, balancers and servers are connected at
// layer 2. Balancers may stand behind software switches. `segue-lab lab` and the end-to-end tests
// use the package.
//
// A Topology describes a lab. The names and addresses of its nodes follow from the topology by the
// rules in plan.go. buildNetwork (network.go) makes the nodes' network namespaces, links
// (links.go), addresses and routes (routes.go). processes (software.go) has the programs that run
// in them.
package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"

	"github.com/segue-lb/segue/internal/wording"
)

// Lab is a lab that is up. Several goroutines may call its methods at the same time, except for
// Impair. Only one goroutine at a time may call the methods of a Process.
type Lab struct {
	Name      string
	Topology  Topology
	Nodes     []*Node
	Processes []*Process
	// delay is the process that keeps back packets. It runs on the fabric while the lab reorders
	// packets. It is not in Processes.
	delay      *Process
	laboratory string // the segue-lab executable
	progress   func(string)
}

// Options has the executables of a lab's processes, and a function that gets its messages. Options
// are not stored with the lab. A process that opens the lab later has options of its own.
type Options struct {
	// Segue is the executable of the balancers and agents. The default is the file `segue` in the
	// directory of this process's executable. If there is none, it is the `segue` in the PATH.
	Segue string
	// Laboratory is the segue-lab executable, which nodes run as emulated server, UDP echo and
	// delay. The default is the executable of this process.
	Laboratory string
	// Progress is called with a description of each step, if it is not nil.
	Progress func(string)
}

// newLab returns the lab that the topology describes, without building it.
func newLab(topology Topology, options Options) (*Lab, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if options.Progress == nil {
		options.Progress = func(string) {}
	}
	l := &Lab{
		Name: topology.Name, Topology: topology, laboratory: options.Laboratory,
		progress: options.Progress,
	}
	for _, spec := range topology.Specs() {
		l.Nodes = append(l.Nodes, &Node{Spec: spec, lab: l})
	}
	for _, n := range l.Nodes {
		l.Processes = append(l.Processes, n.processes(options)...)
	}
	l.delay = &Process{
		Name: "delay", node: l.Node("fabric"), daemon: true,
		args: []string{options.Laboratory, "lab", "delay", delayName},
	}
	return l, nil
}

// complete sets the executables that are empty to their defaults.
func (o *Options) complete() (err error) {
	if o.Laboratory == "" {
		if o.Laboratory, err = ownExecutable(); err != nil {
			return err
		}
	}
	if o.Segue == "" {
		o.Segue, err = Segue()
	}
	return err
}

// ownExecutable returns the path of this process's executable.
func ownExecutable() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("own executable: %w", err)
	}
	return self, nil
}

// Segue returns the path of `segue` in the directory of this process's executable. If there is no
// such file, it returns the name "segue", which the PATH resolves.
func Segue() (string, error) {
	self, err := ownExecutable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(self), "segue")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "segue", nil
	}
	return path, nil
}

// Up builds a lab and returns when all of its processes are ready. Balancers start last. If Up
// fails or the context ends, it removes everything that it has built. It needs root, the programs
// that the nodes run, and a lab name that is not in use.
func Up(ctx context.Context, topology Topology, options Options) (*Lab, error) {
	if err := topology.Validate(); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	if err := checkRoot(); err != nil {
		return nil, err
	}
	l, err := newLab(topology, options)
	if err != nil {
		return nil, err
	}
	err = errors.Join(topology.checkMediaWiki(), topology.checkRouter(), topology.checkSwitches())
	if err != nil {
		return nil, err
	}
	for _, p := range l.Processes {
		if _, err := exec.LookPath(p.args[0]); err != nil {
			return nil, fmt.Errorf("%s runs %s: %w", p.node.Name, p.Name, err)
		}
	}
	lock, err := l.createState()
	if lock == nil { // the name is in use, or the directory could not be made or locked
		return nil, err
	}
	// From here on the state directory belongs to this lab, and a failure has to remove it.
	defer lock.unlock()
	if err == nil {
		err = l.build(ctx)
	}
	if err != nil {
		l.progress("Up failed: removing what was built.")
		return nil, errors.Join(err, remove(l.Name))
	}
	return l, nil
}

// checkRoot returns an error unless this process runs as root.
func checkRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("labs need root, because they use network namespaces")
	}
	return nil
}

// build makes the network and the files, and starts all processes. It returns when the processes
// are ready, the edge router has learned its routes, switches have their entries, and the
// topology's impairment has begun. If it fails, the caller removes what it has built.
func (l *Lab) build(ctx context.Context) error {
	type step struct {
		progress string
		do       func(context.Context) error
	}
	write := func(context.Context) error { return l.writeFiles() }
	steps := []step{
		{"Building the network: " + l.Topology.summary() + ".", l.buildNetwork},
		{"Writing configurations and the servers' files.", write},
	}
	if slices.ContainsFunc(l.Nodes, func(n *Node) bool { return n.Application == MediaWiki }) {
		steps = append(steps, step{"Preparing the wiki.", l.prepareWikis})
	}
	steps = append(steps,
		step{"Starting " + wording.Count(len(l.Processes), "process") + ".", l.startProcesses})
	if router := l.Topology.Edge.Router; router != "" {
		steps = append(steps,
			step{"Waiting until " + string(router) + " has learned the routes.", l.awaitRoutes})
	}
	if l.Topology.Switches > 0 {
		steps = append(steps,
			step{"Waiting until the switches have their entries.", l.awaitSwitches})
	}
	if l.Topology.Impair.Some() {
		steps = append(steps,
			step{"Impairing the links: " + l.Topology.Impair.String() + ".", l.startImpairment})
	}
	if err := mountBPFFS(l.Name); err != nil {
		return err
	}
	if err := l.makeLoadPins(); err != nil {
		return err
	}
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		l.progress(step.progress)
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// startProcesses starts all processes, and returns when they are ready. Balancers start last:
// servers answer their checks and probes only when the agents are ready.
func (l *Lab) startProcesses(ctx context.Context) error {
	if err := l.limitCPUs(); err != nil {
		return err
	}
	balancers, others := l.balancerProcesses()
	start := func(p *Process) error { return p.Start(ctx) }
	if err := forAll(others, start); err != nil {
		return err
	}
	return forAll(balancers, start)
}

// balancerProcesses divides the lab's processes into those of balancers and those of other nodes.
func (l *Lab) balancerProcesses() (balancers, others []*Process) {
	for _, p := range l.Processes {
		if p.node.Role == RoleBalancer {
			balancers = append(balancers, p)
		} else {
			others = append(others, p)
		}
	}
	return balancers, others
}

// summary lists the topology's nodes and services in words.
func (t Topology) summary() string {
	return fmt.Sprintf("client, edge router, %s, %s, %s",
		wording.Count(t.Balancers, "balancer"), wording.Count(t.Servers, "server"),
		wording.Count(len(t.Services), "service"))
}

// forAll calls do for all processes at the same time, and returns when all calls have ended.
func forAll(processes []*Process, do func(*Process) error) error {
	errs := make([]error, len(processes))
	var wait sync.WaitGroup
	for i, p := range processes {
		wait.Go(func() { errs[i] = do(p) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// Down removes the lab and everything that belongs to it. If this process has started processes of
// the lab, Down also waits until they are reaped.
func (l *Lab) Down() error {
	err := Down(l.Name)
	if err == nil {
		for _, p := range append(slices.Clone(l.Processes), l.delay) {
			if p.exited != nil {
				<-p.exited
			}
		}
	}
	return err
}

// Node returns the node with the given name, or nil.
func (l *Lab) Node(name string) *Node {
	i := slices.IndexFunc(l.Nodes, func(n *Node) bool { return n.Name == name })
	if i < 0 {
		return nil
	}
	return l.Nodes[i]
}

// FindNode returns the node with the given name. Its error lists the names of all nodes.
func (l *Lab) FindNode(name string) (*Node, error) {
	if n := l.Node(name); n != nil {
		return n, nil
	}
	var names []string
	for _, n := range l.Nodes {
		names = append(names, n.Name)
	}
	return nil, fmt.Errorf("lab %q has no node %q; its nodes are %s", l.Name, name,
		enumerate(names))
}

// Process returns the node's process with the given name, or nil. A balancer has the process lb,
// and with BFD also bfd; or it has its proxy, haproxy or nginx. A switch has bmv2. The edge router
// has the process of its routing software, if any: frr or bird. A server has agent, unless the lab
// has proxies, echo if there are UDP services, and a process with the name of its application, such
// as nginx. With the application mediawiki it also has mariadb and memcached.
func (l *Lab) Process(node, name string) *Process {
	i := slices.IndexFunc(l.Processes, func(p *Process) bool {
		return p.node.Name == node && p.Name == name
	})
	if i < 0 {
		return nil
	}
	return l.Processes[i]
}

// balancers returns the names of all balancers, from lb1 on.
func (l *Lab) balancers() []string {
	var names []string
	for _, spec := range l.Topology.specs(RoleBalancer) {
		names = append(names, spec.Name)
	}
	return names
}
