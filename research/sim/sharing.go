// SPDX-License-Identifier: Apache-2.0

package sim

// schedule sets the time of the first end at a shared station. Only the first end is an event, and
// it moves when the number of flows or the speed changes.
func (e *engine) schedule(st *station) {
	e.services.Set(st.slot, st.sharing.End())
}

// join adds a flow to a shared station.
func (e *engine) join(st *station, f int32) {
	flow := &e.flows[f]
	st.sharing.Add(e.now, f, e.work(&flow.Flow, flow.stage))
	st.busy++
	e.schedule(st)
}

// endShared removes the flow whose stage ends now from a shared station.
func (e *engine) endShared(st *station) int32 {
	f := st.sharing.Remove(e.now)
	st.busy--
	e.schedule(st)
	return f
}
