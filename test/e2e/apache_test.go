// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// TestApacheServers has Apache servers decide by the workers that are busy with real work. Their
// CPU time is limited.
func TestApacheServers(t *testing.T) {
	t.Parallel()
	testhost.NeedCommand(t, "apache2", "apache2-bin")
	testhost.NeedCPULimits(t)
	const threshold, workers, cpus = 2, 8, 0.2
	s := huntingServices(2)[0]
	s.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(threshold))}
	s.Load = desired.Source{Kind: desired.LoadApache}
	topology := hunting(s)
	topology.Balancers, topology.Servers, topology.Applications = 1, 2, []lab.Application{lab.Apache}
	topology.Apache = lab.ApacheServers{Workers: workers, Backlog: 7, CPUs: cpus}
	var l *lab.Lab
	t.Cleanup(func() { requireGroups(t, l, 0) }) // after up's clean-up has removed the lab
	l = up(t, topology)
	requireSetUp(t, l, map[string]string{"s1": "7", "s2": "7"})
	rows := openRows(t, l)
	get := func(server, target string) *http.Response {
		conn := rows.dialFirst(t, l, s, server)
		defer conn.Close() // Apache would keep it alive, which occupies a worker
		return fetch(t, conn, target)
	}
	requireWork(t, get("s1", "/?a=b&work=100ms"), "s1", 100*time.Millisecond, cpus)
	requireWork(t, get("s2", "/x?work=0.05s10ms"), "s2", 60*time.Millisecond, cpus)
	for _, work := range []string{"", "1", "x", "1x", "1s2", "-1s", "2h"} {
		response := get("s1", "/?work="+work)
		if response.StatusCode != http.StatusBadRequest {
			t.Errorf("work %q: %s, want status 400", work, response.Status)
		}
	}
	awaitLoad(t, l, "s1", s.Name, 0)

	requireThreshold(t, l, s, rows, threshold)
	must(t, l.Process("s1", "apache").Kill())
	must(t, l.Process("s1", "apache").Start(t.Context()))
	awaitLoad(t, l, "s1", s.Name, 0)
	requireServer(t, s, rows.dialFirst(t, l, s, "s1"), "s1")
	requireNoDrops(t, l)
	requireGroups(t, l, 2)
}

// requireWork checks that a server has used the CPU time of the work, and no more of the clock's
// time than it may. The kernel lets a group overdraw its limit by a few milliseconds only.
func requireWork(
	t *testing.T, response *http.Response, server string, work time.Duration, cpus float64,
) {
	t.Helper()
	if got := response.Header.Get("X-Segue-Server"); got != server {
		t.Errorf("%s answers, want %s", got, server)
	}
	var service, sojourn float64 // ms
	timing := response.Header.Get("Server-Timing")
	_, err := fmt.Sscanf(timing, "service;dur=%f, sojourn;dur=%f", &service, &sojourn)
	if least := work.Seconds() * 1e3; err != nil || service < least || sojourn < 0.8*least/cpus {
		t.Errorf("%s: work of %v on %v CPUs: %s, Server-Timing %q: %v",
			server, work, cpus, response.Status, timing, err)
	}
}

// requireGroups checks the number of a lab's control groups. Each has the workers of its Apache,
// and Apache's first process.
func requireGroups(t *testing.T, l *lab.Lab, want int) {
	t.Helper()
	if l == nil {
		return // there was no lab
	}
	var groups []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		found, err := filepath.Glob(filepath.Join(root, "segue-lab-"+l.Name, "s*", "cgroup.procs"))
		must(t, err)
		groups = append(groups, found...)
	}
	if len(groups) != want {
		t.Errorf("the lab has the control groups %v, want %d", groups, want)
	}
	for _, group := range groups {
		text, err := os.ReadFile(group)
		must(t, err)
		pids := strings.Fields(string(text))
		server := filepath.Base(filepath.Dir(group))
		pid, _ := l.Process(server, "apache").PID()
		if len(pids) != l.Topology.Apache.Workers+1 || !slices.Contains(pids, strconv.Itoa(pid)) {
			t.Errorf("%s has the processes %v, want Apache (%d) and its workers", group, pids, pid)
		}
	}
}
