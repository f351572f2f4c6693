package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
)

// Metrics serves Prometheus metrics over HTTP, at /metrics.
type Metrics struct {
	listener net.Listener
	server   http.Server
}

// ListenMetrics opens a TCP address for the metrics of the collector, the process and the build.
// They are served while Run does. Without an address it opens nothing.
func ListenMetrics(address string, collector prometheus.Collector) (*Metrics, error) {
	if address == "" {
		return &Metrics{}, nil
	}
	registry := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		collector,
		collectors.NewBuildInfoCollector(),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics.listen %q: %w", address, err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return &Metrics{
		listener: listener,
		server:   http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second},
	}, nil
}

// Addr is where the metrics are served; nil if nowhere.
func (m *Metrics) Addr() net.Addr {
	if m.listener == nil {
		return nil
	}
	return m.listener.Addr()
}

// Run serves until the context ends.
func (m *Metrics) Run(ctx context.Context) error {
	if m.listener == nil {
		return nil
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := m.server.Serve(m.listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		return m.server.Close()
	})
	return group.Wait()
}
