// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// userAgent is the User-Agent header of HTTP checks.
const userAgent = "segue-health"

// maxHeader is the largest header of a response, in bytes.
const maxHeader = 64 << 10

// errUntried marks a check that this host could not send. It proves nothing about
// the server.
var errUntried = errors.New("not tried")

// attempt checks a target once. Its error is the reason in plain words. Ignore errors after the
// end of the context.
func attempt(ctx context.Context, t Target) error {
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	err := connect(ctx, t)
	var errno unix.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("timeout after %v", t.Timeout)
	case errors.As(err, &errno) && isOwn(errno):
		return fmt.Errorf("%w: %w", errUntried, errno)
	case errors.As(err, &errno):
		return errno // without Go's "dial tcp …: connect:"
	}
	return err
}

// isOwn tells whether an error comes from this host, which lacks descriptors,
// memory or ports, and not from a server or the path to it.
func isOwn(errno unix.Errno) bool {
	switch errno {
	case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL:
		return true
	}
	return false
}

// connect opens a new connection for each check, because the check also tests that the server
// accepts connections.
func connect(ctx context.Context, t Target) error {
	dialer := net.Dialer{KeepAlive: -1}
	conn, err := dialer.DialTCP(ctx, "tcp", netip.AddrPort{}, t.Address)
	if err != nil {
		return err
	}
	defer conn.Close()
	if t.Path == "" {
		// A reset leaves no connection in TIME-WAIT on either side.
		return conn.SetLinger(0)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	return exchange(conn, t)
}

// exchange requests the target's path and checks the status of the response. It
// does not use http.Client, which would reuse connections, follow redirects, obey
// proxies, and leave goroutines behind.
func exchange(conn net.Conn, t Target) error {
	path, err := url.ParseRequestURI(t.Path)
	if err != nil {
		return err
	}
	request := &http.Request{
		Method: http.MethodGet,
		URL:    path,
		Host:   t.Host,
		Header: http.Header{"User-Agent": {userAgent}},
		Close:  true,
	}
	if err := request.Write(conn); err != nil {
		return err
	}
	status, err := readStatus(conn, request)
	if err != nil {
		return err
	}
	if status < 200 || status > 399 {
		return fmt.Errorf("status %d", status)
	}
	return nil
}

// readStatus reads up to the end of the response's header. It skips interim
// responses (RFC 9110 section 15.2).
func readStatus(conn net.Conn, request *http.Request) (int, error) {
	limited := &io.LimitedReader{R: conn, N: maxHeader}
	reader := bufio.NewReader(limited)
	for {
		response, err := http.ReadResponse(reader, request)
		var network *net.OpError
		switch {
		case err == nil:
			// The body stays unread; closing the connection ends it.
		case errors.As(err, &network):
			return 0, err
		case limited.N == 0:
			return 0, fmt.Errorf("response header longer than %d bytes", maxHeader)
		case errors.Is(err, io.ErrUnexpectedEOF):
			return 0, errors.New("connection closed before the end of a response header")
		default: // the library's error would quote the server's text, of any length
			return 0, errors.New("not an HTTP response")
		}
		status := response.StatusCode
		if status < 100 || status > 199 || status == http.StatusSwitchingProtocols {
			return status, nil
		}
	}
}
