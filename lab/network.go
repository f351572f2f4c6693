// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// buildNetwork makes the namespaces, links, addresses and routes of the whole lab, and returns when
// the network carries packets.
func (l *Lab) buildNetwork(ctx context.Context) error {
	for _, n := range l.Nodes {
		if err := n.createNamespace(); err != nil {
			return err
		}
		if err := n.setSysctls(); err != nil {
			return err
		}
	}
	if err := l.buildLinks(); err != nil {
		return err
	}
	for _, n := range l.Nodes {
		if err := n.configure(); err != nil {
			return err
		}
	}
	if err := l.addNeighbours(); err != nil {
		return err
	}
	if l.Topology.Edge.Router == "" {
		if err := l.SetNextHops(l.balancers()...); err != nil {
			return err
		}
	}
	return l.awaitNetwork(ctx)
}

// shareNamespaces makes netnsDir a shared mount. The first `ip netns add` on a machine does the
// same. If it did so while a lab is up, the new mount would cover the mounts of the lab's
// namespaces, and the lab could not unmount them.
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
	if errors.Is(err, unix.EINVAL) { // the directory is not a mount point yet
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

// createNamespace makes the node's network namespace, without interfaces other than lo.
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
	if errLeave := netns.Set(home); errLeave != nil {
		// No other goroutine may use this thread. It stays locked, and ends with this goroutine.
		return errors.Join(err, fmt.Errorf("%s: leave network namespace: %w", n.Name, errLeave))
	}
	runtime.UnlockOSThread()
	return err
}

// namespaces lists the names of a lab's network namespaces. It includes the files that an
// interrupted createNamespace left behind.
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

// deleteNamespace removes the name of a network namespace. The kernel frees the namespace when the
// last process in it has ended.
func deleteNamespace(name string) error {
	path := filepath.Join(netnsDir, name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	// EINVAL: the file is not a mount point. An interrupted createNamespace has left it.
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace: %w", err)
	}
	return nil
}

// sysctl is a setting of the node's network namespace: a path under /proc/sys/net and its value.
type sysctl struct{ path, value string }

// setSysctls sets the sysctls that the node's role needs. It must run before interfaces are made,
// because a new interface inherits the values under conf/default.
func (n *Node) setSysctls() error {
	settings := []sysctl{
		{"ipv6/conf/all/disable_ipv6", "0"},
		{"ipv6/conf/default/disable_ipv6", "0"},
		// Link-local addresses are unique here, so they need no duplicate address detection. It
		// would take a second or two. Until then a server could not resolve the Ethernet address of
		// another server to which it passes packets on.
		{"ipv6/conf/default/accept_dad", "0"},
		{"ipv6/conf/default/accept_ra", "0"},
		// A new namespace may start with the IPv4 settings of the initial one. Reverse-path
		// filtering must be off: with direct server return, a packet can arrive on an interface
		// that does not lead back to its source.
		{"ipv4/conf/all/rp_filter", "0"},
		{"ipv4/conf/default/rp_filter", "0"},
	}
	switch n.Role {
	case RoleEdge:
		settings = append(settings,
			sysctl{"ipv4/ip_forward", "1"},
			sysctl{"ipv6/conf/all/forwarding", "1"},
			// Use ECMP by the 5-tuple, as routers in data centres do. By default, ECMP for IPv6
			// uses the flow label instead of the ports. A Linux client changes the flow label when
			// a connection retransmits, so its packets could change to another balancer.
			sysctl{"ipv4/fib_multipath_hash_policy", "1"},
			sysctl{"ipv6/fib_multipath_hash_policy", "1"},
		)
	case RoleServer:
		// An agent looks up the route to the next segment in XDP, and the kernel permits that
		// lookup only where forwarding is on. A balancer needs no such lookup, and forwarding must
		// be off on it: while its program is not attached, its kernel would send packets for a VIP
		// back to the edge router, in a loop.
		settings = append(settings, sysctl{"ipv6/conf/all/forwarding", "1"})
		if n.Application != Nginx {
			// A full accept queue resets connections, as in the papers (6LB, section VI-A; SRLB,
			// section IV).
			settings = append(settings, sysctl{"ipv4/tcp_abort_on_overflow", "1"})
		}
	case RoleSwitch:
		// The kernel must send no frames of its own, such as router solicitations.
		settings = append(settings, sysctl{"ipv6/conf/default/disable_ipv6", "1"})
	case RoleFabric:
		// The module br_netfilter, if it is loaded, would pass bridged packets to iptables, which
		// could drop them.
		for _, family := range []string{"arp", "ip", "ip6"} {
			path := "bridge/bridge-nf-call-" + family + "tables"
			if _, err := os.Stat(filepath.Join("/proc/sys/net", path)); err == nil {
				settings = append(settings, sysctl{path, "0"})
			}
		}
	}
	if n.lab.Topology.IPv4Only && n.Role != RoleEdge && n.Role != RoleClient {
		settings = append(settings, sysctl{"ipv6/conf/default/disable_ipv6", "1"})
	}
	return n.Do(func() error {
		for _, s := range settings {
			file := filepath.Join("/proc/sys/net", s.path)
			if err := os.WriteFile(file, []byte(s.value), 0); err != nil {
				name := strings.ReplaceAll(s.path, "/", ".")
				return fmt.Errorf("%s: sysctl net.%s=%s: %w", n.Name, name, s.value, err)
			}
		}
		return nil
	})
}

// awaitNetwork returns when the network of each node is ready (Node.awaitNetwork).
func (l *Lab) awaitNetwork(ctx context.Context) error {
	for _, n := range l.Nodes {
		if err := n.awaitNetwork(ctx); err != nil {
			return err
		}
	}
	return nil
}

// awaitNetwork returns when all links of the node are up, and its kernel delivers packets to all of
// its IPv6 addresses. The kernel drops packets on a new link until it notices that the link is up,
// which takes up to a second. It adds the local route of an IPv6 address some time after the
// address.
func (n *Node) awaitNetwork(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if ready, err := n.networkReady(); err != nil || ready {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// networkReady tells whether all links of the node are up, and all of its IPv6 addresses have their
// local routes.
func (n *Node) networkReady() (ready bool, err error) {
	err = n.netlink(func(h *netlink.Handle) (err error) {
		if ready, err = linksUp(h); err == nil && ready {
			ready, err = addressesLocal(h)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		return nil
	})
	return ready, err
}

// linksUp tells whether all veths of the handle's namespace are up.
func linksUp(h *netlink.Handle) (bool, error) {
	links, err := h.LinkList()
	if err != nil {
		return false, fmt.Errorf("list links: %w", err)
	}
	return !slices.ContainsFunc(links, func(link netlink.Link) bool {
		// The lab's links are veths. Some kernels add tunnel devices to every namespace.
		_, ours := link.(*netlink.Veth)
		return ours && link.Attrs().OperState != netlink.OperUp
	}), nil
}

// addressesLocal tells whether each IPv6 address of the handle's namespace has its local route. It
// skips link-local addresses.
func addressesLocal(h *netlink.Handle) (bool, error) {
	addresses, err := h.AddrList(nil, netlink.FAMILY_V6)
	if err != nil {
		return false, fmt.Errorf("list addresses: %w", err)
	}
	for _, address := range addresses {
		if address.IP.IsLinkLocalUnicast() { // added by the kernel
			continue
		}
		routes, err := h.RouteGet(address.IP)
		if errors.Is(err, unix.ENETUNREACH) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("route to %s: %w", address.IP, err)
		}
		if routes[0].Type != unix.RTN_LOCAL {
			return false, nil
		}
	}
	return true, nil
}
