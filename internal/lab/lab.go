// Package lab builds a whole data centre in network namespaces on one machine: a client, an edge
// router that spreads packets over the balancers by ECMP, balancers, and servers that run nginx or Apache,
// joined at layer 2. `segue lab` shows it to people; end-to-end tests use the package.
package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
)

// Lab is a lab that is up. Its methods may be called by several goroutines at a time, but those of
// one Process only by one.
type Lab struct {
	Name      string
	Topology  Topology
	Nodes     []*Node
	Processes []*Process
	// delay runs on the fabric while packets are reordered; it is none of Processes.
	delay    *Process
	progress func(string)
}

// Options are about this process's dealings with a lab, not about the lab.
type Options struct {
	// Binary is the segue executable that the nodes run. Default this process's own.
	Binary string
	// Progress is told in plain words what is going on, if it is not nil.
	Progress func(string)
}

// newLab returns the lab that the topology describes, without building anything.
func newLab(topology Topology, options Options) (*Lab, error) {
	if options.Binary == "" {
		binary, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("own executable: %w", err)
		}
		options.Binary = binary
	}
	if options.Progress == nil {
		options.Progress = func(string) {}
	}
	l := &Lab{Name: topology.Name, Topology: topology, progress: options.Progress}
	for _, spec := range topology.Specs() {
		l.Nodes = append(l.Nodes, &Node{Spec: spec, lab: l})
	}
	for _, n := range l.Nodes {
		l.Processes = append(l.Processes, n.processes(options.Binary)...)
	}
	l.delay = &Process{
		Name: "delay", node: l.Node("fabric"), args: []string{options.Binary, "lab", "delay", delayName}, daemon: true,
	}
	return l, nil
}

// Up builds a lab and returns when all of its processes are ready. When it fails, or the context
// ends, it removes what it has built. It needs root, nginx and a lab name that is not in use.
func Up(ctx context.Context, topology Topology, options Options) (*Lab, error) {
	if err := topology.Validate(); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab needs root, to make network namespaces")
	}
	l, err := newLab(topology, options)
	if err != nil {
		return nil, err
	}
	for _, p := range l.Processes {
		if _, err := exec.LookPath(p.args[0]); err != nil {
			return nil, fmt.Errorf("%s runs %s: %w", p.node.Name, p.Name, err)
		}
	}
	lock, err := l.createState()
	if lock == nil {
		return nil, err
	}
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

func (l *Lab) build(ctx context.Context) error {
	type step struct {
		progress string
		do       func(context.Context) error
	}
	steps := []step{
		{"Building the network: " + l.Topology.summary() + ".", l.buildNetwork},
		{"Writing configurations and the servers' files.", func(context.Context) error { return l.writeFiles() }},
		{fmt.Sprintf("Starting %d processes.", len(l.Processes)), l.startProcesses},
	}
	if l.Topology.Impair.Some() {
		steps = append(steps, step{"Impairing the links: " + l.Topology.Impair.String() + ".", l.startImpairment})
	}
	if err := mountBPFFS(l.Name); err != nil {
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

func (t Topology) summary() string {
	return fmt.Sprintf("client, edge router, %s, %s, %s",
		count(t.Balancers, "balancer"), count(t.Servers, "server"), count(len(t.Services), "service"))
}

// count returns a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// startProcesses starts all processes at the same time.
func (l *Lab) startProcesses(ctx context.Context) error {
	errs := make([]error, len(l.Processes))
	var wait sync.WaitGroup
	for i, p := range l.Processes {
		wait.Go(func() { errs[i] = p.Start(ctx) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// Down removes the lab and everything that belongs to it.
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

// Node returns the node of a name, or nil.
func (l *Lab) Node(name string) *Node {
	i := slices.IndexFunc(l.Nodes, func(n *Node) bool { return n.Name == name })
	if i < 0 {
		return nil
	}
	return l.Nodes[i]
}

// Process returns a process of a node, or nil. The processes are lb on balancers; agent, echo and
// nginx or apache on servers.
func (l *Lab) Process(node, name string) *Process {
	i := slices.IndexFunc(l.Processes, func(p *Process) bool { return p.node.Name == node && p.Name == name })
	if i < 0 {
		return nil
	}
	return l.Processes[i]
}

// balancers returns the names of all balancers.
func (l *Lab) balancers() []string {
	var names []string
	for _, spec := range l.Topology.specs(RoleBalancer) {
		names = append(names, spec.Name)
	}
	return names
}
