// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// userAgent is the User-Agent header of HTTP checks.
const userAgent = "segue-health"

// maxHeader is the largest header of a response, in bytes.
const maxHeader = 64 << 10

// ErrUntried marks a check that this host could not make. It proves nothing about the server.
var ErrUntried = errors.New("not tried")

// errTimeout marks a check that got no answer in time.
var errTimeout = errors.New("timeout")

// Path lets the packets of checks take the path of clients' packets. HostPath implements it.
type Path interface {
	// Socket returns the settings of a socket to a VIP. The error tells why the host cannot check
	// the VIP.
	Socket(vip netip.Addr) (Socket, error)
	// Recheck returns why this host drops the answers of a VIP, or nil if it accepts them.
	Recheck(vip netip.Addr) error
}

// tryOnce checks a target once. It returns nil if the check succeeds, and otherwise the reason in
// plain words. If the context has ended, the error means nothing.
func (c *Checker) tryOnce(ctx context.Context, t *Target) error {
	dialer, err := c.dialer(t) // before the timeout begins: this host may have to look something up
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	err = plain(connect(ctx, dialer, t))
	if errors.Is(err, errTimeout) {
		return c.timeout(t)
	}
	return err
}

// plain returns the error of a connection in plain words. That is errTimeout, or the error of the
// kernel without Go's "dial tcp …: connect:". If the fault is this host's, it wraps ErrUntried.
func plain(err error) error {
	var errno unix.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return errTimeout
	case errors.Is(err, ErrUntried):
		return err
	case errors.As(err, &errno) && isOwn(errno):
		return fmt.Errorf("%w: %w", ErrUntried, errno)
	case errors.As(err, &errno):
		return errno
	}
	return err
}

// Answers opens a connection on the path of clients' packets. The packets of the connection have
// the mark. Answers returns nil if the server answers: the connection opens, or the server refuses
// it. The error wraps ErrUntried if this host cannot connect. The deadline is that of the context.
func Answers(ctx context.Context, path Path, address netip.AddrPort, socket Socket, mark uint32) error {
	dialer := &net.Dialer{
		KeepAlive: -1, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(socket.Source, 0)),
		Control: onPath(socket.Device, mark),
	}
	err := plain(connect(ctx, dialer, &Target{Address: address, Kind: TCP}))
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		return nil
	case errors.Is(err, errTimeout):
		if err := path.Recheck(address.Addr()); err != nil {
			return fmt.Errorf("%w: %w", ErrUntried, err)
		}
	}
	return err
}

// timeout returns the reason why a check got no answer: this host drops the answers, or the server
// gave none.
func (c *Checker) timeout(t *Target) error {
	if t.OnPath {
		if err := c.path.Recheck(t.Address.Addr()); err != nil {
			return fmt.Errorf("%w: %w", ErrUntried, err)
		}
	}
	return fmt.Errorf("%w after %v", errTimeout, t.Timeout)
}

// isOwn tells whether an error is the fault of this host, and not of a server or the path to it:
// the host lacks descriptors, memory, ports or the interface, or its firewall drops the packet.
func isOwn(errno unix.Errno) bool {
	switch errno {
	case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL, unix.ENODEV, unix.EPERM:
		return true
	}
	return false
}

// dialer returns a dialer of connections to the target. If the target is OnPath, its sockets send
// on the path of clients' packets. The error wraps ErrUntried if the host cannot use this path.
func (c *Checker) dialer(t *Target) (*net.Dialer, error) {
	dialer := &net.Dialer{KeepAlive: -1}
	if !t.OnPath {
		return dialer, nil
	}
	socket, err := c.path.Socket(t.Address.Addr())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntried, err)
	}
	local := netip.AddrPortFrom(socket.Source, 0)
	dialer.LocalAddr = net.TCPAddrFromAddrPort(local)
	if t.Kind == UDP {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	dialer.Control = onPath(socket.Device, t.Mark)
	return dialer, nil
}

// onPath returns a net.Dialer.Control that makes sockets send on the path of clients' packets.
func onPath(device string, mark uint32) func(_, _ string, raw syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) { err = prepare(int(fd), mark, device) })
		if err = errors.Join(controlErr, err); err != nil {
			return fmt.Errorf("%w: %w", ErrUntried, err)
		}
		return nil
	}
}

// prepare makes a socket send on the path of clients' packets. The kernel is to choose the source
// port only when it knows the destination. So checks of several VIPs can use the same port.
func prepare(fd int, mark uint32, device string) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return err
	}
	if err := unix.BindToDevice(fd, device); err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
}

