// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/loadshm"
)

// TestEmulatedServers has servers with emulated processors decide by the busy workers that they
// report. One server is slower than the other.
func TestEmulatedServers(t *testing.T) {
	t.Parallel()
	const threshold = 2
	s := huntingServices(2)[0]
	s.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(threshold))}
	s.Load = desired.Source{Kind: desired.LoadSharedMemory}
	topology := hunting(s)
	topology.Balancers, topology.Servers, topology.Applications = 1, 2, []lab.Application{lab.Emulated}
	topology.Emulated.Workers = 3
	topology.Emulated.Exceptions = []lab.EmulatedException{
		{Server: "s2", EmulatedServer: lab.EmulatedServer{Workers: 5, Backlog: 7, Speed: new(0.5)}},
	}
	l := up(t, topology)
	requireSetUp(t, l, map[string]string{"s1": "128", "s2": "7"})
	rows := openRows(t, l)
	for server, service := range map[string]string{"s1": "20.000", "s2": "40.000"} {
		response := fetch(t, rows.dialFirst(t, l, s, server), "/?work=20ms")
		got, timing := response.Header.Get("X-Segue-Server"), response.Header.Get("Server-Timing")
		if got != server || !strings.Contains(timing, "service;dur="+service) {
			t.Errorf("%s answers with Server-Timing %q, want %s and a service of %s ms",
				got, timing, server, service)
		}
		awaitLoad(t, l, server, s.Name, 0)
	}

	requireThreshold(t, l, s, rows, threshold)
	requireStop(t, l, "s1")
	must(t, l.Process("s1", "emulated").Start(t.Context()))
	awaitLoad(t, l, "s1", s.Name, 0)
	requireServer(t, s, rows.dialFirst(t, l, s, "s1"), "s1")
	requireNoDrops(t, l)
}

// requireSetUp checks the lengths of accept queues, and what happens when they overflow.
func requireSetUp(t *testing.T, l *lab.Lab, backlogs map[string]string) {
	t.Helper()
	for server, want := range backlogs {
		out := strings.Fields(command(t, l, server, "ss", "-Htln", "sport = :80"))
		if len(out) < 3 || out[2] != want {
			t.Errorf("%s: the listener is %q, want a backlog of %s", server, out, want)
		}
		reset := command(t, l, server, "cat", "/proc/sys/net/ipv4/tcp_abort_on_overflow")
		if reset != "1\n" {
			t.Errorf("%s: tcp_abort_on_overflow is %q", server, reset)
		}
	}
}

// fetch sends a request and returns the response.
func fetch(t *testing.T, conn net.Conn, target string) *http.Response {
	t.Helper()
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: test\r\n\r\n", target)
	must(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	must(t, response.Body.Close())
	return response
}

// requireStop ends a server's application by SIGTERM, while it has work. It must end by itself.
func requireStop(t *testing.T, l *lab.Lab, server string) {
	t.Helper()
	p := l.Process(server, "emulated")
	must(t, p.Stop())
	log := readLog(t, p)
	if !strings.Contains(log, "stopped") || strings.Contains(log, "level=ERROR") {
		t.Errorf("%s: after SIGTERM, the log is %s", server, log)
	}
	file := filepath.Join("/run/segue/lab", l.Name, server, "load")
	if busy, capacity, err := loadshm.Read(file); !errors.Is(err, loadshm.ErrNobody) {
		t.Errorf("%s has stopped, and its load is %d of %d, %v", server, busy, capacity, err)
	}
}

// requireThreshold makes s1 busy by requests that take an hour. It must accept as many connections
// as its threshold, and refuse the next one, which s2 takes.
func requireThreshold(t *testing.T, l *lab.Lab, s lab.Service, r *rows, threshold int) {
	t.Helper()
	before := offers(t, l, "s1", s.Name)
	for i := range threshold {
		conn := r.dialFirst(t, l, s, "s1")
		_, err := io.WriteString(conn, "GET /?work=1h HTTP/1.1\r\nHost: test\r\n\r\n")
		must(t, err)
		awaitShown(t, l, "s1", s.Name, i+1)
	}
	requireServer(t, s, r.dialFirst(t, l, s, "s1"), "s2")
	after := offers(t, l, "s1", s.Name)
	if after.accepted != before.accepted+threshold || after.refused != before.refused+1 {
		t.Errorf("s1 should have accepted %d connections and refused one: before %+v, after %+v",
			threshold, before, after)
	}
}
