// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"sync/atomic"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/probe"
)

// Wire sends probes through the data path and reads their answers. It implements probe.Wire.
type Wire struct {
	plane  *Plane
	egress atomic.Pointer[egress] // nil: nothing is attached, and nothing is sent
	slots  []uint32               // of the probes to send
}

// NewWire returns a Wire that sends nothing before LeaveBy.
func NewWire(p *Plane) *Wire { return &Wire{plane: p} }

// LeaveBy makes probes leave by an interface, on which XDP runs in that mode.
func (w *Wire) LeaveBy(ifindex int, mode datapath.Mode) { w.egress.Store(&egress{ifindex, mode}) }

// egress is how probes leave.
type egress struct {
	ifindex int
	mode    datapath.Mode
}

// Send implements probe.Wire.
func (w *Wire) Send(requests []probe.Request) error {
	by := w.egress.Load()
	if by == nil {
		return probe.ErrNotReady
	}
	w.slots = w.slots[:0]
	for _, r := range requests {
		w.plane.Probes.Set(r.Target.Slot, r.Target.VIP, r.Target.Encapsulation, r.Token)
		w.slots = append(w.slots, r.Target.Slot)
	}
	return w.plane.Probes.send(w.slots, by.ifindex, by.mode)
}

// HasWay implements probe.Wire.
func (w *Wire) HasWay(slot uint32) bool { return w.plane.Servers.HasNextHop(slot) }

// Answer implements probe.Wire.
func (w *Wire) Answer(slot uint32) (probe.Answer, bool) { return w.plane.Probes.Answer(slot) }

// Offers implements probe.Wire.
func (w *Wire) Offers(slot uint32) (probe.Offers, error) { return w.plane.Offers(slot) }

// Forget implements probe.Wire.
func (w *Wire) Forget(slot uint32) { w.plane.Probes.Forget(slot) }
