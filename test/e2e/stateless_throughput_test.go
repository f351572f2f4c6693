// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var cookieDownloads = flag.Int("cookies.downloads", 30,
	"how many times TestLongTransferWithCookie downloads 10 MB on one connection; nginx allows 1000")

// TestLongTransferWithCookie downloads much on one connection, from a service with a flow table and
// from one without, in turn. The connection with a cookie does not stall. The log compares times,
// and what the servers have repeated: a busy machine reorders packets of both.
func TestLongTransferWithCookie(t *testing.T) {
	t.Parallel()
	service := huntingServices(2)[0]
	stateless := service
	stateless.Name, stateless.Port, stateless.Persistence = "stateless", 81, desired.PersistenceStateless
	topology := hunting(service, stateless)
	topology.Applications = []lab.Application{lab.Nginx}
	l := up(t, topology)
	var all []*downloads
	for _, s := range l.Topology.Services {
		all = append(all, newDownloads(t, l, s))
	}
	for range *cookieDownloads {
		for _, d := range all {
			d.next(t)
		}
	}
	const stall = 10 * time.Second
	for _, d := range all {
		slices.Sort(d.took)
		median, slowest := d.took[len(d.took)/2], d.took[len(d.took)-1]
		t.Logf("%s: the median of %d downloads took %v, the slowest %v: %v", d.service.Name, len(d.took), median, slowest, d.counters)
		if slowest > stall || d.connections != 1 || d.counters["TSEcrRejected"] != 0 {
			t.Errorf("%s: a download took %v, on %d connections, with %d echoes rejected",
				d.service.Name, slowest, d.connections, d.counters["TSEcrRejected"])
		}
	}
}

// downloads are downloads from a service on one connection.
type downloads struct {
	lab         *lab.Lab
	service     lab.Service
	client      http.Client
	connections int
	took        []time.Duration
	counters    counts // of the servers' TCP
}

func newDownloads(t *testing.T, l *lab.Lab, s lab.Service) *downloads {
	d := &downloads{lab: l, service: s, counters: counts{}}
	d.client = http.Client{Transport: &http.Transport{
		MaxConnsPerHost: 1,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			d.connections++
			return l.Node("client").Dial(ctx, network, address)
		},
	}, Timeout: patience}
	t.Cleanup(d.client.CloseIdleConnections)
	return d
}

// next downloads 10 MB.
func (d *downloads) next(t *testing.T) {
	t.Helper()
	before, start := tcpCounters(t, d.lab), time.Now()
	response, err := d.client.Get(fmt.Sprintf("http://%s/10MB", d.service.Address()))
	must(t, err)
	size, err := io.Copy(io.Discard, response.Body)
	must(t, errors.Join(err, response.Body.Close()))
	if size != 10e6 || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d bytes, status %d", d.service.Name, size, response.StatusCode)
	}
	d.took = append(d.took, time.Since(start))
	for name, n := range tcpCounters(t, d.lab).since(t, before) {
		d.counters[name] += n
	}
}

// tcpCounters returns the counters of all servers about segments that were repeated, in vain or
// not.
func tcpCounters(t *testing.T, l *lab.Lab) counts {
	t.Helper()
	all := counts{}
	wanted := []string{
		"RetransSegs", "TCPTimeouts", "TCPSpuriousRTOs", "TCPFullUndo", "TCPPartialUndo", "TCPDSACKUndo", "TCPLossUndo",
		"TCPTSReorder", "TSEcrRejected", "PAWSEstab",
	}
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Node(name).Do(func() error {
			for _, file := range []string{"snmp", "netstat"} {
				text, err := os.ReadFile("/proc/thread-self/net/" + file)
				if err != nil {
					return err
				}
				rows := strings.Split(strings.TrimSpace(string(text)), "\n")
				for i := 0; i+1 < len(rows); i += 2 {
					names, values := strings.Fields(rows[i]), strings.Fields(rows[i+1])
					for j, counter := range names {
						var value uint64
						if !slices.Contains(wanted, counter) {
							continue
						}
						if _, err := fmt.Sscan(values[j], &value); err != nil {
							return err
						}
						all[counter] += value
					}
				}
			}
			return nil
		}))
	}
	return all
}
