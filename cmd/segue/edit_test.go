// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestParseFields(t *testing.T) {
	for _, test := range []struct {
		args string
		want desired.Fields
		err  string
	}{
		{"weight=10 drained=true", desired.Fields{"weight": "10", "drained": true}, ""},
		{"drained=false selection=", desired.Fields{"drained": false, "selection": nil}, ""},
		{"quic-id=007 vip=2001:db8::1", desired.Fields{"quic-id": "007", "vip": "2001:db8::1"}, ""},
		{"timeouts.new=5s timeouts.closing=", desired.Fields{"timeouts": map[string]any{"new": "5s", "closing": nil}}, ""},
		{"health.http.path=/a=b", desired.Fields{"health": map[string]any{"http": map[string]any{"path": "/a=b"}}}, ""},
		{"weight", nil, `"weight": must be FIELD=VALUE, such as weight=10`},
		{"=10", nil, `"=10": must be FIELD=VALUE, such as weight=10`},
		{"weight=1 weight=2", nil, `"weight=2": weight is given twice`},
		{"timeouts=5s timeouts.new=5s", nil, `"timeouts.new=5s": timeouts has a value already`},
		{"timeouts.new=5s timeouts=", nil, `"timeouts=": timeouts is given twice`},
	} {
		got, err := parseFields(strings.Fields(test.args))
		text := ""
		if err != nil {
			text = err.Error()
		}
		if diff := cmp.Diff(test.want, got); diff != "" || text != test.err {
			t.Errorf("%s: error %q, want %q; -want +got:\n%s", test.args, text, test.err, diff)
		}
	}
}

func TestEditsOfBalancer(t *testing.T) {
	startBalancer(t).transcript("edit-balancer.txt", `
service list
server list
service list --json
server list --json
server add web/s4 locator=fd00:5:0:4::/64 weight=2 --dry-run
server add web/s/4 locator=fd00:5:0:4::/64
server add web/s4 locator=fd00:5:0:4::/64 weight=2
server set web/s4 weight=4
server set web/s4 weight=4
server set web/s4 weight=4000
server set web/s9 weight=1
server set web weight=1
server set web/s4 weight
server remove web/s1 --dry-run
server remove web/s1 --if-version 0123456789abcdef
server remove web/s1 --if-version=
server remove web/s1
server list
server reset web/s1
service set web timeouts.new=30s timeouts.closing=20s
service set web timeouts=
service set web timeout.new=30s
service add web vip=2001:db8::1
service add dns vip=2001:db8:80::2 port=53 protocol=udp
service list
service reset web
service remove dns
drain web/s1
drain web/s1
drain web
drain web/s1 --dry-run
undrain web/s1 --dry-run
undrain web/s1
drain web/s7
drain --self --if-version 0123456789abcdef
`)
}

func TestEditsOfAgent(t *testing.T) {
	startAgent(t).transcript("edit-agent.txt", `
service list
service list --json
service set web accept.threshold=4 --dry-run
service set web accept.threshold=4
service set web accept.policy=always
service set web accept.policy=always accept.threshold=
service list
service reset web
service set quic drained=true
service add tls vip=2001:db8:80::1 port=444 protocol=tcp load.source=accept-queue
service remove web
service reset web
service remove web --allow-removals
server list
server set web/s1 weight=1
drain web --dry-run
drain web
service list
drain web --wait --timeout 1m
undrain web
undrain web
drain quic
drain web/s1
drain
`)
}

func TestCompletion(t *testing.T) {
	balancer, agent := startBalancer(t), startAgent(t)
	for _, test := range []struct {
		process *process
		args    string
		want    string
	}{
		{balancer, "server set ", "web/s1 web/s2 quic/s1"},
		{balancer, "service remove ", "web quic"},
		{balancer, "service set web timeouts.n", "timeouts.new="},
		{balancer, "service set web accept.p", ""},
		{balancer, "drain ", "web/s1 web/s2 quic/s1"},
		{agent, "service set ", "web quic"},
		{agent, "service set web accept.p", "accept.policy="},
		{agent, "service set web timeouts.n", ""},
		{agent, "service set web accept.policy=a", ""},
		{agent, "server set ", ""},
		{agent, "undrain ", "web quic"},
	} {
		words := strings.Split(test.args, " ")
		command := append([]string{"__complete"}, words[:len(words)-1]...)
		command = append(command, "--instance", test.process.instance, words[len(words)-1])
		out, err := runSegue(t.Context(), command...)
		testhost.Must(t, err)
		var got []string
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, ":") {
				break
			}
			got = append(got, strings.TrimSpace(line))
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("segue %s: %q, want %q", test.args, got, test.want)
		}
	}
}

func TestPrintChanged(t *testing.T) {
	one, many := uint64(1), uint64(12345)
	changed := &api.Changed{
		Changes: []api.Difference{
			{Kind: "services_changed", Items: []string{"web (timeouts)"}},
			{Kind: "servers_added", Items: []string{"web/s3", "web/s4"}},
		},
		Losses: []api.Loss{
			{Service: "web", Server: "s1", Cause: string(desired.LossRemoved), Flows: &one},
			{Service: "web", Server: "s2", Cause: string(desired.LossForgotten), Flows: &many},
			{Service: "web", Server: "s6", Cause: string(desired.LossMoved), Flows: &many},
			{Service: "web", Server: "s7", Cause: string(desired.LossNarrowed), Flows: &many},
			{Service: "web", Server: "s5", Cause: string(desired.LossRemoved)},
			{Service: "tls", Cause: string(desired.LossRemoved), Flows: &many},
		},
		Version:  "0123456789abcdef",
		Warnings: []string{"services[0].servers: all servers are drained"},
	}
	var out bytes.Buffer
	printChanged(&out, changed, false)
	printChanged(&out, changed, true)
	printChanged(&out, &api.Changed{Version: "0123456789abcdef"}, true)
	clitest.Golden(t, "changed.txt", &out)
}
