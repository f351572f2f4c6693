// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Attached is how AttachXDP attached a program.
type Attached struct {
	Mode Mode
	// NoNative is why the mode is generic; nil when it is native.
	NoNative error
}

// errKept is why a program that takes another's place is in generic mode.
var errKept = errors.New("an earlier process attached in generic mode")

// WarnIfGeneric tells the operator what generic mode costs.
func (a Attached) WarnIfGeneric(log *slog.Logger, iface string) {
	if a.Mode != Generic {
		return
	}
	log.Warn("no native XDP: attached in generic mode, which is slow and loses packets that the interface "+
		"merged (switch GRO and LRO off)", "interface", iface, "native", a.NoNative)
}

// AttachXDP runs prog on an interface and pins the link at pin. A link that is
// pinned there already and belongs to the interface is given the new program in
// one step; no packet passes by. One of another interface works until the new one
// takes its place. The native mode is tried first.
func AttachXDP(prog *ebpf.Program, ifindex int, pin string) (Attached, error) {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return Attached{}, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	err = UpdateLink(prog, ifindex, pin)
	if err == nil && modeOf(iface) == Generic {
		return Attached{Generic, errKept}, nil
	}
	if err == nil {
		return Attached{Mode: Native}, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return Attached{}, err
	}
	l, attached, err := attachXDP(prog, ifindex)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return Attached{}, fmt.Errorf("attach XDP to %s: %w: it runs %s", iface.Attrs().Name, err, describeXDP(ifindex))
	}
	if err != nil {
		return Attached{}, fmt.Errorf("attach XDP to %s: %w", iface.Attrs().Name, err)
	}
	defer l.Close()
	return attached, PinLink(l, pin)
}

// describeXDP names the program that an interface runs, and whose it is, as far as that can be found out.
func describeXDP(ifindex int) string {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil || iface.Attrs().Xdp == nil || iface.Attrs().Xdp.ProgId == 0 {
		return "a program that has gone since"
	}
	id := ebpf.ProgramID(iface.Attrs().Xdp.ProgId)
	text := fmt.Sprintf("program %d", id)
	if program, err := ebpf.NewProgramFromID(id); err == nil {
		if info, err := program.Info(); err == nil {
			text += fmt.Sprintf(" %q", info.Name)
		}
		_ = program.Close()
	}
	if owner := ownerOf(id); owner != nil {
		return fmt.Sprintf("%s of the %s %q", text, owner.Role, owner.Name)
	}
	return text + ", of no instance of segue"
}

// ownerOf is the instance that has attached a program; nil: none.
func ownerOf(id ebpf.ProgramID) *Instance {
	entries, _ := os.ReadDir(Dir(""))
	for _, entry := range entries {
		l, err := link.LoadPinnedLink(filepath.Join(Dir(entry.Name()), LinkPin), nil)
		if err != nil {
			continue
		}
		info, err := l.Info()
		_ = l.Close()
		if err != nil || info.Program != id {
			continue
		}
		role, _ := roleOf(entry.Name())
		return &Instance{entry.Name(), role}
	}
	return nil
}

func attachXDP(prog *ebpf.Program, ifindex int) (link.Link, Attached, error) {
	options := link.XDPOptions{Program: prog, Interface: ifindex, Flags: link.XDPDriverMode}
	l, native := link.AttachXDP(options)
	if native == nil {
		return l, Attached{Mode: Native}, nil
	}
	if !worthGeneric(native) {
		return nil, Attached{}, native
	}
	options.Flags = link.XDPGenericMode
	l, err := link.AttachXDP(options)
	if err != nil {
		return nil, Attached{}, fmt.Errorf("in generic mode: %w; in native mode: %w", err, native)
	}
	return l, Attached{Generic, native}, nil
}

// worthGeneric tells whether generic mode may do what native mode refused. Drivers refuse for reasons
// and with errors of their own: no XDP, the MTU, the number of queues, other features in use. It may
// not where another program has the interface, or for want of privileges.
func worthGeneric(native error) bool {
	for _, hopeless := range []error{unix.EBUSY, unix.EEXIST, unix.EPERM, unix.EACCES} {
		if errors.Is(native, hopeless) {
			return false
		}
	}
	return true
}

