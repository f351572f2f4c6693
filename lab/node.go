// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// netnsDir is the directory of iproute2's named network namespaces.
const netnsDir = "/run/netns"

// Node is a host, router or switch of a lab, in a network namespace of its own. Methods of Node run
// commands and open sockets in this namespace. buildNetwork makes the namespace.
type Node struct {
	Spec
	lab *Lab
}

// namespace returns the name of the node's network namespace.
func (n *Node) namespace() string { return namespacePrefix(n.lab.Name) + n.Name }

// namespacePath returns the file of the node's network namespace.
func (n *Node) namespacePath() string { return filepath.Join(netnsDir, n.namespace()) }

// namespacePrefix begins the names of all network namespaces of a lab.
func namespacePrefix(lab string) string { return "segue-" + lab + "-" }

// labNamespace matches the name of a lab's namespace and captures the lab's name.
var labNamespace = regexp.MustCompile(`^segue-([a-z0-9]{1,12})-`)

// Do runs f on a thread inside the node's network namespace. Sockets that f opens, sysctls that it
// writes and processes that it starts belong to the node. Goroutines that f starts run outside.
// Only the network namespace changes: in the caller's mount namespace /sys/fs/bpf stays visible,
// while `ip netns exec` would hide it under a new /sys.
func (n *Node) Do(f func() error) error {
	return doIn(n.Name, n.namespacePath(), f)
}

// doIn does the same as Node.Do, for the network namespace at a path. If it cannot enter or leave
// the namespace, its error begins with name.
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

// enter moves the calling thread into the network namespace at a path. The caller must have locked
// the thread to its goroutine. Errors begin with name.
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

// netlink runs f with a netlink handle of the node's network namespace.
func (n *Node) netlink(f func(*netlink.Handle) error) error {
	ns, err := netns.GetFromPath(n.namespacePath())
	if err != nil {
		return fmt.Errorf("%s: network namespace %s: %w", n.Name, n.namespacePath(), err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("%s: netlink: %w", n.Name, err)
	}
	defer h.Close()
	return f(h)
}

// Exec replaces the calling process by a command in the node's network namespace. It returns only
// if that fails.
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
		said := strings.TrimSpace(out.String())
		err = fmt.Errorf("%s: %s: %w: %s", n.Name, strings.Join(cmd.Args, " "), err, said)
	}
	return out.String(), err
}

// Dial opens a connection from the node. The address must be numeric, because names would be
// resolved outside the node.
func (n *Node) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.dial(ctx, net.Dialer{}, network, address)
}

// DialTCP opens a TCP connection from one of the node's addresses. That may be an address which no
// interface has, but which a local route makes the node's own (ClientAddresses).
func (n *Node) DialTCP(ctx context.Context, from netip.Addr, to netip.AddrPort) (net.Conn, error) {
	bind := func(_, _ string, c syscall.RawConn) (err error) {
		// For IPv6, bind(2) needs FREEBIND to accept an address that no interface has.
		level, freeBind := unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
		if from.Is4() {
			level, freeBind = unix.IPPROTO_IP, unix.IP_FREEBIND
		}
		errControl := c.Control(func(fd uintptr) {
			// IP_BIND_ADDRESS_NO_PORT leaves the port to connect(2), so that connections to
			// different destinations can share a port.
			err = errors.Join(unix.SetsockoptInt(int(fd), level, freeBind, 1),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1))
		})
		return errors.Join(errControl, err)
	}
	local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	return n.dial(ctx, net.Dialer{LocalAddr: local, Control: bind}, "tcp", to.String())
}

// dial opens a connection from the node with the dialer d.
func (n *Node) dial(
	ctx context.Context, d net.Dialer, network, address string,
) (conn net.Conn, err error) {
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
func (n *Node) ListenPacket(
	ctx context.Context, network, address string,
) (c net.PacketConn, err error) {
	err = n.Do(func() error {
		var config net.ListenConfig
		c, err = config.ListenPacket(ctx, network, address)
		return err
	})
	return c, err
}
