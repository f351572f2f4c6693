// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/segue-lb/segue/internal/p4switch"
)

const (
	// switchWait is how long a change waits for the switch in front of the balancer.
	switchWait = time.Minute
	// switchInterval is the time between two questions whether the switch has the change.
	switchInterval = 200 * time.Millisecond
)

// switchClient asks a balancer about its switch.
type switchClient interface {
	Switch(context.Context) (*p4switch.Status, error)
}

// awaitSwitch waits until the switch in front of a balancer has a change, and warns if it does not
// get it within a time. Balancers without a switch answer with an error.
func awaitSwitch(ctx context.Context, out io.Writer, client switchClient, wait time.Duration) error {
	isTold := false
	for deadline := time.Now().Add(wait); ; {
		s, err := client.Switch(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || s.Follows:
			return nil
		case time.Now().After(deadline):
			_, err := fmt.Fprintf(out, "warning: the switch in front of the balancer does not have the change: %s\n", s.Problem)
			return err
		case !isTold:
			isTold = true
			fmt.Fprintf(out, "waiting for the switch in front of the balancer: %s\n", s.Problem)
		}
		select {
		case <-time.After(switchInterval):
		case <-ctx.Done():
		}
	}
}
