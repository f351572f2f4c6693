// SPDX-License-Identifier: Apache-2.0

package sim

// RunResult is the result of one run.
type RunResult struct {
	Run  int
	Seed uint64
	// Measures cover the flows that Warmup and Cooldown do not exclude. They cover the time from
	// the first of these flows to the first flow after them, or to the last flow of all.
	Measures
	// LastArrival is the time at which the last flow arrived, measured or not, in seconds.
	LastArrival float64
	Servers     []ServerUse
	// Balancers contains the number of flows of each balancer.
	Balancers []uint64
	// Series are the results of the complete intervals of Config.Every in which flows arrived.
	// Each covers all flows that arrived in the interval, including those that Warmup and Cooldown
	// exclude, and the time of the interval.
	Series []Measures

	underWay uint64
}

// Measures are results about flows, whenever they end, and about servers over time. Means over no
// time are NaN.
type Measures struct {
	// Elapsed is the time over which servers were observed, in seconds.
	Elapsed float64
	// Response contains the times from the client's SYN to the end of the response. A flow that
	// timed out counts with the timeout. Other failed flows do not count.
	Response Histogram
	// Outcomes contains the number of flows by Outcome.
	Outcomes [numOutcomes]uint64
	// Hops is the number of times that flows were passed on. Wrongful is the number of flows that
	// the last server had to take although an earlier server had been less loaded (6LB, section
	// V-E).
	Hops, Wrongful uint64
	// Untracked flows had no entry in the flow table. Recovered flows were found again after a
	// change of their balancer. Recovered of a run also counts flows that are not measured.
	Untracked, Recovered uint64
	// Utilisation is the utilisation of all processors, 0 to 1. Open is the number of flows of a
	// server. Both are means over all servers, including absent ones, and over time.
	Utilisation, Open float64
	// Fairness is Jain's index of the open flows per processor, over servers and time (6LB,
	// section V-D). It is NaN without flows. InstantFairness is the mean over time of the index
	// over servers, which is 1 while there are no flows.
	Fairness, InstantFairness float64

	batches batches
}

// ServerUse describes the use of a server.
type ServerUse struct {
	CPUs        int32
	Connections uint64
	Utilisation float64 // utilisation of its processors, 0 to 1
	Open        float64 // mean number of flows over time
}

// Flows returns the number of measured flows.
func (m *Measures) Flows() uint64 {
	sum := uint64(0)
	for _, n := range m.Outcomes {
		sum += n
	}
	return sum
}

// ended counts a flow that has ended.
func (m *Measures) ended(outcome Outcome, response float64) {
	m.Outcomes[outcome]++
	if outcome == Completed || outcome == TimedOut {
		m.Response.Add(response)
		m.batches.add(response)
	}
}

// batches contains the sums of batches of consecutive values. There are fewer than 64 batches,
// whatever the number of values: at 64, each two become one.
type batches struct {
	sums  []float64
	size  uint64  // number of values in a batch; 0 stands for 1
	sum   float64 // of the values since the last batch
	count uint64  // number of these values
}

const mostBatches = 64

// add adds a value, and begins a new batch when one is complete. When mostBatches are complete, it
// joins each two of them and doubles the size of a batch.
func (b *batches) add(x float64) {
	b.sum += x
	b.count++
	if b.count < max(b.size, 1) {
		return
	}
	b.sums = append(b.sums, b.sum)
	b.sum, b.count = 0, 0
	if len(b.sums) < mostBatches {
		return
	}
	for i := range mostBatches / 2 { // each two batches become one
		b.sums[i] = b.sums[2*i] + b.sums[2*i+1]
	}
	b.sums = b.sums[:mostBatches/2]
	b.size = 2 * max(b.size, 1)
}

// means returns the mean of each batch.
func (b *batches) means() []float64 {
	means := make([]float64, len(b.sums))
	for i, sum := range b.sums {
		means[i] = sum / float64(max(b.size, 1))
	}
	return means
}

// finish ends the measurements of a run.
func (e *engine) finish() *RunResult {
	if e.result.Flows() == 0 { // the window was never open: an empty one makes all means NaN
		e.openWindow()
		e.closeWindow()
	}
	for i := range e.balancers {
		e.result.Balancers[i] = e.balancers[i].flows
	}
	for s := range e.servers {
		e.result.Servers[s].Connections = e.servers[s].use.taken
	}
	e.finishSeries()
	return e.result
}
