// SPDX-License-Identifier: Apache-2.0

package sim

// Counts are numbers of servers' flows, one for each, of which it finds the smallest. Each operation
// takes the same time however many servers there are: they are kept in the order of their counts,
// which change by one, so that a server only ever changes places with one end of those of its count.
type Counts struct {
	count    []int32 // by server
	place    []int32 // by server: its index in order; none if it is not in
	order    []int32 // servers
	boundary []int32 // by count: the first place in order of those with this count or more
}

// NewCounts returns counts of n servers, all 0, none of them eligible.
func NewCounts(n int) *Counts {
	c := &Counts{count: make([]int32, n), place: make([]int32, n), order: make([]int32, 0, n), boundary: make([]int32, 2, 64)}
	for s := range c.place {
		c.place[s] = none
	}
	return c
}

// Of returns a server's count.
func (c *Counts) Of(s int32) int32 { return c.count[s] }

// Add counts one more.
func (c *Counts) Add(s int32) {
	c.count[s]++
	n := c.count[s]
	if int(n)+1 >= len(c.boundary) {
		c.boundary = append(c.boundary, int32(len(c.order)))
	}
	if c.place[s] != none {
		c.boundary[n]--
		c.swap(s, c.boundary[n])
	}
}

// Remove counts one less. The count must not be 0.
func (c *Counts) Remove(s int32) {
	n := c.count[s]
	if c.place[s] != none {
		c.swap(s, c.boundary[n])
		c.boundary[n]++
	}
	c.count[s] = n - 1
}

// swap moves a server to a place, and the one there to its.
func (c *Counts) swap(s, to int32) {
	from, other := c.place[s], c.order[to]
	c.order[from], c.place[other] = other, from
	c.order[to], c.place[s] = s, to
}

// SetEligible makes the servers that Least chooses from these, which are in ascending order. The
// others are counted all the same.
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

// include puts a server last, and then before those of each higher count.
func (c *Counts) include(s int32) {
	c.place[s] = int32(len(c.order))
	c.order = append(c.order, s)
	for n := len(c.boundary) - 1; n > int(c.count[s]); n-- {
		c.swap(s, c.boundary[n])
		c.boundary[n]++
	}
}

// exclude does the same backwards.
func (c *Counts) exclude(s int32) {
	for n := int(c.count[s]) + 1; n < len(c.boundary); n++ {
		c.boundary[n]--
		c.swap(s, c.boundary[n])
	}
	c.order = c.order[:len(c.order)-1]
	c.place[s] = none
}

// Least returns the eligible servers of the smallest count, in no order that means anything. They are
// the structure's own, until the next change.
func (c *Counts) Least() []int32 {
	if len(c.order) == 0 {
		return nil
	}
	return c.order[:c.boundary[c.count[c.order[0]]+1]]
}
