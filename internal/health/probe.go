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

// userAgent is how HTTP probes introduce themselves.
const userAgent = "segue-health"

// maxHeader bounds the bytes of a response that a probe reads, in which its
// header must end.
const maxHeader = 64 << 10

// errUntried marks a probe that this host had not the means to send: it says
// nothing about the server.
var errUntried = errors.New("not tried")

// probe checks a target once. Its error is the reason in plain words; the errors
// after the context's end are of no worth.
func probe(ctx context.Context, t Target) error {
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

// isOwn tells the errors of a host that lacks descriptors, memory or ports from
// those of a server or the way to it.
func isOwn(errno unix.Errno) bool {
	switch errno {
	case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL:
		return true
	}
	return false
}

// connect opens a connection for this probe alone: that the server accepts one
// is part of the check.
func connect(ctx context.Context, t Target) error {
	dialer := net.Dialer{KeepAlive: -1}
	conn, err := dialer.DialTCP(ctx, "tcp", netip.AddrPort{}, t.Address)
	if err != nil {
		return err
	}
	defer conn.Close()
	if t.Path == "" {
		// A reset leaves no connection in TIME-WAIT, here or there.
		return conn.SetLinger(0)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	return exchange(conn, t)
}

// exchange asks for the target's path and judges the response's status. It speaks
// HTTP on the connection by itself because http.Client would reuse connections,
// follow redirects and obey proxies, and leaves goroutines that nobody waits for.
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

// readStatus reads up to the end of the response's header, past the interim ones
// that may come first (RFC 9110 section 15.2).
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
		default: // the error quotes what the server sent, at any length
			return 0, errors.New("not an HTTP response")
		}
		status := response.StatusCode
		if status < 100 || status > 199 || status == http.StatusSwitchingProtocols {
			return status, nil
		}
	}
}
