// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
)

// noNextHop is the log line about a service without next hops, up to the name of the service.
const noNextHop = `level=ERROR msg="NO server of the service has a next hop: ` +
	`all packets for the service are dropped" service=`

// checked returns the service with health checks.
func checked(svc desired.Service) desired.Service {
	svc.Health = &desired.Health{
		TCP: &desired.TCPCheck{Port: 80}, Interval: time.Second, Rise: 2, Fall: 3,
	}
	return svc
}

// rack returns a configuration of services that have so many servers that their changes share a
// line.
func rack(names ...string) *desired.Balancer {
	var services []desired.Service
	for i, name := range names {
		var servers []desired.Server
		for n := range uint8(34) {
			servers = append(servers, srv6Server(fmt.Sprintf("s%02d", n), n+1, 1))
		}
		svc := serviceOf(name, vip6, desired.Port(80+i), desired.TCP, desired.SRv6Encap, servers...)
		services = append(services, checked(svc))
	}
	return balancerOf(services...)
}

// logged returns the log of changes since the last call, without times.
func (f *fixture) logged() []string {
	f.t.Helper()
	var out bytes.Buffer
	withoutTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	options := &slog.HandlerOptions{ReplaceAttr: withoutTime}
	f.services.logChanges(slog.New(slog.NewTextHandler(&out, options)))
	return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
}

func (f *fixture) expectLog(when string, want ...string) {
	f.t.Helper()
	if want == nil {
		want = []string{""}
	}
	if diff := cmp.Diff(want, f.logged()); diff != "" {
		f.t.Errorf("%s, -want +got:\n%s", when, diff)
	}
}

// Each change is logged once, with the names of the server and the service.
func TestChangesAreLogged(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 0))
	cfg.Services[0] = checked(cfg.Services[0])
	f := open(t, cfg)
	find := func(server string, healthy bool, reason string) {
		f.services.setHealth(health.Result{
			Service: "web", Server: server, Healthy: healthy, Reason: reason,
		})
	}
	f.expectLog("all is well")
	f.via["s1"] = ""
	s1 := target(&f.services.byName["web"].member("s1").Server)
	f.problems = map[netip.Addr]string{s1: "no route to host"}
	f.route()
	const lost = `level=WARN msg="server has no next hop: its packets are dropped" service=web server=`
	f.expectLog("a next hop is lost", lost+`s1 reason="no route to host"`)
	f.expectLog("nothing has changed since")
	f.mustApply(cfg)
	f.expectLog("after a reload")
	find("s2", false, "refused")
	f.expectLog("the checks of the only reachable server fail",
		`level=WARN msg="server fails its health checks" service=web server=s2 reason=refused`,
		`level=ERROR msg="ALL reachable servers of the service fail their health checks: `+
			`the checks are ignored" service=web`)
	f.via["s1"], f.problems = "out", nil
	f.route()
	f.expectLog("another server stands in",
		`level=INFO msg="server has a next hop" service=web server=s1`,
		`level=INFO msg="the health checks of the service are no longer ignored" service=web`)
	find("s2", true, "2 passed")
	f.expectLog("the server recovers",
		`level=INFO msg="server passes its health checks" service=web server=s2 reason="2 passed"`)
	find("s1", false, "timeout")
	find("s1", true, "successful checks: 2")
	f.expectLog("a server fails for a moment",
		`level=WARN msg="server fails its health checks" service=web server=s1 reason=timeout`,
		`level=INFO msg="server passes its health checks" service=web server=s1 reason="successful checks: 2"`)
	f.expectLog("nothing has changed since that moment")
	f.via["s1"], f.via["s2"] = "", ""
	f.route()
	f.expectLog("all next hops but that of a drained server are lost",
		lost+"s1",
		lost+"s2",
		noNextHop+"web")
}

// Many simultaneous changes share one line.
func TestManyChangesAreOneLine(t *testing.T) {
	t.Parallel()
	f := open(t, rack("api", "web"))
	f.expectLog("all is well")
	links := func(link string) {
		for n := range 34 {
			f.via[fmt.Sprintf("s%02d", n)] = link
		}
		f.route()
	}
	links("")
	const names = `"api/s00, api/s01, api/s02, api/s03, api/s04 and 63 more"`
	f.expectLog("a rack is lost",
		`level=WARN msg="servers have no next hop: their packets are dropped" `+
			`count=68 servers=`+names,
		noNextHop+"api",
		noNextHop+"web")
	links("out")
	f.expectLog("the rack is back",
		`level=INFO msg="servers have a next hop" count=68 servers=`+names,
		`level=INFO msg="a server of the service has a next hop again" service=api`,
		`level=INFO msg="a server of the service has a next hop again" service=web`)
	for n, reason := range []string{"timeout", "no route to host", "timeout", "timeout"} {
		f.fail("api", fmt.Sprintf("s%02d", n), reason)
	}
	f.expectLog("some fail",
		`level=WARN msg="servers fail their health checks" count=4 `+
			`servers="api/s00, api/s01, api/s02, api/s03" reasons="3 times: timeout"`)
}

