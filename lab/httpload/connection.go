// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// request is one request, from its arrival to its outcome.
type request struct {
	number   uint64
	due      time.Duration // the intended send time, since the start of the generator
	target   *Target
	query    string // the request target
	measured bool   // it counts in the report; requests of the warm-up do not
}

// phase tells what a connection waits for.
type phase uint8

const (
	connecting phase = iota // the end of the handshake
	accepted                // the time at which a distant client would see the end of the handshake
	requesting              // the response
	returning               // the time at which a distant client would have the response
	resting                 // the next request; an idle connection waits for nothing
	closing                 // the server's end of the connection, after the response
	closed                  // nothing
)

// connection is a TCP connection to a target.
type connection struct {
	descriptor int // of the socket; -1 without one
	// serial is the number of the connection. Each event of epoll contains the serial of its
	// connection. So the generator can ignore events of an earlier connection with the same
	// descriptor.
	serial  int32
	phase   phase
	target  *Target
	idle    bool // held open without requests
	isEnded bool // the server has closed the connection, after the response

	request  request
	unsent   []byte // the rest of the request, which the socket has not taken yet
	response response
	begun    time.Duration // when the handshake began; on a used connection, when the request was sent
	deadline time.Duration // when the phase is over; only if position is not noDeadline
	position int           // the index in generator.deadlines
	place    int           // in phase resting: the index among the target's resting connections
}

// dial opens a socket and begins the handshake. from is the client address, unless it is the zero
// address: then the kernel chooses. With distant, the kernel sends the last packet of the handshake
// together with the request, or after 200 ms (TCP_DELACK_MAX) if there is none yet.
func dial(from netip.Addr, to netip.AddrPort, distant bool) (descriptor int, err error) {
	family, address := socketAddress(to)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return -1, fmt.Errorf("TCP_NODELAY: %w", err)
	}
	if distant {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 1); err != nil {
			return -1, fmt.Errorf("TCP_DEFER_ACCEPT: %w", err)
		}
	}
	if from.IsValid() {
		if err := bind(fd, from); err != nil {
			return -1, err
		}
	}
	if err := unix.Connect(fd, address); err != nil && err != unix.EINPROGRESS {
		return -1, fmt.Errorf("connect %s: %w", to, err)
	}
	return fd, nil
}

// bind sets the client address of a socket, but not its port. connect chooses the port, because it
// knows the destination. So each client address has all ports for each destination.
func bind(fd int, from netip.Addr) error {
	_, address := socketAddress(netip.AddrPortFrom(from, 0))
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return fmt.Errorf("IP_BIND_ADDRESS_NO_PORT: %w", err)
	}
	// For IPv6, bind needs IPV6_FREEBIND to accept an address that no interface has.
	if from.Is6() {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
			return fmt.Errorf("IPV6_FREEBIND: %w", err)
		}
	}
	if err := unix.Bind(fd, address); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// socketAddress converts an address to the form of system calls.
func socketAddress(a netip.AddrPort) (family int, address unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// socketError returns why a connection failed, or nil.
func socketError(fd int) error {
	errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && errno != 0 {
		err = unix.Errno(errno)
	}
	return err
}

// resetOnClose makes close send a reset. So the server ends the connection immediately, and this
// host does not reserve the port for a while (TIME_WAIT).
func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}
