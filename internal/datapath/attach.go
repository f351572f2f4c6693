// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
)

// Hook is a point at which the kernel runs a program of an instance.
type Hook struct {
	At       ebpf.AttachType // ebpf.AttachXDP, AttachTCXIngress or AttachTCXEgress
	Priority uint16          // of the filter; lower ones run first; no filter of others may have it
	Pin      string          // the name of the link's pin; empty: the link ends with the process
}

// Place is a hook of an interface, with the program that is to run there.
type Place struct {
	Hook
	Program *ebpf.Program
	Ifindex int
}

// Attach runs programs at their places, in this order. Each replaces the program of an earlier
// process in one step. Programs of the earlier process at other places work until the takeover
// ends. Attach returns how it attached each XDP program.
func (l *Loader) Attach(t *Takeover, places []Place) (attached []Attached, err error) {
	if err := l.claim(t, places); err != nil {
		return nil, err
	}
	for _, place := range places {
		if place.At != ebpf.AttachXDP {
			if err := l.attachTC(t, place); err != nil {
				return nil, err
			}
			continue
		}
		a, err := t.AttachXDP(place.Program, place.Ifindex, l.PathOf(place.Pin), l.XDPMode)
		if err != nil {
			return nil, err
		}
		attached = append(attached, a)
	}
	t.OnCommit(func() error { return l.settle(places) })
	return attached, nil
}

// claim renames the pins of the links that an earlier process has left on the interfaces of the
// places, so that each link has the pin of its place. A pin has another name if the interface had
// another hook before, for example if node.interface has become node.inside.
func (l *Loader) claim(t *Takeover, places []Place) error {
	for _, place := range places {
		for _, other := range l.Hooks {
			if place.Pin == "" || other.Pin == place.Pin || other.At != place.At {
				continue
			}
			if err := t.ClaimLink(l.PathOf(place.Pin), l.PathOf(other.Pin), place.Ifindex); err != nil {
				return err
			}
		}
	}
	return nil
}

// settle detaches the programs of earlier processes at all places except the given ones: links
// whose hook has no place, and filters on interfaces without a place.
func (l *Loader) settle(places []Place) error {
	used, ifindexes := map[Hook]bool{}, []int{}
	for _, place := range places {
		used[place.Hook] = true
		ifindexes = append(ifindexes, place.Ifindex)
	}
	var errs []error // after an error, settle goes on with the other programs
	for _, hook := range l.Hooks {
		if used[hook] {
			continue
		}
		errs = append(errs, DetachLink(l.PathOf(hook.Pin)))
	}
	return errors.Join(append(errs, RemoveFilters(l.Instance, ifindexes...))...)
}

