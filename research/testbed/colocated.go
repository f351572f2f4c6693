// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"

	"github.com/segue-lb/segue/lab/application"
	"github.com/segue-lb/segue/lab/httpload"
	"github.com/segue-lb/segue/research/sim"
)

// schedule returns the shares of a server's cores that co-located work takes in a run, and when it
// begins to take them, in emulated time.
func (s settings) schedule(server string) application.Schedule {
	schedule, err := application.ParseSchedule(s.Emulated.Of(server).Colocated)
	if err != nil {
		panic(err) // problems has checked it
	}
	return schedule
}

// sendWithColocated sends requests from the client, while co-located work takes its shares of the
// servers' cores. At the end, it stops the co-located work.
func (b *rig) sendWithColocated(
	ctx context.Context, config httpload.Config, s settings,
) (report *httpload.Report, err error) {
	for _, name := range s.serverNames() {
		schedule := s.schedule(name)
		if len(schedule) == 0 {
			continue
		}
		for i := range schedule {
			schedule[i].At = s.byTheClock(schedule[i].At)
		}
		node := b.lab.Node(name)
		if err := node.Colocate(ctx, schedule); err != nil {
			return nil, err
		}
		defer func() {
			err = errors.Join(err, node.Colocate(context.WithoutCancel(ctx), nil))
		}()
	}
	return b.send(ctx, config)
}

// slowdowns returns events that slow the simulated servers down as the co-located work does.
func (s settings) slowdowns() (events []sim.Event) {
	for i, name := range s.serverNames() {
		speed := speedOf(s.Emulated.Of(name))
		for _, c := range s.schedule(name) {
			events = append(events, sim.Event{
				At: c.At.Seconds(), Kind: sim.SetSpeed, Servers: []int32{int32(i)},
				Speed: speed * (1 - c.Share),
			})
		}
	}
	return events
}
