// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// CPUTimes are CPU times of a lab since its start.
type CPUTimes struct {
	// Balancers is that of the processes on all balancers, such as proxies. Agents is that of the
	// processes of all agents. It includes packets that the kernel handled in their place.
	Balancers, Agents time.Duration
	// BalancerPrograms and AgentPrograms are the times of their BPF programs, as far as the kernel
	// has measured them (ebpf.EnableStats). The kernel mostly runs them in the time of the process
	// that sent the packet.
	BalancerPrograms, AgentPrograms time.Duration
	// All is that of all processes on the lab's nodes.
	All time.Duration
}

// CPUTimes returns the CPU times of the lab until now, without those of processes that have ended.
func (l *Lab) CPUTimes() (c CPUTimes, err error) {
	for _, n := range l.Nodes {
		pids, err := processesIn(n.namespacePath())
		if err != nil {
			return c, err
		}
		agent, programs := 0, time.Duration(0)
		if p := l.Process(n.Name, "agent"); p != nil {
			agent, _ = p.PID()
		}
		for _, pid := range pids {
			used, err := cpuTime(pid)
			if err != nil {
				return c, err
			}
			c.All += used
			switch {
			case n.Role == RoleBalancer:
				c.Balancers += used
			case pid == agent:
				c.Agents += used
			}
		}
		if l.Topology.RunsSegue() && n.Locator.IsValid() {
			if programs, err = datapath.RunTime(n.Instance()); err != nil {
				return c, fmt.Errorf("%s: %w", n.Name, err)
			}
		}
		if n.Role == RoleBalancer {
			c.BalancerPrograms += programs
		} else {
			c.AgentPrograms += programs
		}
	}
	return c, nil
}

// cpuTime returns the CPU time of a process with all of its threads, also those that have ended. It
// returns 0 if there is no such process.
func cpuTime(pid int) (time.Duration, error) {
	const scheduler = 2 // CPUCLOCK_SCHED of the kernel: in nanoseconds, and not in ticks
	var t unix.Timespec
	err := unix.ClockGettime(int32(^pid<<3|scheduler), &t)
	if errors.Is(err, unix.EINVAL) { // it has ended
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}
