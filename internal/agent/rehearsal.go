// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"log/slog"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
)

// Rehearsal is an agent for benchmarks. It has no running process, and its data path is attached to
// no interface.
type Rehearsal struct{ agent *Agent }

// NewRehearsal loads the data path of an agent and applies the configuration, for test runs of the
// program. It has no signal keys. The program treats frames for the MAC address as frames for the
// host.
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

// Constants returns the constants of the program. Other programs that use its tables need them.
func (r *Rehearsal) Constants() map[string]any { return constants(&r.agent.kernel.flowKeys) }

// Close removes the data path.
func (r *Rehearsal) Close() error { return r.agent.Close() }
