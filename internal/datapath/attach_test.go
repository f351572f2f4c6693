// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/testhost"
)

// pass loads a program that passes every packet.
func pass(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	needRoot(t)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "passer", Type: kind, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { program.Close() })
	return program
}

// pins makes the pin directory of an instance for the duration of a test.
func pins(t *testing.T) (dir string) {
	t.Helper()
	instance := fmt.Sprintf("test-%d-attach", os.Getpid())
	dir, err := MakeDir(instance, RoleBalancer)
	must(t, err)
	t.Cleanup(func() {
		if err := RemoveDir(instance); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// pair makes two namespaces whose interfaces eth0 have the same index.
func pair(t *testing.T) (a, b *testhost.Namespace, ifindex int) {
	t.Helper()
	needRoot(t)
	a, b = testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", testhost.Prefixes("10.0.0.1/24"),
		b, "eth0", testhost.Prefixes("10.0.0.2/24"))
	for i, ns := range []*testhost.Namespace{a, b} {
		must(t, ns.Do(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			if i == 1 && l.Attrs().Index != ifindex {
				t.Fatalf("eth0 has the indexes %d and %d; the test wants the same", ifindex, l.Attrs().Index)
			}
			ifindex = l.Attrs().Index
			return nil
		}))
	}
	return a, b, ifindex
}

// inOne runs a takeover with one step.
func inOne(step func(*Takeover) error) error {
	return TakeOver(slog.New(slog.DiscardHandler), step)
}

func attach(prog *ebpf.Program, ifindex int, pin string) (attached Attached, err error) {
	return attachAs(desired.XDPAuto, prog, ifindex, pin)
}

func attachAs(
	mode desired.XDPMode, prog *ebpf.Program, ifindex int, pin string,
) (attached Attached, err error) {
	err = inOne(func(t *Takeover) error {
		attached, err = t.AttachXDP(prog, ifindex, pin, mode)
		return err
	})
	return attached, err
}

func update(prog *ebpf.Program, ifindex int, pin string) error {
	return inOne(func(t *Takeover) error { return t.UpdateLink(prog, ifindex, pin) })
}

func claim(pin, other string, ifindex int) error {
	return inOne(func(t *Takeover) error { return t.ClaimLink(pin, other, ifindex) })
}

// must ends the test if there is an error.
var must = testhost.Must

// If a process ends when its link has its first pin but not its name, the next process can still
// use the interface.
func TestAttachAfterUnfinishedPin(t *testing.T) {
	ns, _, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	pin := filepath.Join(pins(t), LinkPin)
	must(t, ns.Do(func() error {
		l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: ifindex})
		if err != nil {
			return err
		}
		if err := errors.Join(l.Pin(next(pin)), l.Close()); err != nil {
			return err
		}
		_, err = attach(program, ifindex, pin)
		return err
	}))
}

// TestGenericWhereNativeFails uses a veth whose MTU is too large for native XDP.
func TestGenericWhereNativeFails(t *testing.T) {
	ns, peer, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	pin := filepath.Join(pins(t), LinkPin)
	must(t, peer.Do(func() error { // a packet of the peer must fit one page
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, 9000)
	}))
	must(t, ns.Do(func() error {
		attached, err := attach(program, ifindex, pin)
		if err != nil {
			return err
		}
		if attached.Mode != Generic || !errors.Is(attached.NoNative, unix.ERANGE) {
			t.Errorf("attached as %+v, want generic for %v", attached, unix.ERANGE)
		}
		var log strings.Builder
		attached.WarnIfGeneric(slog.New(slog.NewTextHandler(&log, nil)), "eth0")
		if !strings.Contains(log.String(), "interface=eth0") || !strings.Contains(log.String(), unix.ERANGE.Error()) {
			t.Errorf("the warning is %q", log.String())
		}
		again, err := attach(program, ifindex, pin)
		if err != nil || again.Mode != Generic || again.NoNative == nil {
			t.Errorf("attached again as %+v, error %v", again, err)
		}
		return nil
	}))
}

