// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"sync/atomic"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/probe"
)

// wire is the data path as package probe uses it.
type wire struct {
	kernel *kernel
	egress atomic.Pointer[egress] // nil: nothing is attached, and nothing is sent
	slots  []uint32               // of the probes to send
}

// newWire returns a wire that sends nothing before leaveBy.
func newWire(k *kernel) *wire { return &wire{kernel: k} }

// leaveBy has probes sent by an interface on which the programs run in that mode.
func (w *wire) leaveBy(ifindex int, mode datapath.Mode) { w.egress.Store(&egress{ifindex, mode}) }

// egress is how probes leave.
type egress struct {
	ifindex int
	mode    datapath.Mode
}

// Send implements probe.Wire.
func (w *wire) Send(requests []probe.Request) error {
	by := w.egress.Load()
	if by == nil {
		return probe.ErrNotReady
	}
	w.slots = w.slots[:0]
	for _, r := range requests {
		w.kernel.probes.set(r.Target.Slot, r.Target.VIP, r.Target.Encapsulation, r.Token)
		w.slots = append(w.slots, r.Target.Slot)
	}
	return w.kernel.probes.send(w.slots, by.ifindex, by.mode)
}

// HasWay implements probe.Wire.
func (w *wire) HasWay(slot uint32) bool { return w.kernel.servers.hasNextHop(slot) }

// Answer implements probe.Wire.
func (w *wire) Answer(slot uint32) (probe.Answer, bool) { return w.kernel.probes.answer(slot) }

// Offers implements probe.Wire.
func (w *wire) Offers(slot uint32) (probe.Offers, error) { return w.kernel.offers(slot) }

// Forget implements probe.Wire.
func (w *wire) Forget(slot uint32) { w.kernel.probes.forget(slot) }
