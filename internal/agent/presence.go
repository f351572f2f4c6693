// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
)

const (
	// settleInterval is how long changes of addresses are gathered.
	settleInterval = 50 * time.Millisecond
	// presenceInterval is how often VIPs are looked at without a change of addresses: local routes
	// make addresses the host's, too.
	presenceInterval = 10 * time.Second
)

// addressChanges gets a value after changes of the host's addresses, and holds one at most. It is
// closed when the context ends, and when the kernel could not deliver a change.
func addressChanges(ctx context.Context) (<-chan struct{}, error) {
	updates := make(chan netlink.AddrUpdate)
	err := netlink.AddrSubscribeWithOptions(updates, ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(error) {}, // the channel is closed then
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
			default: // one is waiting already
			}
		}
	}()
	return changes, nil
}

// followVIPs tells the data path, and so balancers that probe it, which VIPs are the host's own. It
// puts those back that the agent assigned and somebody has removed.
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
		}
	}
	for vip := range a.absent {
		if !absent[vip] && served[vip] {
			a.log.Info("a VIP is an address of this host again", "vip", vip)
		}
	}
	a.absent = absent
	return nil
}

// restore puts a VIP back on the host, if that is the agent's to do. False: the VIP is still missing.
// A host that refused is left alone for a while: an attempt takes up to a second, and changes
// addresses itself.
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

// setPresent says whether a VIP is an address of the host.
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
