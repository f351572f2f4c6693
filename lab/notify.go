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

// notifySocket receives the state notifications of one process: datagrams of NAME=VALUE lines, as
// sd_notify(3) describes. It exists only during a wait.
type notifySocket struct {
	conn *net.UnixConn
	path string
}

func listenNotify(path string) (*notifySocket, error) {
	if err := os.RemoveAll(path); err != nil { // left by an interrupted wait
		return nil, err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("notify socket: %w", err)
	}
	return &notifySocket{conn, path}, nil
}

func (s *notifySocket) close() {
	s.conn.Close()
	os.Remove(s.path)
}

// await returns when the states have arrived in the given order. It returns an error if the context
// ends, or if the process ends, which closes exited.
func (s *notifySocket) await(ctx context.Context, exited <-chan struct{}, states ...string) error {
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
	s.conn.Close() // ends read
	<-done
	return err
}

func (s *notifySocket) read(states []string) error {
	buf := make([]byte, 4096)
	for len(states) > 0 {
		n, err := s.conn.Read(buf)
		if err != nil {
			return err
		}
		for len(states) > 0 && slices.Contains(strings.Split(string(buf[:n]), "\n"), states[0]) {
			states = states[1:]
		}
	}
	return nil
}
