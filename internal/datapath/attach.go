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

// Attached tells how AttachXDP attached a program.
type Attached struct {
	Mode Mode
	// NoNative is the reason why the mode is generic. It is nil if the mode is native.
	NoNative error
}

// errKept is the reason for generic mode if the program replaces an earlier one.
var errKept = errors.New("an earlier process attached in generic mode")

// WarnIfGeneric logs a warning about the cost of generic mode.
func (a Attached) WarnIfGeneric(log *slog.Logger, iface string) {
	if a.Mode != Generic {
		return
	}
	log.Warn("no native XDP: attached in generic mode, which is slow and drops packets that GRO or LRO "+
		"merged; switch GRO and LRO off", "interface", iface, "native", a.NoNative)
}

// CheckXDP returns an error if an interface runs an XDP program that belongs to none of the pinned
// links.
func CheckXDP(ifindex int, pins ...string) error {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("interface %d: %w", ifindex, err)
	}
	xdp := iface.Attrs().Xdp
	if xdp == nil || xdp.ProgId == 0 {
		return nil
	}
	for _, pin := range pins {
		for _, own := range []string{pin, next(pin)} {
			if program, err := programOf(own); err != nil || program == ebpf.ProgramID(xdp.ProgId) {
				return err
			}
		}
	}
	return busy(iface, unix.EBUSY)
}

// infoOf describes a pinned link. It returns nil if there is no such link.
func infoOf(pin string) (*link.Info, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	return info, nil
}

// programOf returns the program of a pinned link. It is 0 if there is no such link.
func programOf(pin string) (ebpf.ProgramID, error) {
	info, err := infoOf(pin)
	if info == nil {
		return 0, err
	}
	return info.Program, nil
}

// busy adds to an error the program that occupies the interface.
func busy(iface netlink.Link, err error) error {
	attrs := iface.Attrs()
	return fmt.Errorf("attach XDP to %s: %w: it runs %s", attrs.Name, err, describeXDP(attrs.Index))
}

// describeXDP names the program that an interface runs, and its owner, as far as they can be found
// out.
func describeXDP(ifindex int) string {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil || iface.Attrs().Xdp == nil || iface.Attrs().Xdp.ProgId == 0 {
		return "a program that is gone by now"
	}
	id := ebpf.ProgramID(iface.Attrs().Xdp.ProgId)
	text := fmt.Sprintf("program %d", id)
	if program, err := ebpf.NewProgramFromID(id); err == nil {
		if info, err := program.Info(); err == nil {
			text += fmt.Sprintf(" %q", info.Name)
		}
		_ = program.Close()
	}
	owner := ownerOf(id)
	if owner == nil {
		return text + ", which is not of segue"
	}
	text += fmt.Sprintf(" of the %s %q", owner.Role, owner.Name)
	command, ok := commands[owner.Role]
	if !ok {
		return text
	}
	return fmt.Sprintf("%s; an interface runs one instance; to free it (for example after a change "+
		"of node.instance), stop the process of %q and run `segue %s detach %s`",
		text, owner.Name, command, owner.Name)
}

// commands are the subcommands of segue that run the roles.
var commands = map[Role]string{RoleBalancer: "lb", RoleAgent: "agent"}

// ownerOf returns the instance that has attached a program, or nil if there is none.
func ownerOf(id ebpf.ProgramID) *Instance {
	entries, _ := os.ReadDir(Dir(""))
	for _, entry := range entries {
		for _, pin := range xdpPins {
			found, err := programOf(filepath.Join(Dir(entry.Name()), pin))
			if err != nil || found != id {
				continue
			}
			role, _ := roleOf(entry.Name())
			return &Instance{entry.Name(), role}
		}
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

// worthGeneric tells whether to try generic mode after native mode has failed. Drivers refuse
// native mode for various reasons, and with various errors: no XDP support, the MTU, the number of
// queues, other features in use. Generic mode is not tried if another program occupies the
// interface, or if privileges are missing.
func worthGeneric(native error) bool {
	for _, hopeless := range []error{unix.EBUSY, unix.EEXIST, unix.EPERM, unix.EACCES} {
		if errors.Is(native, hopeless) {
			return false
		}
	}
	return true
}

// DetachLink detaches a program from its interface and removes the link's pin. It detaches
// explicitly, because the kernel detaches a link only some time after its pin is removed.
// DetachLink returns nil if the link does not exist.
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

// DetachLinks is DetachLink for links of an instance, by the names of their pins. It continues after
// an error, and returns all errors.
func DetachLinks(instance string, pins ...string) error {
	var errs []error
	for _, pin := range pins {
		errs = append(errs, DetachLink(filepath.Join(Dir(instance), pin)))
	}
	return errors.Join(errs...)
}

// CheckNamespace returns an error if a link of an instance belongs to another network namespace than
// that of the caller. pins are the names of the links' pins.
func CheckNamespace(instance string, pins ...string) error {
	for _, pin := range pins {
		if _, err := AttachedTo(filepath.Join(Dir(instance), pin)); err != nil {
			return err
		}
	}
	return nil
}

// AttachedTo returns the index of the interface of a pinned XDP or tcx link. It is 0 if there is no
// link, or if the interface has been removed. It is an error if the interface is in another network
// namespace: all network namespaces see the same pins, but indexes differ.
func AttachedTo(pin string) (int, error) {
	info, err := infoOf(pin)
	if info == nil {
		return 0, err
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
		return 0, fmt.Errorf("%s: neither an XDP link nor a tcx link", pin)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pin, err)
	}
	if ifindex != 0 && !here {
		return 0, elsewhere(pin, ifindex)
	}
	return ifindex, nil
}

// elsewhere returns the error about an instance in another network namespace. The error says what
// to do.
func elsewhere(pin string, ifindex int) error {
	dir, name := filepath.Split(pin)
	return fmt.Errorf("instance %q works in another network namespace, on its interface %d "+
		"(pin %s): run this command there (`nsenter --net=`); another instance needs another "+
		"node.instance", filepath.Base(dir), ifindex, name)
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
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) { // no interface or no programs
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
