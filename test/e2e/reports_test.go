// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// reportingServices are services whose servers compare their loads and report them.
func reportingServices(selection desired.Selection) []lab.Service {
	services := comparingServices()
	for i := range services {
		services[i].Selection, services[i].Candidates = selection, 0
	}
	return services
}

// TestServersReportLoads opens connections that stay open. Then each server has reported the number
// of its connections to both balancers, and the numbers are nearly even. When the connections end,
// the reported loads fall.
func TestServersReportLoads(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	const connections, servers, tolerance = 120, 6, 3
	topology := hunting(reportingServices(desired.SelectReports)...)
	topology.Servers = servers
	l := up(t, topology)
	awaitServers(t, l) // a balancer offers no connection to a server whose agent has not answered it
	for _, s := range l.Topology.Services {
		all, open := openEvenly(t, l, s, connections, tolerance)
		// A server may have taken no connection of a balancer yet. The next ones change that.
		eventually(t, func() error {
			err := requireReports(t, l, s, open, connections/servers/2)
			if err != nil {
				_, failed := ask(t.Context(), l, s)
				err = errors.Join(err, failed)
			}
			return err
		})
		// Of reports within a tick only the first counts. Some may nevertheless be missing. The
		// next connections bring newer ones, but few to servers that seem busy.
		for _, c := range all {
			must(t, c.conn.Close())
			time.Sleep(2 * srv6.ReportTick)
		}
		eventually(t, func() error {
			_, err := ask(t.Context(), l, s)
			return errors.Join(err, requireReports(t, l, s, map[string]int{}, connections/servers/4))
		})
	}
	requireNoDrops(t, l)
}

// requireReports returns an error unless the newest report of each server tells the number of its
// connections, or one that differs by the tolerance at most. A report is as old as the
// latest connection or end of one.
func requireReports(t *testing.T, l *lab.Lab, s lab.Service, open map[string]int, tolerance int) error {
	t.Helper()
	loads, ages := map[string]float64{}, map[string]float64{}
	var problems []error
	for _, balancer := range nodes(l, lab.RoleBalancer) {
		for server, r := range reportsOf(t, l, balancer, s.Name) {
			if r.Counts["taken"] == 0 {
				problems = append(problems, fmt.Errorf("%s: %s has no report of %s", s.Name, balancer, server))
			}
			if r.Counts["taken"]+r.Counts["relayed"] == 0 || r.Counts["unsynchronised"]+r.Counts["unknown_load"] > 0 {
				t.Errorf("%s: %s, reports of %s: %v", s.Name, balancer, server, r.Counts)
			}
			if age, ok := ages[server]; r.Load != nil && (!ok || *r.Age < age) {
				loads[server], ages[server] = *r.Load-1, *r.Age // a report includes one connection more
			}
		}
	}
	for _, server := range nodes(l, lab.RoleServer) {
		load, ok := loads[server]
		if !ok || math.Abs(load-float64(open[server])) > float64(tolerance) {
			problems = append(problems, fmt.Errorf("%s: %s has %d connections, and reported %g", s.Name, server,
				open[server], load))
		}
	}
	return errors.Join(problems...)
}

// reportsOf returns what a balancer knows of the loads that the servers of a service report.
func reportsOf(t *testing.T, l *lab.Lab, balancer, service string) map[string]*inspect.ReportState {
	t.Helper()
	all := map[string]*inspect.ReportState{}
	for _, s := range balancerStatus(t, l.Node(balancer)).Services {
		for _, r := range s.Servers {
			if s.Name == service && r.Hunt != nil && r.Hunt.Reports != nil {
				all[r.Name] = r.Hunt.Reports
			}
		}
	}
	return all
}
