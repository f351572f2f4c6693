// SPDX-License-Identifier: Apache-2.0

package application

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/load"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
	"github.com/segue-lb/segue/research/sim/processor"
)

// patience bounds everything that should happen soon.
const patience = 30 * time.Second

// forever is longer than any test.
const forever = "/?work=1h"

// testServer is a server that runs in a network namespace of its own.
type testServer struct {
	*Server
	t         *testing.T
	namespace *testhost.Namespace
	stop      func() // ends the server
	ended     chan error
}

// start runs a server on port 80 of a new namespace, whose control is on port 81. change may change
// the configuration.
func start(t *testing.T, change func(*Config)) *testServer {
	t.Helper()
	c := Config{
		Name: "s1", Listen: []string{"127.0.0.1:80"}, Backlog: 128, Workers: 32,
		Processors: processor.Config{Cores: 2, Speed: 1}, Control: "127.0.0.1:81", Idle: patience,
		Loads: []string{filepath.Join(t.TempDir(), "load")},
	}
	if change != nil {
		change(&c)
	}
	s := &testServer{t: t, namespace: testhost.NewNamespace(t), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	must(t, s.namespace.Do(func() (err error) {
		// The setting that the lab makes on servers with this application.
		if err := os.WriteFile("/proc/sys/net/ipv4/tcp_abort_on_overflow", []byte("1"), 0); err != nil {
			return err
		}
		s.Server, err = New(ctx, c)
		return err
	}))
	go func() { s.ended <- s.Run(ctx) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-s.ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Errorf("Run has not returned %v after the end of its context", patience)
		}
	})
	t.Cleanup(s.stop)
	return s
}

// Helpers of all tests.
var must, eventually = testhost.Must, testhost.Eventually

