// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
)

// read reads the tables that an earlier process has left. It returns an error if they have no room
// for the services and servers that the configuration adds.
func (b *Balancer) read() (err error) {
	b.generations = b.loadGenerations().Next(b.cfg.Services)
	if b.slots, err = dataplane.LoadSlots(b.plane); err != nil {
		return err
	}
	if b.services, err = loadServices(b.plane, b.slots, b.inference, b.applyHop); err != nil {
		return err
	}
	added := 0
	for _, service := range b.cfg.Services {
		if b.services.byName[service.Name] == nil {
			added++
		}
	}
	return errors.Join(b.services.checkRoom(added), b.slots.CheckRoom(keysOf(b.cfg)))
}

// fill applies the configuration to the tables that an earlier process has left.
func (b *Balancer) fill(t *datapath.Takeover) error {
	if err := b.plane.BackUp(t); err != nil {
		return err
	}
	if err := b.plane.WriteIdentity(); err != nil {
		return err
	}
	if err := b.slots.Reclaim(keysOf(b.cfg)); err != nil {
		return err
	}
	return b.reconcile(b.cfg, b.secrets.SignalKeys, b.generations)
}

// reconcile makes the data path follow a desired state, the signal keys and the generations of the
// services.
func (b *Balancer) reconcile(cfg *desired.Balancer, keys desired.SignalKeys, generations serversets.Generations) error {
	if err := b.services.reconcile(cfg, generations); err != nil {
		return err
	}
	b.inference.poller.SetKeys(keys)
	return b.plane.SetSignalKeys(keys)
}

// start attaches the data path when all next hops are known, or resolveTimeout after the resolver's
// first update.
func (b *Balancer) start(ctx context.Context) error {
	b.resolver.SetTargets(ctx, targetsOf(b.cfg))
	// It starts at the resolver's first update. Before that update, no next hop can be known.
	var patience <-chan time.Time
	for !b.attached {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case update := <-b.resolver.Updates():
			err = b.follow(update)
			if patience == nil {
				patience = time.After(resolveTimeout)
			}
		case <-patience:
			err = b.attach()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// attach applies the configuration and attaches the programs. If attach fails, the data path of an
// earlier process continues unchanged.
func (b *Balancer) attach() error {
	for i, name := range b.cfg.Node.Interfaces() {
		if b.own[i].Index == 0 {
			return fmt.Errorf("%s %q: there is no such interface", b.plane.Sides[i].Setting, name)
		}
	}
	if err := b.setHost(); err != nil {
		return err
	}
	if err := b.plane.CheckInterfaces(b.own); err != nil {
		return err
	}
	attached, err := b.takeOver()
	if err != nil {
		return err
	}
	b.attached, b.mode = true, datapath.Generic
	for i, a := range attached {
		a.WarnIfGeneric(b.log, b.own[i].Name)
		b.log.Info("steering", "interface", b.own[i].Name, "mode", a.Mode,
			"services", len(b.services.byName), "servers", len(b.services.members()))
		if a.Mode == datapath.Native {
			b.mode = a.Mode
		}
	}
	inside := len(attached) - 1
	b.holdFragments(attached)
	b.wire.LeaveBy(b.own[inside].Index, attached[inside].Mode)
	b.applyHops()
	b.publishAll()
	b.logChanges()
	b.showVLANTags()
	b.trySweep() // otherwise the numbers of flows are unknown until the first tick
	close(b.ready)
	return nil
}

// holdFragments says on which interfaces fragments arrive that are held.
func (b *Balancer) holdFragments(attached []datapath.Attached) {
	ifindexes, modes := make([]int, len(attached)), make([]datapath.Mode, len(attached))
	for i, a := range attached {
		ifindexes[i], modes[i] = b.own[i].Index, a.Mode
	}
	b.plane.Held.ArriveBy(ifindexes, modes)
}

// takeOver applies the configuration and attaches the programs. On an error it restores the tables
// and the programs.
func (b *Balancer) takeOver() (attached []datapath.Attached, err error) {
	err = datapath.TakeOver(b.log, func(t *datapath.Takeover) error {
		if err := b.fill(t); err != nil {
			return err
		}
		attached, err = b.plane.Attach(t, b.own)
		return err
	})
	return attached, err
}