// logLines is a writer that sends each line to a channel.
type logLines chan string

func (l logLines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

// next waits for the next line about servers.
func (l logLines) next(t *testing.T) string {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line := <-l:
			if !strings.Contains(line, "msg=steering") {
				return line
			}
		case <-timeout:
			t.Fatal("no further line in the log")
		}
	}
}

// In TestRacksAreLoggedOnce, no server has a route at the start. All routes then come, and go.
func TestRacksAreLoggedOnce(t *testing.T) {
	t.Parallel()
	cfg := rack("web", "api")
	for i := range cfg.Services {
		cfg.Services[i].Health = nil
	}
	s := newSteered(t, cfg)
	lines := make(logLines, 1000)
	s.log = slog.New(slog.NewTextHandler(lines, nil))
	s.run(0)
	expect := func(when string, want ...string) {
		t.Helper()
		for _, text := range want {
			if line := lines.next(t); !strings.Contains(line, text) {
				t.Errorf("%s: logged %q, want %s", when, line, text)
			}
		}
	}
	lost := []string{
		`level=WARN msg="servers have no next hop: their packets are dropped" count=68 servers="api/`,
		noNextHop + "api",
		noNextHop + "web",
	}
	// Nobody finds the other end of the fixture's interface.
	expect("at the start", append(lost, `msg="packets in VLANs may be taken for packets in none"`)...)
	s.routeServers(netlink.RouteAdd)
	expect("with a route", `level=INFO msg="servers have a next hop" count=68`,
		"service=api", "service=web")
	s.routeServers(netlink.RouteDel)
	expect("without the route", lost...)
	if len(lines) > 0 {
		t.Errorf("there is another line: %s", <-lines)
	}
	s.routeServers(netlink.RouteAdd)
	slot := s.slot("web", "s00")
	s.await("the route is not taken on", func() bool { return s.plane.Servers.HasNextHop(slot) })
	s.end() // before the delay of the changes has passed
	expect("at the end", `level=INFO msg="servers have a next hop" count=68`)
}

// fail makes a server fail its health checks for a reason.
func (f *fixture) fail(service, server, reason string) {
	f.t.Helper()
	if f.services.setHealth(health.Result{Service: service, Server: server, Reason: reason}) == nil {
		f.t.Errorf("%s/%s: nothing changed", service, server)
	}
}

// A server that failed its health checks before a restart still fails them, also if its service
// ignores this.
func TestIgnoredChecksOutliveRestart(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 0))
	cfg.Services[0] = checked(cfg.Services[0])
	f := open(t, cfg)
	f.setHealth("web", "s1", false)
	f.expectService("one fails", []inspect.Condition{inspect.ServerFailing, inspect.ServerUnchecked, inspect.ServerDrained})
	f.setHealth("web", "s2", true)
	f.expectService("another passes", []inspect.Condition{inspect.ServerFailing, inspect.ServerUp, inspect.ServerDrained})
	f.setHealth("web", "s2", false)
	allFail := []inspect.Condition{inspect.ServerFailing, inspect.ServerFailing, inspect.ServerDrained}
	f.expectService("all fail", allFail, inspect.ServerFailing)
	f.stop()
	f.start(cfg)
	f.attached = true
	f.expectService("after a restart", allFail, inspect.ServerFailing)
	f.setHealth("web", "s1", true)
	f.expectService("one recovers", []inspect.Condition{inspect.ServerUp, inspect.ServerFailing, inspect.ServerDrained})
	for i := range cfg.Services {
		cfg.Services[i].Health = nil
	}
	f.mustApply(cfg)
	f.expectService("without checks", []inspect.Condition{inspect.ServerUnchecked, inspect.ServerUnchecked, inspect.ServerDrained})
}

// expectService checks what status and metrics show of the only service.
func (f *fixture) expectService(when string, conditions []inspect.Condition, ignored ...inspect.Condition) {
	f.t.Helper()
	service := mustSnapshot(f.t, f.view()).Services[0]
	var got []inspect.Condition
	for _, server := range service.Servers {
		got = append(got, server.Condition)
	}
	if ignored == nil {
		ignored = []inspect.Condition{}
	}
	if diff := cmp.Diff(conditions, got); diff != "" {
		f.t.Errorf("%s: conditions, -want +got:\n%s", when, diff)
	}
	if diff := cmp.Diff(ignored, service.Ignored); diff != "" {
		f.t.Errorf("%s: ignored causes, -want +got:\n%s", when, diff)
	}
}
