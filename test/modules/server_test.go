// SPDX-License-Identifier: Apache-2.0

// Package modules tests the modules for Apache and nginx with the real servers.
package modules

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
)

const project = "../.."

// build builds the modules for the servers of this machine, and returns their folder.
var build = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("modules/build.sh")
	cmd.Dir = project
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return filepath.Abs(project + "/bin/modules")
})

// capacity is that of the tests' servers.
const capacity = 7

// settings are the values of a server's configuration.
type settings struct {
	Dir, Modules, Listen, Backend, Load, MPM string
	HTTP2                                    bool
	Capacity                                 int
}

const apacheConfig = `
ServerRoot {{.Dir}}
ServerName localhost
PidFile pid
ErrorLog {{.Dir}}/error.log
Listen {{.Listen}}
LoadModule mpm_{{.MPM}}_module /usr/lib/apache2/modules/mod_mpm_{{.MPM}}.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule proxy_module /usr/lib/apache2/modules/mod_proxy.so
LoadModule proxy_http_module /usr/lib/apache2/modules/mod_proxy_http.so
LoadModule segue_load_module {{.Modules}}/mod_segue_load.so
{{if .HTTP2}}
LoadModule http2_module /usr/lib/apache2/modules/mod_http2.so
Protocols h2c http/1.1
H2MaxWorkers 32
{{end}}
User www-data
Group www-data
SegueLoad {{.Load}}{{if .Capacity}} {{.Capacity}}{{end}}
StartServers 2
ServerLimit 16
{{if eq .MPM "prefork"}}
MaxRequestWorkers 16
{{else}}
MaxRequestWorkers 64
ThreadsPerChild 32
{{end}}
KeepAliveTimeout 60
ProxyPass / http://{{.Backend}}/
`

const nginxConfig = `
load_module {{.Modules}}/ngx_http_segue_load_module.so;
user www-data;
worker_processes 2;
pid {{.Dir}}/pid;
error_log {{.Dir}}/error.log;
events {}
http {
	access_log off;
	keepalive_timeout 60;
	segue_load {{.Load}}{{if .Capacity}} {{.Capacity}}{{end}};
	client_body_temp_path {{.Dir}}/body;
	proxy_temp_path {{.Dir}}/proxy;
	fastcgi_temp_path {{.Dir}}/fastcgi;
	uwsgi_temp_path {{.Dir}}/uwsgi;
	scgi_temp_path {{.Dir}}/scgi;
	server {
		listen {{.Listen}}{{if .HTTP2}} http2{{end}};
		location / { proxy_pass http://{{.Backend}}; }
		location /elsewhere {
			error_page 404 = /found;
			return 404;
		}
	}
}
`

// kind is a server program, with its way of working.
type kind struct {
	name string // "nginx", or that of Apache's MPM
	// keepsBusy tells that a connection that is kept alive occupies a worker.
	keepsBusy bool
}

var kinds = []kind{{"prefork", true}, {"worker", true}, {"event", false}, {"nginx", false}}

// server is a running Apache or nginx. Its requests wait in a backend until the test releases them.
type server struct {
	*testing.T
	kind
	settings
	load    *loadshm.Map // nil: the load is in a file
	cmd     *exec.Cmd
	ended   chan error // is closed when the process has ended
	client  *http.Client
	release chan struct{} // each value ends a request
}

// start starts a server that reports to a map, or to a file if load is its path.
func start(t *testing.T, k kind, change func(*settings)) *server {
	t.Helper()
	testhost.NeedBPF(t)
	testhost.NeedCommand(t, "apache2", "apache2-bin")
	testhost.NeedCommand(t, "apxs", "apache2-dev")
	testhost.NeedCommand(t, "nginx", "nginx")
	testhost.NeedCommand(t, "dh_nginx", "nginx-dev")
	modules, err := build()
	testhost.Must(t, err)
	dir, err := os.MkdirTemp("/sys/fs/bpf", "modules")
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, os.RemoveAll(dir)) })
	s := &server{T: t, kind: k, release: make(chan struct{})}
	backend := httptest.NewServer(http.HandlerFunc(s.answer))
	t.Cleanup(backend.Close)
	s.settings = settings{
		Dir: t.TempDir(), Modules: modules, Listen: freeAddress(t), MPM: k.name,
		Backend: backend.Listener.Addr().String(), Load: filepath.Join(dir, "load"), Capacity: capacity,
	}
	if change != nil {
		change(&s.settings)
	}
	s.newClient()
	s.run()
	return s
}

// answer is the backend. A request to /wait waits until it is released or abandoned.
func (s *server) answer(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/wait") {
		select {
		case <-s.release:
		case <-r.Context().Done():
		}
	}
	fmt.Fprintln(w, "done")
}

// newClient gives the test a client with connections of its own.
func (s *server) newClient() {
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	if s.HTTP2 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	}
	s.client = &http.Client{Transport: transport}
	s.Cleanup(transport.CloseIdleConnections)
}

func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testhost.Must(t, err)
	defer l.Close()
	return l.Addr().String()
}

// writeConfig writes the server's configuration file, and returns its path.
func (s *server) writeConfig() string {
	text := apacheConfig
	if s.name == "nginx" {
		text = nginxConfig
	}
	var b bytes.Buffer
	testhost.Must(s, template.Must(template.New("").Parse(text)).Execute(&b, s.settings))
	path := filepath.Join(s.Dir, "conf")
	testhost.Must(s, os.WriteFile(path, b.Bytes(), 0o644))
	return path
}

