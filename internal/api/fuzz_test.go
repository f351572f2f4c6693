// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzRequests sends any requests to a balancer and to an agent. None of them fails in the process,
// all answers are JSON, and what is stored can be read again.
func FuzzRequests(f *testing.F) {
	const changes = "/v1/changes"
	for _, r := range [][5]string{
		{"GET", "/v1/services", "", "", ""},
		{"GET", "/v1/overrides", "", "", ""},
		{"GET", "/v1/events", "", "", ""},
		{"GET", "/openapi.json", "", "", ""},
		{"POST", "/v1/reload", "", "", ""},
		{"POST", changes, "dry-run=true", "", `{"edits":[{"service":"web","server":"s1","set":{"drained":true}}]}`},
		{"POST", changes, "", "old", `{"edits":[{"service":"web","server":"s1","set":{"weight":1000}}]}`},
		{"POST", changes, "", "", `{"edits":[{"service":"web","server":"s3","add":{"address":"2001:db8:1::3"}}]}`},
		{"POST", changes, "", "", `{"edits":[{"service":"web","set":{"timeouts":{"new":"7s"}}},{"service":"web","reset":true}]}`},
		{"POST", changes, "dry-run=2", "", `{"edits":[{"service":"web","server":"s1","set":{"weight":1e400}}]}`},
		{"PUT", "/v1/services", "", "", "services:\n- {name: web, vip: 2001:db8:80::1, port: 80, protocol: tcp, encapsulation: gre}\n"},
		{"GET", "/v1/instance", "", "", ""},
		{"POST", changes, "", "", `{"edits":[{"service":"web","set":{"accept":{"policy":"never","threshold":null}}}]}`},
		{"POST", changes, "", "", `{"edits":[{"service":"web","set":{"drained":true}},{"service":"quic","remove":true}]}`},
	} {
		f.Add(r[0], r[1], r[2], r[3], []byte(r[4]))
	}
	dir := f.TempDir()
	file := filepath.Join(dir, "lb.yaml")
	testhost.Must(f, os.WriteFile(file, fmt.Appendf(nil, text, dir), 0o644))
	c, _, err := control.LoadBalancer(file)
	testhost.Must(f, err)
	c.Attach(follower{}, unreported)
	handler := Balancer{
		Control: c, Reload: c.Reload, Events: events.NewStream(),
		Source: func(func(string) bool) (*inspect.Snapshot, error) { return &inspect.Snapshot{}, nil },
	}.Handler()
	agent, agentFile := newAgent(f)
	handlers := []http.Handler{handler, agent.Handler()}
	gone, leave := context.WithCancel(f.Context()) // a client that follows events, and has gone
	leave()
	f.Fuzz(func(t *testing.T, method, path, query, version string, body []byte) {
		target, err := url.ParseRequestURI(path)
		if err != nil || strings.ContainsAny(method, " \r\n") || method == "" {
			return // the server answers such requests itself
		}
		target.RawQuery = query
		for _, handler := range handlers {
			sendAny(t, handler, gone, method, target, version, body)
		}
		if b, _, err := config.LoadBalancer(file); err != nil || len(b.Invalid) > 0 {
			t.Fatalf("the balancer cannot start any more: %v %v", err, b)
		}
		if a, _, err := config.LoadAgent(agentFile); err != nil || len(a.Invalid) > 0 {
			t.Fatalf("the agent cannot start any more: %v %v", err, a)
		}
	})
}

// sendAny sends a request. gone has ended: it is for requests whose answer has no end.
func sendAny(
	t *testing.T, handler http.Handler, gone context.Context, method string, target *url.URL, version string, body []byte,
) {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "http://localhost/", strings.NewReader(string(body)))
	r.Method, r.URL = method, target
	r.Header.Set("Content-Type", "application/json")
	if method == http.MethodPut {
		r.Header.Set("Content-Type", "application/yaml")
	}
	if target.Path == "/v1/events" {
		r = r.WithContext(gone)
	}
	if version != "" {
		r.Header.Set("If-Match", version)
	}
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, r)
	if answer.Code >= 500 {
		t.Errorf("%d %s", answer.Code, answer.Body)
	}
	if strings.Contains(answer.Header().Get("Content-Type"), "json") && !json.Valid(answer.Body.Bytes()) {
		t.Errorf("not JSON: %s", answer.Body)
	}
}
