// SPDX-License-Identifier: Apache-2.0

package sim

// RunResult is what one run has measured.
type RunResult struct {
	Run  int
	Seed uint64
	// Measures are of the flows that are not left out by Warmup and Cooldown, and of the time from the
	// first of them to the first flow that arrived after them, or the last of all.
	Measures
	// LastArrival is when the last flow arrived, measured or not, in seconds.
	LastArrival float64
	Servers     []ServerUse
	// Balancers counts flows by balancer.
	Balancers []uint64
	// Series are the whole intervals of Config.Every in which flows arrived: each is of the flows that
	// arrived in it, also those that Warmup and Cooldown leave out, and of the time that it is long.
	Series []Measures

	underWay uint64
}

// Measures are what is measured of flows, however late they end, and of servers over time. What is over no time
// is NaN.
type Measures struct {
	// Elapsed is how long in seconds servers were looked at.
	Elapsed float64
	// Response are the times from the client's SYN to the end of the response. Flows that timed out
	// are in it with the timeout; others that failed are not.
	Response Histogram
	// Outcomes counts flows by Outcome.
	Outcomes [numOutcomes]uint64
	// Hops is how often flows were passed on; Wrongful how many the last server had to take though
	// one before it had been less loaded (6LB, section V-E).
	Hops, Wrongful uint64
	// Untracked flows had no entry in the flow table. Recovered flows were found again after their
	// balancer had changed; those of a run are of all flows.
	Untracked, Recovered uint64
	// Utilisation is that of all processors, 0 to 1, and Open the flows of a server, both in the mean over
	// all servers, absent ones too, and time.
	Utilisation, Open float64
	// Fairness is Jain's index of the open flows for each processor, over servers and time (6LB,
	// section V-D), NaN of none; InstantFairness the mean over time of that over servers, 1 of none.
	Fairness, InstantFairness float64

	batches batches
}

// ServerUse is how a server was used.
type ServerUse struct {
	CPUs        int32
	Connections uint64
	Utilisation float64 // of its processors, 0 to 1
	Open        float64 // flows, in the mean over time
}

// Flows is how many were measured.
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

// batches are the means of batches of consecutive values, of which there are 32 to 64 whatever the
// number of values: when there are 64, pairs become one.
type batches struct {
	sums  []float64
	size  uint64 // values in a batch
	sum   float64
	count uint64 // values in the sum
}

const mostBatches = 64

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
	for i := range mostBatches / 2 {
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

// finish ends a run's measurements.
func (e *engine) finish() *RunResult {
	if e.result.Flows() == 0 { // a window that was never open: there is nothing to say of no time
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
