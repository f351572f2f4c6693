// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// filterPriority is the priority of the agent's filters. No other filter should have this number.
const filterPriority = 0x5e6e

var (
	egress  = datapath.Hook{At: ebpf.AttachTCXEgress, Priority: filterPriority, Pin: "link_egress"}
	ingress = datapath.Hook{At: ebpf.AttachTCXIngress, Priority: filterPriority, Pin: "link_ingress"}
	xdp     = datapath.Hook{At: ebpf.AttachXDP, Pin: datapath.LinkPin}
)

// hooks are in the order in which programs are attached. XDP comes last, because its program hands
// packets to the other programs.
var hooks = []datapath.Hook{egress, ingress, xdp}

// attach attaches the programs to an interface, and pins them and their tables for other tools.
// Each program replaces the one of an earlier process. If the earlier process used another
// interface, its programs work there until all new programs are attached.
func (k *kernel) attach(t *datapath.Takeover, ifindex int) (datapath.Attached, error) {
	if err := k.loader.Publish(t); err != nil {
		return datapath.Attached{}, err
	}
	attached, err := k.loader.Attach(t, []datapath.Place{
		{Hook: egress, Program: k.objects.TcAgent, Ifindex: ifindex},
		{Hook: ingress, Program: k.objects.TcForward, Ifindex: ifindex},
		{Hook: xdp, Program: k.objects.XdpAgent, Ifindex: ifindex},
	})
	if err != nil {
		return datapath.Attached{}, err
	}
	return attached[0], nil // there is one program for XDP
}

// setHostMAC sets the MAC address by which the program recognises frames for this host.
func (k *kernel) setHostMAC(mac [6]byte) error {
	var word [8]byte
	copy(word[:], mac[:])
	if err := k.objects.HostMac.Set(binary.NativeEndian.Uint64(word[:])); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// Detach removes an agent's data path from the kernel, with all its counters, and the VIPs that the
// agent has put on the host. The calling thread must be in the agent's network namespace. Detach
// returns nil if the instance does not exist.
func Detach(instance string) error {
	dir := datapath.Dir(instance)
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, agentMapBelongings), nil)
	if errors.Is(err, os.ErrNotExist) {
		return datapath.RemoveDir(instance) // an earlier start failed before it made the map
	}
	if err != nil {
		return fmt.Errorf("open map %s: %w", agentMapBelongings, err)
	}
	defer m.Close()
	assigned := assignedVIPs{m}
	if err := datapath.CheckNamespace(instance, hooks); err != nil {
		return err
	}
	// Remove the programs first, so that they do not deliver packets to a removed address.
	if err := datapath.Detach(instance, hooks); err != nil {
		return err
	}
	if err := datapath.DetachLink(filepath.Join(dir, connectionCountPin)); err != nil {
		return err
	}
	if err := assigned.release(nil); err != nil {
		return err
	}
	return datapath.RemoveDir(instance)
}
