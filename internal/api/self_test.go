// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/datapath"
)

// speaker is a Speaker that only remembers whether it is drained.
type speaker struct {
	drained      bool
	untilRestart bool
	refuses      error
}

func (s *speaker) State(context.Context) (*bgp.State, error) {
	state := &bgp.State{ASN: 64600, Peers: []bgp.Peer{}, Routes: []bgp.Route{}}
	if s.drained {
		now := time.Now()
		state.Drained = &now
	}
	return state, s.refuses
}

func (s *speaker) Drain(_ context.Context, untilRestart bool) error {
	if s.refuses == nil {
		s.drained, s.untilRestart = true, untilRestart
	}
	return s.refuses
}

func (s *speaker) Undrain(context.Context) error {
	if s.refuses == nil {
		s.drained, s.untilRestart = false, false
	}
	return s.refuses
}

func TestSelfOfAPI(t *testing.T) {
	t.Parallel()
	snapshot := &inspect.Snapshot{}
	snapshot.Reasons = []datapath.ReasonCount{
		{Reason: "pass_not_vip", Packets: 100},
		{Reason: "forward_known", Packets: 5},
		{Reason: "forward_new", Packets: 2},
	}
	static, s := serve(t, snapshot).URL+"/v1/self", &speaker{}
	speakingServer, _ := serveWith(t, snapshot, s)
	speaking := speakingServer.URL + "/v1/self"
	for i, step := range []struct {
		method, url, body string
		status            int
		answer            string // part of it
		untilRestart      bool
	}{
		{"GET", static, "", 200, `{"drained":false,"packets":7}`, false},
		{"PATCH", static, `{"drained":true}`, 409, "has no section bgp", false},
		{"GET", speaking, "", 200, `"drained":false,"packets":7,"bgp":{"asn":64600`, false},
		{"PATCH", speaking, `{"drained":true}`, 200, `"drained":true`, false},
		{"GET", speaking, "", 200, `"drained_since":"`, false},
		{"PATCH", speaking, `{"drained":false}`, 200, `"drained":false`, false},
		{"PATCH", speaking, `{"drained":true,"until_restart":true}`, 200, `"drained":true`, true},
		{"PATCH", speaking, `{"drained":false}`, 200, `"drained":false`, false},
		{"PATCH", speaking, `{"drained":false,"until_restart":true}`, 422, "until_restart", false},
		{"PATCH", speaking, `{}`, 422, "drained", false},
		{"PATCH", speaking, `{"drained":1}`, 422, "boolean", false},
	} {
		status, answer := send(t, step.method, step.url, step.body)
		if status != step.status || !strings.Contains(answer, step.answer) {
			t.Errorf("step %d: %s %s: %d %s\nwant %d %s", i, step.method, step.body, status, answer, step.status, step.answer)
		}
		if s.untilRestart != step.untilRestart {
			t.Errorf("step %d: drained until the restart: %t", i, s.untilRestart)
		}
	}
	// Packets that a switch has forwarded count, too.
	source := func(func(string) bool) (*inspect.Snapshot, error) { return snapshot, nil }
	behind := &balancerAPI{Balancer: Balancer{Source: source, Switch: follows{}}}
	if state, err := behind.selfState(t.Context()); err != nil || state.Packets != 7+40 {
		t.Errorf("behind a switch: %+v, %v", state, err)
	}
	// The balancer is not drained if its state cannot be read.
	unreadable, other := errors.New("the tables are gone"), &speaker{}
	api := &balancerAPI{Balancer: Balancer{
		Speaker: other, Source: func(func(string) bool) (*inspect.Snapshot, error) { return nil, unreadable },
	}}
	if _, err := api.changeSelf(t.Context(), &selfChange{SelfChange{Self: Self{Drained: true}}}); err == nil || other.drained {
		t.Errorf("drained %t, error %v", other.drained, err)
	}
	s.refuses = errors.New("no space left on device")
	if status, answer := send(t, "PATCH", speaking, `{"drained":true}`); status != 503 || !strings.Contains(answer, "no space") {
		t.Errorf("%d %s", status, answer)
	}
}