// dial connects from the server's namespace.
func (s *testServer) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = s.namespace.Do(func() error {
		conn, err = (&net.Dialer{Timeout: patience}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// open sends a request on a connection of its own, and does not wait for the response.
func (s *testServer) open(target string, header ...string) net.Conn {
	s.t.Helper()
	conn, err := s.dial(s.t.Context(), "tcp", s.config.Listen[0])
	must(s.t, err)
	s.t.Cleanup(func() { conn.Close() })
	must(s.t, conn.SetDeadline(time.Now().Add(patience)))
	send(s.t, conn, target, header...)
	return conn
}

func send(t *testing.T, conn net.Conn, target string, header ...string) {
	t.Helper()
	lines := append([]string{"GET " + target + " HTTP/1.1", "Host: test"}, header...)
	_, err := io.WriteString(conn, strings.Join(lines, "\r\n")+"\r\n\r\n")
	must(t, err)
}

// receive reads a response.
func receive(t *testing.T, conn net.Conn) (*http.Response, string) {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	body, err := io.ReadAll(response.Body)
	must(t, err)
	return response, string(body)
}

// do sends a request with Go's HTTP client.
func (s *testServer) do(method, url, body string) (status int, answer string) {
	s.t.Helper()
	client := http.Client{
		Transport: &http.Transport{DialContext: s.dial, DisableKeepAlives: true}, Timeout: patience,
	}
	request, err := http.NewRequestWithContext(s.t.Context(), method, url, strings.NewReader(body))
	must(s.t, err)
	response, err := client.Do(request)
	must(s.t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	must(s.t, err)
	return response.StatusCode, string(text)
}

// require sends a request to the server. The answer must begin with the text.
func (s *testServer) require(method, path, body string, status int, answer string) {
	s.t.Helper()
	s.requireAt("http://127.0.0.1:80"+path, method, body, status, answer)
}

// requireAt does the same as require, but takes a URL instead of a path.
func (s *testServer) requireAt(url, method, body string, status int, answer string) {
	s.t.Helper()
	got, text := s.do(method, url, body)
	if got != status || !strings.HasPrefix(text, answer) {
		s.t.Errorf("%s %s: %d %q, want %d %q", method, url, got, text, status, answer)
	}
}

// await waits until the server has accepted this number of connections, and the accept queue has
// this length.
func (s *testServer) await(accepted, queued int) {
	s.t.Helper()
	eventually(s.t, func() error {
		if a, q := int(s.State().Connections), s.queued(); a != accepted || q != queued {
			return fmt.Errorf("%d connections are accepted and %d are in the accept queue; want %d and %d",
				a, q, accepted, queued)
		}
		return nil
	})
}

// queued returns the length of the accept queue. For a listening socket, tcpi_unacked has it.
func (s *testServer) queued() (length int) {
	s.t.Helper()
	must(s.t, withDescriptor(s.listeners[0].queue, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			length = int(info.Unacked)
		}
		return err
	}))
	return length
}

// requireLoad waits until the server reports a load.
func (s *testServer) requireLoad(want load.Load) {
	s.t.Helper()
	eventually(s.t, func() error {
		got, err := load.NewSharedMemory(s.config.Loads[0]).Read()
		if err == nil && got != want {
			err = fmt.Errorf("the load is %+v, want %+v", got, want)
		}
		return err
	})
}

func TestResponse(t *testing.T) {
	s := start(t, func(c *Config) { c.Processors.Speed = 10 })
	conn := s.open("/?work=100ms")
	response, body := receive(t, conn)
	if response.StatusCode != http.StatusOK || body != "s1\n" {
		t.Errorf("%s %q", response.Status, body)
	}
	if got := response.Header.Get("X-Segue-Server"); got != "s1" {
		t.Errorf("X-Segue-Server is %q", got)
	}
	queueing, service, sojourn := timing(t, response)
	if queueing != 0 || service != 10 || sojourn < 10 {
		t.Errorf("queueing %v ms, service %v ms, sojourn %v ms of 100 ms of work at speed 10",
			queueing, service, sojourn)
	}
	if _, err := conn.Read(make([]byte, 1)); !response.Close || err != io.EOF {
		t.Errorf("the connection should be closed: announced %v, then read %v", response.Close, err)
	}

	conn = s.open("/", "Connection: x, Keep-Alive")
	for range 2 {
		if response, _ := receive(t, conn); response.Close || response.StatusCode != http.StatusOK {
			t.Errorf("keep-alive: %s, closes: %v", response.Status, response.Close)
		}
		send(t, conn, "/", "Connection: keep-alive")
	}
	s.require("GET", "/?work=5", "", http.StatusBadRequest, `work "5": must be a duration`)
	s.require("GET", "/healthz", "", http.StatusOK, "ok\n")
}

// timing reads the header Server-Timing, in milliseconds.
func timing(t *testing.T, r *http.Response) (queueing, service, sojourn float64) {
	t.Helper()
	text := r.Header.Get("Server-Timing")
	const form = "queueing;dur=%f, service;dur=%f, sojourn;dur=%f"
	if _, err := fmt.Sscanf(text, form, &queueing, &service, &sojourn); err != nil {
		t.Fatalf("Server-Timing %q: %v", text, err)
	}
	return queueing, service, sojourn
}

// TestAcceptsOnlyForIdleWorkers keeps all workers busy, from two ports. Further connections stay in
// the kernel's accept queue, and the reported load follows the workers.
func TestAcceptsOnlyForIdleWorkers(t *testing.T) {
	s := start(t, func(c *Config) {
		c.Workers, c.Listen = 2, []string{"127.0.0.1:80", "127.0.0.1:8080"}
	})
	s.requireLoad(load.Load{Busy: 0, Capacity: 2})
	working := s.open(forever)
	s.await(1, 0)
	s.requireLoad(load.Load{Busy: 1, Capacity: 2})
	// A connection without a request also occupies a worker, as in prefork.
	idle, err := s.dial(t.Context(), "tcp", "127.0.0.1:8080")
	must(t, err)
	defer idle.Close()
	s.await(2, 0)
	s.requireLoad(load.Load{Busy: 2, Capacity: 2})
	waiting := s.open(forever)
	s.await(2, 1)
	// A job goes on when its client has gone, as in prefork. So the worker stays busy.
	must(t, working.Close())
	must(t, idle.Close())
	s.await(3, 0)
	s.requireLoad(load.Load{Busy: 2, Capacity: 2})
	last := s.open("/")
	s.await(3, 1)
	s.stop()
	if _, err := last.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the end of the server should have reset the connection in the accept queue: %v", err)
	}
	if n, err := waiting.Read(make([]byte, 1)); err == nil {
		t.Errorf("the server has ended, and a connection reads %d bytes", n)
	}
}

// TestWorkerIsFreeAfterResponse: the next connection from the accept queue gets the worker.
func TestWorkerIsFreeAfterResponse(t *testing.T) {
	s := start(t, func(c *Config) { c.Workers = 1 })
	var conns []net.Conn
	for range 5 {
		conns = append(conns, s.open("/?work=10ms"))
	}
	for _, conn := range conns {
		if response, _ := receive(t, conn); response.StatusCode != http.StatusOK {
			t.Errorf("%s", response.Status)
		}
	}
	s.await(5, 0)
	s.requireLoad(load.Load{Busy: 0, Capacity: 1})
}

// TestOverflowResets fills the accept queue while a client is half-open. The last packet of the
// client's handshake finds the queue full, and the kernel resets the connection.
func TestOverflowResets(t *testing.T) {
	const backlog = 3
	s := start(t, func(c *Config) { c.Workers, c.Backlog = 1, backlog })
	s.open(forever)
	s.await(1, 0)
	late := s.halfOpen()
	for range backlog + 1 { // Linux queues one more than the backlog
		s.open("/")
	}
	s.await(1, backlog+1)
	if err := late(); !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the half-open connection ends with %v, want a reset", err)
	}
	s.await(1, backlog+1)
	// A SYN that finds the queue full is dropped, since Linux 4.10 also with tcp_abort_on_overflow.
	before := s.overflows()
	fd := s.connect(nil)
	eventually(t, func() error {
		if s.overflows() == before {
			return errors.New("no SYN has been dropped")
		}
		return nil
	})
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	must(t, err)
	if info.State != unix.BPF_TCP_SYN_SENT {
		t.Errorf("the state of the socket is %d, want SYN-SENT", info.State)
	}
}

