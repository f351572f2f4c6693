// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/rundir"
)

// Located is an instance with the place where its program runs. All network namespaces see the same
// pins, so a listed instance may work in another network namespace than the reader's.
type Located struct {
	Instance
	Attachment *Attachment `json:"attachment"` // of LinkPin; nil: not attached
	// Namespace is the path of the interface's network namespace, as `nsenter --net=` takes it. It
	// is empty if the namespace is the reader's, if it was not found, or if there is no interface.
	Namespace string `json:"network_namespace"`
}

// Here tells whether the instance works in the network namespace of the thread that located it.
func (l *Located) Here() bool { return l.Attachment != nil && l.Attachment.Interface != "" }

// Locate finds the place where an instance's program runs.
func Locate(instance Instance) (Located, error) {
	l := Located{Instance: instance}
	pin := filepath.Join(Dir(instance.Name), LinkPin)
	var err error
	if l.Attachment, err = ReadAttachment(pin); err != nil || l.Attachment == nil || l.Here() {
		return l, err
	}
	program, err := programOf(pin)
	if err != nil {
		return l, err
	}
	for _, path := range namespacePaths(instance.Name) {
		if runsIn(path, l.Attachment.Ifindex, program) {
			l.Namespace = path
			break
		}
	}
	return l, nil
}

// namespacePaths returns the network namespaces that the instance may be in: those with names of
// ip-netns(8), the host's, and that of the instance's process.
func namespacePaths(instance string) []string {
	paths, _ := filepath.Glob("/run/netns/*") // fails only for a bad pattern
	paths = append(paths, "/proc/1/ns/net")
	if process, err := rundir.FindProcess(instance); err == nil && process != nil {
		paths = append(paths, fmt.Sprintf("/proc/%d/ns/net", process.PID))
	}
	return paths
}

// runsIn tells whether the interface of a network namespace runs a program. It returns false if the
// namespace does not exist any more or cannot be entered.
func runsIn(namespace string, ifindex int, program ebpf.ProgramID) bool {
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return false
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return false
	}
	defer handle.Close()
	iface, err := handle.LinkByIndex(ifindex)
	return err == nil && iface.Attrs().Xdp != nil && iface.Attrs().Xdp.ProgId == uint32(program)
}
