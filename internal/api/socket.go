// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
)

// requestTimeout is how long a request may take. A reload takes at most two seconds more than it
// needs to build tables.
const requestTimeout = time.Minute

// Socket serves the API of a balancer or an agent.
type Socket struct {
	log      *slog.Logger
	listener net.Listener
}

// Listen opens the socket of an instance. Members of the group may use the socket. If group is
// empty, it is the group of the process. Listen returns an error if there is no such group, or if
// the socket cannot be opened. A caller that never calls Run must call Close.
func Listen(instance, group string, log *slog.Logger) (*Socket, error) {
	path := rundir.SocketFile(instance)
	listener, err := listenAt(path, group)
	if err != nil {
		return nil, fmt.Errorf("open the socket %s: %w", path, err)
	}
	return &Socket{log: log, listener: listener}, nil
}

// listenAt opens a socket. The caller holds the lock of the instance. So if there is a socket
// already, a process that was killed has left it, and listenAt removes it.
func listenAt(path, group string) (net.Listener, error) {
	id, err := groupID(group)
	if err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// Nobody else may use the socket before its group is set. The umask holds for the whole process:
	// files that other goroutines make at this moment are restricted, too.
	before := unix.Umask(0o177)
	listener, err := net.Listen("unix", path)
	unix.Umask(before)
	if err != nil {
		return nil, err
	}
	err = os.Chown(path, -1, id)
	if err == nil {
		err = os.Chmod(path, 0o660)
	}
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// groupID returns the ID of a group, or that of the group of the process if the name is empty.
func groupID(name string) (int, error) {
	if name == "" {
		return os.Getegid(), nil
	}
	group, err := user.LookupGroup(name)
	if err != nil {
		return 0, fmt.Errorf("api.group %q: %w", name, err)
	}
	return strconv.Atoi(group.Gid)
}

// Close closes the socket and removes it.
func (s *Socket) Close() error { return s.listener.Close() }

// Run answers requests by a handler until the context ends.
func (s *Socket) Run(ctx context.Context, handler http.Handler) error {
	server := &http.Server{
		Handler:           withStreams(ctx, handler),
		ConnContext:       withPeer,
		ReadHeaderTimeout: requestTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	if err := daemon.ServeHTTP(ctx, server, s.listener); err != nil {
		return fmt.Errorf("socket %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// withPeer returns a context in which the user at the other end of a connection is the actor of
// changes.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	return events.WithActor(ctx, sync.OnceValue(func() string { return peerOf(c) }))
}

// peerOf returns the user at the other end of a connection. It is empty if the user is unknown.
func peerOf(c net.Conn) string {
	socket, ok := c.(syscall.Conn)
	if !ok {
		return ""
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return ""
	}
	var peer *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err != nil || failed != nil {
		return ""
	}
	return events.User(peer.Uid)
}
