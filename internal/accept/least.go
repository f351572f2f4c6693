// SPDX-License-Identifier: Apache-2.0

package accept

// Answer is what a candidate does with a connection that travels along a list of candidates.
type Answer int

const (
	// Pass passes it on to the next candidate, with the load written into the candidate's own
	// segment.
	Pass Answer = iota
	// Take accepts it.
	Take
	// Return sends it back, by connect-force, to an earlier candidate.
	Return
)

// Least decides for a candidate. It uses the candidate's own load and the loads that earlier
// candidates wrote into their segments when they passed the connection on, in the order of travel.
// A candidate with a free worker accepts. The last candidate sends the connection back to the
// least loaded of the earlier candidates (the first of several), if that one has a lower load than
// itself. So there are no wrongful refusals (6LB, section V-E), at the cost of at most one more
// hop. Loads are compared per unit of capacity, including the new connection. So if a small and a
// large server are both just full, the large one is better.
//
// For Return, it also returns the index in passed of the candidate that gets the connection.
func Least(own Load, passed []Load, last bool) (answer Answer, back int) {
	if own.free() {
		return Take, 0
	}
	if !last {
		return Pass, 0
	}
	answer, least := Take, own
	for i, l := range passed {
		if l.lessBusy(least) {
			answer, back, least = Return, i, l
		}
	}
	return answer, back
}

// free tells whether one more connection would not have to wait.
func (l Load) free() bool { return l.Busy < l.Capacity }

// lessBusy compares the loads per unit of capacity, with one more connection each.
func (l Load) lessBusy(other Load) bool {
	return (uint64(l.Busy)+1)*uint64(other.Capacity) < (uint64(other.Busy)+1)*uint64(l.Capacity)
}
