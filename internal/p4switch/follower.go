// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/desired"
)

// retryInterval is the time between two attempts to connect with a switch, or to write to it.
const retryInterval = 2 * time.Second

// Follower makes a switch follow a content that changes. It connects again if the switch has
// restarted, and tries again if the switch has refused a change.
type Follower struct {
	to  desired.Switch
	log *slog.Logger
	// What the metrics tell.
	follows  atomic.Bool
	entries  atomic.Int64
	failures atomic.Int64
	problem  string        // the last error that was logged
	retry    time.Duration // retryInterval
}

// NewFollower returns a follower of the switch that a configuration names.
func NewFollower(to *desired.Switch, log *slog.Logger) *Follower {
	return &Follower{to: *to, log: log, retry: retryInterval}
}

// Run follows the contents until the context ends. Then the switch keeps its entries, and goes on.
func (f *Follower) Run(ctx context.Context, contents <-chan *Content) error {
	var last *Content
	for ctx.Err() == nil {
		err := f.follow(ctx, contents, &last)
		f.follows.Store(false)
		if ctx.Err() != nil {
			break
		}
		f.complain(err)
		select {
		case <-ctx.Done():
		case <-time.After(f.retry):
		}
	}
	return nil
}

// follow connects, and makes the switch follow contents until an error. last is the last content.
func (f *Follower) follow(ctx context.Context, contents <-chan *Content, last **Content) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client, err := Dial(ctx, &f.to)
	if err != nil {
		return err
	}
	defer client.Close()
	if !client.IsPrimary() {
		return ErrNotPrimary
	}
	s, err := Open(ctx, client)
	for err == nil {
		if *last != nil {
			if err = s.Sync(ctx, *last); err != nil {
				return err
			}
			f.succeed(s.Size())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-client.ended:
			return client.err
		case *last = <-contents:
		}
	}
	return err
}

// complain logs an error, unless it is that of the last time.
func (f *Follower) complain(err error) {
	f.failures.Add(1)
	if text := err.Error(); text != f.problem {
		f.problem = text
		f.log.Error("the switch does not follow", "switch", f.to.Address, "error", err)
	}
}

func (f *Follower) succeed(entries int) {
	f.entries.Store(int64(entries))
	if !f.follows.Swap(true) {
		f.problem = ""
		f.log.Info("the switch follows", "switch", f.to.Address, "entries", entries)
	}
}

var (
	followsMetric = prometheus.NewDesc("segue_lb_switch_follows",
		"1 if the switch has all entries of the balancer, 0 if it cannot be reached or refuses entries.", nil, nil)
	entriesMetric = prometheus.NewDesc("segue_lb_switch_entries",
		"Entries in the tables of the switch.", nil, nil)
	failuresMetric = prometheus.NewDesc("segue_lb_switch_failures_total",
		"Failed attempts to make the switch follow.", nil, nil)
)

// Describe implements prometheus.Collector.
func (f *Follower) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(f, out) }

// Collect implements prometheus.Collector.
func (f *Follower) Collect(out chan<- prometheus.Metric) {
	follows := 0.0
	if f.follows.Load() {
		follows = 1
	}
	out <- prometheus.MustNewConstMetric(followsMetric, prometheus.GaugeValue, follows)
	out <- prometheus.MustNewConstMetric(entriesMetric, prometheus.GaugeValue, float64(f.entries.Load()))
	out <- prometheus.MustNewConstMetric(failuresMetric, prometheus.CounterValue, float64(f.failures.Load()))
}
