// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"text/template"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// apache is a real Apache httpd in its own network namespace. Requests for /slow last until they
// are released.
type apache struct {
	t       *testing.T
	dir     string
	network *testhost.Namespace
	client  *http.Client
	arrived atomic.Int32  // number of slow requests so far
	release chan struct{} // each element ends one slow request
	process *exec.Cmd

	complaints strings.Builder // output to standard error; complete when the process has ended
}

const modules = "/usr/lib/apache2/modules"

var httpdConf = template.Must(template.New("").Parse(`
ServerRoot {{.Dir}}
ServerName apache.test
PidFile {{.Dir}}/pid
ErrorLog {{.Dir}}/error.log
DocumentRoot /usr
DefaultRuntimeDir {{.Dir}}
Listen 127.0.0.1:80
User nobody
Group nogroup
LoadModule mpm_{{.MPM}}_module {{.Modules}}/mod_mpm_{{.MPM}}.so
LoadModule authz_core_module {{.Modules}}/mod_authz_core.so
LoadModule status_module {{.Modules}}/mod_status.so
LoadModule proxy_module {{.Modules}}/mod_proxy.so
LoadModule proxy_http_module {{.Modules}}/mod_proxy_http.so
ScoreBoardFile {{.Dir}}/scoreboard
GracefulShutdownTimeout 0
KeepAliveTimeout 3600
{{if eq .MPM "prefork" -}}
StartServers 10
ServerLimit 12
MaxRequestWorkers 10
MinSpareServers 1
MaxSpareServers 12
{{- else -}}
StartServers 4
ServerLimit 6
ThreadLimit 8
ThreadsPerChild 4
MaxRequestWorkers 16
MinSpareThreads 1
MaxSpareThreads 16
{{- end}}
<Location /server-status>
SetHandler server-status
</Location>
ProxyPass /slow http://127.0.0.1:81/ disablereuse=on
`))

func newApache(t *testing.T, mpm string) *apache {
	for _, file := range []string{"mod_mpm_" + mpm + ".so", "mod_status.so", "mod_proxy_http.so"} {
		if _, err := os.Stat(filepath.Join(modules, file)); err != nil {
			t.Skipf("needs Apache httpd (package apache2-bin): %v", err)
		}
	}
	a := &apache{t: t, dir: t.TempDir(), network: testhost.NewNamespace(t), release: make(chan struct{})}
	conf, err := os.Create(filepath.Join(a.dir, "httpd.conf"))
	testhost.Must(t, err)
	defer conf.Close()
	testhost.Must(t, httpdConf.Execute(conf, map[string]string{"Dir": a.dir, "MPM": mpm, "Modules": modules}))
	a.client = &http.Client{Transport: &http.Transport{DialContext: a.dial, DisableKeepAlives: true}}
	a.startBackend()
	t.Cleanup(a.kill)
	a.start()
	return a
}

func (a *apache) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = a.network.Do(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, "127.0.0.1:80")
		return err
	})
	return conn, err
}

// startBackend starts the server that answers Apache's requests for /slow.
func (a *apache) startBackend() {
	var listener net.Listener
	err := a.network.Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:81")
		return err
	})
	testhost.Must(a.t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.arrived.Add(1)
		select {
		case <-a.release:
		case <-r.Context().Done():
		}
	})}
	ended := make(chan error)
	go func() { ended <- server.Serve(listener) }()
	a.t.Cleanup(func() {
		server.Close()
		<-ended
	})
}

func (a *apache) start() {
	a.t.Helper()
	a.process = exec.Command("/usr/sbin/apache2", "-f", filepath.Join(a.dir, "httpd.conf"), "-D", "FOREGROUND")
	a.process.Stderr = &a.complaints
	a.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	testhost.Must(a.t, a.network.Do(a.process.Start))
	a.eventually("it serves", func() error {
		_, err := a.status()
		return err
	})
}

// kill ends Apache and all its children.
func (a *apache) kill() {
	_ = syscall.Kill(-a.process.Process.Pid, syscall.SIGKILL)
	_ = a.process.Wait()
	_ = os.Remove(posixShared(a.scoreboard())) // Apache does the same when it stops normally
	if a.t.Failed() {
		log, _ := os.ReadFile(filepath.Join(a.dir, "error.log"))
		a.t.Logf("Apache said:\n%s%s", a.complaints.String(), log[max(0, len(log)-4000):])
	}
}

