package daemon

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetrics(t *testing.T) {
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "segue_test_total", Help: "A test."})
	counter.Add(7)
	m, err := ListenMetrics("127.0.0.1:0", counter)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	url := "http://" + m.Addr().String() + "/metrics"
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"segue_test_total 7", "go_build_info", "process_start_time_seconds"} {
		if !strings.Contains(string(body), want) {
			t.Errorf("no %q in:\n%s", want, body)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := http.Get(url); err == nil {
		t.Error("served after the end")
	}
}

func TestMetricsAddressInUse(t *testing.T) {
	first, err := ListenMetrics("127.0.0.1:0", prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer first.listener.Close()
	_, err = ListenMetrics(first.Addr().String(), prometheus.NewRegistry())
	if err == nil || !strings.Contains(err.Error(), first.Addr().String()) {
		t.Errorf("error %v, want one that names the address", err)
	}
}

func TestNoMetrics(t *testing.T) {
	m, err := ListenMetrics("", prometheus.NewRegistry())
	if err != nil || m.Addr() != nil {
		t.Fatalf("address %v, error %v", m.Addr(), err)
	}
	if err := m.Run(t.Context()); err != nil {
		t.Error(err)
	}
}
