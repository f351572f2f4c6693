// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/events"
)

const (
	// settleInterval is the time from a change of an address to the check of the VIPs. Further
	// changes in this time begin it anew.
	settleInterval = 50 * time.Millisecond
	// presenceInterval is the time between checks of the VIPs while no address changes. A local
	// route also makes an address one of the host, and addressChanges does not tell of routes.
	presenceInterval = 10 * time.Second
)

// addressChanges returns a channel that gets a value after the host's addresses have changed. The
// channel holds at most one value. It closes when the context ends, or when a change was lost.
func addressChanges(ctx context.Context) (<-chan struct{}, error) {
	updates := make(chan netlink.AddrUpdate)
	err := netlink.AddrSubscribeWithOptions(updates, ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(error) {}, // the channel is closed on an error
	})
	if err != nil {
		return nil, fmt.Errorf("follow the addresses: %w", err)
	}
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		for range updates {
			select {
			case changes <- struct{}{}:
			default: // the channel holds a value already
			}
		}
	}()
	return changes, nil
}

// followVIPs tells the data path which VIPs are addresses of the host. The data path tells
// balancers in its answers to probes. If the agent assigns VIPs, followVIPs also restores those
// that somebody else has removed.
func (a *Agent) followVIPs() error {
	absent, served := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for i := range a.cfg.Services {
		for _, vip := range a.cfg.Services[i].AllVIPs() {
			served[vip] = true
			present := isLocal(vip) || a.restore(vip)
			if !present {
				absent[vip] = true
			}
			if err := a.kernel.setPresent(vip, present); err != nil {
				return err
			}
		}
	}
	for vip := range absent {
		if !a.absent[vip] {
			a.log.Warn("a VIP is not an address of this host: balancers send no new connections", "vip", vip)
			a.events.Publish(events.Event{Kind: events.VIPMissing, Reason: vip.String()})
		}
	}
	for vip := range a.absent {
		if !absent[vip] && served[vip] {
			a.log.Info("a VIP is an address of this host again", "vip", vip)
			a.events.Publish(events.Event{Kind: events.VIPBack, Reason: vip.String()})
		}
	}
	a.absent = absent
	return nil
}

// restore puts a VIP on the host again, if the agent assigns VIPs. It returns whether the VIP is
// present now. After a failed attempt, restore makes no other for presenceInterval: an attempt
// takes up to a second, and changes addresses, so that the VIPs are checked again.
func (a *Agent) restore(vip netip.Addr) bool {
	if !a.cfg.Node.AssignsVIPs() || time.Since(a.restoreFailed[vip]) < presenceInterval {
		return false
	}
	delete(a.restoreFailed, vip)
	err := datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
		return a.kernel.assigned.assign(t, map[netip.Addr]bool{vip: true})
	})
	if err != nil {
		if !a.absent[vip] {
			a.log.Error("cannot restore a VIP on this host", "vip", vip, "error", err)
		}
		a.restoreFailed[vip] = time.Now()
		return false
	}
	if isLocal(vip) {
		a.log.Warn("a VIP was removed from this host, and is restored", "vip", vip)
		return true
	}
	return false
}

// setPresent tells the data path whether a VIP is an address of the host.
func (k *kernel) setPresent(vip netip.Addr, present bool) error {
	value := uint32(absentVIP)
	if present {
		value = presentVIP
	}
	if err := k.objects.Vips.Put(vip.As16(), value); err != nil {
		return fmt.Errorf("note whether VIP %s is on the host: %w", vip, err)
	}
	return nil
}
