// Package datapath attaches BPF programs to interfaces and pins them with their
// maps, so that they outlive the process that loaded them: a restart finds them
// again and swaps the program without losing a packet.
package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

// Root is where the BPF file system is mounted.
const Root = "/sys/fs/bpf"

// Mode is how an XDP program is attached.
type Mode string

const (
	// Native runs in the driver, before the kernel builds a socket buffer.
	Native Mode = "native"
	// Generic runs on socket buffers, where the driver has no XDP.
	Generic Mode = "generic"
)

// Dir is where the pins of an instance are; the name must be one that config.CheckInstance accepts.
func Dir(instance string) string {
	return filepath.Join(Root, "segue", instance)
}

// MakeDir makes the pin directory of an instance, and mounts the BPF file system
// first where the machine has not.
func MakeDir(instance string) (string, error) {
	if err := config.CheckInstance(instance); err != nil {
		return "", err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(Root, &stat); err != nil {
		return "", fmt.Errorf("%s: %w", Root, err)
	}
	if stat.Type != unix.BPF_FS_MAGIC {
		if err := unix.Mount("bpf", Root, "bpf", 0, ""); err != nil {
			return "", fmt.Errorf("mount the BPF file system at %s: %w", Root, err)
		}
	}
	dir := Dir(instance)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return dir, nil
}

// RemoveDir unpins everything that an instance pinned; what only the pins held
// is thereby detached. A directory that does not exist is no error.
func RemoveDir(instance string) error {
	if err := config.CheckInstance(instance); err != nil {
		return err
	}
	dir := Dir(instance)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	// The parent goes with its last instance.
	if err := os.Remove(filepath.Dir(dir)); err != nil &&
		!errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// AttachXDP runs prog on an interface and pins the link at pin. A link that is
// pinned there already and belongs to the interface is given the new program in
// one step; no packet passes by. The native mode is tried first.
func AttachXDP(prog *ebpf.Program, ifindex int, pin string) (Mode, error) {
	mode, err := updateXDP(prog, ifindex, pin)
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return mode, err
	}
	mode = Native
	l, err := link.AttachXDP(link.XDPOptions{
		Program: prog, Interface: ifindex, Flags: link.XDPDriverMode,
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		mode = Generic
		l, err = link.AttachXDP(link.XDPOptions{
			Program: prog, Interface: ifindex, Flags: link.XDPGenericMode,
		})
	}
	if err != nil {
		return "", fmt.Errorf("attach XDP to interface %d: %w", ifindex, err)
	}
	defer l.Close()
	if err := l.Pin(pin); err != nil {
		return "", fmt.Errorf("pin %s: %w", pin, err)
	}
	return mode, nil
}

// updateXDP gives a pinned link a new program. The error is os.ErrNotExist when
// there is no such link, or it was left behind by another interface.
func updateXDP(prog *ebpf.Program, ifindex int, pin string) (Mode, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return "", err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return "", fmt.Errorf("%s: %w", pin, err)
	}
	if xdp := info.XDP(); xdp == nil || xdp.Ifindex != uint32(ifindex) {
		if err := l.Unpin(); err != nil {
			return "", fmt.Errorf("%s: %w", pin, err)
		}
		return "", os.ErrNotExist
	}
	if err := l.Update(prog); err != nil {
		return "", fmt.Errorf("replace the program of %s: %w", pin, err)
	}
	return attachedMode(ifindex)
}

// PinProgram pins prog at path, in the place of what is pinned there.
func PinProgram(prog *ebpf.Program, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := prog.Pin(path); err != nil {
		return fmt.Errorf("pin %s: %w", path, err)
	}
	return nil
}
