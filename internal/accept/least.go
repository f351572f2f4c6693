// SPDX-License-Identifier: Apache-2.0

package accept

// Answer is what a candidate does with a connection that travels along a list of candidates.
type Answer int

const (
	// Pass passes the connection on to the next candidate. If the candidate knows its load, it
	// writes the load into its own segment.
	Pass Answer = iota
	// Take accepts the connection.
	Take
	// Return sends the connection back, by connect-force, to an earlier candidate.
	Return
)

// Place is the place of a candidate in the list along which a connection travels.
type Place int

const (
	// First is the place of the first of several candidates.
	First Place = iota
	// Middle is the place of all candidates between the first and the last.
	Middle
	// Last is the place of the last candidate, and of the only candidate of a list of one.
	Last
)

// Least decides for a candidate. It uses the candidate's own load, and in passed the loads that the
// earlier candidates wrote into their segments, in the order of travel. A candidate that wrote no
// load is Unknown.
//
//	own load                 first  middle  last
//	free capacity            Take   Take    Take
//	known, no free capacity  Pass   Pass    Return if a load in passed is lower, otherwise Take
//	unknown                  Take   Pass    Return if a load in passed is known, otherwise Take
//
// If the answer is Return, back is the index in passed of the candidate that gets the connection:
// the least loaded one, or the first of several such. So there are no wrongful refusals (6LB,
// section V-E), at the cost of at most one more hop. A candidate that does not know its load gets
// the connections that a hash would give it.
//
// Loads are compared per unit of capacity, including the new connection. So of a small and a large
// server that are both just full, the large one has the lower load.
//
// For a server without a listener, the caller never passes First, because such a server must not be
// preferred.
func Least(own Load, passed []Load, place Place) (answer Answer, back int) {
	switch {
	case own.free(), place == First && !own.known():
		return Take, 0
	case place != Last:
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

// known tells whether the load is known.
func (l Load) known() bool { return l.Capacity != 0 }

// free tells whether the server surely has capacity for one more connection.
func (l Load) free() bool { return l.Capacity != NoCapacity && l.Busy < l.Capacity }

// units returns the capacity by which a comparison divides the load. It is 1 if the source does not
// know the capacity, and 0 if the load is unknown.
func (l Load) units() uint64 {
	if l.Capacity == NoCapacity {
		return 1
	}
	return uint64(l.Capacity)
}

// lessBusy tells whether l is less than other, per unit of capacity and with one more connection
// each. An unknown load is not less than any other. Its units are 0, so every known load is less
// than an unknown one.
func (l Load) lessBusy(other Load) bool {
	return l.known() && (uint64(l.Busy)+1)*other.units() < (uint64(other.Busy)+1)*l.units()
}
