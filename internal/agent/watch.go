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

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/load"
)

// intervals are the times between two readings of the load sources that the control plane reads.
var intervals = map[desired.LoadSource]time.Duration{
	desired.LoadApache:       load.ApacheInterval,
	desired.LoadCgroup:       load.CgroupInterval,
	desired.LoadSharedMemory: load.SharedMemoryInterval,
}

// watch reads a load source for a service.
type watch struct {
	source desired.Source
	stop   func() // returns when no more loads will be reported
}

// watches are the load sources that the control plane reads, by service.
type watches map[agentServiceKey]watch

// follow reads the sources of the configuration until stopAll. It does not interrupt the reading of
// unchanged sources.
func (w watches) follow(k *kernel, cfg *desired.Agent, log *slog.Logger) {
	want := map[agentServiceKey]desired.AgentService{}
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
		// The next load source may report in another unit.
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

// watchLoad keeps the load of a service in the data path up to date. The data path treats a load as
// stale by its age, also after this process has ended.
func (k *kernel) watchLoad(key agentServiceKey, s desired.AgentService, log *slog.Logger) (stop func()) {
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
		_ = watcher.Run(ctx) // always nil
	}()
	return func() {
		cancel()
		<-done
	}
}

func newSource(s desired.Source) load.Source {
	switch s.Kind {
	case desired.LoadApache:
		return load.NewApache(s.Path, s.Workers)
	case desired.LoadCgroup:
		return load.NewCgroup(s.Path)
	default:
		return load.NewSharedMemory(s.Path)
	}
}

// report writes the current load to the data path.
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

// monotonic returns the time on the clock of the data path (CLOCK_MONOTONIC), in nanoseconds.
func monotonic() (int64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return now.Nano(), nil
}
