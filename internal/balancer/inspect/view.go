// SPDX-License-Identifier: Apache-2.0

// Package inspect shows the state of a balancer, its metrics, and what the balancer would do with a
// packet. It reads the tables in the kernel, whether a process runs the balancer or not. It changes
// no table, except that a trace corrects ranks of servers.
package inspect

import (
	"errors"
	"fmt"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// View shows the state of a balancer, whether its process runs or not. Packets and reloads can
// change the tables meanwhile. So the results for different tables can be from different moments.
type View struct {
	tables *dataplane.Reader
	dryRun *dataplane.DryRun // nil before the first trace
}

// OpenView opens the tables of an instance. It returns an error if another build with another
// layout has made the tables.
func OpenView(instance string) (*View, error) {
	tables, err := dataplane.OpenReader(instance)
	if err != nil {
		return nil, err
	}
	return NewView(tables), nil
}

// NewView returns a view of open tables. Close closes the tables.
func NewView(tables *dataplane.Reader) *View { return &View{tables: tables} }

// Close closes the tables.
func (v *View) Close() error {
	err := v.tables.Close()
	if v.dryRun != nil {
		err = errors.Join(err, v.dryRun.Close())
	}
	return err
}

// Count returns how many packets were counted under a reason. It returns an error if there is no
// such reason.
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
