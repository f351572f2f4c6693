// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// steps are the steps of a balancer's program, in order. enum step of bpf/bench/steps.bpf.c has the
// same order.
var steps = []string{"parse", "classify", "lookup", "choose", "commit", "encapsulate", "count"}

// newFlow is the prefix of the names of steps for packets of new flows. For each step there are two
// programs that end after it: one for known flows, and one for new flows, whose name has the
// prefix.
const newFlow = "new-"

// agentSteps are the steps of an agent's program for an offer that the server accepts, in order.
// enum agent_step of bpf/bench/agent_steps.bpf.c has the same order.
var agentSteps = []string{
	"envelope", "vip", "client", "lookup", "socket", "policy", "enter", "deliver",
}

// upTo returns the program that ends after a step. If step is empty, it returns the whole program.
func (r *rig) upTo(step string) (_ *ebpf.Program, err error) {
	if step == "" {
		return r.program, nil
	}
	if r.steps[step] == nil {
		r.steps[step], err = r.loadStep(step)
	}
	return r.steps[step], err
}

// loadBalancerStep loads a balancer's program that ends after a step. If the step's name begins
// with newFlow, it is the program for packets of new flows. The program uses the tables of the
// rig's balancer.
func (r *rig) loadBalancerStep(step string) (*ebpf.Program, error) {
	spec, err := loadSteps()
	if err != nil {
		return nil, err
	}
	program := "xdp_steps"
	step, isNew := strings.CutPrefix(step, newFlow)
	if isNew {
		program = "xdp_steps_new"
	}
	if err := spec.Variables["last_step"].Set(uint32(slices.Index(steps, step))); err != nil {
		return nil, err
	}
	return r.load(spec, program)
}

// loadAgentStep loads an agent's program that ends after a step. It uses the tables of the rig's
// agent, and has the agent's constants.
func (r *rig) loadAgentStep(step string, constants map[string]any) (*ebpf.Program, error) {
	spec, err := loadAgentSteps()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["last_step"].Set(uint32(slices.Index(agentSteps, step))); err != nil {
		return nil, err
	}
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	shared, err := datapath.MapsOf(r.program, spec.Maps)
	if err != nil {
		return nil, err
	}
	// A map whose name begins with a dot has the variables of a section. The agent's program and
	// the step's program have the same sections, but with different variables, because the compiler
	// leaves out the variables that a program does not use. So the programs cannot share these
	// maps, except for .data.vips, which has the same content in both.
	for name, m := range shared {
		if strings.HasPrefix(name, ".") && name != ".data.vips" {
			_ = m.Close()
			delete(shared, name)
		}
	}
	locator := serverLocator(1).Addr().As16()
	return r.loadShared(spec, "xdp_agent_steps", shared, map[string]any{
		"host_mac": macWord(hostMAC), "node_locator": [8]byte(locator[:8]),
	})
}
