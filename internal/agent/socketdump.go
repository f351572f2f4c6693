// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Constants of the kernel's inet_diag.h and sock_diag.h.
const (
	inetDiagRequestStorages = 2  // INET_DIAG_REQ_SK_BPF_STORAGES
	storageRequestMap       = 1  // SK_DIAG_BPF_STORAGE_REQ_MAP_FD
	inetDiagStorages        = 20 // INET_DIAG_SK_BPF_STORAGES
	storageReply            = 1  // SK_DIAG_BPF_STORAGE
	storageReplyValue       = 3  // SK_DIAG_BPF_STORAGE_MAP_VALUE

	nlaTypeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)

	inetDiagMessageSize = 72 // of struct inet_diag_msg, in bytes
)

// dumpTimeout is how long a dump waits for the kernel's next message.
const dumpTimeout = 10 * time.Second

// socketDump lists the TCP sockets of open connections in a network namespace, by sock_diag(7). It
// also reads the value that each socket has in storages, a map of socket storages.
type socketDump struct {
	storages *ebpf.Map
	sockets  map[int]*nl.SocketHandle // by netlink protocol, in the form of package nl
}

// openSocketDump opens a dump of the calling thread's network namespace.
func openSocketDump(storages *ebpf.Map) (*socketDump, error) {
	s, err := nl.Subscribe(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open a socket for sock_diag: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(dumpTimeout))
	if err := errors.Join(s.SetReceiveTimeout(&timeout), s.SetSendTimeout(&timeout)); err != nil {
		s.Close()
		return nil, fmt.Errorf("set the timeout of sock_diag: %w", err)
	}
	sockets := map[int]*nl.SocketHandle{unix.NETLINK_SOCK_DIAG: {Socket: s}}
	return &socketDump{storages, sockets}, nil
}

// close closes the socket of the dump.
func (d *socketDump) close() error {
	d.sockets[unix.NETLINK_SOCK_DIAG].Close()
	return nil
}

// diagSocket is the socket of a TCP connection.
type diagSocket struct {
	state uint8
	local netip.AddrPort
	mark  *agentCountedSocket // nil: the socket has no mark
}

// isEstablished tells whether the handshake of an open connection is complete. The program that
// counts connections has marked the socket of such a connection, if the program was attached.
func (s diagSocket) isEstablished() bool { return s.state != synRecv }

// each calls f for the socket of each open TCP connection.
func (d *socketDump) each(f func(diagSocket)) error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		request.Sockets = d.sockets
		request.AddData(&diagRequest{family: family})
		storages := nl.NewRtAttr(inetDiagRequestStorages|unix.NLA_F_NESTED, nil)
		storages.AddRtAttr(storageRequestMap, nl.Uint32Attr(uint32(d.storages.FD())))
		request.AddData(storages)
		var failed error
		err := request.ExecuteIter(unix.NETLINK_SOCK_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(message []byte) bool {
			var s diagSocket
			if s, failed = socketOf(message); failed == nil {
				f(s)
			}
			return failed == nil // false ends the dump
		})
		if err := errors.Join(err, failed); err != nil {
			return fmt.Errorf("list the sockets of TCP: %w", err)
		}
	}
	return nil
}

// The states of connections that the server has not closed: BPF_TCP_* in the kernel's bpf.h.
const established, synRecv, closeWait = 1, 3, 8

// diagRequest is the header of a request for TCP sockets: struct inet_diag_req_v2.
type diagRequest struct{ family uint8 }

// Len implements nl.NetlinkRequestData. It returns the size of the struct, in bytes.
func (r *diagRequest) Len() int { return 56 }

// Serialize implements nl.NetlinkRequestData.
func (r *diagRequest) Serialize() []byte {
	b := make([]byte, r.Len())
	b[0], b[1] = r.family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], 1<<established|1<<synRecv|1<<closeWait) // idiag_states
	return b
}

// socketOf reads a message about a socket: a struct inet_diag_msg, and attributes after it. In the
// struct, byte 0 is the family, byte 1 the state, bytes 4 and 5 the local port, and the local
// address begins at byte 8.
func socketOf(message []byte) (s diagSocket, err error) {
	if len(message) < inetDiagMessageSize {
		return s, fmt.Errorf("a message of %d bytes", len(message))
	}
	address, _ := netip.AddrFromSlice(message[8:24])
	if message[0] == unix.AF_INET {
		address, _ = netip.AddrFromSlice(message[8:12])
	}
	s.state = message[1]
	s.local = netip.AddrPortFrom(address, binary.BigEndian.Uint16(message[4:]))
	s.mark, err = markOf(message[inetDiagMessageSize:])
	return s, err
}

// markOf returns the mark in the attributes of a socket, or nil if the socket has none. The mark is
// inside three nested attributes.
func markOf(value []byte) (*agentCountedSocket, error) {
	for _, kind := range []uint16{inetDiagStorages, storageReply, storageReplyValue} {
		var err error
		if value, err = attribute(value, kind); value == nil || err != nil {
			return nil, err
		}
	}
	var mark agentCountedSocket
	if len(value) != int(unsafe.Sizeof(mark)) {
		return nil, fmt.Errorf("a mark of %d bytes", len(value))
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&mark)), len(value)), value)
	return &mark, nil
}

// attribute returns the value of the first attribute of a kind, or nil if there is none.
func attribute(attributes []byte, kind uint16) ([]byte, error) {
	for len(attributes) > 0 {
		if len(attributes) < unix.SizeofNlAttr {
			return nil, fmt.Errorf("an attribute of %d bytes", len(attributes))
		}
		length := int(binary.NativeEndian.Uint16(attributes))
		if length < unix.SizeofNlAttr || length > len(attributes) {
			return nil, fmt.Errorf("an attribute with the length %d in %d bytes", length, len(attributes))
		}
		if binary.NativeEndian.Uint16(attributes[2:])&nlaTypeMask == kind {
			return attributes[unix.SizeofNlAttr:length], nil
		}
		padded := (length + 3) &^ 3 // NLA_ALIGN
		attributes = attributes[min(len(attributes), padded):]
	}
	return nil, nil
}
