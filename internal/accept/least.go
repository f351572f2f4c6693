// SPDX-License-Identifier: Apache-2.0

package accept

// Answer is what a candidate does with a connection that travels along a list of candidates.
type Answer int

const (
	// Pass sends it on to the next candidate, with the load written into the candidate's own segment.
	Pass Answer = iota
	// Take keeps it.
	Take
	// Return hands it back, by connect-force, to an earlier candidate.
	Return
)

// Least decides for a candidate by its own load and those that the candidates before it wrote into
// their segments when they passed the connection on, in the order of travel. One with a free worker
// takes it. The last one hands it back to the least busy of the others, the earliest of several, if
// that one is less busy than itself. So nobody refuses where all others are busier (the wrongful
// rejections of 6LB's section V-E), for at most one hop more. Busy is compared with the connection counted
// in, for each unit of capacity: of a small server and a large one that are just full the large one is
// worth more.
//
// With Return comes the index in passed of the candidate that gets the connection.
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

// free tells whether one more would not have to wait.
func (l Load) free() bool { return l.Busy < l.Capacity }

// lessBusy compares what would be busy of each unit of capacity with one more.
func (l Load) lessBusy(other Load) bool {
	return (uint64(l.Busy)+1)*uint64(other.Capacity) < (uint64(other.Busy)+1)*uint64(l.Capacity)
}