// UpdateLink gives a pinned XDP or tcx link a new program, in one step. The error is os.ErrNotExist
// when there is no such link, or it is another interface's: see PinLink. A link of another network
// namespace is another error. A link that an earlier process has made, and whose pin it did not live to
// name, is taken off its interface first.
func UpdateLink(prog *ebpf.Program, ifindex int, pin string) error {
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
	defer l.Close()
	if attached != ifindex {
		return os.ErrNotExist
	}
	if err := l.Update(prog); err != nil {
		return fmt.Errorf("replace the program of %s: %w", pin, err)
	}
	return nil
}

// ClaimLink gives the pin of a name to the link of an interface where that has another one, which gets what the name
// was of: interfaces can have changed their parts since an earlier process. It names links only, and none is
// taken off, but for such as UpdateLink would.
func ClaimLink(pin, other string, ifindex int) error {
	for _, unfinished := range []string{next(pin), next(other)} {
		if err := DetachLink(unfinished); err != nil {
			return err
		}
	}
	attached, err := AttachedTo(other)
	if err != nil || attached != ifindex {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, other, unix.AT_FDCWD, pin, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = os.Rename(other, pin)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", other, pin, err)
	}
	return nil
}

// PinLink pins a new link. It takes the place of the one that is pinned there, if any, whose program is
// then taken off its interface.
func PinLink(l link.Link, pin string) error {
	before, err := link.LoadPinnedLink(pin, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	if before != nil {
		defer before.Close()
	}
	if err := Pin(l, pin); err != nil {
		return err
	}
	if before == nil {
		return nil
	}
	if err := before.Detach(); err != nil {
		return fmt.Errorf("detach what %s was before: %w", pin, err)
	}
	return nil
}

// DetachLink takes a program off its interface, and its link's pin away. It does not leave that to the
// kernel, which does it some time after the pin is gone. A link that does not exist is no error.
func DetachLink(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	if err := errors.Join(l.Detach(), l.Unpin(), l.Close()); err != nil {
		return fmt.Errorf("detach %s: %w", pin, err)
	}
	return nil
}

// AttachedTo is the index of the interface of a pinned XDP or tcx link; 0 if there is no link, or its
// interface is gone. Pins are the same in all network namespaces, and indexes are not: it is an error
// if the interface is in another one.
func AttachedTo(pin string) (int, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pin, err)
	}
	ifindex := 0
	here := false
	if xdp := info.XDP(); xdp != nil {
		ifindex = int(xdp.Ifindex)
		here, err = runsXDP(ifindex, info.Program)
	} else if tcx := info.TCX(); tcx != nil {
		ifindex = int(tcx.Ifindex)
		here, err = runsTCX(ifindex, ebpf.AttachType(tcx.AttachType), info.ID)
	} else {
		return 0, fmt.Errorf("%s: neither an XDP nor a tcx link", pin)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pin, err)
	}
	if ifindex != 0 && !here {
		return 0, fmt.Errorf("%s: interface %d is in another network namespace", pin, ifindex)
	}
	return ifindex, nil
}

// runsXDP tells whether the interface of this network namespace runs a program.
func runsXDP(ifindex int, program ebpf.ProgramID) (bool, error) {
	if ifindex == 0 {
		return false, nil
	}
	iface, err := netlink.LinkByIndex(ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	xdp := iface.Attrs().Xdp
	return xdp != nil && xdp.ProgId == uint32(program), nil
}

// runsTCX tells whether the interface of this network namespace has a link.
func runsTCX(ifindex int, at ebpf.AttachType, id link.ID) (bool, error) {
	if ifindex == 0 {
		return false, nil
	}
	found, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) { // no such interface, or nothing on it
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("list the programs of interface %d: %w", ifindex, err)
	}
	for _, program := range found.Programs {
		if other, ok := program.LinkID(); ok && other == id {
			return true, nil
		}
	}
	return false, nil
}
