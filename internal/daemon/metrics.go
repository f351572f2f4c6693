// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"github.com/segue-lb/segue/internal/version"
)

const (
	mostScrapes     = 4  // at a time; further ones get the status 503
	mostConnections = 64 // at a time; further ones wait
)

// scrapeTimeout is how long a client may take to send a request, and again to read the answer.
const scrapeTimeout = 30 * time.Second

// Metrics serves Prometheus metrics over HTTP, at /metrics: those that the caller registers, and
// those of the process, of the build, and of reloads of the configuration.
type Metrics struct {
	*prometheus.Registry
	log      *slog.Logger
	listener net.Listener // nil: metrics are not served
	reloaded prometheus.Gauge
	readAt   prometheus.Gauge
}

// ListenMetrics listens on the TCP address in metrics.listen of the configuration. If the address
// is empty, metrics are not served. Requests are answered while Run runs. A caller that never calls
// Run must call Close. The names of the metrics about reloads begin with prefix.
func ListenMetrics(address, prefix string, log *slog.Logger) (*Metrics, error) {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		log:      log,
		reloaded: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: prefix + "_config_last_reload_success",
			Help: "1 if the last reload of the configuration succeeded, otherwise 0.",
		}),
		readAt: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: prefix + "_config_last_reload_success_timestamp_seconds",
			Help: "Unix time at which the configuration in force was read.",
		}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "segue_build_info",
		Help:        "The version of segue. The value is always 1.",
		ConstLabels: prometheus.Labels{"version": version.String()},
	})
	build.Set(1)
	m.MustRegister(build, m.reloaded, m.readAt, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.observeReload(nil) // the start counts as a successful reload
	if address == "" {
		return m, nil
	}
	var err error
	if m.listener, err = net.Listen("tcp", address); err != nil {
		return nil, fmt.Errorf("metrics.listen %q: %w", address, err)
	}
	return m, nil
}

// Close stops listening.
func (m *Metrics) Close() error {
	if m.listener == nil {
		return nil
	}
	return m.listener.Close()
}

// Addr returns the address at which the metrics are served. It is nil if they are not served.
func (m *Metrics) Addr() net.Addr {
	if m.listener == nil {
		return nil
	}
	return m.listener.Addr()
}

// Run serves the metrics until the context ends.
func (m *Metrics) Run(ctx context.Context) error {
	if m.listener == nil {
		return nil
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(m.log.Handler(), slog.LevelError),
		MaxRequestsInFlight: mostScrapes,
	}))
	server := &http.Server{
		Handler:      mux,
		ReadTimeout:  scrapeTimeout,
		WriteTimeout: scrapeTimeout,
		ErrorLog:     slog.NewLogLogger(m.log.Handler(), slog.LevelWarn),
	}
	if err := ServeHTTP(ctx, server, netutil.LimitListener(m.listener, mostConnections)); err != nil {
		return fmt.Errorf("metrics.listen %q: %w", m.listener.Addr(), err)
	}
	return nil
}

// TrackReloads returns a function that calls reload and exports the result as metrics.
func (m *Metrics) TrackReloads(reload func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		err := reload(ctx)
		m.observeReload(err)
		return err
	}
}

// observeReload sets the metrics about reloads. err is the result of the last reload.
func (m *Metrics) observeReload(err error) {
	if err != nil {
		m.reloaded.Set(0)
		return
	}
	m.reloaded.Set(1)
	m.readAt.SetToCurrentTime()
}