// connect makes the check of a target. Each check opens a new connection, to test that the server
// accepts connections.
func connect(ctx context.Context, dialer *net.Dialer, t *Target) error {
	if t.Kind == UDP {
		return ask(ctx, dialer, t)
	}
	dialed, err := dialer.DialContext(ctx, "tcp", t.Address.String())
	if err != nil {
		return err
	}
	conn := dialed.(*net.TCPConn)
	defer conn.Close()
	// Close then sends a reset, which leaves no connection in TIME-WAIT on either side. Such
	// connections would use up the ports.
	if err := conn.SetLinger(0); err != nil {
		return err
	}
	if t.Kind == TCP {
		return nil // the check has only to open a connection
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
	defer stop()
	if t.Kind == HTTP {
		return exchange(conn, t)
	}
	secure := tls.Client(conn, tlsConfig(t))
	if err := secure.HandshakeContext(ctx); err != nil {
		return tlsReason(err)
	}
	return exchange(secure, t)
}

// past is a deadline that ends all reads and writes at once.
var past = time.Unix(1, 0)

// tlsConfig returns the configuration of an HTTPS check. It offers only curves with short keys, so
// that the client's first message fits into one packet.
func tlsConfig(t *Target) *tls.Config {
	name := t.Host
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	return &tls.Config{
		ServerName: strings.Trim(name, "[]"), InsecureSkipVerify: !t.Verify, //nolint:gosec // as configured
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256},
		NextProtos:       []string{"http/1.1"}, MinVersion: tls.VersionTLS12,
	}
}

// tlsReason returns the reason why a handshake has failed, without any text from the server.
func tlsReason(err error) error {
	var network *net.OpError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, os.ErrDeadlineExceeded):
		return err
	case errors.As(err, &certificate):
		return fmt.Errorf("certificate: %w", certificate.Err)
	}
	return errors.New("the TLS handshake failed")
}

// ask makes a UDP check: it sends the datagram, and waits for the answer.
func ask(ctx context.Context, dialer *net.Dialer, t *Target) error {
	conn, err := dialer.DialContext(ctx, "udp", t.Address.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
	defer stop()
	if _, err := io.WriteString(conn, t.Request); err != nil {
		return err
	}
	answer := make([]byte, 64<<10)
	n, err := conn.Read(answer)
	if err != nil {
		return err
	}
	if !bytes.Contains(answer[:n], []byte(t.Answer)) {
		return errors.New("the answer does not contain the expected bytes")
	}
	return nil
}

// exchange sends an HTTP request for the target's path, and checks the response. It does not use
// http.Client, which would reuse connections, follow redirects, obey proxies, and leave goroutines
// behind.
func exchange(conn net.Conn, t *Target) error {
	path, err := url.ParseRequestURI(t.Path)
	if err != nil {
		return err
	}
	request := &http.Request{
		Method: http.MethodGet, URL: path, Host: t.Host, Close: true,
		Header: http.Header{"User-Agent": {userAgent}},
	}
	if err := request.Write(conn); err != nil {
		return err
	}
	limited := &io.LimitedReader{R: conn, N: maxHeader}
	response, err := readResponse(limited, request)
	if err != nil {
		return err
	}
	if !isSuccess(response.StatusCode, t.Status) {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	if t.Body == "" {
		return nil // the caller closes the connection, so nobody need read the body
	}
	limited.N = maxHeader + desired.MaxCheckedBody // room for the body and the lengths of its chunks
	return searchBody(response.Body, t.Body)
}

// isSuccess tells whether a status is in a list of statuses and ranges, such as "200-299,301".
func isSuccess(status int, list string) bool {
	ranges, _ := desired.ParseStatus(list) // the configuration was checked
	return slices.ContainsFunc(ranges, func(r desired.StatusRange) bool {
		return status >= r.First && status <= r.Last
	})
}

// searchBody returns an error if the first MaxCheckedBody bytes of a body do not contain a text.
func searchBody(body io.Reader, text string) error {
	read, err := io.ReadAll(io.LimitReader(body, desired.MaxCheckedBody))
	if bytes.Contains(read, []byte(text)) {
		return nil
	}
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return err
	}
	return fmt.Errorf("the first %d bytes of the body do not contain the text", len(read))
}

// readResponse reads a response up to the end of its header. It skips interim responses (RFC 9110
// section 15.2).
func readResponse(limited *io.LimitedReader, request *http.Request) (*http.Response, error) {
	reader := bufio.NewReader(limited)
	for {
		response, err := http.ReadResponse(reader, request)
		var network *net.OpError
		switch {
		case err == nil:
		case errors.As(err, &network):
			return nil, err
		case limited.N == 0:
			return nil, fmt.Errorf("response header longer than %d bytes", maxHeader)
		case errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errors.New("connection closed before the end of a response header")
		default: // the library's error would quote the server's text, of any length
			return nil, errors.New("not an HTTP response")
		}
		status := response.StatusCode
		if status < 100 || status > 199 || status == http.StatusSwitchingProtocols {
			return response, nil
		}
	}
}
