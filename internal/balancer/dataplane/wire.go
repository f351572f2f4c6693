// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"sync/atomic"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/health/probe"
)

// Wire sends probes through the data path and reads their answers. It implements probe.Wire.
type Wire struct {
	plane  *Plane
	egress atomic.Pointer[egress] // nil: no program is attached, and no probe is sent
	slots  []uint32               // the slots to probe; kept to reuse the memory
}

// NewWire returns a Wire that sends no probes before LeaveBy is called.
func NewWire(p *Plane) *Wire { return &Wire{plane: p} }

// LeaveBy makes probes leave through the interface with this index, on which XDP runs in this mode.
func (w *Wire) LeaveBy(ifindex int, mode datapath.Mode) { w.egress.Store(&egress{ifindex, mode}) }

// egress is the interface through which probes leave.
type egress struct {
	ifindex int
	mode    datapath.Mode
}

// Send implements probe.Wire.
func (w *Wire) Send(requests []probe.Request) error {
	egress := w.egress.Load()
	if egress == nil {
		return probe.ErrNotReady
	}
	w.slots = w.slots[:0]
	for _, r := range requests {
		w.plane.Probes.Set(r)
		w.slots = append(w.slots, r.Target.Slot)
	}
	return w.plane.Probes.send(w.slots, egress.ifindex, egress.mode)
}

// HasNextHop implements probe.Wire.
func (w *Wire) HasNextHop(slot uint32) bool { return w.plane.Servers.HasNextHop(slot) }

// Answer implements probe.Wire.
func (w *Wire) Answer(slot uint32) (probe.Answer, bool) { return w.plane.Probes.Answer(slot) }

// Signals implements probe.Wire.
func (w *Wire) Signals(slot uint32) (uint64, error) {
	signals, err := readServerSignals(w.plane.Objects.ServerSignals, slot)
	return signals.Created + signals.Removed, err
}

// Offers implements probe.Wire.
func (w *Wire) Offers(slot uint32) (probe.Offers, error) { return w.plane.Offers(slot) }

// Forget implements probe.Wire.
func (w *Wire) Forget(slot uint32) { w.plane.Probes.Forget(slot) }
