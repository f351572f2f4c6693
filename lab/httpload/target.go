// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Target is a URL to which requests go.
type Target struct {
	URL     string
	Address netip.AddrPort
	Host    string // the value of the header Host
	parts   []part // of the request target
}

// part is a piece of a request target: text, or a placeholder.
type part struct {
	text        string
	placeholder placeholder
}

// placeholder stands for a value that differs from request to request.
type placeholder uint8

const (
	noPlaceholder      placeholder = iota
	demandText                     // the work in milliseconds, with the unit
	demandMicroseconds             // the work in microseconds
	requestNumber
)

// placeholders are the placeholders that a URL may contain.
var placeholders = map[string]placeholder{
	"{demand}": demandText, "{demand-us}": demandMicroseconds, "{n}": requestNumber,
}

// ParseTarget reads a URL of the scheme http. Its path and query may contain {demand}, which stands
// for the request's work in milliseconds with the unit, such as 190.125ms. They may contain
// {demand-us}, the work in whole microseconds, and {n}, the number of the request. ParseTarget
// resolves a host name, so all requests go to the same address.
func ParseTarget(ctx context.Context, text string) (*Target, error) {
	rest, found := strings.CutPrefix(text, "http://")
	if !found {
		return nil, fmt.Errorf("URL %q: must begin with http://", text)
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	authority, err := url.Parse("http://" + rest[:end])
	if err != nil || authority.User != nil || authority.Hostname() == "" {
		return nil, fmt.Errorf("URL %q: the host must be a name or an address, and a port, "+
			"such as [2001:db8::1]:8080", text)
	}
	t := &Target{URL: text, Host: authority.Host}
	if t.Address, err = resolve(ctx, authority); err != nil {
		return nil, fmt.Errorf("URL %q: %w", text, err)
	}
	path, _, _ := strings.Cut(rest[end:], "#")
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	if t.parts, err = parseTemplate(path); err != nil {
		return nil, fmt.Errorf("URL %q: %w", text, err)
	}
	return t, nil
}

// resolve returns the address and port of a URL's host. If the host has several addresses, it
// returns the first one.
func resolve(ctx context.Context, u *url.URL) (address netip.AddrPort, err error) {
	port := uint64(80)
	if text := u.Port(); text != "" {
		if port, err = strconv.ParseUint(text, 10, 16); err != nil || port == 0 {
			return address, fmt.Errorf("port %q: must be from 1 to 65535", text)
		}
	}
	host, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
		if err != nil {
			return address, err
		}
		host = all[0]
	}
	return netip.AddrPortFrom(host.Unmap(), uint16(port)), nil
}

// parseTemplate splits a path with its query string into texts and placeholders. It returns an
// error for unknown placeholders, and for characters that a request target must not have.
func parseTemplate(path string) (parts []part, err error) {
	for path != "" {
		before, after, found := strings.Cut(path, "{")
		if before != "" {
			if err := checkTarget(before); err != nil {
				return nil, err
			}
			parts = append(parts, part{text: before})
		}
		if !found {
			break
		}
		name, rest, _ := strings.Cut(after, "}")
		kind, known := placeholders["{"+name+"}"]
		if !known {
			return nil, fmt.Errorf("{%s}: must be {demand}, {demand-us} or {n}", name)
		}
		parts = append(parts, part{placeholder: kind})
		path = rest
	}
	return parts, nil
}

// checkTarget returns an error if a request target contains blanks or control characters.
func checkTarget(text string) error {
	for _, c := range []byte(text) {
		if c <= ' ' || c == 0x7f {
			return fmt.Errorf("%q: must be written as %%%02X in a URL", string(rune(c)), c)
		}
	}
	return nil
}

// requestTarget returns the request target of a query in a trace. The query is a URL or a request
// target. Of a URL, the result is the path with the query string, or / if the URL has no path. It
// returns an error if the query is neither, or has characters that a request target must not have.
func requestTarget(query string) (string, error) {
	path := query
	for _, scheme := range []string{"http://", "https://"} {
		if rest, found := strings.CutPrefix(query, scheme); found {
			path = "/"
			if slash := strings.IndexByte(rest, '/'); slash >= 0 {
				path = rest[slash:]
			}
		}
	}
	if !strings.HasPrefix(path, "/") {
		return "", errors.New("the query must be a URL, or begin with /")
	}
	path, _, _ = strings.Cut(path, "#")
	return path, checkTarget(path)
}

// HasDemand tells whether the URL has a placeholder for the work.
func (t *Target) HasDemand() bool {
	return slices.ContainsFunc(t.parts, func(p part) bool {
		return p.placeholder == demandText || p.placeholder == demandMicroseconds
	})
}

// isBare tells whether the URL has no path and no query.
func (t *Target) isBare() bool { return len(t.parts) == 1 && t.parts[0].text == "/" }

// query returns the request target of a request. Placeholders are replaced by the number of the
// request and its work, demand.
func (t *Target) query(number uint64, demand time.Duration) string {
	if len(t.parts) == 1 && t.parts[0].placeholder == noPlaceholder {
		return t.parts[0].text
	}
	var text []byte
	for _, p := range t.parts {
		switch p.placeholder {
		case demandText:
			text = strconv.AppendFloat(text, float64(demand.Microseconds())/1e3, 'f', -1, 64)
			text = append(text, "ms"...)
		case demandMicroseconds:
			text = strconv.AppendInt(text, demand.Microseconds(), 10)
		case requestNumber:
			text = strconv.AppendUint(text, number, 10)
		default:
			text = append(text, p.text...)
		}
	}
	return string(text)
}
