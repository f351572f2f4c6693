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
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// join makes a balancer join the fleet of a store. The directory has its file and its state.
func join(t *testing.T, directory, endpoint, limits string) (*control.Balancer, *control.Fleet) {
	t.Helper()
	text := fmt.Sprintf(`
node: {instance: edge, interface: eth0, addresses: ["2001:db8::1"], state: %q, limits: {%s}}
store: {etcd: {endpoints: [%q], prefix: /segue/main}}
`, directory, limits, endpoint)
	file := filepath.Join(directory, "lb.yaml")
	testhost.Must(t, os.WriteFile(file, []byte(text), 0o644))
	c, _, err := control.LoadBalancer(file)
	testhost.Must(t, err)
	fleet, err := c.Join(t.Context(), slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	t.Cleanup(func() { _ = fleet.Close() })
	return c, fleet
}

// While a balancer waits for its store, it says so, and refuses requests at once.
func TestStarting(t *testing.T) {
	t.Parallel()
	c, _ := join(t, t.TempDir(), "http://127.0.0.1:1", "")
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

// A balancer can follow neither its last state nor, within its limit, the state of the store. It
// starts when an operator confirms the version of the store.
func TestStartingConfirm(t *testing.T) {
	t.Parallel()
	directory, endpoint := t.TempDir(), etcdtest.Start(t).Endpoint()
	// The balancer had services of its own before, so it need not leave the lease to others.
	former := serversets.Generations{"former": {Number: 1}}
	testhost.Must(t, former.Save(serversets.File(directory, "edge")))
	s, err := store.Open(&desired.Etcd{Endpoints: []string{endpoint}, Prefix: "/segue/main"}, "operator")
	testhost.Must(t, err)
	defer s.Close()
	content := func(servers int) func(store.Tree) (store.Tree, error) {
		list := make([]any, servers)
		for i := range list {
			list[i] = map[string]any{"name": fmt.Sprint("s", i), "address": fmt.Sprint("2001:db8:1::", i+1)}
		}
		web := desired.Fields{
			"name": "web", "vip": "2001:db8:80::1", "port": 80, "protocol": "tcp", "encapsulation": "gre",
			"servers": list,
		}
		return func(store.Tree) (store.Tree, error) {
			return (&store.Document{Services: []desired.Fields{web}}).Tree()
		}
	}
	if _, err := s.Apply(t.Context(), store.Change{Fills: true, Edit: content(4)}); err != nil {
		t.Fatal(err)
	}
	_, before := join(t, directory, endpoint, "")
	testhost.Must(t, before.First(t.Context(), func(store.Status) {}))
	testhost.Must(t, before.Close())
	version, err := s.Apply(t.Context(), store.Change{Edit: content(2)})
	testhost.Must(t, err)
	c, fleet := join(t, directory, endpoint, "servers: 3")
	server := httptest.NewServer(NewStarting(c))
	defer server.Close()
	testhost.Must(t, fleet.Await(t.Context(), func(s store.Status) bool { return s.Confirmable == version }))
	if status := fleet.Status(); status.Follows != (store.Version{}) {
		t.Fatalf("the balancer has started already: %+v", status)
	}
	confirm := server.URL + "/v1/store/confirm"
	status, answer := send(t, http.MethodPost, confirm, "", "If-Match", version.Epoch+"-9")
	if status != http.StatusPreconditionFailed {
		t.Errorf("another version: status %d, %s", status, answer)
	}
	status, answer = send(t, http.MethodPost, confirm, "", "If-Match", version.String())
	if status != http.StatusOK || !strings.Contains(answer, fmt.Sprintf(`"follows":%q`, version)) {
		t.Fatalf("status %d, %s", status, answer)
	}
	testhost.Must(t, fleet.First(t.Context(), func(store.Status) {}))
	if web := c.Desired().Service("web"); web == nil || len(web.Servers) != 2 {
		t.Errorf("the balancer starts with %+v", web)
	}
}
