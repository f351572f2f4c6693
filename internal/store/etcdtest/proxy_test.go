// SPDX-License-Identifier: Apache-2.0

package etcdtest

import "testing"

// Heal also lets the data go on that waits since the first of two cuts.
func TestCutTwice(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, &Server{})
	p.Cut()
	first := p.uncut
	p.Cut()
	p.Heal()
	select {
	case <-first:
	default:
		t.Error("what the first cut has stopped waits for ever")
	}
}
