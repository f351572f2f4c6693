// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/netdev"
)

// visitOtherEnd calls visit for the other end of a veth if that end hides tags. It calls visit in
// the network namespace of that end.
//
// It enters the namespace each time. A socket that is kept open there would keep the namespace,
// with its interfaces, after the namespace was removed.
func visitOtherEnd(veth *netlink.LinkAttrs, visit func(hider) error) error {
	visitThere := func(remark string) error {
		link, err := netlink.LinkByIndex(veth.ParentIndex)
		if err != nil {
			return err
		}
		return visitActive(hider{link.Attrs().Name, remark, sending}, visit)
	}
	remark := fmt.Sprintf(" (the other end of %s)", veth.Name)
	if veth.NetNsID < 0 { // in this namespace
		return withRemedy(veth, visitThere(remark))
	}
	ns, path, err := findNamespace(veth.NetNsID)
	if err != nil {
		return withRemedy(veth, err)
	}
	defer ns.Close()
	remark = fmt.Sprintf(" (the other end of %s, in %s)", veth.Name, path)
	if err := ns.Do(func() error { return visitThere(remark) }); err != nil {
		return withRemedy(veth, fmt.Errorf("%s: %w", path, err))
	}
	return nil
}

// withRemedy adds to an error about the other end of a veth the command that helps there. It
// returns nil if there is no error.
func withRemedy(veth *netlink.LinkAttrs, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("they come from the other end of the veth, interface %d there: %w; run there: "+
		"ethtool -K NAME txvlan off tx-vlan-stag-hw-insert off", veth.ParentIndex, err)
}

// findNamespace finds a network namespace by the number that it has in the calling thread's network
// namespace. It searches the named namespaces of iproute2 (/run/netns), and that of process 1. It
// returns the namespace and its path. If one of them cannot be opened, the error says so.
func findNamespace(id int) (*netdev.Namespace, string, error) {
	named, _ := filepath.Glob("/run/netns/*") // the pattern is right
	var notOpened error
	for _, path := range append(named, "/proc/1/ns/net") {
		ns, err := netdev.OpenNamespace(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			notOpened = err
			continue
		}
		if number, err := ns.ID(); err == nil && number == id {
			return ns, path, nil
		}
		_ = ns.Close()
	}
	err := errors.New("its network namespace is not found in /run/netns or at process 1")
	if notOpened != nil {
		err = fmt.Errorf("%w: %w", err, notOpened)
	}
	return nil, "", err
}
