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

// fill applies the configuration to the tables that an earlier process has left. The programs of
// that process may lack features that the configuration needs. The programs of this process have
// the features of the former services, too. So fill calls attach, which replaces the programs,
// before it changes rules of services. By then, the tables of this process have all that packets of
// the former services need. On undo, the rules are restored before the programs.
func (b *Balancer) fill(t *datapath.Takeover, attach func(*datapath.Takeover) error) error {
	if err := b.plane.BackUp(t); err != nil {
		return err
	}
	if err := b.plane.WriteIdentity(); err != nil {
		return err
	}
	if err := b.slots.Reclaim(keysOf(b.cfg)); err != nil {
		return err
	}
	next, err := b.prepare(b.cfg, b.secrets.SignalKeys, b.generations)
	if err != nil {
		return err
	}
	if err := attach(t); err != nil {
		return err
	}
	b.plane.RestoreOnUndo(t)
	return b.services.enforce(next)
}

// withoutPrograms is the argument attach of fill if no program is to be attached.
func withoutPrograms(*datapath.Takeover) error { return nil }

// reconcile makes the data path follow a desired state, with its signal keys and the generations of
// its services. After an error, another call with the state before can restore it.
func (b *Balancer) reconcile(
	cfg *desired.Balancer, keys desired.SignalKeys, generations serversets.Generations,
) error {
	next, err := b.prepare(cfg, keys, generations)
	if err != nil {
		return err
	}
	return b.services.enforce(next)
}

// prepare is the part of reconcile before any rule of a service changes.
func (b *Balancer) prepare(
	cfg *desired.Balancer, keys desired.SignalKeys, generations serversets.Generations,
) (*transition, error) {
	if err := b.plane.SetSignalKeys(keys); err != nil {
		return nil, err
	}
	b.inference.poller.SetKeys(keys)
	return b.services.prepare(cfg, generations)
}

// start attaches the data path when all next hops are known, or resolveTimeout after the resolver's
// first update. If the context ends before that, start returns nil, and nothing is attached.
func (b *Balancer) start(ctx context.Context) error {
	b.resolver.SetTargets(ctx, b.waysTo(targetsOf(b.cfg)))
	// patience begins at the resolver's first update: no next hop can be known before.
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
	for _, link := range b.own {
		if err := b.plane.Loader.Check(link.Index); err != nil {
			return err
		}
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
	towardsServers := len(attached) - 1
	b.wire.LeaveBy(b.own[towardsServers].Index, attached[towardsServers].Mode)
	b.applyHops()
	b.publishAll()
	b.logChanges()
	b.showVLANTags()
	b.trySweep() // otherwise the numbers of flows are unknown until control sweeps
	close(b.ready)
	return nil
}

// locateFragments tells the reader of held fragments on which interfaces they arrive, and the mode
// of XDP on each.
func (b *Balancer) locateFragments(attached []datapath.Attached) {
	ifindexes, modes := make([]int, len(attached)), make([]datapath.Mode, len(attached))
	for i, a := range attached {
		ifindexes[i], modes[i] = b.own[i].Index, a.Mode
	}
	b.plane.Held.SetArrivals(ifindexes, modes)
}

// takeOver applies the configuration and attaches the programs. On an error it restores the tables
// and the programs.
func (b *Balancer) takeOver() (attached []datapath.Attached, err error) {
	err = datapath.TakeOver(b.log, func(t *datapath.Takeover) error {
		return b.fill(t, func(t *datapath.Takeover) error {
			if attached, err = b.plane.Attach(t, b.own); err == nil {
				b.locateFragments(attached)
			}
			return err
		})
	})
	return attached, err
}