// TestChosenMode changes the mode of an interface that can do both, and then chooses native mode
// where the driver refuses it.
func TestChosenMode(t *testing.T) {
	ns, peer, ifindex := pair(t)
	program, other := pass(t, ebpf.XDP, 2), pass(t, ebpf.XDP, 2)
	pin := filepath.Join(pins(t), LinkPin)
	setPeerMTU := func(mtu int) {
		must(t, peer.Do(func() error {
			l, err := netlink.LinkByName("eth0")
			return errors.Join(err, netlink.LinkSetMTU(l, mtu))
		}))
	}
	must(t, ns.Do(func() error {
		for _, step := range []struct {
			wanted desired.XDPMode
			mode   Mode
			why    error
		}{
			{desired.XDPGeneric, Generic, nil},
			{desired.XDPGeneric, Generic, nil},
			{desired.XDPAuto, Generic, errKept},
			{desired.XDPNative, Native, nil},
			{desired.XDPAuto, Native, nil},
			{desired.XDPGeneric, Generic, nil},
		} {
			attached, err := attachAs(step.wanted, program, ifindex, pin)
			must(t, err)
			if want := (Attached{step.mode, step.why}); attached != want {
				t.Errorf("%s: attached as %+v, want %+v", step.wanted, attached, want)
			}
			requireRuns(t, ifindex, program, step.mode)
		}
		setPeerMTU(9000)
		_, err := attachAs(desired.XDPNative, other, ifindex, pin)
		if !errors.Is(err, unix.ERANGE) || !strings.Contains(err.Error(), "node.xdp-mode") {
			t.Errorf("native mode, which the driver refuses: error %v", err)
		}
		requireRuns(t, ifindex, program, Generic) // as before
		if at, err := AttachedTo(pin); at != ifindex || err != nil {
			t.Errorf("the pin is of interface %d, error %v", at, err)
		}
		setPeerMTU(1500)
		_, err = attachAs(desired.XDPNative, other, ifindex, pin)
		must(t, err)
		requireRuns(t, ifindex, other, Native)
		return nil
	}))
}

// requireRuns requires that an interface runs a program in a mode.
func requireRuns(t *testing.T, ifindex int, program *ebpf.Program, mode Mode) {
	t.Helper()
	iface, err := netlink.LinkByIndex(ifindex)
	must(t, err)
	info, err := program.Info()
	must(t, err)
	id, _ := info.ID()
	xdp := iface.Attrs().Xdp
	if xdp == nil || xdp.ProgId != uint32(id) || modeOf(iface) != mode {
		t.Errorf("interface %d runs %+v, want program %d in %s mode", ifindex, xdp, id, mode)
	}
}

// TestWarningOfMerging checks that a start in a chosen generic mode warns of GRO, and only of that.
func TestWarningOfMerging(t *testing.T) {
	ns, _, _ := pair(t)
	for _, on := range []bool{true, false} {
		var log strings.Builder
		must(t, ns.Do(func() error {
			must(t, netdev.SetOffloads("eth0", on, netdev.GRO))
			Attached{Mode: Generic}.WarnIfGeneric(slog.New(slog.NewTextHandler(&log, nil)), "eth0")
			return nil
		}))
		if on != strings.Contains(log.String(), "offloads="+netdev.GRO) || !on && log.Len() > 0 {
			t.Errorf("with GRO %v: the log is %q", on, log.String())
		}
	}
}

