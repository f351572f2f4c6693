// SPDX-License-Identifier: Apache-2.0

package agent

import "github.com/cilium/ebpf"

// Rehearse readies a data path that Run has not put in place for test runs of its program: frames for
// the MAC address are the host's. The program belongs to the agent.
func (a *Agent) Rehearse(mac [6]byte) (*ebpf.Program, error) {
	if err := a.kernel.setHostMAC(mac); err != nil {
		return nil, err
	}
	if err := a.kernel.write(newContent(a.cfg, a.mtu(a.cfg))); err != nil {
		return nil, err
	}
	return a.kernel.objects.XdpAgent, nil
}
