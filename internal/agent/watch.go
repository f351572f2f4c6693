// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/bpfclock"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/loadshm"
)

// watches are the load sources that the control plane reads or opens. Services with the same source
// and interval share a watch, whatever their capacities are.
type watches map[desired.Source]*watch

// loadTables are the tables of the data path to which watches write.
type loadTables struct {
	loads *ebpf.Map // the loads that user space has read
	maps  *ebpf.Map // the maps of applications
}

// follow makes w read the sources that the configuration names, until stopAll. It does not
// interrupt the watches of sources that the configuration still names.
func (w watches) follow(tables loadTables, cfg *desired.Agent, log *slog.Logger) {
	want := map[agentServiceKey]desired.Source{}
	for _, s := range cfg.Services {
		if s.Load.Kind.HasPath() {
			want[serviceKey(s)] = withoutCapacity(s.Load)
		}
	}
	// Each service leaves its former watch before it joins another, because only one watch may
	// write its load.
	for source, running := range w {
		for key := range running.services {
			if want[key] != source {
				running.leave(key, !sameLoad(want[key], source))
			}
		}
		if len(running.services) == 0 {
			running.stop()
			delete(w, source)
		}
	}
	for key, source := range want {
		if w[source] == nil {
			w[source] = startWatch(tables, source, log.With("source", source.Kind, "path", source.Path))
		}
		w[source].join(key)
	}
}

// withoutCapacity returns a source without its configured capacity. Only the data path uses the
// capacity, so services with different capacities can share a watch.
func withoutCapacity(s desired.Source) desired.Source {
	s.Capacity = 0
	return s
}

// sameLoad tells whether two sources give the same load: they differ in the interval at most.
func sameLoad(a, b desired.Source) bool {
	a.Interval = b.Interval
	return a == b
}

// stopAll ends all watches.
func (w watches) stopAll() {
	for source, running := range w {
		running.stop()
		delete(w, source)
	}
}

// watch reads one source, and writes its load to the data path for each service with this source.
// The data path finds by a load's age whether it is stale, also after this process has ended. If the
// source is the map of an application, the watch writes the map itself to the data path.
type watch struct {
	loadTables
	interval time.Duration
	log      *slog.Logger
	stop     func() // returns when no more loads will be written

	mu       sync.Mutex
	services map[agentServiceKey]bool // only the owner of the watches changes it
	last     agentLoad                // the last load that was written; none if its When is 0
	at       time.Time                // time of the last write; zero: it failed
	mapped   *ebpf.Map                // the application's map, if that is the source; nil: none
}

// startWatch begins to read a source. No service has joined yet.
func startWatch(tables loadTables, source desired.Source, log *slog.Logger) *watch {
	w := &watch{
		loadTables: tables, interval: cmp.Or(source.Interval, loadshm.CheckInterval), log: log,
		services: map[agentServiceKey]bool{},
	}
	report := w.report
	if source.Kind == desired.LoadSharedMap {
		report = w.reportMap
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	staleAfter := load.StaleAfter(w.interval)
	watcher := load.NewWatcher(w.newSource(source), w.interval, staleAfter, log, report)
	go func() {
		defer close(done)
		if err := watcher.Run(ctx); err != nil {
			log.Error("the load source is not read", "error", err)
		}
	}()
	w.stop = func() {
		cancel()
		<-done
		w.closeMap()
	}
	return w
}

// newSource returns the reader of a source.
func (w *watch) newSource(s desired.Source) load.Source {
	switch s.Kind {
	case desired.LoadApache:
		return load.NewApache(s.Path, s.Workers)
	case desired.LoadCgroup:
		return load.NewCgroup(s.Path)
	case desired.LoadSharedMap:
		return load.NewSharedMap(s.Path, w.opened)
	default:
		return load.NewSharedMemory(s.Path)
	}
}

// join adds a service. If there is a last load, the service gets it at once. join does nothing if
// the service has joined already.
func (w *watch) join(key agentServiceKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.services[key] {
		return
	}
	w.services[key] = true
	if w.last.When != 0 {
		w.put(key)
	}
	if w.mapped != nil {
		if err := w.putMap(key); err != nil {
			w.log.Error("report the load", "error", err)
		}
	}
}

// leave removes a service. If forget is true, it also removes the service's load from the data
// path: the next source of the service may have another unit.
func (w *watch) leave(key agentServiceKey, forget bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.services, key)
	if forget {
		w.forget(key)
	}
}