// attachTC runs a program at a hook for TC. If an earlier process has left a tcx link for the
// place, the link gets the new program. Otherwise attachTC makes a tcx link. If the kernel has no
// tcx, because it is older than 6.6, attachTC adds a filter of the queueing discipline clsact.
func (l *Loader) attachTC(t *Takeover, place Place) error {
	if l.unpinned[place.Hook] != nil {
		return nil // this process has attached it already
	}
	if place.Pin != "" {
		err := t.UpdateLink(place.Program, place.Ifindex, l.PathOf(place.Pin))
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	tcx, err := l.AttachTCX(link.TCXOptions{Program: place.Program, Interface: place.Ifindex, Attach: place.At})
	switch {
	case errors.Is(err, ebpf.ErrNotSupported):
		return t.attachFilter(l.Instance, place)
	case err != nil:
		return fmt.Errorf("attach %s to interface %d: %w", place.At, place.Ifindex, err)
	case place.Pin != "":
		return t.PinLink(tcx, place.Program, l.PathOf(place.Pin))
	}
	l.unpinned[place.Hook] = tcx
	t.OnUndo(func() error {
		delete(l.unpinned, place.Hook)
		return tcx.Close()
	})
	return nil
}

// Close detaches the programs whose links have no pins. It does not close the loaded objects.
func (l *Loader) Close() error {
	var errs []error
	for _, tcx := range l.unpinned {
		errs = append(errs, tcx.Close())
	}
	return errors.Join(errs...)
}

// Attached tells how AttachXDP attached a program.
type Attached struct {
	Mode Mode
	// NoNative is the reason why the mode is generic. It is nil if the mode is native, or was chosen.
	NoNative error
}

// errKept is the reason for generic mode if the program replaces an earlier one.
var errKept = errors.New("an earlier process attached in generic mode")

// WarnIfGeneric logs a warning about the cost of generic mode. If an operator has chosen the mode,
// it warns only of offloads that lose packets.
func (a Attached) WarnIfGeneric(log *slog.Logger, iface string) {
	if a.Mode != Generic {
		return
	}
	if a.NoNative == nil {
		a.warnOfMerging(log, iface)
		return
	}
	log.Warn("no native XDP: attached in generic mode, which is slow and drops packets that GRO or LRO "+
		"merged; switch GRO and LRO off", "interface", iface, "native", a.NoNative)
}

// merging are the offloads that merge packets before XDP in generic mode gets them.
var merging = []string{netdev.GRO, "rx-gro-hw", "rx-lro"}

// warnOfMerging logs a warning if offloads of an interface merge packets, or if that is not known.
func (a Attached) warnOfMerging(log *slog.Logger, iface string) {
	active, err := netdev.ActiveOffloads(iface, merging...)
	if err != nil {
		active = merging
	}
	if len(active) > 0 {
		log.Warn("generic XDP drops packets that offloads merged; switch these offloads off",
			"interface", iface, "offloads", strings.Join(active, ", "))
	}
}

// AttachXDP runs prog on an interface and pins the link at pin. If a link of the interface is
// pinned there already, the link gets the new program in one step, and no packet bypasses the
// programs, unless the link has another mode than the wanted one. A link of another interface works
// until the takeover ends.
func (t *Takeover) AttachXDP(
	prog *ebpf.Program, ifindex int, pin string, wanted desired.XDPMode,
) (Attached, error) {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return Attached{}, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	if err := t.leaveMode(iface, pin, wanted); err != nil {
		return Attached{}, err
	}
	err = t.UpdateLink(prog, ifindex, pin) // the mode of the link stays
	switch {
	case err == nil && modeOf(iface) == Generic && wanted != desired.XDPGeneric:
		return Attached{Generic, errKept}, nil
	case err == nil:
		return Attached{Mode: modeOf(iface)}, nil
	case !errors.Is(err, os.ErrNotExist):
		return Attached{}, err
	}
	l, attached, err := attachXDP(prog, ifindex, wanted)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return Attached{}, busy(iface, err)
	}
	if err != nil {
		return Attached{}, fmt.Errorf("attach XDP to %s: %w", iface.Attrs().Name, err)
	}
	return attached, t.PinLink(l, prog, pin)
}

// leaveMode detaches the program of an earlier process from an interface if its mode is not the
// wanted one: an interface cannot run programs in both modes. Packets bypass the programs until the
// next one is attached. Undo attaches the earlier program again.
func (t *Takeover) leaveMode(iface netlink.Link, pin string, wanted desired.XDPMode) error {
	mode, ifindex := modeOf(iface), iface.Attrs().Index
	if wanted == desired.XDPAuto || wanted == "" || string(wanted) == string(mode) {
		return nil
	}
	attached, err := AttachedTo(pin)
	if err != nil || attached != ifindex {
		return err
	}
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	t.held = append(t.held, l)
	info, err := l.Info()
	if err != nil {
		return err
	}
	before, err := openProgram(filepath.Dir(pin), info.Program)
	if err != nil {
		return fmt.Errorf("program %d: %w", info.Program, err)
	}
	t.held = append(t.held, before)
	if err := l.Detach(); err != nil {
		return fmt.Errorf("detach %s: %w", pin, err)
	}
	t.OnUndo(func() error {
		again, err := attachInMode(before, ifindex, mode)
		if err != nil {
			return err
		}
		next, err := pinNext(again, pin)
		if err == nil {
			err = os.Rename(next, pin)
		}
		return errors.Join(err, again.Close())
	})
	return nil
}

// attachXDP attaches a program in the wanted mode. If that is auto, and native mode fails, it tries
// generic mode, unless the error shows that generic mode would fail too (worthGeneric).
func attachXDP(prog *ebpf.Program, ifindex int, wanted desired.XDPMode) (link.Link, Attached, error) {
	if wanted == desired.XDPGeneric {
		l, err := attachInMode(prog, ifindex, Generic)
		return l, Attached{Mode: Generic}, err
	}
	l, noNative := attachInMode(prog, ifindex, Native)
	if noNative == nil {
		return l, Attached{Mode: Native}, nil
	}
	if wanted == desired.XDPNative {
		return nil, Attached{}, fmt.Errorf("in native mode, which node.xdp-mode asks for: %w", noNative)
	}
	if !worthGeneric(noNative) {
		return nil, Attached{}, noNative
	}
	l, err := attachInMode(prog, ifindex, Generic)
	if err != nil {
		return nil, Attached{}, fmt.Errorf("in generic mode: %w; in native mode: %w", err, noNative)
	}
	return l, Attached{Generic, noNative}, nil
}

