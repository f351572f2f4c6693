// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
)

// NotifySocket receives the state notifications of one process: datagrams of NAME=VALUE lines, as
// sd_notify(3) describes. It exists only while the lab waits for a state.
type NotifySocket struct {
	conn *net.UnixConn
	path string
}

// ListenNotify opens a socket at a path. It replaces a socket that an interrupted wait has left
// there.
func ListenNotify(path string) (*NotifySocket, error) {
	if err := os.RemoveAll(path); err != nil {
		return nil, err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("notify socket: %w", err)
	}
	return &NotifySocket{conn, path}, nil
}

// Close removes the socket.
func (s *NotifySocket) Close() {
	s.conn.Close()
	os.Remove(s.path)
}

// Await returns nil when the states have arrived in the given order. It returns an error if the
// context ends before that, or if the channel exited is closed before that. exited is closed when
// the process has ended. If it is nil, Await does not notice the end of the process.
func (s *NotifySocket) Await(ctx context.Context, exited <-chan struct{}, states ...string) error {
	done := make(chan error, 1)
	go func() { done <- s.read(states) }()
	var err error
	select {
	case err := <-done:
		return err
	case <-exited:
		err = errEnded
	case <-ctx.Done():
		err = fmt.Errorf("waiting for %s: %w", strings.Join(states, ", "), context.Cause(ctx))
	}
	s.conn.Close() // so that read returns
	<-done
	return err
}

// read returns when the states have arrived in the given order. One datagram may have several.
func (s *NotifySocket) read(states []string) error {
	buf := make([]byte, 4096)
	for len(states) > 0 {
		n, err := s.conn.Read(buf)
		if err != nil {
			return err
		}
		lines := strings.Split(string(buf[:n]), "\n")
		for len(states) > 0 && slices.Contains(lines, states[0]) {
			states = states[1:]
		}
	}
	return nil
}
