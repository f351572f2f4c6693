// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/p4switch"
)

// follows is a switch that follows.
type follows struct{}

func (follows) Status(context.Context) *p4switch.Status {
	return &p4switch.Status{
		Address: "192.0.2.9:9559", Follows: true,
		Services: []p4switch.ServiceStatus{{Name: "web", Generation: new(uint64(3))}},
		Reasons:  []datapath.ReasonCount{{Reason: "forward_known", Packets: 40}, {Reason: "pass_not_ip", Packets: 3}},
	}
}

func TestSwitchOfAPI(t *testing.T) {
	t.Parallel()
	without := serve(t, &inspect.Snapshot{})
	with := httptest.NewServer(Balancer{Control: loadBalancer(t), Switch: follows{}}.Handler())
	t.Cleanup(with.Close)
	for server, want := range map[*httptest.Server]struct {
		status int
		text   string
	}{
		without: {http.StatusNotFound, "has no switch"},
		with:    {http.StatusOK, `"name":"web","entries":0,"generation":3`},
	} {
		status, answer := send(t, http.MethodGet, server.URL+"/v1/switch", "")
		if status != want.status || !strings.Contains(answer, want.text) {
			t.Errorf("status %d, %s; want %d with %s", status, answer, want.status, want.text)
		}
	}
}
