// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/testhost"
)

const agentText = `
node: {instance: s1, interface: eth0, locator: "fd00:5:0:1::/64", balancers: ["fd00:6c::/32"], state: %q}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, accept: {policy: static, threshold: 3}}
- {name: quic, vip: "2001:db8:80::1", port: 443, protocol: udp}
- {name: tls, vip: "2001:db8:80::1", port: 443, protocol: tcp}
`

// agentFollower is an agent whose service web has 12 connections.
type agentFollower struct{}

func (agentFollower) Reload(context.Context, *desired.Agent, desired.Secrets) error { return nil }

func (agentFollower) Losses(_ context.Context, a *desired.Agent) (losses []desired.Loss, err error) {
	if a.Services[0].Name != "web" {
		losses = append(losses, desired.Loss{Service: "web", Cause: desired.LossRemoved, Flows: new(uint64(12))})
	}
	return losses, nil
}

// newAgent returns an agent and its configuration file.
func newAgent(t testing.TB) (a Agent, file string) {
	t.Helper()
	dir := t.TempDir()
	file = filepath.Join(dir, "agent.yaml")
	testhost.Must(t, os.WriteFile(file, fmt.Appendf(nil, agentText, dir), 0o644))
	c, _, err := control.LoadAgent(file)
	testhost.Must(t, err)
	c.Attach(agentFollower{}, unreported)
	source := func() (*agent.Snapshot, error) {
		vip := netip.MustParseAddr("2001:db8:80::1")
		return &agent.Snapshot{Services: []*agent.ServiceState{
			{Name: "gone", VIP: vip, Port: 81, Protocol: desired.TCP},
			{Name: "quic", VIP: vip, Port: 443, Protocol: desired.UDP},
			{Name: "web", VIP: vip, Port: 80, Protocol: desired.TCP, Connections: new(uint32(12)), Accept: &agent.AcceptState{
				Policy: desired.AcceptStatic, Source: "connections", Load: &agent.Load{Busy: 12}, Threshold: new(uint32(3)),
				Offered: 7, Accepted: 5, Offers: map[string]uint64{"accepted": 5, "refused": 2},
			}},
		}}, nil
	}
	return Agent{Control: c, Source: source, Reload: c.Reload, Events: events.NewStream()}, file
}

func serveAgent(t *testing.T) *httptest.Server {
	t.Helper()
	a, _ := newAgent(t)
	server := httptest.NewServer(a.Handler())
	t.Cleanup(server.Close)
	return server
}

func TestChangesOfAgent(t *testing.T) {
	t.Parallel()
	url := serveAgent(t).URL + "/v1/"
	edits := func(list string) string { return `{"edits":[` + list + `]}` }
	web := func(action string) string { return edits(`{"service":"web",` + action + `}`) }
	const none = `"overrides":[]`
	const one = "services: [{name: web, vip: \"2001:db8:80::1\", port: 80, protocol: tcp}]\n"
	file := agentText[strings.Index(agentText, "services:"):]
	for i, step := range []struct {
		method, path, body string
		headers            []string
		status             int
		answer             string // part of it
	}{
		{"GET", "services", "", nil, 200, `[{"name":"quic","vip":"2001:db8:80::1","port":"443","protocol":"udp","encapsulation":"srv6-encap","drained":false},` +
			`{"name":"web","vip":"2001:db8:80::1","port":"80","protocol":"tcp","encapsulation":"srv6-encap","drained":false,"connections":12,` +
			`"accept":{"policy":"static","source":"connections","busy":12,"threshold":3,"offered":7,"accepted":5}}]`},
		{"POST", "changes", web(`"set":{"drained":true}`), []string{"If-Match", "old"}, 412, "has another version"},
		{"POST", "changes?dry-run=true", web(`"set":{"drained":true}`), nil, 200, `"items":["web (drained false to true)"]`},
		{"GET", "overrides", "", nil, 200, none},
		{"POST", "changes", web(`"set":{"drained":true}`), nil, 200, `"items":["web (drained false to true)"]`},
		{"GET", "services", "", nil, 200, `"drained":true,"override":"drained","connections":12`},
		{"PUT", "services", strings.Replace(file, "threshold: 3", "threshold: 4", 1), []string{"Content-Type", "application/yaml"}, 200, `"web (accept)"`},
		{"GET", "overrides", "", nil, 200, `"overrides":[{"service":"web","set":{"accept":{"threshold":4},"drained":true}}]`},
		{"POST", "changes", web(`"reset":true`), nil, 200, `"web (accept, drained true to false)"`},
		{"POST", "changes?dry-run=true", web(`"remove":true`), nil, 200, `"losses":[{"service":"web","cause":"removed","flows":12}]`},
		{"POST", "changes", edits(`{"service":"web","server":"s1","set":{"drained":true}}`), nil, 404, "web/s1"},
		{"POST", "changes", edits(`{"service":"web","server":"s1","add":{"weight":1}}`), nil, 422, "services of an agent have no servers"},
		{"POST", "changes", edits(`{"service":"quic","set":{"drained":true}}`), nil, 422, "only for services that hunt"},
		{"POST", "changes", web(`"set":{"accept":{"threshold":-1}}`), nil, 422, `web.accept.threshold \"-1\"`},
		{"POST", "changes", web(`"set":{"accept":null},"remove":true`), nil, 422, "match exactly one schema"},
		{"PUT", "services", one, []string{"Content-Type", "application/yaml"}, 409, "would remove 2 of 3 services, and the limit is 30 percent"},
		{"PUT", "services?allow-removals=true&dry-run=true", one, []string{"Content-Type", "application/yaml"}, 200, `"services_removed"`},
		{"POST", "changes?dry-run", web(`"remove":true`), nil, 422, "query.dry-run"},
		{"POST", "changes?allow-removals=true", web(`"remove":true`), nil, 422, "allow-removals"},
		{"PUT", "services", fmt.Sprintf(text, "/nonexistent"), []string{"Content-Type", "application/yaml"}, 422, "servers"},
		{"GET", "overrides", "", nil, 200, none},
		{"POST", "reload", "", nil, 200, `"warnings":[]`},
	} {
		status, answer := send(t, step.method, url+step.path, step.body, step.headers...)
		if status != step.status || !strings.Contains(answer, step.answer) {
			t.Errorf("step %d: %s %s %s: %d %s\nwant %d %s", i, step.method, step.path, step.body, status, answer,
				step.status, step.answer)
		}
	}
}
