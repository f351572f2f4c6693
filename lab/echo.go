// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/daemon"
)

// UDPEcho answers every datagram to the given ports. The answer is the name, a newline and the
// datagram's content. It comes from the address to which the datagram was sent. UDPEcho sends a
// notification when it is ready, as sd_notify(3) describes. It returns when the context ends.
func UDPEcho(ctx context.Context, name string, ports []uint16) error {
	var conns []*net.UDPConn
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	for _, port := range ports {
		for _, addr := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
			conn, err := listenEcho(netip.AddrPortFrom(addr, port))
			if err != nil {
				return fmt.Errorf("udp-echo: port %d: %w", port, err)
			}
			conns = append(conns, conn)
		}
	}
	if err := daemon.Notify("READY=1"); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wait sync.WaitGroup
	for _, conn := range conns {
		wait.Go(func() { cancel(serveEcho(conn, name)) })
	}
	<-ctx.Done()
	for _, conn := range conns {
		conn.Close()
	}
	wait.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listenEcho opens a socket that reports the destination address of each datagram: the client
// accepts a reply only from the VIP to which it has sent.
func listenEcho(addr netip.AddrPort) (*net.UDPConn, error) {
	network, level, option := "udp4", unix.IPPROTO_IP, unix.IP_PKTINFO
	if addr.Addr().Is6() {
		network, level, option = "udp6", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	conn, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, err
	}
	raw, err := conn.SyscallConn()
	if err == nil {
		var errSet error
		err = raw.Control(func(fd uintptr) { errSet = unix.SetsockoptInt(int(fd), level, option, 1) })
		err = errors.Join(err, errSet)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// serveEcho answers until the socket is closed or fails.
func serveEcho(conn *net.UDPConn, name string) error {
	buf := make([]byte, 64<<10)
	start := copy(buf, name+"\n")
	control := make([]byte, 128)
	for {
		n, controlLen, _, client, err := conn.ReadMsgUDPAddrPort(buf[start:], control)
		if err != nil {
			return fmt.Errorf("udp-echo: %w", err)
		}
		source, err := replySource(control[:controlLen])
		if err != nil {
			return fmt.Errorf("udp-echo: datagram from %s: %w", client, err)
		}
		// The error is ignored, because it concerns only this client: the client is unreachable, or
		// the reply is too long.
		conn.WriteMsgUDPAddrPort(buf[:start+n], source, client)
	}
}

// replySource returns the control message for a reply to a datagram with the given control
// messages. The reply's source address is the datagram's destination address. The message names no
// interface, so the routing table selects it.
func replySource(control []byte) ([]byte, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO &&
			len(m.Data) >= unix.SizeofInet4Pktinfo:
			var info unix.Inet4Pktinfo
			copy(info.Spec_dst[:], m.Data[8:]) // struct in_pktinfo: ifindex, spec_dst, addr
			return unix.PktInfo4(&info), nil
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO &&
			len(m.Data) >= unix.SizeofInet6Pktinfo:
			var info unix.Inet6Pktinfo
			copy(info.Addr[:], m.Data) // struct in6_pktinfo: addr, ifindex
			return unix.PktInfo6(&info), nil
		}
	}
	return nil, errors.New("no destination address")
}
