// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// connectionCountPin is the pin of the link of the program that counts connections.
const connectionCountPin = "link_sockops"

// followConnections attaches the program that counts connections, if a service can be offered
// connections. The program also moves cookies to sockets (bpf/agent/cookie.h). Once attached, it
// stays until the agent is detached, even if no service needs the count. If it were detached and
// attached again, connections that had ended in between would stay counted.
//
// If the host does not support the program, followConnections logs that. Then the load of services
// whose source is connections is unknown, and a cookie moves to its socket when the host sends its
// first packet in the connection, unless a flood has evicted the cookie before.
func (a *Agent) followConnections(t *datapath.Takeover, cfg *desired.Agent) {
	wanted := slices.ContainsFunc(cfg.Services, func(s desired.AgentService) bool { return s.Accept.Policy != "" })
	begun, err := a.kernel.countingBegun()
	if wanted || begun {
		err = errors.Join(err, a.kernel.startCounting(t))
	}
	if err != nil {
		a.log.Warn("cannot count connections: services whose load.source is connections have no load",
			"error", err)
	}
}

// countingBegun tells whether an agent of this instance has attached the program before.
func (k *kernel) countingBegun() (bool, error) {
	_, err := os.Stat(k.loader.PathOf(connectionCountPin))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// startCounting attaches the program, and tells the data path whether that has succeeded. The
// program counts the sockets of the calling thread's network namespace.
func (k *kernel) startCounting(t *datapath.Takeover) error {
	cookie, err := netnsCookie()
	if err != nil {
		return err
	}
	if err := k.objects.NodeNetns.Set(cookie); err != nil {
		return fmt.Errorf("set the network namespace: %w", err)
	}
	if err := k.attachCounting(t); err != nil {
		return errors.Join(err, k.objects.ConnectionsCounted.Set(uint32(0)))
	}
	return k.objects.ConnectionsCounted.Set(uint32(1))
}

// attachCounting attaches the program to the root of the cgroup hierarchy, or puts it in place of
// that of an earlier process.
func (k *kernel) attachCounting(t *datapath.Takeover) error {
	pin := k.loader.PathOf(connectionCountPin)
	l, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		return t.Update(l, k.objects.CountConnections, k.loader.Dir)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	root, err := cgroupRoot()
	if err != nil {
		return err
	}
	l, err = link.AttachCgroup(link.CgroupOptions{
		Path: root, Attach: ebpf.AttachCGroupSockOps, Program: k.objects.CountConnections,
	})
	if errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("attach to %s: %w: the kernel allows 64 such programs, and each agent on "+
			"this machine has one", root, err)
	}
	if err != nil {
		return fmt.Errorf("attach to %s: %w", root, err)
	}
	return t.PinLink(l, k.objects.CountConnections, pin)
}

// netnsCookie returns the number by which BPF programs identify the network namespace of the
// calling thread.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace: %w", err)
	}
	return cookie, nil
}

// cgroupRoot returns the mount point of cgroup version 2.
func cgroupRoot() (string, error) {
	const table = "/proc/self/mounts"
	f, err := os.Open(table)
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 2 && fields[2] == "cgroup2" {
			return fields[1], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("read %s: %w", table, err)
	}
	return "", fmt.Errorf("%s: no control groups, version 2, are mounted", table)
}
