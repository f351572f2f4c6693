// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Capture is a running recording of packets. Node.Capture starts it.
type Capture struct {
	socket *os.File
	done   chan error
}

// captureBuffer is the size of the socket's receive buffer, in bytes. It is large because the
// reader may not run for a while, and because the kernel counts a whole page for each packet that
// was sent by XDP, however short the packet is.
const captureBuffer = 512 << 20

// Every stands for all interfaces of a node in Node.Capture. A packet that the node forwards is
// then recorded twice: on arrival and on departure.
const Every = ""

// Capture starts to record all packets of one of the node's interfaces, in both directions. It
// writes them to w as a pcap file, in the order in which they pass, with the kernel's times. The
// recording has begun when Capture returns. Packets that a node sends by XDP do not pass packet
// sockets on the node: capture them at the fabric's port of the node.
func (n *Node) Capture(ifname string, w io.Writer) (*Capture, error) {
	c := &Capture{done: make(chan error, 1)}
	err := n.Do(func() (err error) {
		c.socket, err = packetSocket(ifname)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: capture on %s: %w", n.Name, ifname, err)
	}
	// The file header (draft-ietf-opsawg-pcap): the magic number for times in nanoseconds, the
	// version 2.4, two unused fields, the largest length of a packet, and the link type.
	const magic, major, minor, ethernet = 0xa1b23c4d, 2, 4, 1
	header := binary.NativeEndian.AppendUint32(nil, magic)
	header = binary.NativeEndian.AppendUint16(header, major)
	header = binary.NativeEndian.AppendUint16(header, minor)
	for _, field := range []uint32{0, 0, maxPacket, ethernet} {
		header = binary.NativeEndian.AppendUint32(header, field)
	}
	if _, err := w.Write(header); err != nil {
		return nil, errors.Join(err, c.socket.Close())
	}
	go func() { c.done <- c.record(w) }()
	return c, nil
}

// maxPacket is more than the length of the longest packet, in bytes. GSO packets are longer than
// the MTU.
const maxPacket = 256 << 10

// packetSocket opens a non-blocking socket that receives all packets of an interface, or of all
// interfaces if ifname is Every.
func packetSocket(ifname string) (*os.File, error) {
	ifindex := 0
	if ifname != Every {
		ifi, err := net.InterfaceByName(ifname)
		if err != nil {
			return nil, err
		}
		ifindex = ifi.Index
	}
	// With protocol 0 the socket receives nothing until it is bound to the interface.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), "packet socket on "+ifname)
	// ETH_P_ALL in network byte order.
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: ifindex}),
	)
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	return socket, nil
}

// timestamp returns the time at which a packet passed the interface, from the control messages of
// the socket. Without such a message it returns the present time.
func timestamp(control []byte) time.Time {
	messages, _ := unix.ParseSocketControlMessage(control)
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_TIMESTAMPNS {
			continue
		}
		seconds := binary.NativeEndian.Uint64(m.Data)
		return time.Unix(int64(seconds), int64(binary.NativeEndian.Uint64(m.Data[8:])))
	}
	return time.Now()
}

// record writes packets to w. It returns nil when Stop has set the socket's read deadline, and the
// socket's queue is empty. It returns an error if it cannot read or write.
func (c *Capture) record(w io.Writer) error {
	raw, err := c.socket.SyscallConn()
	if err != nil {
		return err
	}
	buf, control := make([]byte, maxPacket), make([]byte, 64)
	for {
		n, controls, err := receivePacket(raw, buf, control)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
		passed := timestamp(control[:controls])
		packet := binary.NativeEndian.AppendUint32(nil, uint32(passed.Unix()))
		for _, field := range []int{passed.Nanosecond(), n, n} {
			packet = binary.NativeEndian.AppendUint32(packet, uint32(field))
		}
		if _, err := w.Write(append(packet, buf[:n]...)); err != nil {
			return err
		}
	}
}

// receivePacket reads the next packet and its control messages, and returns their lengths. It waits
// for a packet until the socket's read deadline. After that it returns EAGAIN if there is none.
func receivePacket(raw syscall.RawConn, buf, control []byte) (n, controls int, err error) {
	receive := func(fd uintptr) (done bool) {
		n, controls, _, _, err = unix.Recvmsg(int(fd), buf, control, 0)
		return !errors.Is(err, unix.EAGAIN)
	}
	errWait := raw.Read(receive)
	if errors.Is(errWait, os.ErrDeadlineExceeded) {
		// After the deadline, raw.Read does not call receive, even if the queue has packets.
		errWait = raw.Control(func(fd uintptr) { receive(fd) })
	}
	if errWait != nil {
		return 0, 0, errWait
	}
	return n, controls, err
}

// Stop ends the recording, after it has written all packets that have passed so far. It returns an
// error if the kernel dropped packets, because the buffer was full.
func (c *Capture) Stop() error {
	err := c.socket.SetReadDeadline(time.Now())
	err = errors.Join(err, <-c.done)
	raw, errRaw := c.socket.SyscallConn()
	err = errors.Join(err, errRaw)
	var errMissing error
	if err == nil {
		err = raw.Control(func(fd uintptr) { errMissing = requireAll(int(fd)) })
	}
	return errors.Join(err, errMissing, c.socket.Close())
}

// requireAll returns an error if the kernel dropped packets of a packet socket, or cannot tell.
func requireAll(socket int) error {
	stats, err := unix.GetsockoptTpacketStats(socket, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err == nil && stats.Drops > 0 {
		err = fmt.Errorf("capture: %d of %d packets are missing", stats.Drops, stats.Packets)
	}
	return err
}
