// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"log/slog"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
)

// Rehearsal is an agent's data path for benchmarks. It is attached to no interface, and no control
// plane runs.
type Rehearsal struct{ agent *Agent }

// NewRehearsal loads the data path of an agent and applies the configuration, for test runs of the
// program. The data path has no signal keys. mac is the MAC address of the host in test frames.
func NewRehearsal(cfg *desired.Agent, mac [6]byte, log *slog.Logger) (*Rehearsal, error) {
	a, err := New(cfg, desired.Secrets{}, log)
	if err != nil {
		return nil, err
	}
	content := newTableContent(cfg, a.mtu(cfg))
	if err := errors.Join(a.kernel.setHostMAC(mac), a.kernel.write(content)); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return &Rehearsal{a}, nil
}

// Program returns the XDP program of the agent. The rehearsal owns it.
func (r *Rehearsal) Program() *ebpf.Program { return r.agent.kernel.objects.XdpAgent }

// Constants returns the constants of the program. Any other program that uses its tables needs the
// same constants.
func (r *Rehearsal) Constants() map[string]any { return constants(&r.agent.kernel.flowKeys) }

// Close removes the data path.
func (r *Rehearsal) Close() error { return r.agent.Close() }