// overflows returns the number of packets that have found an accept queue full.
func (s *testServer) overflows() (count string) {
	s.t.Helper()
	must(s.t, s.namespace.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		lines := strings.Split(string(text), "\n")
		i := slices.Index(strings.Fields(lines[0]), "ListenOverflows")
		if i < 0 {
			return fmt.Errorf("netstat has no ListenOverflows: %s", text)
		}
		count = strings.Fields(lines[1])[i]
		return nil
	}))
	return count
}

// connect begins to connect a socket to the server, and does not wait. filter may be nil.
func (s *testServer) connect(filter *unix.SockFprog) (fd int) {
	s.t.Helper()
	must(s.t, s.namespace.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	s.t.Cleanup(func() { unix.Close(fd) })
	if filter != nil {
		must(s.t, unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, filter))
	}
	address := unix.SockaddrInet4{Port: 80, Addr: [4]byte{127, 0, 0, 1}}
	if err := unix.Connect(fd, &address); err != unix.EINPROGRESS {
		s.t.Fatalf("connect: %v", err)
	}
	return fd
}

// halfOpen sends a SYN and ignores the SYN-ACK, by a socket filter that drops it. The returned
// function removes the filter, so that a repeated SYN-ACK arrives, and returns the socket's error
// when there is one. An established connection has none, until the kernel resets it.
func (s *testServer) halfOpen() (finish func() error) {
	s.t.Helper()
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0}
	fd := s.connect(&unix.SockFprog{Len: 1, Filter: &drop})
	return func() error {
		must(s.t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0))
		var errSocket error
		eventually(s.t, func() error {
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err != nil || code == 0 {
				return fmt.Errorf("the half-open connection has no error yet (%v)", err)
			}
			errSocket = unix.Errno(code)
			return nil
		})
		return errSocket
	}
}

// TestStop ends a server with requests in work and an idle connection. Its load is then unknown.
func TestStop(t *testing.T) {
	s := start(t, nil)
	working, idle := s.open(forever), s.open("/", "Connection: keep-alive")
	receive(t, idle)
	s.requireLoad(load.Load{Busy: 2, Capacity: 32})
	s.stop()
	for _, conn := range []net.Conn{working, idle} {
		if n, err := conn.Read(make([]byte, 1)); err == nil {
			t.Errorf("the server has ended, and a connection reads %d bytes", n)
		}
	}
	if _, err := load.NewSharedMemory(s.config.Loads[0]).Read(); !errors.Is(err, loadshm.ErrNobody) {
		t.Errorf("the server has ended, and the load is read with %v", err)
	}
	if _, err := s.dial(t.Context(), "tcp", "127.0.0.1:80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the server has ended, and a connection ends with %v", err)
	}
}

// TestProcessorsInRealTime has two requests share a core, whose half then goes to co-located work.
func TestProcessorsInRealTime(t *testing.T) {
	s := start(t, func(c *Config) { c.Processors.Cores = 1 })
	begin := time.Now()
	a, b := s.open("/?work=200ms"), s.open("/?work=200ms")
	for _, conn := range []net.Conn{a, b} {
		response, _ := receive(t, conn)
		queueing, service, sojourn := timing(t, response)
		if service != 200 || queueing == 0 || sojourn < queueing+service-0.01 {
			t.Errorf("queueing %v, service %v, sojourn %v ms", queueing, service, sojourn)
		}
	}
	if took := time.Since(begin); took < 400*time.Millisecond {
		t.Errorf("one core has done 400 ms of work in %v", took)
	}
	const colocated = "http://127.0.0.1:81/colocated"
	s.requireAt(colocated, "PUT", "80%@0s,75%@1ms,0%@1h", http.StatusNoContent, "")
	eventually(t, func() error {
		var state State
		_, text := s.do("GET", "http://127.0.0.1:81/", "")
		must(t, json.Unmarshal([]byte(text), &state))
		if state.Colocated != 0.75 {
			return fmt.Errorf("state: %s", text)
		}
		if want := (State{
			Server: "s1", Workers: 32, Cores: 1, Speed: 1, Colocated: 0.75,
			Connections: 2, Requests: 2, Served: 2, Work: 0.4,
		}); state != want {
			return fmt.Errorf("state: %+v, want %+v", state, want)
		}
		return nil
	})
	response, _ := receive(t, s.open("/?work=50ms"))
	queueing, service, _ := timing(t, response)
	if queueing < 149.99 || queueing > 150.01 || service != 50 {
		t.Errorf("with a quarter of the core: queueing %v ms, service %v ms; want 150 and 50",
			queueing, service)
	}
	s.requireAt(colocated, "PUT", "100%@0s", http.StatusBadRequest, `colocated "100%@0s": must be`)
}

