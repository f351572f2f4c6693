// SPDX-License-Identifier: Apache-2.0

// Package etcdtest runs real servers of etcd for tests, and puts faults between them and their
// clients.
package etcdtest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/testhost"
)

// Server is a member of a cluster of etcd, which may have no other member.
type Server struct {
	t      testing.TB
	name   string
	dir    string
	place  *netdev.Namespace // in which the process runs; nil: that of the test
	listen string            // address and port for clients
	peer   string            // URL for other members; empty: a free port for each run
	// cluster has the names and URLs of all members, as etcd takes them; empty: only this one.
	cluster  string
	existing bool // joins a cluster that exists
	scheme   string
	flags    []string
	run      *exec.Cmd
	ended    chan struct{} // closed when the process has ended
	output   bytes.Buffer
}

// Start starts a server that listens for clients on a local port, and ends it with the test. The
// flags are those of etcd. Start skips the test if etcd is not installed.
func Start(t testing.TB, flags ...string) *Server {
	t.Helper()
	return StartAt(t, FreePort(t), "http", flags...)
}

// StartAt starts a server that listens for clients on an address and port.
func StartAt(t testing.TB, listen, scheme string, flags ...string) *Server {
	t.Helper()
	testhost.NeedCommand(t, "etcd", "etcd-server")
	s := &Server{t: t, name: "test", dir: t.TempDir(), listen: listen, scheme: scheme, flags: flags}
	t.Cleanup(s.Kill)
	s.Run()
	return s
}

// FreePort returns a local address with a port that nobody uses. While a server is down, the kernel
// gives its port to no other socket, because the port is below net.ipv4.ip_local_port_range.
func FreePort(t testing.TB) string {
	t.Helper()
	const first, count, attempts = 20000, 12000, 100
	var last error
	for range attempts {
		address := fmt.Sprintf("127.0.0.1:%d", first+rand.N(count))
		listener, err := net.Listen("tcp", address)
		if err == nil {
			_ = listener.Close()
			return address
		}
		last = err
	}
	t.Fatal(last)
	return ""
}

// Address returns the address and port for clients.
func (s *Server) Address() string { return s.listen }

// Endpoint returns the URL for clients.
func (s *Server) Endpoint() string { return s.scheme + "://" + s.listen }

// Run starts the server, for the first time or again after Kill. It waits until the server accepts
// connections.
func (s *Server) Run() {
	s.t.Helper()
	peer, cluster, state := s.peer, s.cluster, "new"
	if peer == "" {
		peer = "http://" + FreePort(s.t)
	}
	if cluster == "" {
		cluster = s.name + "=" + peer
	}
	if s.existing {
		state = "existing"
	}
	s.output.Reset()
	s.run = exec.Command("etcd", append([]string{
		"--name=" + s.name, "--data-dir=" + filepath.Join(s.dir, "data"),
		"--listen-client-urls=" + s.Endpoint(), "--advertise-client-urls=" + s.Endpoint(),
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=" + cluster, "--initial-cluster-state=" + state,
		"--logger=zap", "--log-level=warn",
	}, s.flags...)...)
	s.run.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64") // else it refuses to run there
	s.run.Stdout, s.run.Stderr = &s.output, &s.output
	if err := s.start(); err != nil {
		s.t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for {
		connection, err := s.Dial(s.t.Context())
		if err == nil {
			_ = connection.Close()
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("etcd does not listen on %s: %v\n%s", s.listen, err, s.output.String())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// start starts the process so that it does not outlive a test that is killed. The process ends with
// the thread that has started it (prctl(2)), so this thread does nothing else.
func (s *Server) start() error {
	started := make(chan error, 2)
	s.ended = make(chan struct{})
	go func() {
		defer close(s.ended)
		err := s.inside(func() error {
			s.run.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			err := s.run.Start()
			started <- err
			if err == nil {
				_ = s.run.Wait()
			}
			return nil
		})
		started <- err // if the function did not run
	}()
	return <-started
}

// inside runs a function in the namespace of the server, on a thread that does nothing else.
func (s *Server) inside(f func() error) error {
	if s.place != nil {
		return s.place.Do(f)
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	return f()
}

// Dial connects with the server, in its namespace.
func (s *Server) Dial(ctx context.Context) (connection net.Conn, err error) {
	dial := func() (err error) {
		d := net.Dialer{Timeout: time.Second}
		connection, err = d.DialContext(ctx, "tcp", s.listen)
		return err
	}
	if s.place == nil {
		err = dial()
	} else {
		err = s.place.Do(dial)
	}
	return connection, err
}

// Kill ends the server at once.
func (s *Server) Kill() {
	if s.run == nil {
		return
	}
	_ = s.run.Process.Kill()
	<-s.ended
	s.run = nil
}

// Stop suspends the server: it accepts connections and says nothing. Continue ends that. Stop
// returns when all threads have stopped.
func (s *Server) Stop() {
	s.t.Helper()
	s.signal(syscall.SIGSTOP)
	tasks := fmt.Sprintf("/proc/%d/task/*/stat", s.run.Process.Pid)
	for deadline := time.Now().Add(time.Minute); runs(tasks); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatal("etcd does not stop")
		}
	}
}

// runs tells whether at least one thread is not stopped. The argument is a pattern of files
// (proc_pid_stat(5)).
func runs(stats string) bool {
	files, _ := filepath.Glob(stats)
	for _, file := range files {
		stat, err := os.ReadFile(file)
		_, state, _ := bytes.Cut(stat, []byte(") "))
		if err == nil && !bytes.HasPrefix(state, []byte("T")) {
			return true
		}
	}
	return false
}

// Continue ends Stop.
func (s *Server) Continue() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(signal syscall.Signal) {
	s.t.Helper()
	if err := s.run.Process.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
}

// Lose removes the content of a server that was killed.
func (s *Server) Lose() {
	s.t.Helper()
	if err := os.RemoveAll(filepath.Join(s.dir, "data")); err != nil {
		s.t.Fatal(err)
	}
}

// BackUp copies the content of a server that was killed, and Restore brings it back.
func (s *Server) BackUp() { s.copy("data", "backup") }

// Restore brings the content of BackUp back.
func (s *Server) Restore() {
	s.Lose()
	s.copy("backup", "data")
}

// copy copies the server's folder from to the folder to, which must not exist.
func (s *Server) copy(from, to string) {
	s.t.Helper()
	if err := os.CopyFS(filepath.Join(s.dir, to), os.DirFS(filepath.Join(s.dir, from))); err != nil {
		s.t.Fatal(err)
	}
	// CopyFS makes files readable for all, and etcd insists on a private directory.
	if err := os.Chmod(filepath.Join(s.dir, to), 0o700); err != nil {
		s.t.Fatal(err)
	}
}

// Client returns a client that is closed with the test.
func (s *Server) Client() *clientv3.Client {
	s.t.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return s.Dial(ctx)
		})},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Compact forgets all revisions but the last.
func (s *Server) Compact() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	c := s.Client()
	now, err := c.Get(ctx, "any")
	if err == nil {
		_, err = c.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		s.t.Fatal(fmt.Errorf("compact: %w", err))
	}
}