func attachInMode(prog *ebpf.Program, ifindex int, mode Mode) (link.Link, error) {
	options := link.XDPOptions{Program: prog, Interface: ifindex, Flags: link.XDPDriverMode}
	if mode == Generic {
		options.Flags = link.XDPGenericMode
	}
	return link.AttachXDP(options)
}

// worthGeneric tells whether to try generic mode after native mode has failed with an error.
// Drivers refuse native mode for various reasons, and with various errors: no XDP support, the MTU,
// the number of queues, other features in use. Generic mode is not tried if another program
// occupies the interface, or if privileges are missing.
func worthGeneric(noNative error) bool {
	for _, hopeless := range []error{unix.EBUSY, unix.EEXIST, unix.EPERM, unix.EACCES} {
		if errors.Is(noNative, hopeless) {
			return false
		}
	}
	return true
}

// UpdateLink gives a pinned XDP or tcx link a new program, in one step. The error is os.ErrNotExist
// when there is no such link, or when it belongs to another interface: then use PinLink. If the
// link is in another network namespace, the error is a different one. UpdateLink first detaches a
// link that a killed process has left half-way: new, but not named yet, or replaced, but not
// detached yet.
func (t *Takeover) UpdateLink(prog *ebpf.Program, ifindex int, pin string) error {
	if err := DetachLink(next(pin)); err != nil {
		return err
	}
	attached, err := AttachedTo(pin)
	if err != nil {
		return err
	}
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	if attached != ifindex {
		return errors.Join(os.ErrNotExist, l.Close())
	}
	if err := t.Update(l, prog, filepath.Dir(pin)); err != nil {
		return fmt.Errorf("replace the program of %s: %w", pin, err)
	}
	return nil
}

// Update gives a link a new program, in one step. The takeover closes the link. dir is the
// directory of the instance's pins.
func (t *Takeover) Update(l link.Link, prog *ebpf.Program, dir string) error {
	t.held = append(t.held, l)
	if err := t.keep(prog, dir); err != nil {
		return err
	}
	info, err := l.Info()
	if err != nil {
		return err
	}
	before, err := openProgram(dir, info.Program)
	if err != nil {
		return fmt.Errorf("program %d: %w", info.Program, err)
	}
	t.held = append(t.held, before)
	if err := l.Update(prog); err != nil {
		return err
	}
	t.OnUndo(func() error { return l.Update(before) })
	return nil
}

// keep pins a program by its number before it is attached, for the next process. The end of the
// takeover removes the pins of programs that are no longer attached. If the takeover is undone, a
// new pin is removed.
func (t *Takeover) keep(prog *ebpf.Program, dir string) error {
	id, isNew, err := keepProgram(dir, prog)
	if err != nil {
		return err
	}
	if t.kept == nil {
		t.kept = map[ebpf.ProgramID]bool{}
		t.OnCommit(func() error { return releasePrograms(dir, t.kept) })
	}
	t.kept[id] = true
	if isNew {
		t.OnUndo(func() error { return release(numberPin(dir, programKind, uint32(id))) })
	}
	return nil
}

// ClaimLink renames the pin of an interface's link from other to pin. It does nothing if the link
// with the pin other is not of this interface. If there is a link with the name pin already, the
// two exchange their names. ClaimLink detaches only links that a killed process has left half-way.
func (t *Takeover) ClaimLink(pin, other string, ifindex int) error {
	for _, unfinished := range []string{next(pin), next(other)} {
		if err := DetachLink(unfinished); err != nil {
			return err
		}
	}
	attached, err := AttachedTo(other)
	if err != nil || attached != ifindex {
		return err
	}
	back := func() error { return exchange(other, pin) }
	err = exchange(other, pin)
	if errors.Is(err, unix.ENOENT) {
		back = func() error { return os.Rename(pin, other) }
		err = os.Rename(other, pin)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", other, pin, err)
	}
	t.OnUndo(back)
	return nil
}

// PinLink pins a new link of a program, and closes it when the takeover ends. Undo detaches it. If
// an earlier link is pinned at pin, the earlier link works until the takeover ends.
func (t *Takeover) PinLink(l link.Link, prog *ebpf.Program, pin string) error {
	t.held = append(t.held, l)
	t.OnUndo(l.Detach)
	if err := t.keep(prog, filepath.Dir(pin)); err != nil {
		return err
	}
	return t.pin(l, pin, DetachLink)
}
