// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/health/probe"
)

// caller makes connections of the balancer's own to servers of services that hunt. It implements
// probe.Caller. The data path offers such a connection only to the server that is called
// (bpf/balancer/signal/check.h), or through another server, which passes the SYN on to it. The
// prober makes one call at a time to a server, or through it.
type caller struct {
	plane *dataplane.Plane
	path  *health.HostPath
}

// Call implements probe.Caller. If through is nil, the SYN goes directly to the called server. If
// the host cannot make the call, the error is probe.ErrUntried, which says nothing about the
// server.
func (c *caller) Call(ctx context.Context, to, through *probe.Target) error {
	first := to.Slot
	if through != nil {
		first = through.Slot
	}
	c.plane.Checks.Lead(first, to.Slot)
	socket, err := c.path.Socket(to.VIP)
	if err != nil {
		return fmt.Errorf("%w: %w", probe.ErrUntried, err)
	}
	address := netip.AddrPortFrom(to.VIP, to.CallPort)
	err = health.Answers(ctx, c.path, address, socket, dataplane.CallMarkOf(first))
	if errors.Is(err, health.ErrUntried) {
		return fmt.Errorf("%w: %w", probe.ErrUntried, err)
	}
	return err
}
