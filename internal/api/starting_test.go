// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/control"
)

// A balancer that waits for its store tells so, and lets nobody wait with it.
func TestStarting(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "lb.yaml")
	text := fmt.Sprintf(`
node: {instance: edge, interface: eth0, addresses: ["2001:db8::1"], state: %q}
store: {etcd: {endpoints: ["http://127.0.0.1:1"], prefix: /segue/main}}
`, t.TempDir())
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, _, err := control.LoadBalancer(file)
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := c.Join(t.Context(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer fleet.Close()
	handler := NewStarting(c)
	server := httptest.NewServer(handler)
	defer server.Close()
	for path, want := range map[string]string{
		instancePath: `"name":"edge"`, storePath: `"reachable":false`,
	} {
		if status, answer := send(t, http.MethodGet, server.URL+path, ""); status != http.StatusOK ||
			!strings.Contains(answer, want) {
			t.Errorf("%s: status %d, %s", path, status, answer)
		}
	}
	change := server.URL + "/v1/changes"
	if status, answer := send(t, http.MethodPost, change, "{}"); status != http.StatusServiceUnavailable ||
		!strings.Contains(answer, "it waits for the store") {
		t.Errorf("a change: status %d, %s", status, answer)
	}
	handler.Start(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	if status, _ := send(t, http.MethodPost, change, "{}"); status != http.StatusTeapot {
		t.Errorf("after the start: status %d", status)
	}
}
