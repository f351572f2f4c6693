// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/load"
)

// intervals are how often user space reads the load sources that it does.
var intervals = map[config.LoadSource]time.Duration{
	config.LoadApache:       load.ApacheInterval,
	config.LoadCgroup:       load.CgroupInterval,
	config.LoadSharedMemory: load.SharedMemoryInterval,
}

// watch is a load source that is read for a service.
type watch struct {
	source config.Source
	stop   func() // returns when nothing is reported any more
}

// watches are the load sources that user space reads, by service.
type watches map[agentServiceKey]watch

// follow reads the sources of the configuration until stopAll. One that stays is not interrupted.
func (w watches) follow(k *kernel, cfg *config.Agent, log *slog.Logger) {
	want := map[agentServiceKey]config.AgentService{}
	for _, s := range cfg.Services {
		if intervals[s.Load.Kind] != 0 {
			want[serviceKey(s)] = s
		}
	}
	for key, running := range w {
		if want[key].Load == running.source {
			delete(want, key)
			continue
		}
		running.stop()
		delete(w, key)
		// What the next source says may be of another unit.
		if err := k.objects.Loads.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			log.Error("forget the load", "error", err)
		}
	}
	for key, s := range want {
		w[key] = watch{s.Load, k.watchLoad(key, s, log.With("service", s.Name, "source", s.Load.Kind))}
	}
}

func (w watches) stopAll() {
	for key, running := range w {
		running.stop()
		delete(w, key)
	}
}

// watchLoad keeps the load of a service in the data path true. What goes stale there does so by its age,
// also when this process has ended.
func (k *kernel) watchLoad(key agentServiceKey, s config.AgentService, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	interval := intervals[s.Load.Kind]
	watcher := load.NewWatcher(newSource(s.Load), interval, load.StaleAfter(interval), log, func(state load.State) {
		if state.Stale {
			return
		}
		if err := k.report(key, state.Load); err != nil {
			log.Error("report the load", "error", err)
		}
	})
	go func() {
		defer close(done)
		_ = watcher.Run(ctx) // nil always
	}()
	return func() {
		cancel()
		<-done
	}
}

func newSource(s config.Source) load.Source {
	switch s.Kind {
	case config.LoadApache:
		return load.NewApache(s.Path, s.Workers)
	case config.LoadCgroup:
		return load.NewCgroup(s.Path)
	default:
		return load.NewSharedMemory(s.Path)
	}
}

// report gives the data path the load of this moment.
func (k *kernel) report(key agentServiceKey, l load.Load) error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	value := agentLoad{Busy: l.Busy, Capacity: l.Capacity, When: uint64(now)}
	if err := k.objects.Loads.Put(key, value); err != nil {
		return fmt.Errorf("write to %s: %w", k.objects.Loads, err)
	}
	return nil
}

// monotonic is the time of the data path, in nanoseconds.
func monotonic() (int64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return now.Nano(), nil
}
