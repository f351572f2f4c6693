// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/vishvananda/netlink"
)

// linkRetry is the time until a link is read again that could not be read or used.
const linkRetry = time.Second

// link is the state of an interface. The zero value is an interface that cannot be used.
type link struct {
	ifindex int
	mac     net.HardwareAddr
}

func (l link) isUp() bool { return l.ifindex > 0 }

func (l link) equals(other link) bool {
	return l.ifindex == other.ifindex && bytes.Equal(l.mac, other.mac)
}

// followLink sends the state of an interface to a channel, at first and after each change, until
// the context ends.
func followLink(ctx context.Context, name string, to chan<- link, log *slog.Logger) {
	isLogged := false
	for ctx.Err() == nil {
		if err := watchLink(ctx, name, to); err != nil && ctx.Err() == nil && !isLogged {
			log.Warn("the interface cannot be followed", "interface", name, "error", err)
			isLogged = true
		}
		select {
		case <-time.After(linkRetry):
		case <-ctx.Done():
		}
	}
}

// watchLink is followLink until an error occurs.
func watchLink(ctx context.Context, name string, to chan<- link) error {
	done, changes := make(chan struct{}), make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(changes, done); err != nil {
		return fmt.Errorf("subscribe to changes of interfaces: %w", err)
	}
	defer func() {
		close(done)
		for range changes { // until the library's goroutine has ended
		}
	}()
	for {
		select {
		case to <- readLink(name):
		case <-ctx.Done():
			return nil
		}
		select {
		case _, isOpen := <-changes:
			if !isOpen {
				return errors.New("the subscription to changes of interfaces has ended")
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// readLink returns the state of an interface.
func readLink(name string) link {
	found, err := netlink.LinkByName(name)
	if err != nil {
		return link{}
	}
	attributes := found.Attrs()
	// Some drivers never tell whether their link is up: their state is unknown.
	works := attributes.OperState == netlink.OperUp || attributes.OperState == netlink.OperUnknown
	if attributes.Flags&net.FlagUp == 0 || !works || len(attributes.HardwareAddr) != 6 {
		return link{}
	}
	return link{attributes.Index, attributes.HardwareAddr}
}
