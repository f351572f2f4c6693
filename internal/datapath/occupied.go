// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// CheckXDP returns an error if an interface runs an XDP program that is not the instance's.
func CheckXDP(ifindex int, instance string) error {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("interface %d: %w", ifindex, err)
	}
	xdp := iface.Attrs().Xdp
	if xdp == nil || xdp.ProgId == 0 {
		return nil
	}
	for _, pin := range xdpPins {
		pin := filepath.Join(Dir(instance), pin)
		for _, own := range []string{pin, next(pin)} {
			if program, err := programOf(own); err != nil || program == ebpf.ProgramID(xdp.ProgId) {
				return err
			}
		}
	}
	return busy(iface, unix.EBUSY)
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
