// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// packetSocket sends the frames that XDP cannot send. It is a file descriptor, or negative if the
// socket is not open.
type packetSocket int

const noSocket packetSocket = -1

// open opens the socket, unless it is open.
func (s *packetSocket) open() error {
	if *s >= 0 {
		return nil
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open a packet socket: %w", err)
	}
	*s = packetSocket(fd)
	return nil
}

func (s packetSocket) send(frame []byte, ifindex uint32) error {
	return unix.Sendto(int(s), frame, 0, &unix.SockaddrLinklayer{Ifindex: int(ifindex)})
}

func (s packetSocket) close() error {
	if s < 0 {
		return nil
	}
	return unix.Close(int(s))
}
