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

// notifySocket is the receiving end of what one process tells of its state: datagrams of NAME=VALUE
// lines, as sd_notify(3) describes. It exists while somebody waits.
type notifySocket struct {
	conn *net.UnixConn
	path string
}

func listenNotify(path string) (*notifySocket, error) {
	if err := os.RemoveAll(path); err != nil { // of an earlier, interrupted wait
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

// await returns when the states have arrived, in their order. An end of the context or of the
// process, which exited signals, is an error.
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
