// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// patience bounds everything that should happen soon. It measures no speed.
const patience = 60 * time.Second

// listen runs serve for each connection to a new listener, until the test ends.
func listen(t *testing.T, serve func(net.Conn, *http.Request)) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	var group sync.WaitGroup
	t.Cleanup(func() {
		listener.Close()
		group.Wait()
	})
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				defer conn.Close()
				reader := bufio.NewReader(conn)
				if request, err := http.ReadRequest(reader); err == nil {
					serve(conn, request)
				}
			})
		}
	})
	return "http://" + listener.Addr().String()
}

// answer is a response without a body.
const answer = "HTTP/1.1 200 OK\r\nX-Segue-Server: s1\r\nContent-Length: 0\r\n\r\n"

// respond returns a server that sends a text and closes the connection.
func respond(text string) func(net.Conn, *http.Request) {
	return func(conn net.Conn, _ *http.Request) { conn.Write([]byte(text)) }
}

func target(t *testing.T, url string) *Target {
	t.Helper()
	parsed, err := ParseTarget(t.Context(), url)
	testhost.Must(t, err)
	return parsed
}

// config returns a configuration with n requests, 1000 a second.
func config(t *testing.T, url string, n uint64) Config {
	t.Helper()
	return Config{
		Targets: []*Target{target(t, url)}, Arrivals: Constant{Rate: 1000}, Requests: n,
		ConnectTimeout: patience, Timeout: patience, ServerHeader: "X-Segue-Server", Seed: 1,
	}
}

func run(t *testing.T, c Config) *Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	report, err := Run(ctx, c)
	testhost.Must(t, err)
	if report.Interrupted {
		t.Fatalf("the run did not end within %v: %+v", 2*patience, report)
	}
	return report
}

// logged is a line of the log of requests.
type logged struct {
	time, latency, exchange float64
	query, server, outcome  string
}

// runLogged returns the report and the log, in the order in which the requests ended.
func runLogged(t *testing.T, c Config) (*Report, []logged) {
	t.Helper()
	var text bytes.Buffer
	c.Log = &text
	report := run(t, c)
	lines, err := csv.NewReader(&text).ReadAll()
	testhost.Must(t, err)
	var log []logged
	for _, line := range lines[1:] {
		l := logged{query: line[1], server: line[2], outcome: line[3]}
		for i, number := range map[int]*float64{0: &l.time, 4: &l.latency, 5: &l.exchange} {
			if line[i] != "" {
				if *number, err = strconv.ParseFloat(line[i], 64); err != nil {
					t.Fatal(err)
				}
			}
		}
		log = append(log, l)
	}
	return report, log
}

func write(t *testing.T, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}
