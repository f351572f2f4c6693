// SPDX-License-Identifier: Apache-2.0

// Package application is an HTTP server for the lab, with emulated processors. A request takes as
// long as its work would take on a server with the given cores, but timers take the place of the
// work. So a small machine can run many servers, each at a known load.
//
// Everything in front of the processors is real. A worker serves one connection at a time, as in
// Apache's MPM prefork. While all workers are busy, connections wait in the kernel's accept queue
// (6LB, section VI-A; SRLB, section IV).
package application

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/loadshm"
	"github.com/segue-lb/segue/research/sim/processor"
)

// Config describes a server.
type Config struct {
	Name       string   // the server's name in responses
	Listen     []string // addresses with ports; at least one
	Backlog    int      // largest number of connections in the accept queue (listen(2)); 0 or more
	Workers    int      // largest number of connections that are served at a time; 1 to MaxWorkers
	Processors processor.Config
	Demand     Demand
	Colocated  Schedule // of co-located work; its times count from the server's start
	// Loads are the files and the pins of maps in which the server reports how many workers it has,
	// and how many of them are busy (package loadshm).
	Loads []string
	// Files is a folder with files that are served without work. If it is empty, no files are
	// served.
	Files string
	// Uploads is the folder to which PUT /upload/NAME writes. If it is empty, there are no uploads.
	Uploads string
	// Control is the address of a second HTTP server, which needs no workers. It shows the state of
	// the server, and changes the schedule of co-located work. If Control is empty, there is none.
	Control string
	// Idle is how long a worker waits for a request on an open connection; positive.
	Idle time.Duration
	Log  *slog.Logger // for unexpected errors; the default is slog.Default
}

// MaxWorkers is the largest number of workers.
const MaxWorkers = 65536

// Validate returns an error that names the field and its value, unless all fields are in range.
func (c Config) Validate() error {
	switch {
	case c.Name == "":
		return errors.New("name: required")
	case len(c.Listen) == 0:
		return errors.New("listen: at least one address is required")
	case c.Backlog < 0:
		return fmt.Errorf("backlog %d: must not be negative", c.Backlog)
	case c.Workers < 1 || c.Workers > MaxWorkers:
		return fmt.Errorf("workers %d: must be 1 to %d", c.Workers, MaxWorkers)
	case c.Idle <= 0:
		return fmt.Errorf("idle-timeout %v: must be positive", c.Idle)
	}
	return c.Processors.Validate()
}

// Server is an application server.
type Server struct {
	config     Config
	demand     *drawer
	processors *processors
	workers    *workers
	loads      []*loadshm.Reporter
	listeners  []*listener
	control    net.Listener // nil if there is none
	requests   atomic.Uint64
}

// New opens the server's sockets and files. If it succeeds, the caller must call Run or Close
// afterwards. If it fails, it closes what it has opened.
func New(ctx context.Context, c Config) (server *Server, err error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Log = cmp.Or(c.Log, slog.Default())
	s := &Server{config: c, demand: newDrawer(c.Demand, c.Name)}
	defer func() {
		if err != nil {
			server, err = nil, errors.Join(err, s.Close())
		}
	}()
	if s.processors, err = newProcessors(c.Processors); err != nil {
		return nil, err
	}
	for _, path := range c.Loads {
		load, err := loadshm.Open(path, uint32(c.Workers))
		if err != nil {
			return nil, fmt.Errorf("load: %w", err)
		}
		s.loads = append(s.loads, load)
	}
	s.workers = newWorkers(c.Workers, s.loads)
	for _, address := range c.Listen {
		l, err := listen(ctx, address, c.Backlog, s.workers)
		if err != nil {
			return nil, err
		}
		s.listeners = append(s.listeners, l)
	}
	if c.Control != "" {
		if s.control, err = net.Listen("tcp", c.Control); err != nil {
			return nil, fmt.Errorf("control: %w", err)
		}
	}
	return s, s.processors.colocate(c.Colocated)
}

// Close releases everything that New opened. It is not needed after Run.
func (s *Server) Close() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Close())
	}
	if s.control != nil {
		if err := s.control.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if s.processors != nil {
		errs = append(errs, s.processors.close())
	}
	for _, load := range s.loads {
		errs = append(errs, load.Close())
	}
	return errors.Join(errs...)
}

