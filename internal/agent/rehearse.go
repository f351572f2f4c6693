// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// Rehearse readies a data path that Run has not put in place for test runs of its program: frames for
// the MAC address are the host's. The program belongs to the agent.
func (a *Agent) Rehearse(mac [6]byte) (*ebpf.Program, error) {
	if err := a.kernel.setHostMAC(mac); err != nil {
		return nil, err
	}
	return a.kernel.objects.XdpAgent, datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
		if err := a.kernel.pinKept(t); err != nil {
			return err
		}
		return a.kernel.fill(t, newTableContent(a.cfg, a.mtu(a.cfg)))
	})
}
