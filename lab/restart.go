// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Restart ends processes of a node and starts them again. Without names it restarts all. It ends
// them by SIGTERM or, if kill is set, by SIGKILL, as in a crash. A process that does not run is
// started. Balancers and agents run Options.Segue, which may be another build than before. Restart
// returns these processes when all of them are ready. It never restarts the process delay, which
// starts and ends with an impairment.
func (l *Lab) Restart(
	ctx context.Context, node string, names []string, kill bool,
) ([]*Process, error) {
	processes, err := l.choose(node, names)
	if err != nil {
		return nil, err
	}
	lock, err := lockState(l.Name)
	if err != nil {
		return nil, err
	}
	defer lock.unlock()
	end := (*Process).Stop
	if kill {
		end = (*Process).Kill
	}
	if err := forAll(processes, end); err != nil {
		return nil, err
	}
	return processes, forAll(processes, func(p *Process) error { return p.Start(ctx) })
}

// choose returns the named processes of a node, each once. If names is empty, it returns all
// processes of the node. It returns an error if the node has no processes, or none with such a
// name.
func (l *Lab) choose(node string, names []string) ([]*Process, error) {
	n, err := l.FindNode(node)
	if err != nil {
		return nil, err
	}
	var all []string         // the names of the node's processes
	var restartable []string // for each process of the lab, the name of its node
	for _, p := range l.Processes {
		restartable = append(restartable, p.node.Name)
		if p.node == n {
			all = append(all, p.Name)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("node %q of lab %q has no processes to restart; these nodes have some: %s",
			node, l.Name, enumerate(slices.Compact(restartable)))
	}
	if len(names) == 0 {
		names = all
	}
	var chosen []*Process
	for _, name := range names {
		p := l.Process(node, name)
		if p == nil {
			return nil, fmt.Errorf("node %q of lab %q has no process %q; its processes are %s",
				node, l.Name, name, strings.Join(all, ", "))
		}
		if !slices.Contains(chosen, p) {
			chosen = append(chosen, p)
		}
	}
	return chosen, nil
}
