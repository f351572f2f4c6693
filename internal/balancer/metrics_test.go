// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
)

func newRegistry(f *fixture) *prometheus.Registry {
	f.t.Helper()
	collector, err := f.Collector()
	f.must(err)
	f.t.Cleanup(func() { _ = collector.Close() })
	registry := prometheus.NewPedanticRegistry()
	f.must(registry.Register(collector))
	return registry
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	cfg := varied()
	cfg.Services[0], cfg.Services[3] = checked(cfg.Services[0]), checked(cfg.Services[3])
	f := open(t, cfg)
	registry := newRegistry(f)
	flow := flowTo(vip6, 80, desired.TCP)
	port := uint16(1) // the first port whose flow s1 gets
	for f.placed(fromPort(flow, port), "insert") != "s1" {
		port++
	}
	f.send(port, packet.SYN, "forward_new")
	f.send(port, packet.ACK, "forward_known")
	f.via["s2"], f.silent["s3"] = "", true
	f.route()
	f.setHealth("insert", "s1", true)
	f.setHealth("insert", "s2", false)
	f.setHealth("rest", "r4", false)
	f.setHealth("rest", "r6", false)
	if got := expose(t, registry); strings.Contains(got, "segue_lb_flows{") {
		t.Errorf("numbers of flows before the first sweep:\n%s", got)
	}
	f.must(f.sweep())

	problems, err := testutil.GatherAndLint(registry)
	testhost.Must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
segue_lb_flow_table_capacity 1024
segue_lb_packets_total{reason="forward_new"} 1
segue_lb_packets_total{reason="forward_known"} 1
segue_lb_packets_total{reason="drop_fragment"} 0
segue_lb_bytes_total{reason="forward_known"} 60
segue_lb_server_packets_total{server="s1",service="insert"} 2
segue_lb_server_bytes_total{server="s1",service="insert"} 120
segue_lb_server_flows_total{server="s1",service="insert"} 1
segue_lb_flows{server="s1",service="insert",state="established"} 1
segue_lb_flows{server="s1",service="insert",state="new"} 0
segue_lb_flows{server="s1",service="insert",state="silent"} 0
segue_lb_flows{server="s1",service="insert",state="closing"} 0
segue_lb_server_next_hop{server="s1",service="insert"} 1
segue_lb_server_next_hop{server="s2",service="insert"} 0
segue_lb_server_next_hop{server="s3",service="insert"} 0
segue_lb_server_healthy{server="s1",service="insert"} 1
segue_lb_server_healthy{server="s2",service="insert"} 0
segue_lb_server_draining{server="s1",service="insert"} 0
segue_lb_server_draining{server="s3",service="insert"} 1
segue_lb_service_servers{condition="up",service="insert"} 1
segue_lb_service_servers{condition="unresolved",service="insert"} 1
segue_lb_service_servers{condition="drained",service="insert"} 1
segue_lb_service_servers{condition="failing",service="insert"} 0
segue_lb_service_servers{condition="unchecked",service="encap"} 1
segue_lb_service_cause_ignored{cause="failing",service="insert"} 0
segue_lb_service_cause_ignored{cause="unresolved",service="insert"} 0
segue_lb_service_cause_ignored{cause="failing",service="rest"} 1
`
	want += fmt.Sprintln("segue_lb_tables_version", tables.Version)
	got := expose(t, registry)
	for _, line := range strings.Split(strings.TrimSpace(want), "\n") {
		if !strings.Contains(got, "\n"+line+"\n") {
			t.Errorf("no line %q", line)
		}
	}
	if strings.Contains(got, `server_healthy{server="s1",service="encap"}`) {
		t.Error("a service without checks has a healthy server")
	}
	if t.Failed() {
		t.Log(got)
	}
}

// expose returns the text that a scrape reads.
func expose(t *testing.T, registry *prometheus.Registry) string {
	t.Helper()
	families, err := registry.Gather()
	testhost.Must(t, err)
	names := make([]string, len(families))
	for i := range families {
		names[i] = families[i].GetName()
	}
	text, err := testutil.GatherAndFormat(registry, expfmt.TypeTextPlain, names...)
	testhost.Must(t, err)
	return string(text)
}

// A server that is removed and added with another address has two slots for a while. Scrapes
// succeed.
func TestMetricsOfMovedServer(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	registry := newRegistry(f)
	for slot, key := range maps.Collect(f.slots.All()) {
		if key.Server == "s1" {
			key.Address = key.Address.Next()
			if _, err := f.slots.Claim(key, f.services.byName[key.Service].id, dataplane.KnownSID{Function: srv6.Deliver}, dataplane.FlagInUse); err != nil {
				t.Fatalf("claim a second slot beside %d: %v", slot, err)
			}
		}
	}
	if _, err := registry.Gather(); err != nil {
		t.Error(err)
	}
}

// The manual describes all metrics and all reasons.
func TestDocumented(t *testing.T) {
	t.Parallel()
	manual, err := os.ReadFile("../../docs/reference/observability.md")
	testhost.Must(t, err)
	_, table, _ := strings.Cut(string(manual), "## Reasons of a balancer")
	table, _, _ = strings.Cut(table, "## ")
	_, names, err := dataplane.LoadSpec()
	testhost.Must(t, err)
	for _, reason := range names[1:] {
		if !strings.Contains(table, "| `"+reason+"` |") {
			t.Errorf("reason %s is not in the manual", reason)
		}
	}
	descs := make(chan *prometheus.Desc, 100)
	(&inspect.Collector{}).Describe(descs)
	close(descs)
	for desc := range descs {
		_, rest, _ := strings.Cut(desc.String(), `fqName: "`)
		name, _, _ := strings.Cut(rest, `"`)
		if !strings.Contains(string(manual), "| `"+name) {
			t.Errorf("metric %s is not in the manual", name)
		}
	}
}
