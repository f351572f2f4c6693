// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/segue-lb/segue/internal/testhost"
)

func TestMetricsAreServed(t *testing.T) {
	m, err := ListenMetrics("127.0.0.1:0", "segue_lb", slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()

	url := fmt.Sprintf("http://%s/metrics", m.Addr())
	response, err := http.Get(url)
	testhost.Must(t, err)
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	testhost.Must(t, err)
	for _, name := range []string{"segue_build_info{version=", "go_goroutines ", "process_open_fds "} {
		if !strings.Contains(string(body), "\n"+name) {
			t.Errorf("%s has no %s", url, name)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if conn, err := net.Dial("tcp", m.Addr().String()); err == nil {
		_ = conn.Close()
		t.Error("still listens after the end")
	}
}

// TestConnectionsOfMetricsAreBounded opens more connections than there may be. The process serves
// at most that many, so that strangers cannot use up its file descriptors.
func TestConnectionsOfMetricsAreBounded(t *testing.T) {
	m, err := ListenMetrics("127.0.0.1:0", "segue_lb", slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	// dial opens a connection and asks for something. The connection stays open.
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", m.Addr().String())
		testhost.Must(t, err)
		if _, err := io.WriteString(conn, "GET /none HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	answers := func(conn net.Conn, within time.Duration) error {
		_ = conn.SetReadDeadline(time.Now().Add(within))
		_, err := conn.Read(make([]byte, 1))
		return err
	}
	var conns []net.Conn
	for range mostConnections {
		conn := dial()
		defer conn.Close()
		if err := answers(conn, time.Minute); err != nil {
			t.Fatalf("connection %d: %v", len(conns), err)
		}
		conns = append(conns, conn)
	}
	further := dial()
	defer further.Close()
	if err := answers(further, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection %d: error %v, want none to be served", mostConnections, err)
	}
	_ = conns[0].Close()
	if err := answers(further, time.Minute); err != nil {
		t.Errorf("after another connection was closed: %v", err)
	}
}

func TestMetricsOfClosedAddress(t *testing.T) {
	m, err := ListenMetrics("127.0.0.1:0", "segue_lb", slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	_ = m.Close()
	if err := m.Run(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("error: %v", err)
	}
}

func TestListenMetricsNamesTheField(t *testing.T) {
	first, err := ListenMetrics("127.0.0.1:0", "segue_lb", nil)
	testhost.Must(t, err)
	defer first.Close()
	address := first.Addr().String()
	if _, err := ListenMetrics(address, "segue_lb", nil); err == nil || !strings.Contains(err.Error(), `metrics.listen "`+address+`"`) {
		t.Errorf("error: %v", err)
	}
}

func TestReloadMetrics(t *testing.T) {
	m, err := ListenMetrics("", "segue_lb", nil)
	testhost.Must(t, err)
	if m.Addr() != nil || m.Run(t.Context()) != nil || m.Close() != nil {
		t.Error("without an address there is nothing to serve")
	}
	if problems, err := testutil.GatherAndLint(m, "segue_build_info", "segue_lb_config_last_reload_success",
		"segue_lb_config_last_reload_success_timestamp_seconds"); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	start := testutil.ToFloat64(m.readAt)
	if testutil.ToFloat64(m.reloaded) != 1 || start == 0 {
		t.Errorf("at the start: success %v, time %v", testutil.ToFloat64(m.reloaded), start)
	}
	failure := errors.New("bad")
	if err := m.TrackReloads(func(context.Context) error { return failure })(t.Context()); err != failure {
		t.Errorf("error: %v, want that of the reload", err)
	}
	if testutil.ToFloat64(m.reloaded) != 0 || testutil.ToFloat64(m.readAt) != start {
		t.Errorf("after a failure: success %v, time %v", testutil.ToFloat64(m.reloaded), testutil.ToFloat64(m.readAt))
	}
	_ = m.TrackReloads(func(context.Context) error { return nil })(t.Context())
	if testutil.ToFloat64(m.reloaded) != 1 || testutil.ToFloat64(m.readAt) <= start {
		t.Errorf("after a success: success %v, time %v", testutil.ToFloat64(m.reloaded), testutil.ToFloat64(m.readAt))
	}
}