// TestNoGenericOverAnother checks that a program on the interface stays, and that the error names
// it.
func TestNoGenericOverAnother(t *testing.T) {
	ns, _, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	dir := pins(t)
	must(t, ns.Do(func() error {
		attached, err := attach(program, ifindex, filepath.Join(dir, "first"))
		if err != nil || attached.Mode != Native {
			t.Errorf("attached as %+v, error %v", attached, err)
		}
		_, err = attach(program, ifindex, filepath.Join(dir, "second"))
		if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "eth0") || strings.Contains(err.Error(), "generic") {
			t.Errorf("over another program: error %v", err)
		}
		info, idErr := program.Info()
		if idErr != nil {
			return idErr
		}
		id, _ := info.ID()
		if want := fmt.Sprintf(`program %d "passer", which is not of segue`, id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("over another program: error %v, want %s", err, want)
		}
		pinnedMap(t, dir, marks[RoleBalancer])
		want := fmt.Sprintf(`program %d "passer" of the balancer %q`, id, filepath.Base(dir))
		remedy := fmt.Sprintf("run `segue lb detach %s`", filepath.Base(dir))
		at := "first"
		for _, pin := range xdpPins {
			must(t, os.Rename(filepath.Join(dir, at), filepath.Join(dir, pin)))
			at = pin
			_, err := attach(program, ifindex, filepath.Join(dir, "second"))
			for _, part := range []string{want, remedy} {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("over a balancer's %s: error %v, want %s", pin, err, part)
				}
			}
		}
		return nil
	}))
}

// TestAttachedAgain checks that an interface is free as soon as the previous program is detached.
func TestAttachedAgain(t *testing.T) {
	ns, _, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	pin := filepath.Join(pins(t), LinkPin)
	must(t, ns.Do(func() error {
		for range 20 {
			if _, err := attach(program, ifindex, pin); err != nil {
				return err
			}
			if err := DetachLink(pin); err != nil {
				return err
			}
		}
		return DetachLink(pin) // without a link
	}))
}

// TestOtherInterface checks that a link works until the program is attached to another interface.
func TestOtherInterface(t *testing.T) {
	ns, peer, first := pair(t)
	testhost.Connect(t, ns, "eth1", nil, peer, "eth1", nil)
	program := pass(t, ebpf.XDP, 2)
	dir := pins(t)
	pin, blocker := filepath.Join(dir, LinkPin), filepath.Join(dir, "blocker")
	must(t, ns.Do(func() error {
		eth1, err := netlink.LinkByName("eth1")
		if err != nil {
			return err
		}
		second := eth1.Attrs().Index
		if _, err := attach(program, first, pin); err != nil {
			return err
		}
		if _, err := attach(program, second, blocker); err != nil {
			return err
		}
		if _, err := attach(program, second, pin); !errors.Is(err, unix.EBUSY) {
			t.Errorf("over another program: error %v", err)
		}
		if at, err := AttachedTo(pin); at != first || err != nil {
			t.Errorf("after that attached to %d, error %v; want %d", at, err, first)
		}
		if err := DetachLink(blocker); err != nil {
			return err
		}
		if _, err := attach(program, second, pin); err != nil {
			return err
		}
		if at, err := AttachedTo(pin); at != second || err != nil {
			t.Errorf("moved to %d, error %v; want %d", at, err, second)
		}
		eth0, err := netlink.LinkByIndex(first)
		if err == nil && eth0.Attrs().Xdp != nil && eth0.Attrs().Xdp.Attached {
			t.Error("a program is left where it was")
		}
		return err
	}))
}

// TestUnusedLinksAreDetached checks that a link that cannot be detached keeps no other attached.
func TestUnusedLinksAreDetached(t *testing.T) {
	ns, _, ifindex := pair(t)
	dir := pins(t)
	l := &Loader{Instance: filepath.Base(dir), Dir: dir, Hooks: []Hook{
		{At: ebpf.AttachTCXIngress, Pin: "no_link"}, {At: ebpf.AttachXDP, Pin: LinkPin},
	}}
	program := pass(t, ebpf.XDP, 2)
	must(t, program.Pin(l.PathOf("no_link")))
	must(t, ns.Do(func() error {
		if _, err := attach(program, ifindex, l.PathOf(LinkPin)); err != nil {
			return err
		}
		if err := l.settle(nil); err == nil || !strings.Contains(err.Error(), "no_link") {
			t.Errorf("error %v, want one about no_link", err)
		}
		eth0, err := netlink.LinkByIndex(ifindex)
		if err == nil && eth0.Attrs().Xdp != nil && eth0.Attrs().Xdp.Attached {
			t.Error("the other link is attached")
		}
		return err
	}))
}