func (a *apache) signal(s syscall.Signal) {
	a.t.Helper()
	testhost.Must(a.t, a.process.Process.Signal(s))
}

func (a *apache) scoreboard() string { return filepath.Join(a.dir, "scoreboard") }

// eventually waits until check returns no error. It polls, because nothing tells when that is.
func (a *apache) eventually(what string, check func() error) {
	a.t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			a.t.Fatalf("waited in vain until %s: %v", what, err)
		}
	}
}

// status returns the status page of mod_status.
func (a *apache) status() (map[string]int, error) {
	response, err := a.client.Get("http://apache/server-status?auto")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(response.Status)
	}
	values := map[string]int{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		key, text, _ := strings.Cut(lines.Text(), ": ")
		if value, err := strconv.Atoi(text); err == nil {
			values[key] = value
		}
	}
	return values, lines.Err()
}

// slow sends requests that wait, and returns when all have reached a worker.
func (a *apache) slow(n int) {
	a.t.Helper()
	want := a.arrived.Load() + int32(n)
	for range n {
		go func() {
			response, err := a.client.Get("http://apache/slow")
			if err == nil {
				_, _ = io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
		}()
	}
	a.eventually("requests arrive", func() error {
		if got := a.arrived.Load(); got < want {
			return fmt.Errorf("%d of %d did", got, want)
		}
		return nil
	})
}

// finish ends slow requests.
func (a *apache) finish(n int) {
	a.t.Helper()
	for range n {
		select {
		case a.release <- struct{}{}:
		case <-time.After(limit):
			a.t.Fatalf("no slow request is left to finish, of %d", n)
		}
	}
}

// expect waits until the source reads a load, and compares it with the count of mod_status, which
// includes the worker of the status request.
func (a *apache) expect(source *Apache, busy, capacity uint32) {
	a.t.Helper()
	a.eventually(fmt.Sprintf("%d of %d workers are busy", busy, capacity), func() error {
		got, err := source.Read()
		if err != nil {
			return err
		}
		if want := (Load{busy, capacity}); got != want {
			return fmt.Errorf("read %+v", got)
		}
		return nil
	})
	a.eventually("mod_status agrees", func() error {
		status, err := a.status()
		if err != nil {
			return err
		}
		if got := status["BusyWorkers"] + status["GracefulWorkers"] - 1; got != int(busy) {
			return fmt.Errorf("it counts %d busy workers, the source read %d: %v", got, busy, status)
		}
		return nil
	})
}

func (a *apache) generation() int {
	a.t.Helper()
	status, err := a.status()
	testhost.Must(a.t, err)
	return status["ParentServerMPMGeneration"]
}

// awaitGeneration waits until Apache has restarted.
func (a *apache) awaitGeneration(old int) {
	a.t.Helper()
	a.eventually("Apache has restarted", func() error {
		status, err := a.status()
		if err != nil {
			return err
		}
		if status["ParentServerMPMGeneration"] == old {
			return fmt.Errorf("it is still in generation %d", old)
		}
		return nil
	})
}

func TestApache(t *testing.T) {
	for _, c := range []struct {
		mpm      string
		capacity uint32 // capacity in the scoreboard
		keeping  uint32 // workers that one kept-alive connection occupies
		old      uint32 // workers that count for each request from before a graceful restart
	}{
		{mpm: "prefork", capacity: 12, keeping: 1, old: 1},
		{mpm: "event", capacity: 6 * 4, keeping: 0, old: 0},
	} {
		t.Run(c.mpm, func(t *testing.T) {
			a := newApache(t, c.mpm)
			source := NewApache(a.scoreboard(), 0)
			a.expect(source, 0, c.capacity)
			for _, n := range []uint32{1, 4, 7} {
				a.slow(int(n))
				a.expect(source, n, c.capacity)
				a.finish(int(n))
				a.expect(source, 0, c.capacity)
			}
			a.expect(NewApache(a.scoreboard(), 10), 0, 10)

			connection := a.keepAlive()
			a.expect(source, c.keeping, c.capacity)
			connection.Close()
			a.expect(source, 0, c.capacity)

			// A graceful restart lets old workers complete their requests.
			a.slow(3)
			generation := a.generation()
			a.signal(unix.SIGUSR1)
			a.awaitGeneration(generation)
			a.expect(source, 3*c.old, c.capacity)
			a.slow(2)
			a.expect(source, 3*c.old+2, c.capacity)
			a.finish(5)
			a.expect(source, 0, c.capacity)

			// A restart clears the scoreboard.
			generation = a.generation()
			a.signal(unix.SIGHUP)
			a.awaitGeneration(generation)
			a.slow(6)
			a.expect(source, 6, c.capacity)
			a.finish(6)
			a.expect(source, 0, c.capacity)

			// A stop removes the scoreboard, and a start makes a new one.
			a.signal(unix.SIGTERM)
			if err := a.process.Wait(); err != nil {
				t.Error(err)
			}
			if _, err := source.Read(); err == nil || !strings.Contains(err.Error(), "start Apache with this ScoreBoardFile") {
				t.Errorf("of an Apache that has ended: %v", err)
			}
			a.start()
			a.slow(2)
			a.expect(source, 2, c.capacity)
			a.finish(2)
		})
	}
}

// keepAlive returns a connection on which one request was answered.
func (a *apache) keepAlive() net.Conn {
	a.t.Helper()
	conn, err := a.dial(context.Background(), "tcp", "")
	testhost.Must(a.t, err)
	if _, err := io.WriteString(conn, "GET /server-status?auto HTTP/1.1\r\nHost: apache\r\n\r\n"); err != nil {
		a.t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		a.t.Fatal(err)
	}
	return conn
}

// board is a scoreboard for tests.
func board(l layout, servers, threads int) []byte {
	content := make([]byte, l.size(servers, threads))
	binary.NativeEndian.PutUint32(content[globalServerLimit:], uint32(servers))
	binary.NativeEndian.PutUint32(content[globalThreadLimit:], uint32(threads))
	for i := range servers {
		binary.NativeEndian.PutUint32(content[l.global+i*l.process+processPID:], uint32(100+i))
	}
	return content
}

func setState(content []byte, l layout, servers, threads, server, thread int, state byte) {
	content[l.global+servers*l.process+(server*threads+thread)*l.worker+workerStatus] = state
}

func TestEveryLayout(t *testing.T) {
	for _, l := range layouts {
		for _, limits := range [][2]int{{1, 1}, {2, 1}, {1, 2}, {16, 64}, {150, 1}, {7, 13}, {10000, 1}} {
			servers, threads := limits[0], limits[1]
			content := board(l, servers, threads)
			setState(content, l, servers, threads, servers-1, threads-1, 4)
			s, err := parseScoreboard(content)
			if err != nil || s.layout != l {
				t.Errorf("limits %v: layout %v, error %v; want %v", limits, s.layout, err, l)
				continue
			}
			if got, want := s.load(), (Load{1, uint32(servers * threads)}); got != want {
				t.Errorf("limits %v, layout %v: %+v, want %+v", limits, l, got, want)
			}
		}
	}
}

func TestStatesOfWorkers(t *testing.T) {
	// The states from reading to graceful in include/scoreboard.h.
	busy := []byte{3, 4, 5, 6, 7, 8, 9}
	l := layouts[len(layouts)-1]
	for state := range 256 {
		content := board(l, 4, 3)
		for server := range 4 {
			setState(content, l, 4, 3, server, 1, byte(state))
		}
		content[l.global+1*l.process+processQuiescing] = 1
		binary.NativeEndian.PutUint32(content[l.global+2*l.process+processPID:], 0)
		want := Load{0, 4 * 2}
		if state == 0 {
			want.Capacity = 4
		}
		if slices.Contains(busy, byte(state)) {
			want.Busy = 2
		}
		s, err := parseScoreboard(content)
		testhost.Must(t, err)
		if got := s.load(); got != want {
			t.Errorf("state %d: %+v, want %+v", state, got, want)
		}
	}
}

func TestScoreboardErrorsNamePathAndValue(t *testing.T) {
	good := sized(board(layouts[4], 4, 2))
	with := func(offset int, value uint32) []byte {
		content := slices.Clone(good)
		binary.NativeEndian.PutUint32(content[offset:], value)
		return content
	}
	dir := t.TempDir()
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"empty":    {nil, "empty: size is 0 bytes, outside 8 to"},
		"text":     {[]byte("Hello, world\n"), "text: not shared memory of Apache: its first 8 bytes give the size"},
		"tiny":     {sized(make([]byte, 16)), "tiny: size is 16 bytes, too small for a scoreboard"},
		"cut":      {good[:len(good)-8], fmt.Sprintf("give the size %d, but its size is %d", len(good), len(good)-8)},
		"larger":   {sized(append(slices.Clone(good[8:]), 0, 0, 0, 0, 0, 0, 0, 0)), "which does not fit ServerLimit 4 and ThreadLimit 2"},
		"none":     {with(8, 0), "none: ServerLimit is 0, outside 1 to 200000"},
		"negative": {with(8, 1<<31), "negative: ServerLimit is -2147483648, outside"},
		"huge":     {with(12, 100001), "huge: ThreadLimit is 100001, outside 1 to 100000"},
		"absent":   {binary.NativeEndian.AppendUint64(nil, 3000), "absent: open its System V shared memory, key 0x"},
	} {
		path := filepath.Join(dir, name)
		testhost.Must(t, os.WriteFile(path, c.content, 0o600))
		if _, err := NewApache(path, 0).Read(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
	fifo := filepath.Join(dir, "fifo")
	testhost.Must(t, unix.Mkfifo(fifo, 0o600))
	if _, err := NewApache(fifo, 0).Read(); err == nil || !strings.Contains(err.Error(), "fifo: not a regular file") {
		t.Errorf("FIFO: error %v", err)
	}
}

// sized adds the size that APR writes before shared memory.
func sized(content []byte) []byte {
	return append(binary.NativeEndian.AppendUint64(nil, uint64(sizeWord+len(content))), content...)
}

// The same scoreboard in each of the three forms in which APR keeps shared memory.
func TestWhereTheScoreboardIs(t *testing.T) {
	l := layouts[4]
	content := board(l, 4, 2)
	setState(content, l, 4, 2, 3, 1, 4)
	want := Load{1, 8}
	for name, lay := range map[string]func(*testing.T, string){
		"file": func(t *testing.T, path string) {
			testhost.Must(t, os.WriteFile(path, sized(content), 0o600))
		},
		"POSIX": func(t *testing.T, path string) {
			if err := os.WriteFile(posixShared(path), sized(content), 0o600); err != nil {
				t.Skip(err)
			}
			t.Cleanup(func() { os.Remove(posixShared(path)) })
		},
		"System V": func(t *testing.T, path string) {
			size := binary.NativeEndian.AppendUint64(nil, uint64(len(content)))
			testhost.Must(t, os.WriteFile(path, size, 0o600))
			layInSystemV(t, path, content)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "scoreboard")
			lay(t, path)
			source := NewApache(path, 0)
			for range 2 {
				if got, err := source.Read(); err != nil || got != want {
					t.Fatalf("read %+v, error %v; want %+v", got, err, want)
				}
			}
		})
	}
}

func layInSystemV(t *testing.T, path string, content []byte) {
	t.Helper()
	key, err := systemVKey(path)
	testhost.Must(t, err)
	id, err := unix.SysvShmGet(key, len(content), unix.IPC_CREAT|unix.IPC_EXCL|0o600)
	testhost.Must(t, err)
	t.Cleanup(func() { _, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil) })
	shared, err := unix.SysvShmAttach(id, 0, 0)
	testhost.Must(t, err)
	copy(shared, content)
	testhost.Must(t, unix.SysvShmDetach(shared))
}

func BenchmarkApache(b *testing.B) {
	path := filepath.Join(b.TempDir(), "scoreboard")
	testhost.Must(b, os.WriteFile(path, sized(board(layouts[4], 16, 64)), 0o600))
	source := NewApache(path, 0)
	for b.Loop() {
		if _, err := source.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
