// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/segue-lb/segue/internal/netdev"
)

// prepareForXDP prepares an interface whose peer, at the other end of the cable, runs XDP natively.
// The interface is in the calling thread's network namespace. The role is that of the peer's node.
func prepareForXDP(name string, role Role) error {
	// A frame that the peer sends by XDP_TX or redirect arrives here without an sk_buff. veth
	// accepts such frames only while NAPI runs, and otherwise counts them as xdp_tx_errors. NAPI
	// runs while any XDP program is attached.
	if err := attachPass(name); err != nil {
		return fmt.Errorf("attach XDP pass program: %w", err)
	}
	// NAPI also enables GRO, which would corrupt packets: inside SRv6 or a tunnel, it would merge TCP
	// segments that have only partial checksums.
	if err := netdev.SetOffloads(name, false, netdev.GRO); err != nil {
		return err
	}
	if role == RoleBalancer {
		// The kernels of senders leave checksums and segmentation to a network card, but a veth is
		// none. A balancer does not complete packets before it encapsulates them. So this interface
		// must complete the packets that it sends to the balancer.
		if err := netdev.SetOffloads(name, false, netdev.Checksum); err != nil {
			return err
		}
	}
	return nil
}

// attachPass attaches, in native mode, an XDP program that passes every packet. The program stays
// attached while the interface exists.
func attachPass(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	const xdpPass = 2 // enum xdp_action
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "lab_pass",
		Type:         ebpf.XDP,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
		License:      "GPL",
	})
	if err != nil {
		return err
	}
	defer prog.Close()
	return netlink.LinkSetXdpFdWithFlags(link, prog.FD(), nl.XDP_FLAGS_DRV_MODE)
}