// ClaimLink gives a pin to the link of the requested interface. No link loses its program. A link
// without a name does not count.
func TestClaimLink(t *testing.T) {
	ns, peer, first := pair(t)
	testhost.Connect(t, ns, "eth1", nil, peer, "eth1", nil)
	program := pass(t, ebpf.XDP, 2)
	dir := pins(t)
	pin, other := filepath.Join(dir, LinkPin), filepath.Join(dir, "other")
	must(t, ns.Do(func() error {
		eth1, err := netlink.LinkByName("eth1")
		must(t, err)
		second := eth1.Attrs().Index
		want := func(what string, wantPin, wantOther int) {
			t.Helper()
			for pin, want := range map[string]int{pin: wantPin, other: wantOther} {
				if at, err := AttachedTo(pin); at != want || err != nil {
					t.Errorf("%s: %s is attached to %d, error %v; want %d", what, filepath.Base(pin), at, err, want)
				}
			}
		}
		must(t, claim(pin, other, first))
		want("without links", 0, 0)
		_, err = attach(program, first, other)
		must(t, err)
		must(t, claim(pin, other, second))
		want("claimed for another interface", 0, first)
		must(t, claim(pin, other, first))
		want("claimed", first, 0)
		_, err = attach(program, second, other)
		must(t, err)
		must(t, claim(pin, other, first))
		want("claimed again", first, second)
		must(t, claim(pin, other, second))
		want("changed", second, first)
		for _, at := range []int{first, second} {
			iface, err := netlink.LinkByIndex(at)
			must(t, err)
			if iface.Attrs().Xdp == nil || !iface.Attrs().Xdp.Attached {
				t.Errorf("%s has lost its program", iface.Attrs().Name)
			}
		}
		must(t, os.Rename(pin, next(pin)))
		must(t, os.Rename(other, next(other)))
		must(t, claim(pin, other, first))
		want("claimed after unfinished pins", 0, 0)
		for _, at := range []int{first, second} { // nothing prevents another start
			if _, err := attach(program, at, pin); err != nil {
				t.Error(err)
			}
		}
		return nil
	}))
}

// TestLinkOfAnotherNamespace checks that the link stays unchanged, although the interfaces have the
// same index.
func TestLinkOfAnotherNamespace(t *testing.T) {
	a, b, ifindex := pair(t)
	program, next := pass(t, ebpf.XDP, 2), pass(t, ebpf.XDP, 2)
	filter, nextFilter := pass(t, ebpf.SchedCLS, -1), pass(t, ebpf.SchedCLS, -1)
	dir := pins(t)
	xdpPin, tcxPin := filepath.Join(dir, LinkPin), filepath.Join(dir, "link_ingress")
	must(t, a.Do(func() error {
		if _, err := attach(program, ifindex, xdpPin); err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Program: filter, Interface: ifindex, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return err
		}
		return errors.Join(l.Pin(tcxPin), l.Close())
	}))
	for pin, program := range map[string]*ebpf.Program{xdpPin: next, tcxPin: nextFilter} {
		must(t, b.Do(func() error {
			if err := update(program, ifindex, pin); err == nil || errors.Is(err, os.ErrNotExist) {
				t.Errorf("update %s from another namespace: error %v", pin, err)
			}
			return nil
		}))
		must(t, a.Do(func() error {
			if at, err := AttachedTo(pin); at != ifindex || err != nil {
				t.Errorf("%s is attached to %d, error %v; want %d", pin, at, err, ifindex)
			}
			return update(program, ifindex, pin)
		}))
	}
}