// run starts the server, and waits until it serves requests.
func (s *server) run() {
	s.Helper()
	path := s.writeConfig()
	// Workers run as www-data. They use this folder, but not that of the load.
	testhost.Must(s, os.Chmod(s.Dir, 0o777))
	s.cmd = exec.Command("apache2", "-f", path, "-D", "FOREGROUND")
	if s.name == "nginx" {
		s.cmd = exec.Command("nginx", "-p", s.Dir, "-c", path, "-e", filepath.Join(s.Dir, "error.log"), "-g", "daemon off;")
	}
	var out bytes.Buffer
	s.cmd.Stdout, s.cmd.Stderr = &out, &out
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Apache ends its process group
	testhost.Must(s, s.cmd.Start())
	s.ended = make(chan error)
	go func() {
		defer close(s.ended)
		_ = s.cmd.Wait()
	}()
	s.Cleanup(func() {
		s.stop()
		if s.Failed() {
			log, _ := os.ReadFile(filepath.Join(s.Dir, "error.log"))
			s.Logf("%s\n%s", out.String(), log)
		}
	})
	testhost.Eventually(s, func() error {
		select {
		case <-s.ended:
			s.Fatalf("%s has ended", s.name)
		default:
		}
		return s.get("/")
	})
	if m, err := loadshm.OpenMap(s.Load); err == nil {
		s.load = m
		s.Cleanup(func() { testhost.Must(s, m.Close()) })
	}
}

// stop ends the server and waits for it. It does nothing if the server has ended.
func (s *server) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	<-s.ended
}

// get makes a request.
func (s *server) get(path string) error { return s.getUntil(context.Background(), path) }

// getUntil makes a request, and abandons it when the context ends.
func (s *server) getUntil(ctx context.Context, path string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.Listen+path, nil)
	if err != nil {
		return err
	}
	answer, err := s.client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	var body bytes.Buffer
	if _, err := body.ReadFrom(answer.Body); err != nil {
		return err
	}
	if s.HTTP2 != (answer.ProtoMajor == 2) {
		return fmt.Errorf("%s: the protocol is %s", path, answer.Proto)
	}
	if answer.StatusCode != http.StatusOK || body.String() != "done\n" {
		return fmt.Errorf("%s: %s, %q", path, answer.Status, body.String())
	}
	return nil
}

// waitBeside begins n requests beside others that wait, and returns when the load shows all. The
// requests end when s.release has values for them. The returned function waits for that, and returns
// the errors of the requests.
func (s *server) waitBeside(others, n int) (finish func() error) {
	s.Helper()
	errs := make(chan error, n)
	for range n {
		go func() { errs <- s.get("/wait") }()
	}
	s.expect(uint32(others+n), s.capacity())
	return func() (err error) {
		for range n {
			err = errors.Join(err, <-errs)
		}
		return err
	}
}

// wait makes n requests at the same time. The load must show them before they end.
func (s *server) wait(n int) {
	s.Helper()
	finish := s.waitBeside(0, n)
	for range n {
		s.release <- struct{}{}
	}
	testhost.Must(s, finish())
}

func (s *server) capacity() uint32 { return uint32(s.Capacity) }

// read returns the load. It does what an agent does, too: it looks for ended processes.
func (s *server) read() (busy, capacity uint32, err error) {
	if s.load == nil {
		return loadshm.Read(s.Load)
	}
	if err := s.load.ClearEnded(); err != nil {
		return 0, 0, err
	}
	return s.load.Sum()
}

// expect waits until the server has a load. A capacity of 0 means that no process reports.
func (s *server) expect(busy, capacity uint32) {
	s.Helper()
	testhost.Eventually(s, func() error {
		gotBusy, gotCapacity, err := s.read()
		if errors.Is(err, loadshm.ErrNobody) {
			err = nil
		}
		if err == nil && (gotBusy != busy || gotCapacity != capacity) {
			err = fmt.Errorf("the load is %d of %d, want %d of %d", gotBusy, gotCapacity, busy, capacity)
		}
		return err
	})
}

// idle waits until no request counts. It closes kept connections first if they occupy workers.
func (s *server) idle() {
	s.Helper()
	if s.keepsBusy {
		s.client.CloseIdleConnections()
	}
	s.expect(0, s.capacity())
}

// workers returns the numbers of the server's worker processes.
func (s *server) workers() (all []int) {
	s.Helper()
	main := strconv.Itoa(s.cmd.Process.Pid)
	text, err := os.ReadFile("/proc/" + main + "/task/" + main + "/children")
	testhost.Must(s, err)
	for _, field := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(field)
		testhost.Must(s, err)
		all = append(all, pid)
	}
	return all
}

// reload makes the server read its configuration again, without interrupting requests. It returns
// when the former workers serve no further requests.
func (s *server) reload() {
	s.Helper()
	signal := syscall.SIGUSR1
	if s.name == "nginx" {
		signal = syscall.SIGHUP
	}
	before := map[int]bool{}
	for _, pid := range s.workers() {
		before[pid] = true
	}
	testhost.Must(s, s.cmd.Process.Signal(signal))
	testhost.Eventually(s, func() error {
		for _, pid := range s.workers() {
			if !before[pid] {
				return nil
			}
		}
		return errors.New("no new worker")
	})
}
