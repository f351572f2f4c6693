// SPDX-License-Identifier: Apache-2.0

// Package datapathtest contains shared parts of tests of BPF programs.
package datapathtest

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/segue-lb/segue/internal/testhost"
)

// mostStack is the maximum stack of a program and a chain of called functions, in bytes
// (MAX_BPF_STACK of Linux).
const mostStack = 512

// frameUnit is the unit to which the stack of each function is rounded up, in bytes
// (check_max_stack_depth of Linux 6.1). Later kernels round up to 16 if programs are compiled, and
// so would not detect programs that older kernels refuse.
const frameUnit = 32

var stackDepths = regexp.MustCompile(`(?m)^stack depth ([0-9+]+)`)

// RequireStackForAllKernels loads a program. It fails the test if the deepest chain of calls would
// use more stack than the oldest kernels allow. It pins no maps.
func RequireStackForAllKernels(t *testing.T, spec *ebpf.CollectionSpec, program string) {
	t.Helper()
	testhost.NeedBPF(t)
	for name := range spec.Programs {
		if name != program {
			delete(spec.Programs, name)
		}
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatalf("load %s: %+v", program, err)
	}
	defer collection.Close()
	calls := keptFunctions(t, spec.Programs[program], collection.Programs[program])
	depths, err := depthsOf(collection.Programs[program].VerifierLog, len(calls))
	if err != nil {
		t.Fatalf("%s: %v", program, err)
	}
	deepest, chain := deepestChain(calls, depths, program)
	t.Logf("%s: %d bytes of stack: %s", program, deepest, strings.Join(chain, " > "))
	if deepest > mostStack {
		t.Errorf("%s needs %d bytes of stack where frames are rounded up to %d, more than %d: %s",
			program, deepest, frameUnit, mostStack, strings.Join(chain, " > "))
	}
}

// function is a function of a program, with the names of the functions that it calls.
type function struct {
	name  string
	calls []string
}

// keptFunctions returns the functions of a program in the order of its instructions, without those
// that the kernel has removed because no call is left.
func keptFunctions(t *testing.T, spec *ebpf.ProgramSpec, program *ebpf.Program) (kept []function) {
	t.Helper()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	offsets, err := info.FuncInfos()
	if err != nil {
		t.Fatal(err)
	}
	isKept := func(name string) bool {
		return slices.ContainsFunc(offsets, func(o btf.FuncOffset) bool { return o.Func.Name == name })
	}
	for _, f := range functions(spec) {
		if isKept(f.name) {
			f.calls = slices.DeleteFunc(f.calls, func(name string) bool { return !isKept(name) })
			kept = append(kept, f)
		}
	}
	return kept
}

// functions returns the functions of a program in the order of its instructions.
func functions(program *ebpf.ProgramSpec) (all []function) {
	for _, instruction := range program.Instructions {
		if name := instruction.Symbol(); name != "" {
			all = append(all, function{name: name})
		}
		if instruction.IsFunctionReference() {
			last := &all[len(all)-1]
			last.calls = append(last.calls, instruction.Reference())
		}
	}
	return all
}

// depthsOf reads the stack size of each function, in bytes. The verifier lists the sizes in the
// order of the functions.
func depthsOf(log string, want int) (depths []int, err error) {
	match := stackDepths.FindStringSubmatch(log)
	if match == nil {
		return nil, fmt.Errorf("the verifier's log has no stack depth: %q", log)
	}
	for _, text := range strings.Split(match[1], "+") {
		depth, err := strconv.Atoi(text)
		if err != nil {
			return nil, err
		}
		depths = append(depths, depth)
	}
	if len(depths) != want {
		return nil, fmt.Errorf("the verifier knows %d functions, the object has %d", len(depths), want)
	}
	return depths, nil
}

// deepestChain returns the maximum stack of a function and the functions that it calls, in bytes,
// and the chain of calls. The verifier refuses recursion.
func deepestChain(all []function, depths []int, name string) (deepest int, chain []string) {
	for i, f := range all {
		if f.name != name {
			continue
		}
		for _, called := range f.calls {
			if d, c := deepestChain(all, depths, called); d > deepest {
				deepest, chain = d, c
			}
		}
		own := (max(depths[i], 1) + frameUnit - 1) / frameUnit * frameUnit
		return own + deepest, append([]string{fmt.Sprintf("%s (%d)", name, depths[i])}, chain...)
	}
	panic("no function " + name)
}
