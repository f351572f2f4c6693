// SPDX-License-Identifier: Apache-2.0

package sim

// Counts contains the number of flows of each server, and finds the eligible servers with the
// fewest. Each operation takes constant time, whatever the number of servers. The eligible servers
// are in the order of their counts. A count changes by one, so the server only changes places with
// the first or last server of the same count.
type Counts struct {
	count    []int32 // by server
	place    []int32 // by server: its index in order; none if it is not eligible
	order    []int32 // the eligible servers, those with the smallest counts first
	boundary []int32 // by count: the index in order of the first server with this count or more
}

// NewCounts returns counts of n servers. All counts are 0, and no server is eligible.
func NewCounts(n int) *Counts {
	c := &Counts{
		count: make([]int32, n), place: make([]int32, n), order: make([]int32, 0, n),
		boundary: make([]int32, 2, 64), // of the counts 0 and 1
	}
	for s := range c.place {
		c.place[s] = none
	}
	return c
}

// Of returns the count of a server.
func (c *Counts) Of(s int32) int32 { return c.count[s] }

// Add adds one to the count of a server. An eligible server also changes its place in order.
func (c *Counts) Add(s int32) {
	c.count[s]++
	n := c.count[s]
	if int(n)+1 >= len(c.boundary) { // no server had n flows before
		c.boundary = append(c.boundary, int32(len(c.order)))
	}
	if c.place[s] != none {
		// The last place of the old count becomes the first of count n.
		c.boundary[n]--
		c.swap(s, c.boundary[n])
	}
}

// Remove subtracts one from the count of a server, which must not be 0.
func (c *Counts) Remove(s int32) {
	n := c.count[s]
	if c.place[s] != none {
		// The first place of count n becomes the last of the count below.
		c.swap(s, c.boundary[n])
		c.boundary[n]++
	}
	c.count[s] = n - 1
}

// swap exchanges a server with the server at a place.
func (c *Counts) swap(s, to int32) {
	from, other := c.place[s], c.order[to]
	c.order[from], c.place[other] = other, from
	c.order[to], c.place[s] = s, to
}

// SetEligible sets the servers from which Least chooses, in ascending order. The other servers are
// still counted.
func (c *Counts) SetEligible(servers []int32) {
	for s := range int32(len(c.count)) {
		is := len(servers) > 0 && servers[0] == s
		if is {
			servers = servers[1:]
		}
		switch was := c.place[s] != none; {
		case is && !was:
			c.include(s)
		case was && !is:
			c.exclude(s)
		}
	}
}

// include appends a server to order, and then moves it in front of the servers of each higher
// count.
func (c *Counts) include(s int32) {
	c.place[s] = int32(len(c.order))
	c.order = append(c.order, s)
	for n := len(c.boundary) - 1; n > int(c.count[s]); n-- {
		c.swap(s, c.boundary[n])
		c.boundary[n]++
	}
}

// exclude moves a server behind the servers of each higher count, and then removes it from the end
// of order.
func (c *Counts) exclude(s int32) {
	for n := int(c.count[s]) + 1; n < len(c.boundary); n++ {
		c.boundary[n]--
		c.swap(s, c.boundary[n])
	}
	c.order = c.order[:len(c.order)-1]
	c.place[s] = none
}

// Least returns the eligible servers with the smallest count, in arbitrary order. The slice is
// valid until the next change.
func (c *Counts) Least() []int32 {
	if len(c.order) == 0 {
		return nil
	}
	least := c.count[c.order[0]]
	return c.order[:c.boundary[least+1]]
}
