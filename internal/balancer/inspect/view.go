// SPDX-License-Identifier: Apache-2.0

// Package inspect tells what a balancer does: its state, its metrics, and what it would do with
// a packet. It reads the tables in the kernel, whether a process runs the balancer or not, and
// writes none.
package inspect

import (
	"fmt"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// View tells the state of a balancer, whether its process runs or not. Traffic and reloads go on
// meanwhile: what is read is true of each table, not of all at one moment.
type View struct{ tables *dataplane.Reader }

// OpenView opens the tables of an instance. Those of a build with another layout are refused.
func OpenView(instance string) (*View, error) {
	tables, err := dataplane.OpenReader(instance)
	if err != nil {
		return nil, err
	}
	return NewView(tables), nil
}

// NewView returns a view of tables that are open. Close closes them.
func NewView(tables *dataplane.Reader) *View { return &View{tables} }

// Close closes the tables.
func (v *View) Close() error { return v.tables.Close() }

// Count is how many packets left the data path for a reason.
func (v *View) Count(reason string) (uint64, error) {
	counts, err := v.tables.CountReasons()
	if err != nil {
		return 0, err
	}
	for _, count := range counts {
		if count.Reason == reason {
			return count.Packets, nil
		}
	}
	return 0, fmt.Errorf("instance %s: there is no reason %s", v.tables.Instance, reason)
}
