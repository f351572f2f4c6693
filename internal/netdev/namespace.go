// SPDX-License-Identifier: Apache-2.0

// Package netdev works with network namespaces and with offloads of interfaces.
package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Namespace is a network namespace. The kernel frees it when it is closed and contains nothing any
// more.
type Namespace struct {
	handle netns.NsHandle
}

// NewNamespace makes a namespace whose loopback interface is up. It needs CAP_SYS_ADMIN.
func NewNamespace() (*Namespace, error) {
	n := &Namespace{}
	err := onOwnThread(func() (err error) {
		if n.handle, err = netns.New(); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return n, nil
}

// OpenNamespace opens the namespace at a path, such as /run/netns/NAME.
func OpenNamespace(path string) (*Namespace, error) {
	handle, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open the network namespace %s: %w", path, err)
	}
	return &Namespace{handle}, nil
}

// ID returns the number that the namespace has in the calling thread's namespace (NETNSA_NSID). It
// is negative if the namespace has none there.
func (n *Namespace) ID() (int, error) {
	return netlink.GetNetNsIdByFd(int(n.handle))
}

// Close closes the handle of the namespace.
func (n *Namespace) Close() error {
	return n.handle.Close()
}

// Do runs f inside the namespace, on a separate thread, and waits for it. Sockets and processes
// that f makes are in the namespace. Goroutines that f starts are not.
func (n *Namespace) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := netns.Set(n.handle); err != nil {
			return fmt.Errorf("enter the namespace: %w", err)
		}
		return f()
	})
}

// onOwnThread runs f on a thread that ends after f, so that no other goroutine runs in its
// namespace.
func onOwnThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		defer close(result)    // also if f ends the goroutine, as a failing test does
		runtime.LockOSThread() // never unlocked: the thread ends here
		result <- f()
	}()
	err, returned := <-result
	if !returned {
		return errors.New("the function ended its goroutine")
	}
	return err
}

// End is one end of a veth pair: an interface in a namespace.
type End struct {
	Namespace *Namespace
	Name      string
	Addresses []netip.Prefix
}

// Connect connects two namespaces by a veth pair with the given number of queues in each direction.
// It brings both ends up and adds their addresses. A frame uses the queue with the number of the
// sending CPU, modulo the number of queues.
func Connect(a, b End, queues int) error {
	err := a.Namespace.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.NumTxQueues, attrs.NumRxQueues = a.Name, queues, queues
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(b.Namespace.handle),
			PeerNumTxQueues: uint32(queues), PeerNumRxQueues: uint32(queues),
		})
	})
	if err != nil {
		return fmt.Errorf("connect %s and %s: %w", a.Name, b.Name, err)
	}
	for _, end := range []End{a, b} {
		if err := end.Namespace.Do(end.up); err != nil {
			return fmt.Errorf("configure %s: %w", end.Name, err)
		}
	}
	return nil
}

// up adds the addresses, and brings the interface up. It must be called in the end's namespace.
func (e End) up() error {
	link, err := netlink.LinkByName(e.Name)
	if err != nil {
		return err
	}
	for _, address := range e.Addresses {
		addr, err := netlink.ParseAddr(address.String())
		if err != nil {
			return err
		}
		addr.Flags = ifaNoDAD
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add %s: %w", address, err)
		}
	}
	return netlink.LinkSetUp(link)
}

// ifaNoDAD makes an IPv6 address usable at once (IFA_F_NODAD).
const ifaNoDAD = 0x02