// forget removes a service's load from the data path.
func (w *watch) forget(key agentServiceKey) {
	for _, table := range []*ebpf.Map{w.loads, w.maps} {
		if err := table.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			w.log.Error("forget the load", "error", err)
		}
	}
}

// opened makes the data path read a map of the application for all services of the source.
func (w *watch) opened(m *loadshm.Map) error {
	fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate the map's descriptor: %w", err)
	}
	mapped, err := ebpf.NewMapFromFD(fd)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closeMap()
	w.mapped = mapped
	for key := range w.services {
		if err := w.putMap(key); err != nil {
			return err
		}
	}
	return nil
}

// putMap makes the data path read the application's map for a service.
func (w *watch) putMap(key agentServiceKey) error {
	if err := w.maps.Put(key, w.mapped); err != nil {
		return fmt.Errorf("write to %s: %w", w.maps, err)
	}
	return nil
}

// reportMap removes the application's map from the data path if the map cannot be opened any more.
// If it can, the data path finds by itself whether a process reports.
func (w *watch) reportMap(state load.State) {
	if !state.Stale || errors.Is(state.Err, loadshm.ErrNobody) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for key := range w.services {
		w.forget(key)
	}
	w.closeMap()
}

// closeMap closes the application's map. The data path keeps it until it is forgotten.
func (w *watch) closeMap() {
	if w.mapped != nil {
		_ = w.mapped.Close()
		w.mapped = nil
	}
}

// report writes a load to the data path for all services of the source. It writes nothing if the
// source is stale: the data path finds that by the age of the last load. It also writes nothing if
// the load equals the last one, and can wait for the next reading: a load must be written again
// before its age is a quarter of the time after which it is stale.
func (w *watch) report(state load.State) {
	if state.Stale {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	last := load.Load{Busy: w.last.Busy, Capacity: w.last.Capacity}
	unchanged := w.last.When != 0 && state.Load == last
	mayWait := state.At.Sub(w.at) <= load.StaleAfter(w.interval)/4-w.interval
	if unchanged && mayWait {
		return
	}
	now, err := monotonic()
	if err != nil {
		w.log.Error("report the load", "error", err)
		return
	}
	w.last = agentLoad{Busy: state.Load.Busy, Capacity: state.Load.Capacity, When: uint64(now)}
	w.at = state.At
	for key := range w.services {
		w.put(key)
	}
}

// put writes the last load to the data path for a service.
func (w *watch) put(key agentServiceKey) {
	if err := putLoad(w.loads, &key, &w.last); err != nil {
		w.at = time.Time{} // so that the next report writes the load even if it is unchanged
		w.log.Error("report the load", "error", err)
	}
}

// putLoad does the same as loads.Put, by a raw system call, which does not block. An ordinary
// system call wakes the monitor thread of the Go runtime. That would double the CPU time of a load
// source whose load always changes.
func putLoad(loads *ebpf.Map, key *agentServiceKey, value *agentLoad) error {
	attr := struct { // union bpf_attr of bpf(2), BPF_MAP_*_ELEM
		fd    uint32
		_     uint32
		key   unsafe.Pointer
		value unsafe.Pointer
		flags uint64
	}{
		fd: uint32(loads.FD()), key: unsafe.Pointer(key), value: unsafe.Pointer(value),
		flags: unix.BPF_ANY,
	}
	_, _, errno := unix.RawSyscall(unix.SYS_BPF, unix.BPF_MAP_UPDATE_ELEM,
		uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		return fmt.Errorf("write to %s: %w", loads, errno)
	}
	return nil
}

// monotonic returns the time on the clock of the data path, in nanoseconds. Like putLoad, it makes
// a raw system call.
func monotonic() (int64, error) {
	now, err := bpfclock.Monotonic()
	return int64(now), err
}
