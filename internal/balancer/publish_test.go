// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

// Events tell when servers and services become unfit and fit again, what a change of the desired
// state does, and when a drained server has no flow left.
func TestEvents(t *testing.T) {
	t.Parallel()
	config := func() *desired.Balancer {
		cfg := probedWeb(3)
		cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{Port: 80}}
		return cfg
	}
	f := open(t, config())
	stream := events.NewStream()
	f.Balancer.PublishTo(stream)
	last := stream.Last()
	require := func(when string, want ...string) {
		t.Helper()
		stream.Publish(events.Event{Kind: "end"}) // so that After returns
		list, err := stream.After(t.Context(), last)
		testhost.Must(t, err)
		last = stream.Last()
		got := []string{}
		for _, e := range list[:len(list)-1] {
			text := fmt.Sprintf("%s %s/%s", e.Kind, e.Service, e.Server)
			if e.Reason != "" {
				text += ": " + e.Reason
			}
			if e.By != "" {
				text += " by " + e.By
			}
			got = append(got, text)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: events %q, want %q", when, got, want)
		}
	}
	publish := func() { f.Balancer.publish(f.services.byName["web"]) }
	publish()
	require("all are fit")
	f.find(probe.Silent, "s1")
	publish()
	publish()
	require("one is silent", "server_down web/s1: silent")
	f.services.setCause("web", "s3", dataplane.Failing, true, "status 500")
	f.find(probe.Silent, "s2", "s3")
	publish()
	require("all are unfit", "server_down web/s2: silent", "server_down web/s3: failing (status 500), silent",
		"service_down web/")
	f.find(probe.None, "s2")
	publish()
	require("one is fit again", "server_up web/s2", "service_up web/")

	after := config()
	after.Services[0].Servers[1].Drained = true
	f.mustApply(after)
	require("a reload", "changed /", "server_draining web/s2", "service_down web/")
	f.must(f.Balancer.sweep())
	f.must(f.Balancer.sweep())
	require("no flow is left", "server_drained web/s2")
	f.mustApply(config())
	require("the end of the drain", "changed /", "server_undrained web/s2", "service_up web/")
	after = config()
	after.Services[0].Servers[1].Drained = true
	f.mustApply(after)
	require("another drain before the next sweep", "changed /", "server_draining web/s2", "service_down web/")
	f.must(f.Balancer.sweep())
	require("no flow is left again", "server_drained web/s2")
	f.mustApply(config())
	require("the end of the second drain", "changed /", "server_undrained web/s2", "service_up web/")
	f.Balancer.publishReload(&serviceDiff{}, []desired.Loss{
		{Service: "web", Server: "s9", Cause: desired.LossRemoved, Flows: new(uint64(3))},
		{Service: "web", Server: "s8", Cause: desired.LossRemoved, Flows: new(uint64)},
		{Service: "web", Server: "s7", Cause: desired.LossForgotten, Flows: new(uint64(3))},
		{Service: "web", Server: "s6", Cause: desired.LossMoved, Flows: new(uint64(3))},
		{Service: "web", Server: "s5", Cause: desired.LossNarrowed, Flows: new(uint64(3))},
	}, after.ChangesFrom(config()), "root (uid 0)")
	require("losses", "changed / by root (uid 0)", "flows_lost web/s9: the server was removed",
		"flows_lost web/s6: the server got another address, or its service another VIP, port or protocol",
		"flows_lost web/s5: the service gets fewer VIPs or ports: at most the flows of the others are lost")
}

// The balancer tells the reasons of present conditions, when they change.
func TestReasonsAreTold(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(3))
	var told [][]rundir.ServerReason
	f.ReportReasons(func(reasons []rundir.ServerReason) { told = append(told, reasons) })
	f.tellReasons()
	f.services.setCause("web", "s2", dataplane.Failing, true, "connection refused")
	f.find(probe.Refusing, "s2")
	f.tellReasons()
	f.tellReasons()
	f.services.setCause("web", "s2", dataplane.Failing, false, "successful checks: 2")
	f.tellReasons()
	want := [][]rundir.ServerReason{{{Service: "web", Server: "s2", Condition: "failing", Reason: "connection refused"}}, nil}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
