// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
)

// softwareSwitch is the program of the switches: that of bmv2 with P4Runtime.
const softwareSwitch = "simple_switch_grpc"

// The ports of a switch.
const (
	networkPort = 1 // towards the fabric
	hostPort    = 2 // towards the balancer
)

// switchPort returns the name of the interface of a switch's port.
func switchPort(port int) string { return fmt.Sprintf("port%d", port) }

// switchProblems calls fail for every problem of the number of switches.
func (t Topology) switchProblems(fail func(path string, value any, format string, args ...any)) {
	switch {
	case t.Switches < 0 || t.Switches > t.Balancers:
		fail("switches", t.Switches, "must be 0 to %d, the number of balancers", t.Balancers)
	case t.Switches > 0 && t.Bare:
		fail("switches", t.Switches, "cannot be used with bare: there are no balancers that program them")
	case t.Switches > 0 && t.TwoArmed:
		fail("switches", t.Switches, "cannot be used with two-armed: "+
			"a switch receives from clients and sends to servers by the same port")
	}
}

// checkSwitches returns an error if balancers stand behind switches, and the software switch is not
// installed. Up itself checks only the program that starts it.
func (t Topology) checkSwitches() error {
	if t.Switches == 0 {
		return nil
	}
	if _, err := exec.LookPath(softwareSwitch); err != nil {
		return fmt.Errorf("lb1 stands behind a software switch: %w", err)
	}
	return nil
}

// switchInFront returns the switch in front of a balancer, or nil.
func (n *Node) switchInFront() *Node {
	number, isBalancer := strings.CutPrefix(n.Name, "lb")
	if !isBalancer {
		return nil
	}
	return n.lab.Node("sw" + number)
}

// switchConfig returns the switch of a balancer's configuration, or nil.
func (n *Node) switchConfig() *desired.Switch {
	sw := n.switchInFront()
	if sw == nil {
		return nil
	}
	return &desired.Switch{
		Address: "unix:" + sw.p4Runtime(), NetworkPort: networkPort, HostPort: hostPort,
	}
}

// p4Runtime returns the socket of the switch's P4Runtime.
func (n *Node) p4Runtime() string { return n.lab.path("run", n.Name+"-p4runtime.sock") }

// bmv2 returns the process of a switch. It starts without a program, which the balancer loads. It
// finds its interfaces in the /sys of its network namespace, which ip mounts.
func (n *Node) bmv2() Process {
	args := []string{"ip", "netns", "exec", n.namespace(), softwareSwitch, "--no-p4"}
	for _, port := range []int{networkPort, hostPort} {
		args = append(args, "-i", fmt.Sprintf("%d@%s", port, switchPort(port)))
	}
	args = append(args, "--", "--grpc-server-addr", "unix:"+n.p4Runtime())
	return Process{args: args, socket: n.p4Runtime()}
}

// entriesTimeout is the longest time that a switch may take for its entries. bmv2 takes half a minute
// for a service of 65,536 buckets.
const entriesTimeout = 3 * time.Minute

// awaitSwitches returns when all switches have the entries of their balancers. It returns an error
// if that takes longer than entriesTimeout.
func (l *Lab) awaitSwitches(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, entriesTimeout,
		fmt.Errorf("it does not have all entries after %v", entriesTimeout))
	defer cancel()
	for _, n := range l.Nodes {
		if n.switchInFront() == nil {
			continue
		}
		if err := n.awaitSwitch(ctx); err != nil {
			return fmt.Errorf("the switch in front of %s: %w%s", n.Name, err,
				l.Process(n.Name, "lb").lastWords())
		}
	}
	return nil
}

// awaitSwitch returns when the switch in front of a balancer has the balancer's entries.
func (n *Node) awaitSwitch(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if follows, err := n.switchFollows(ctx); ctx.Err() == nil && (err != nil || follows) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// switchFollows tells whether the switch in front of a balancer has the balancer's entries, by a
// metric of the balancer.
func (n *Node) switchFollows(ctx context.Context) (bool, error) {
	conn, err := n.Dial(ctx, "tcp", balancerMetrics)
	if err != nil {
		return false, fmt.Errorf("metrics: %w", err)
	}
	defer conn.Close()
	errDeadline := conn.SetDeadline(time.Now().Add(readyTimeout))
	_, errWrite := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n")
	text, errRead := io.ReadAll(conn)
	if err := errors.Join(errDeadline, errWrite, errRead); err != nil {
		return false, fmt.Errorf("metrics: %w", err)
	}
	return strings.Contains(string(text), "\nsegue_lb_switch_follows 1\n"), nil
}

// SwitchFrames returns how many frames have entered the switches of the lab, and how many have left
// them. When no frames are under way, the switches have lost the difference: bmv2 drops frames when
// the queue of a port is full, which holds 64 frames.
func (l *Lab) SwitchFrames() (in, out uint64, err error) {
	for _, n := range l.Nodes {
		if n.Role != RoleSwitch {
			continue
		}
		err := n.netlink(func(h *netlink.Handle) error {
			for _, port := range []int{networkPort, hostPort} {
				link, err := h.LinkByName(switchPort(port))
				if err != nil {
					return fmt.Errorf("%s: %s: %w", n.Name, switchPort(port), err)
				}
				in += link.Attrs().Statistics.RxPackets
				out += link.Attrs().Statistics.TxPackets
			}
			return nil
		})
		if err != nil {
			return 0, 0, err
		}
	}
	return in, out, nil
}
