// Package testnet gives tests network namespaces of their own.
package testnet

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Namespace is a network namespace without a name: it goes with the test.
type Namespace struct {
	handle netns.NsHandle
}

// New makes a namespace whose loopback interface is up. It skips the test where
// the user is not root.
func New(t testing.TB) *Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
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
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { _ = n.handle.Close() })
	return n
}

// Do runs f inside the namespace, and waits for it. Goroutines that f starts are
// not in the namespace; sockets and processes that it makes are.
func (n *Namespace) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := netns.Set(n.handle); err != nil {
			return fmt.Errorf("enter the namespace: %w", err)
		}
		return f()
	})
}

// onOwnThread runs f on a thread that ends with it, so that its namespace is
// never met by other goroutines.
func onOwnThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		result <- f()
	}()
	return <-result
}

// Connect joins two namespaces by a veth pair, whose ends are up and have the
// given names and addresses.
func Connect(t testing.TB, a *Namespace, aName string, aAddrs []netip.Prefix, b *Namespace, bName string, bAddrs []netip.Prefix) {
	t.Helper()
	err := a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = aName
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attrs, PeerName: bName, PeerNamespace: netlink.NsFd(b.handle),
		})
	})
	if err != nil {
		t.Fatalf("connect %s and %s: %v", aName, bName, err)
	}
	a.up(t, aName, aAddrs)
	b.up(t, bName, bAddrs)
}

func (n *Namespace) up(t testing.TB, name string, addresses []netip.Prefix) {
	t.Helper()
	err := n.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, address := range addresses {
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
	})
	if err != nil {
		t.Fatalf("configure %s: %v", name, err)
	}
}

// ifaNoDAD makes an IPv6 address usable at once (IFA_F_NODAD).
const ifaNoDAD = 0x02
