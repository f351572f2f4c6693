// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// errLate is the error of a step after all others.
var errLate = errors.New("late")

// fail runs a takeover whose last step fails.
func fail(t *testing.T, steps func(*Takeover) error) {
	t.Helper()
	err := inOne(func(takeover *Takeover) error { return errors.Join(steps(takeover), errLate) })
	if err == nil || err.Error() != errLate.Error() {
		t.Errorf("error %v, want %v alone", err, errLate)
	}
}

// xdpOf returns the ID of the XDP program that an interface runs, or 0 if it runs none.
func xdpOf(t *testing.T, name string) uint32 {
	t.Helper()
	iface, err := netlink.LinkByName(name)
	must(t, err)
	if iface.Attrs().Xdp == nil {
		return 0
	}
	return iface.Attrs().Xdp.ProgId
}

// undoing holds two interfaces, and the pins of their programs.
type undoing struct {
	t             *testing.T
	dir           string
	first, second int // interfaces
	program       *ebpf.Program
}

func (u *undoing) pin(name string) string { return filepath.Join(u.dir, name) }

// attach attaches the program to an interface and pins it.
func (u *undoing) attach(takeover *Takeover, ifindex int) error {
	unpinned, err := u.program.Clone()
	must(u.t, err)
	u.t.Cleanup(func() { unpinned.Close() })
	_, err = takeover.AttachXDP(u.program, ifindex, u.pin(LinkPin), desired.XDPAuto)
	return errors.Join(err, takeover.Pin(unpinned, u.pin(BalancerProgram)))
}

// requireUndone runs a takeover whose last step fails, and requires that it changes nothing.
func (u *undoing) requireUndone(name string, steps func(*Takeover) error) {
	u.t.Helper()
	before, on0, on1 := datapathtest.ReadState(u.t, u.dir), xdpOf(u.t, "eth0"), xdpOf(u.t, "eth1")
	fail(u.t, steps)
	before.RequireSame(u.t, name, datapathtest.ReadState(u.t, u.dir))
	if now0, now1 := xdpOf(u.t, "eth0"), xdpOf(u.t, "eth1"); now0 != on0 || now1 != on1 {
		u.t.Errorf("%s: eth0 runs program %d, eth1 %d; before %d, %d", name, now0, now1, on0, on1)
	}
}

// requireAttachUndone requires that a takeover that attaches the program to an interface is undone,
// for either interface.
func (u *undoing) requireAttachUndone(when string) {
	u.t.Helper()
	for name, ifindex := range map[string]int{"eth0": u.first, "eth1": u.second} {
		u.requireUndone(when+" "+name, func(takeover *Takeover) error {
			return u.attach(takeover, ifindex)
		})
	}
}

// A takeover whose last step fails leaves pins, links and programs unchanged.
func TestTakeoverIsUndone(t *testing.T) {
	ns, peer, first := pair(t)
	testhost.Connect(t, ns, "eth1", nil, peer, "eth1", nil)
	old := pass(t, ebpf.XDP, 2)
	u := &undoing{t: t, dir: pins(t), first: first, program: pass(t, ebpf.XDP, 2)}
	link, other := u.pin(LinkPin), u.pin("other")
	must(t, ns.Do(func() error {
		eth1, err := netlink.LinkByName("eth1")
		must(t, err)
		u.second = eth1.Attrs().Index
		u.requireAttachUndone("without a program before, on")
		_, err = attach(old, u.first, link)
		must(t, errors.Join(err, Pin(old, u.pin(BalancerProgram))))
		u.requireAttachUndone("with a program on eth0, on")
		u.requireUndone("renamed", func(takeover *Takeover) error {
			return takeover.ClaimLink(other, link, u.first)
		})
		_, err = attach(u.program, u.second, other)
		must(t, err)
		u.requireUndone("exchanged", func(takeover *Takeover) error {
			return errors.Join(takeover.ClaimLink(link, other, u.second),
				takeover.ClaimLink(other, link, u.first), takeover.UpdateLink(old, u.second, link))
		})
		return nil
	}))
}

