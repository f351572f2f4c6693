// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"container/heap"
	"time"
)

// deadlines is a heap of connections, with the earliest deadline first.
type deadlines []*connection

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadline < d[j].deadline }

// Swap implements heap.Interface. Each connection knows its position in the heap.
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].position, d[j].position = i, j
}

// Push implements heap.Interface.
func (d *deadlines) Push(x any) {
	c := x.(*connection)
	c.position = len(*d)
	*d = append(*d, c)
}

// Pop implements heap.Interface.
func (d *deadlines) Pop() any {
	last := len(*d) - 1
	c := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	c.position = noDeadline
	return c
}

// noDeadline is the position of a connection without a deadline.
const noDeadline = -1

// set gives a connection a deadline. It replaces the deadline that the connection may have.
func (d *deadlines) set(c *connection, at time.Duration) {
	c.deadline = at
	if c.position == noDeadline {
		heap.Push(d, c)
	} else {
		heap.Fix(d, c.position)
	}
}

// clear removes a connection's deadline, if it has one.
func (d *deadlines) clear(c *connection) {
	if c.position != noDeadline {
		heap.Remove(d, c.position)
	}
}
