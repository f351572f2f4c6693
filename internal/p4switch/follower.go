// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/desired"
)

// incomplete is the problem of a switch that gets its entries, or a change of them.
const incomplete = "the switch does not have all entries yet"

// retryInterval is the time between the loss of a switch and the next attempt. Each further attempt
// comes after twice the time, up to mostRetries times retryInterval.
const (
	retryInterval = 500 * time.Millisecond
	mostRetries   = 16
)

// Follower makes a switch follow a content that changes. It connects again if the switch has
// restarted, and tries again if the switch has refused a change.
type Follower struct {
	to    desired.Switch
	log   *slog.Logger
	retry time.Duration // retryInterval
	// patience is countPatience.
	patience time.Duration
	known    map[uint16]version // the versions of services that were in force

	logged string // the problem that was logged last; empty: that the switch follows

	mu       sync.Mutex
	state    Status
	servers  []*Server // of the content that the switch has
	failures int
}

// NewFollower returns a follower of the switch that a configuration names.
func NewFollower(to *desired.Switch, log *slog.Logger) *Follower {
	return &Follower{
		to: *to, log: log, retry: retryInterval, patience: countPatience, known: map[uint16]version{},
		logged: incomplete,
		state: Status{
			Address: to.Address, Device: to.Device, ElectionID: to.ElectionID, Since: time.Now(),
			Problem:  incomplete,
			Services: []ServiceStatus{}, Passed: []PassedService{},
		},
	}
}

// Run follows the contents until the context ends. Then the switch keeps its entries, and goes on.
func (f *Follower) Run(ctx context.Context, contents <-chan *Content) error {
	var last *Content
	delay := f.retry
	for ctx.Err() == nil {
		err := f.follow(ctx, contents, &last)
		if ctx.Err() != nil {
			break
		}
		delay = min(2*delay, mostRetries*f.retry)
		if f.logged == "" { // the switch has followed
			delay = f.retry
		}
		f.fail(err)
		select {
		case <-ctx.Done():
		case <-time.After(delay):
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
	if err == nil {
		err = s.PassAll(ctx, uint16(f.to.NetworkPort), uint16(f.to.HostPort))
	}
	if err != nil {
		return err
	}
	if *last != nil {
		f.note(s, *last) // what it still has
	}
	f.wait()
	for {
		select { // there may be a later one: the connection or the last Sync may have taken long
		case *last = <-contents:
		default:
		}
		if *last != nil {
			f.wait()
			if err := s.Sync(ctx, *last); err != nil {
				return err
			}
			f.note(s, *last)
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
}

// fail notes an error, and logs it unless it is that of the last time.
func (f *Follower) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures++
	f.set(false, err.Error())
	if f.logged != err.Error() {
		f.logged = err.Error()
		f.log.Error("the switch does not follow", "switch", f.to.Address, "error", err)
	}
}

// wait notes that the switch does not have all entries yet.
func (f *Follower) wait() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set(false, incomplete)
}

func (f *Follower) succeed(entries int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set(true, "")
	if f.logged != "" {
		f.logged = ""
		f.log.Info("the switch follows", "switch", f.to.Address, "entries", entries)
	}
}

// set notes whether the switch follows, and why not.
func (f *Follower) set(follows bool, problem string) {
	if f.state.Follows != follows {
		f.state.Since = time.Now()
	}
	f.state.Follows, f.state.Problem = follows, problem
}

var (
	followsMetric = desc("follows",
		"1 if the switch has all entries of the balancer, 0 if it is getting them, cannot be reached, or refuses them.")
	entriesMetric    = desc("entries", "Entries in the tables of the switch.")
	failuresMetric   = desc("failures_total", "Failed attempts to make the switch follow.")
	generationMetric = desc("service_generation",
		"Number of the service's generation whose rows are in force on the switch. It is missing if the "+
			"switch has other rows.", "service", "digest")
	packetsMetric       = desc("packets_total", "Packets that left the switch, by what became of them.", "reason")
	bytesMetric         = desc("bytes_total", "Bytes of frames as the switch received them, by what became of them.", "reason")
	serverPacketsMetric = desc("server_packets_total", "Packets that the switch sent to the server.", "service", "server")
	serverBytesMetric   = desc("server_bytes_total",
		"Bytes of the frames that the switch sent to the server, without encapsulation.", "service", "server")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("segue_lb_switch_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector. Which metrics there are depends on the switch.
func (f *Follower) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		followsMetric, entriesMetric, failuresMetric, generationMetric,
		packetsMetric, bytesMetric, serverPacketsMetric, serverBytesMetric,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector. It reads the counters of the switch. If the switch does not
// answer, it leaves out their metrics.
func (f *Follower) Collect(out chan<- prometheus.Metric) {
	put := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
	f.mu.Lock()
	state, servers, failures := f.state, f.servers, f.failures
	f.mu.Unlock()
	follows := 0.0
	if state.Follows {
		follows = 1
	}
	put(followsMetric, prometheus.GaugeValue, follows)
	put(entriesMetric, prometheus.GaugeValue, float64(state.Entries))
	put(failuresMetric, prometheus.CounterValue, float64(failures))
	for _, service := range state.Services {
		if service.Generation != nil {
			put(generationMetric, prometheus.GaugeValue, float64(*service.Generation), service.Name, service.Digest)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), f.patience)
	defer cancel()
	_ = withReader(&f.to, func(r *Reader) error {
		counts, err := r.Reasons(ctx)
		if err != nil {
			return err
		}
		for _, count := range counts {
			put(packetsMetric, prometheus.CounterValue, float64(count.Packets), count.Reason)
			put(bytesMetric, prometheus.CounterValue, float64(count.Bytes), count.Reason)
		}
		return r.Servers(ctx, servers, func(server *Server, packets, bytes uint64) {
			put(serverPacketsMetric, prometheus.CounterValue, float64(packets), server.Service, server.Name)
			put(serverBytesMetric, prometheus.CounterValue, float64(bytes), server.Service, server.Name)
		})
	})
}