func TestFilesAndUploads(t *testing.T) {
	files, uploads := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(files, "1kB"), make([]byte, 1000), 0o644))
	s := start(t, func(c *Config) { c.Files, c.Uploads = files, uploads })
	s.require("GET", "/1kB", "", http.StatusOK, string(make([]byte, 1000)))
	s.require("GET", "/other", "", http.StatusOK, "s1\n")
	s.require("PUT", "/upload/a", "content", http.StatusCreated, "")
	s.require("PUT", "/upload/a", "new content", http.StatusNoContent, "")
	text, err := os.ReadFile(filepath.Join(uploads, "a"))
	if string(text) != "new content" || err != nil {
		t.Errorf("stored %q, %v", text, err)
	}
	s.require("PUT", "/upload/..%2Fb", "content", http.StatusBadRequest, `"../b": must be the name of a file`)
}

var (
	errorRequests = flag.Int("sojourn.requests", 200, "requests of TestSojournError")
	errorRate     = flag.Float64("sojourn.rate", 500, "requests per second of TestSojournError")
)

// TestSojournError compares the times that requests take with the emulated times. A request never
// takes less. The error is how much more it takes; -v prints it. It depends on the machine.
func TestSojournError(t *testing.T) {
	s := start(t, func(c *Config) { c.Workers, c.Processors.Cores = 1000, 4 })
	random := rand.New(rand.NewPCG(1, 1))
	var mu sync.Mutex
	var errs []float64
	var group sync.WaitGroup
	next := time.Now()
	for range *errorRequests {
		next = next.Add(time.Duration(random.ExpFloat64() / *errorRate * float64(time.Second)))
		time.Sleep(time.Until(next))
		work := seconds(random.ExpFloat64() * 0.005)
		group.Go(func() {
			response, _ := receive(t, s.open("/?work="+work.String()))
			queueing, service, sojourn := timing(t, response)
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, sojourn-queueing-service)
		})
	}
	group.Wait()
	slices.Sort(errs)
	t.Logf("error of %d sojourn times: p50 %.3f ms, p99 %.3f ms, maximum %.3f ms", len(errs),
		errs[len(errs)/2], errs[len(errs)*99/100], errs[len(errs)-1])
	if errs[0] < -0.002 { // rounding of three numbers
		t.Errorf("a request took %v ms less than emulated", -errs[0])
	}
}

func TestConfigIsChecked(t *testing.T) {
	valid := Config{
		Name: "s1", Listen: []string{"127.0.0.1:0"}, Workers: 1, Idle: time.Second,
		Processors: processor.Config{Cores: 1, Speed: 1},
	}
	for _, test := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Name = "" }, "name: required"},
		{func(c *Config) { c.Listen = nil }, "listen: at least one address is required"},
		{func(c *Config) { c.Backlog = -1 }, "backlog -1: must not be negative"},
		{func(c *Config) { c.Workers = 0 }, "workers 0: must be 1 to 65536"},
		{func(c *Config) { c.Idle = 0 }, "idle-timeout 0s: must be positive"},
		{func(c *Config) { c.Processors.Cores = 0 }, "cores 0: must be 1 to 1024"},
		{func(c *Config) { c.Loads = []string{t.TempDir()} }, "load: open "},
		{func(c *Config) { c.Listen = []string{"nowhere"} }, "listen tcp: address nowhere: missing port"},
		{func(c *Config) { c.Control = "nowhere" }, "control: listen tcp: address nowhere: missing port"},
	} {
		c := valid
		test.change(&c)
		s, err := New(t.Context(), c)
		if err == nil || !strings.HasPrefix(err.Error(), test.want) || s != nil {
			t.Errorf("%v, want %s", err, test.want)
		}
	}
}
