// SPDX-License-Identifier: Apache-2.0

package sim

// event is an event of a flow, of a balancer or of the whole system.
type event struct {
	at float64
	// Number in the order of creation; of events at the same time, the oldest comes first.
	order uint64
	kind  eventKind
	index int32 // index of the flow, the balancer or other object, depending on the kind
}

type eventKind uint8

func (e *event) before(other *event) bool {
	return e.at < other.at || e.at == other.at && e.order < other.order
}

// eventQueue is a heap in which each node has four children. It is half as deep as a binary heap,
// and the children of a node are next to each other in memory.
type eventQueue struct {
	heap    []event
	created uint64
}

// push adds an event.
func (q *eventQueue) push(at float64, kind eventKind, index int32) {
	q.created++
	e := event{at: at, order: q.created, kind: kind, index: index}
	q.heap = append(q.heap, e)
	i := len(q.heap) - 1
	for i > 0 {
		parent := (i - 1) / 4
		if !e.before(&q.heap[parent]) {
			break
		}
		q.heap[i] = q.heap[parent]
		i = parent
	}
	q.heap[i] = e
}

// pop removes and returns the first event. The queue must not be empty.
func (q *eventQueue) pop() event {
	first := q.heap[0]
	n := len(q.heap) - 1
	last := q.heap[n]
	heap := q.heap[:n]
	q.heap = heap
	i := 0
	for {
		child := 4*i + 1
		if child >= n {
			break
		}
		least := child
		for c := child + 1; c < min(child+4, n); c++ {
			if heap[c].before(&heap[least]) {
				least = c
			}
		}
		if !heap[least].before(&last) {
			break
		}
		heap[i] = heap[least]
		i = least
	}
	if n > 0 {
		heap[i] = last
	}
	return first
}
