// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestBPFObjectsOfAProcess counts each map and program of a process once, and also a map inside a
// map that the process has closed.
func TestBPFObjectsOfAProcess(t *testing.T) {
	needRoot(t)
	var own []*ebpf.Map
	newMap := func(spec *ebpf.MapSpec) *ebpf.Map {
		m, err := ebpf.NewMap(spec)
		testhost.Must(t, err)
		own = append(own, m)
		return m
	}
	array := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 100_000}
	inner := newMap(array)
	outer := newMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 9, InnerMap: array})
	testhost.Must(t, outer.Put(uint32(7), inner))
	twice, err := outer.Clone()
	testhost.Must(t, err)
	defer twice.Close()
	defer outer.Close()
	want := bpfObjects{}
	for _, m := range own {
		info, err := m.Info()
		testhost.Must(t, err)
		id, _ := info.ID()
		bytes, _ := info.Memlock()
		want[bpfObject{mapKey, uint32(id)}] = bytes
	}
	testhost.Must(t, inner.Close())
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	testhost.Must(t, err)
	defer program.Close()
	info, err := program.Info()
	testhost.Must(t, err)
	id, _ := info.ID()
	want[bpfObject{programKey, uint32(id)}], _ = info.Memlock()

	got := bpfObjects{}
	testhost.Must(t, got.addOf(os.Getpid()))
	for object, bytes := range want {
		if bytes == 0 || got[object] != bytes {
			t.Errorf("%+v has %d bytes, want %d", object, got[object], bytes)
		}
	}
	if sum := want.sum(); sum < 800_000 || got.sum() < sum {
		t.Errorf("%d bytes in all, and %d of this test, want at least 800,000", got.sum(), sum)
	}
}

// TestResidentMemory counts memory that a process uses, and not the pages of a BPF map that it has
// mapped.
func TestResidentMemory(t *testing.T) {
	needRoot(t)
	const size = 64 << 20
	touch := func(fd, flags int) []byte {
		area, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, flags)
		testhost.Must(t, err)
		for i := 0; i < size; i += 4096 {
			area[i] = 1
		}
		return area
	}
	resident := func() uint64 {
		bytes, err := residentMemory(os.Getpid())
		testhost.Must(t, err)
		return bytes
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.Array, KeySize: 4, ValueSize: 4096, MaxEntries: size / 4096, Flags: unix.BPF_F_MMAPABLE,
	})
	testhost.Must(t, err)
	defer m.Close()
	before := resident()
	defer unix.Munmap(touch(m.FD(), unix.MAP_SHARED))
	mapped := resident()
	defer unix.Munmap(touch(-1, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))
	used := resident()
	if mapped > before+size/2 || used < mapped+size/2 {
		t.Errorf("%d bytes, %d with a map of %d bytes, %d with as much memory", before, mapped, size, used)
	}
}