// A takeover whose last step fails restores a filter that it has replaced, and removes a filter
// that it has added.
func TestFilterIsUndone(t *testing.T) {
	old, program := pass(t, ebpf.SchedCLS, -1), pass(t, ebpf.SchedCLS, 0)
	makeInstances(t, "a")
	ns, _, ifindex := pair(t)
	must(t, ns.Do(func() error {
		at := func(at ebpf.AttachType, prog *ebpf.Program) Place {
			return Place{Hook{At: at, Priority: 10}, prog, ifindex}
		}
		must(t, addFilter("a", at(ebpf.AttachTCXIngress, old)))
		info, err := old.Info()
		must(t, err)
		id, _ := info.ID()
		fail(t, func(takeover *Takeover) error {
			must(t, takeover.attachFilter("a", at(ebpf.AttachTCXIngress, program)))
			return takeover.attachFilter("a", at(ebpf.AttachTCXEgress, program))
		})
		eth0, err := netlink.LinkByIndex(ifindex)
		must(t, err)
		found, err := netlink.FilterList(eth0, netlink.HANDLE_MIN_INGRESS)
		must(t, err)
		if len(found) != 1 || found[0].(*netlink.BpfFilter).Id != int(id) {
			t.Errorf("at ingress: %+v, want program %d alone", found, id)
		}
		found, err = netlink.FilterList(eth0, netlink.HANDLE_MIN_EGRESS)
		must(t, err)
		if len(found) != 0 {
			t.Errorf("at egress: %+v, want none", found)
		}
		return nil
	}))
}

// The error names the steps that could not be undone. The log names the replaced objects that could
// not be removed.
func TestTakeoverTellsTheRest(t *testing.T) {
	stuck := errors.New("stuck")
	var log bytes.Buffer
	var undone []string
	err := TakeOver(slog.New(slog.NewTextHandler(&log, nil)), func(takeover *Takeover) error {
		for _, step := range []string{"first", "second"} {
			takeover.OnUndo(func() error { undone = append(undone, step); return stuck })
			takeover.OnCommit(func() error { t.Errorf("commits after an error"); return nil })
		}
		return errLate
	})
	if !errors.Is(err, errLate) || !errors.Is(err, stuck) || log.Len() > 0 {
		t.Errorf("error %v, logged %q", err, &log)
	}
	if got := strings.Join(undone, " "); got != "second first" {
		t.Errorf("undone: %s", got)
	}
	err = TakeOver(slog.New(slog.NewTextHandler(&log, nil)), func(takeover *Takeover) error {
		takeover.OnUndo(func() error { t.Errorf("undoes without an error"); return nil })
		takeover.OnCommit(func() error { return stuck })
		return nil
	})
	logged := log.String()
	if err != nil || !strings.Contains(logged, "level=ERROR") ||
		!strings.Contains(logged, "stuck") {
		t.Errorf("error %v, logged %q", err, logged)
	}
}

// CheckXDP accepts the instance's own links, whether they have their name already or not, and no
// other.
func TestCheckXDP(t *testing.T) {
	ns, _, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	dir := pins(t)
	own, instance := filepath.Join(dir, LinkPin), filepath.Base(dir)
	must(t, ns.Do(func() error {
		must(t, CheckXDP(ifindex, instance))
		_, err := attach(program, ifindex, own)
		must(t, err)
		must(t, CheckXDP(ifindex, instance))
		err = CheckXDP(ifindex, instance+"-foreign")
		if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), `"passer"`) {
			t.Errorf("the interface runs another program: error %v", err)
		}
		must(t, os.Rename(own, next(own)))
		return CheckXDP(ifindex, instance)
	}))
}

// The error names the instance that works in another network namespace, and says what to do.
func TestElsewhereSaysWhatToDo(t *testing.T) {
	a, b, ifindex := pair(t)
	program := pass(t, ebpf.XDP, 2)
	dir := pins(t)
	pin := filepath.Join(dir, "link_inside")
	must(t, a.Do(func() error {
		_, err := attach(program, ifindex, pin)
		return err
	}))
	want := fmt.Sprintf("instance %q works in another network namespace, on its interface %d "+
		"(pin link_inside): run this command there (`nsenter --net=`); another instance needs "+
		"another node.instance", filepath.Base(dir), ifindex)
	must(t, b.Do(func() error {
		if _, err := AttachedTo(pin); err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
		return nil
	}))
}
