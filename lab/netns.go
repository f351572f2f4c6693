// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// netnsDir is the directory of iproute2's named network namespaces.
const netnsDir = "/run/netns"

// Node is a network namespace of a lab.
type Node struct {
	Spec
	lab *Lab
}

func (n *Node) namespace() string     { return namespacePrefix(n.lab.Name) + n.Name }
func (n *Node) namespacePath() string { return filepath.Join(netnsDir, n.namespace()) }

func namespacePrefix(lab string) string { return "segue-" + lab + "-" }

// labNamespace matches the name of a lab's namespace and captures the lab's name.
var labNamespace = regexp.MustCompile(`^segue-([a-z0-9]{1,12})-`)

// Do runs f on a thread inside the node's network namespace. Sockets that f opens, sysctls that it
// writes and processes that it starts belong to the node. Goroutines that it starts do not. All
// other namespaces remain the caller's. That includes the mount namespace, so /sys/fs/bpf stays
// visible; `ip netns exec` would hide it under a new /sys.
func (n *Node) Do(f func() error) error {
	return doIn(n.Name, n.namespacePath(), f)
}

// doIn does the same as Node.Do, for the network namespace at a path. Errors about entering and
// leaving the namespace begin with the name.
func doIn(name, namespacePath string, f func() error) error {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("%s: own network namespace: %w", name, err)
	}
	defer home.Close()
	if err := enter(name, namespacePath); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	errF := f()
	if err := netns.Set(home); err != nil {
		// No other goroutine may use this thread. It stays locked, and ends with this goroutine.
		return errors.Join(errF, fmt.Errorf("%s: leave network namespace: %w", name, err))
	}
	runtime.UnlockOSThread()
	return errF
}

// enter moves the calling thread, which must be locked, into the network namespace at a path.
func enter(name, namespacePath string) error {
	handle, err := netns.GetFromPath(namespacePath)
	if err != nil {
		return fmt.Errorf("%s: network namespace %s: %w", name, namespacePath, err)
	}
	defer handle.Close()
	if err := netns.Set(handle); err != nil {
		return fmt.Errorf("%s: enter network namespace: %w", name, err)
	}
	return nil
}

// Exec replaces the calling process by a command in the node's network namespace. If it returns, it
// returns an error.
func (n *Node) Exec(command []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread() // never unlocked: this thread becomes the command
	if err := enter(n.Name, n.namespacePath()); err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", path, unix.Exec(path, command, os.Environ()))
}

// Start starts a command in the node's network namespace.
func (n *Node) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs a command in the node's network namespace. It returns what the command wrote to standard
// output and standard error. The error contains the same text.
func (n *Node) Run(ctx context.Context, command string, args ...string) (string, error) {
	var out strings.Builder
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := n.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %s: %w: %s", n.Name, strings.Join(cmd.Args, " "), err, strings.TrimSpace(out.String()))
	}
	return out.String(), err
}

// Dial opens a connection from the node. The address must be numeric, because names would be
// resolved outside the node.
func (n *Node) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.dial(ctx, net.Dialer{}, network, address)
}

// DialTCP opens a TCP connection from one of the node's addresses. The address may be one that a
// local route gives to the node (ClientAddresses), which bind(2) accepts with this option only.
func (n *Node) DialTCP(ctx context.Context, from netip.Addr, to netip.AddrPort) (net.Conn, error) {
	bind := func(_, _ string, c syscall.RawConn) (err error) {
		level, option := unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
		if from.Is4() {
			level, option = unix.IPPROTO_IP, unix.IP_FREEBIND
		}
		failed := c.Control(func(fd uintptr) {
			// Without the second option, a port would be taken for all destinations at once.
			err = errors.Join(unix.SetsockoptInt(int(fd), level, option, 1),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1))
		})
		return errors.Join(failed, err)
	}
	local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	return n.dial(ctx, net.Dialer{LocalAddr: local, Control: bind}, "tcp", to.String())
}

func (n *Node) dial(ctx context.Context, d net.Dialer, network, address string) (conn net.Conn, err error) {
	err = n.Do(func() error {
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen opens a listener in the node.
func (n *Node) Listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	err = n.Do(func() error {
		var config net.ListenConfig
		l, err = config.Listen(ctx, network, address)
		return err
	})
	return l, err
}

// ListenPacket opens a datagram socket in the node.
func (n *Node) ListenPacket(ctx context.Context, network, address string) (c net.PacketConn, err error) {
	err = n.Do(func() error {
		var config net.ListenConfig
		c, err = config.ListenPacket(ctx, network, address)
		return err
	})
	return c, err
}

// shareNamespaces makes the directory of named network namespaces a shared mount, as the first `ip
// netns add` on a machine does. If ip did so while a lab is up, its mount would cover those of the
// lab's namespaces, which could then not be removed.
func shareNamespaces() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil { // ip takes the same lock
		return fmt.Errorf("lock %s: %w", netnsDir, err)
	}
	share := func() error { return unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	err = share()
	if errors.Is(err, unix.EINVAL) { // it is no mount yet
		err = unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, "")
		if err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("share the mount of %s: %w", netnsDir, err)
	}
	return nil
}

// createNamespace makes the node's network namespace and prepares IPv4 and IPv6 in it.
func (n *Node) createNamespace() error {
	if err := shareNamespaces(); err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("%s: own network namespace: %w", n.Name, err)
	}
	defer home.Close()
	handle, err := netns.NewNamed(n.namespace()) // also enters it
	if err == nil {
		handle.Close()
	} else {
		err = fmt.Errorf("create network namespace %s: %w", n.namespace(), err)
	}
	if back := netns.Set(home); back != nil {
		return errors.Join(err, fmt.Errorf("%s: leave network namespace: %w", n.Name, back))
	}
	runtime.UnlockOSThread()
	return err
}

// namespaces lists the names of a lab's network namespaces, including incomplete ones.
func namespaces(lab string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(netnsDir, namespacePrefix(lab)+"*"))
	if err != nil {
		return nil, err
	}
	for i, path := range paths {
		paths[i] = filepath.Base(path)
	}
	return paths, nil
}

// deleteNamespace removes a named network namespace. The kernel frees its content when the last
// process has left.
func deleteNamespace(name string) error {
	path := filepath.Join(netnsDir, name)
	// EINVAL means that the path is not a mount point. An interrupted creation leaves it so.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace: %w", err)
	}
	return nil
}
