// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/segue-lb/segue/internal/testhost"
)

// Programs that may not read the kernel's memory contain no such reads, and still load.
func TestLockedDown(t *testing.T) {
	testhost.NeedAgent(t)
	spec, err := loadAgent()
	testhost.Must(t, err)
	reads := func() (n int) {
		for _, program := range spec.Programs {
			for _, ins := range program.Instructions {
				if ins.IsBuiltinCall() && ins.Constant == int64(asm.FnProbeReadKernel) {
					n++
				}
			}
		}
		return n
	}
	if reads() == 0 {
		t.Error("no program reads the kernel's memory")
	}
	refuseReads(spec)
	if n := reads(); n > 0 {
		t.Errorf("%d reads of the kernel's memory are left", n)
	}
	programs, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	programs.Close()
}

// A view can be loaded on every kernel, without testing what the kernel allows.
func TestViewReadsNoMemory(t *testing.T) {
	k := testKernel(t)
	testhost.Must(t, pinAll(k))
	view, err := OpenView(k.loader.Instance)
	testhost.Must(t, err)
	defer view.Close()
	spec, err := loadAgent()
	testhost.Must(t, err)
	refuseReads(spec)
	want, err := ebpf.NewProgram(spec.Programs[agentProgQuerySocket])
	testhost.Must(t, err)
	defer want.Close()
	if got, want := tag(t, view.sockets), tag(t, want); got != want {
		t.Errorf("the view's program has the tag %s, that without reads of memory %s", got, want)
	}
}

// tag returns the kernel's hash of a program's instructions.
func tag(t *testing.T, program *ebpf.Program) string {
	t.Helper()
	info, err := program.Info()
	testhost.Must(t, err)
	return info.Tag
}
