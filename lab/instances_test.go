// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestDownRemovesInstancesStartedByHand makes instances whose names are not the lab's. Down must
// remove one that is attached in the lab, and one whose process runs there and has attached nothing
// yet. It must keep one that is attached elsewhere, one that is stopped, and one of another lab.
func TestDownRemovesInstancesStartedByHand(t *testing.T) {
	l := up(t, bareTopology())
	attached, starting := l.Name+"-attached", l.Name+"-starting"
	elsewhere, stopped := l.Name+"-elsewhere", l.Name+"-stopped"
	other := "lab-" + l.Name + "x-s1"
	all := []string{attached, starting, elsewhere, stopped, other}
	t.Cleanup(func() {
		if err := removeInstances(all); err != nil {
			t.Error(err)
		}
	})
	for _, name := range all {
		testhost.Must(t, os.MkdirAll(filepath.Join(pinRoot, name), 0o700))
		for _, path := range []string{rundir.LockFile(name), rundir.RecordFile(name)} {
			testhost.Must(t, os.WriteFile(path, nil, 0o600))
		}
	}
	outside, err := netdev.NewNamespace()
	testhost.Must(t, err)
	defer outside.Close()
	for _, err := range []error{
		l.Node("s1").Do(func() error { return pinXDP(attached, "eth0") }),
		outside.Do(func() error { return pinXDP(elsewhere, "lo") }),
	} {
		testhost.Must(t, err)
	}
	holder := exec.Command("flock", "--no-fork", rundir.LockFile(starting), "sleep", "1000")
	testhost.Must(t, l.Node("lb1").Start(holder))
	awaitProcess(t, starting)

	testhost.Must(t, l.Down())
	holder.Wait()
	for name, gone := range map[string]bool{
		attached: true, starting: true, elsewhere: false, stopped: false, other: false,
	} {
		pins := filepath.Join(pinRoot, name)
		for _, path := range []string{pins, rundir.LockFile(name), rundir.RecordFile(name)} {
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) != gone {
				t.Errorf("%s: %v; should it be gone: %t", path, err, gone)
			}
		}
	}
}

// pinXDP attaches a program to an interface of this thread's network namespace, and pins the link
// as an instance with that name does.
func pinXDP(instance, ifname string) error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}, // XDP_PASS
	})
	if err != nil {
		return err
	}
	defer program.Close()
	device, err := netlink.LinkByName(ifname)
	if err != nil {
		return err
	}
	l, err := link.AttachXDP(link.XDPOptions{
		Program: program, Interface: device.Attrs().Index, Flags: link.XDPGenericMode,
	})
	if err != nil {
		return fmt.Errorf("attach to %s: %w", ifname, err)
	}
	defer l.Close()
	return l.Pin(filepath.Join(pinRoot, instance, "link"))
}

// awaitProcess waits until a process holds an instance's lock.
func awaitProcess(t *testing.T, instance string) {
	t.Helper()
	for deadline := time.Now().Add(readyTimeout); ; time.Sleep(10 * time.Millisecond) {
		process, err := rundir.FindProcess(instance)
		testhost.Must(t, err)
		if process != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no process holds the lock of %s", instance)
		}
	}
}

// TestDownOfALabWithoutItsState removes a lab whose state directory somebody has deleted.
func TestDownOfALabWithoutItsState(t *testing.T) {
	needRoot(t)
	name := bareTopology().Name
	l := testLab(t, Topology{Name: name})
	testhost.Must(t, l.Node("client").createNamespace())
	_, err := Up(t.Context(), bareTopology(), Options{})
	if err == nil || !strings.Contains(err.Error(), "segue-lab lab down") {
		t.Errorf("Up where a namespace is left: %v", err)
	}
	testhost.Must(t, Down(name))
	if err := Down(name); !errors.Is(err, ErrNotUp) {
		t.Errorf("second Down: %v", err)
	}
}
