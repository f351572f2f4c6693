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
	// settleInterval is the time for which changes of addresses are collected before they are
	// handled.
	settleInterval = 50 * time.Millisecond
	// presenceInterval is the time between checks of the VIPs when no address changes. Local
	// routes, too, make addresses the host's own, and they change without notice here.
	presenceInterval = 10 * time.Second
)

// addressChanges returns a channel that gets a value after the host's addresses have changed. The
// channel holds at most one value. It is closed when the context ends, or when the kernel could not
// deliver a change.
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

// followVIPs tells the data path which VIPs are addresses of the host. Balancers learn it from the
// answers to their probes. followVIPs restores VIPs that the agent has assigned and somebody else
// has removed.
func (a *Agent) followVIPs() error {
	absent, served := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, s := range a.cfg.Services {
		served[s.VIP] = true
		present := isLocal(s.VIP) || a.restore(s.VIP)
		if !present {
			absent[s.VIP] = true
		}
		if err := a.kernel.setPresent(s.VIP, present); err != nil {
			return err
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

// restore puts a VIP on the host again, if the agent assigns VIPs. It returns false if the VIP is
// still missing. After a refusal by the host, restore makes no attempt for presenceInterval: an
// attempt takes up to a second, and changes addresses itself.
func (a *Agent) restore(vip netip.Addr) bool {
	if !a.cfg.Node.AssignsVIPs() || time.Since(a.refused[vip]) < presenceInterval {
		return false
	}
	delete(a.refused, vip)
	err := datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
		return a.kernel.assigned.assign(t, map[netip.Addr]bool{vip: true})
	})
	if err != nil {
		if !a.absent[vip] {
			a.log.Error("cannot restore a VIP on this host", "vip", vip, "error", err)
		}
		a.refused[vip] = time.Now()
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
	value := uint32(0)
	if present {
		value = 1
	}
	if err := k.objects.Vips.Put(vip.As16(), value); err != nil {
		return fmt.Errorf("note whether VIP %s is on the host: %w", vip, err)
	}
	return nil
}