// Run serves until the context ends. Then it closes all connections immediately, as Apache and
// nginx do on SIGTERM, and releases everything that New opened.
func (s *Server) Run(ctx context.Context) error {
	application := s.newHTTPServer(s)
	application.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed { // the connection's worker is idle again
			s.workers.end()
		}
	}
	control := s.newHTTPServer(s.controlHandler())
	group, ctx := errgroup.WithContext(ctx)
	// The processors outlive ctx: they stop when the connections are closed.
	processing, stopProcessing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopProcessing()
	group.Go(func() error { return s.processors.run(processing) })
	var serving sync.WaitGroup
	serve := func(server *http.Server, l net.Listener) {
		serving.Add(1)
		group.Go(func() error {
			defer serving.Done()
			return ignoreClosed(server.Serve(l))
		})
	}
	for _, l := range s.listeners {
		serve(application, l)
	}
	if s.control != nil {
		serve(control, s.control)
	}
	group.Go(func() error {
		<-ctx.Done()
		err := errors.Join(application.Close(), control.Close())
		serving.Wait()
		// Close again the connections that were accepted during the first Close.
		err = errors.Join(err, application.Close())
		// Give up the jobs that are left. Their connections are closed, so nobody waits for an
		// answer.
		stopProcessing()
		s.workers.busy.Wait()
		return err
	})
	return errors.Join(group.Wait(), s.Close())
}

// ignoreClosed returns nil for the error of a server that Close has ended, and other errors as they
// are.
func ignoreClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// newHTTPServer returns an HTTP server with the idle timeout and the log of the configuration.
func (s *Server) newHTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: s.config.Idle, IdleTimeout: s.config.Idle,
		ErrorLog: slog.NewLogLogger(s.config.Log.Handler(), slog.LevelWarn),
	}
}

// ServeHTTP answers a request. It answers the health check, stores an upload, or sends a file of
// Config.Files, all without work. Any other request brings work for the processors.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	w.Header().Set("X-Segue-Server", s.config.Name)
	if !keepsAlive(r) {
		w.Header().Set("Connection", "close")
	}
	upload, isUpload := strings.CutPrefix(r.URL.Path, "/upload/")
	switch {
	case r.URL.Path == "/healthz":
		io.WriteString(w, "ok\n")
	case isUpload && r.Method == http.MethodPut && s.config.Uploads != "":
		s.upload(w, r, upload)
	case !s.file(w, r):
		s.work(w, r)
	}
}

// keepsAlive tells whether the client asks explicitly to keep the connection open. HTTP/1.1 keeps
// it by default, but this server does not, so that connections do not occupy workers.
func keepsAlive(r *http.Request) bool {
	for _, field := range r.Header["Connection"] {
		for option := range strings.SplitSeq(field, ",") {
			if strings.EqualFold(strings.TrimSpace(option), "keep-alive") {
				return true
			}
		}
	}
	return false
}

// work answers a request with the server's name, when the processors have done the request's work.
// It answers with an error at once if the work is not known or not valid.
func (s *Server) work(w http.ResponseWriter, r *http.Request) {
	work, err := s.demand.work(r)
	if err != nil {
		status := http.StatusBadRequest
		if errors.Is(err, errUnknownQuery) {
			status = http.StatusNotFound
		}
		http.Error(w, err.Error(), status)
		return
	}
	served, err := s.processors.serve(work)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Server-Timing", served.String())
	w.Header().Set("Content-Type", "text/plain")
	io.WriteString(w, s.config.Name+"\n")
}

// String returns the value of a Server-Timing header field (W3C, Server Timing), with times in
// milliseconds.
func (s served) String() string {
	milliseconds := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	return fmt.Sprintf("queueing;dur=%.3f, service;dur=%.3f, sojourn;dur=%.3f",
		milliseconds(s.queueing), milliseconds(s.service), milliseconds(s.sojourn))
}

// file answers with the file of Config.Files that the path names, and returns true. If there is no
// such file, it returns false, and has not answered.
func (s *Server) file(w http.ResponseWriter, r *http.Request) bool {
	name := strings.TrimPrefix(path.Clean(r.URL.Path), "/")
	if s.config.Files == "" || name == "" {
		return false
	}
	file, err := os.OpenInRoot(s.config.Files, name)
	if err != nil {
		return false
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", info.ModTime(), file)
	return true
}

// upload stores the body of a request in Config.Uploads. The status is 201 for a new file, and 204
// if the body replaces a file.
func (s *Server) upload(w http.ResponseWriter, r *http.Request, name string) {
	if name == "" || !filepath.IsLocal(name) || strings.Contains(name, "/") {
		http.Error(w, fmt.Sprintf("%q: must be the name of a file", name), http.StatusBadRequest)
		return
	}
	target := filepath.Join(s.config.Uploads, name)
	status := http.StatusCreated
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		status = http.StatusNoContent
	}
	if err := store(target, r.Body); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.WriteHeader(status)
}

// store writes a file. The file has another name until it is complete.
func store(target string, content io.Reader) error {
	file, err := os.CreateTemp(filepath.Dir(target), ".upload-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = io.Copy(file, content)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), target)
}
