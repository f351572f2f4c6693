// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/segue-lb/segue/internal/fieldpath"
)

func (r *rules) checkHealth(path string, s *Service) {
	h := s.Health
	checkKnown(r, fieldpath.Child(path, "via"), h.Via, ViaPackets, ViaHost)
	kinds := 0
	for _, isSet := range []bool{h.HTTP != nil, h.HTTPS != nil, h.TCP != nil, h.UDP != nil} {
		if isSet {
			kinds++
		}
	}
	if kinds != 1 {
		r.failf(path, "must have exactly one of http, https, tcp and udp; tcp: {} uses the defaults")
	}
	if h.Rise == 0 {
		r.failf(fieldpath.Child(path, "rise"), "required")
	}
	if h.Fall == 0 {
		r.failf(fieldpath.Child(path, "fall"), "required")
	}
	r.checkHTTP(fieldpath.Child(path, "http"), h.HTTP, s)
	r.checkHTTP(fieldpath.Child(path, "https"), h.HTTPS, s)
	if h.HTTP != nil && h.HTTP.Verify {
		r.failf(fieldpath.Child(path, "http.verify"), "not used by http, which has no certificates")
	}
	if h.TCP != nil {
		r.checkHealthPort(fieldpath.Child(path, "tcp.port"), h.TCP.Port, s.Port)
	}
	if h.UDP != nil {
		r.checkUDP(fieldpath.Child(path, "udp"), h.UDP, s)
	}
	if h.Interval < 100*time.Millisecond {
		r.failf(fieldpath.Child(path, "interval"), "must be at least 100ms")
		return
	}
	checkRange(r, fieldpath.Child(path, "timeout"), h.Timeout, time.Millisecond, h.Interval)
	if h.Jitter == nil {
		r.failf(fieldpath.Child(path, "jitter"), "required")
	} else {
		checkRange(r, fieldpath.Child(path, "jitter"), *h.Jitter, 0, h.Interval/2)
	}
}

// checkHTTP checks an HTTP or HTTPS check, or nothing if there is none.
func (r *rules) checkHTTP(at string, h *HTTPCheck, s *Service) {
	if h == nil {
		return
	}
	r.checkHealthPort(fieldpath.Child(at, "port"), h.Port, s.Port)
	if _, err := url.ParseRequestURI(h.Path); err != nil || h.Path[0] != '/' {
		r.failf(fieldpath.Child(at, "path"), "must be a URL path that begins with /")
	}
	r.checkLength(fieldpath.Child(at, "path"), h.Path)
	r.checkLength(fieldpath.Child(at, "body"), h.Body)
	r.checkLength(fieldpath.Child(at, "host"), h.Host)
	if strings.ContainsFunc(h.Host, func(c rune) bool { return c > unicode.MaxASCII || c <= ' ' || c == '/' }) {
		r.failf(fieldpath.Child(at, "host"), "must be a host name or an address, and perhaps a port")
	}
	if _, err := ParseStatus(h.Status); err != nil {
		r.failf(fieldpath.Child(at, "status"), "%v: write it as 200-299, 404", err)
	}
}

func (r *rules) checkUDP(at string, u *UDPCheck, s *Service) {
	r.checkHealthPort(fieldpath.Child(at, "port"), u.Port, s.Port)
	switch {
	case u.Request != "" && u.RequestHex != "":
		r.failf(fieldpath.Child(at, "request-hex"), "not allowed beside request")
	case u.Request == "" && u.RequestHex == "":
		r.failf(fieldpath.Child(at, "request"), "required, unless there is request-hex")
	}
	if u.Answer != "" && u.AnswerHex != "" {
		r.failf(fieldpath.Child(at, "answer-hex"), "not allowed beside answer")
	}
	const digits = "must be hexadecimal digits, two for each byte"
	if _, err := u.Datagram(); err != nil {
		r.failf(fieldpath.Child(at, "request-hex"), digits)
	}
	if _, err := u.Expected(); err != nil {
		r.failf(fieldpath.Child(at, "answer-hex"), digits)
	}
	r.checkLength(fieldpath.Child(at, "request"), u.Request)
	r.checkLength(fieldpath.Child(at, "answer"), u.Answer)
}

// checkLength checks that a text of a check is not too long for one packet.
func (r *rules) checkLength(path, text string) {
	if len(text) > maxCheckText {
		r.failf(path, "must have at most %d bytes, has %d", maxCheckText, len(text))
	}
}

// checkHealthPort reports a missing port of a health check. The default is the service's port, if
// it has one.
func (r *rules) checkHealthPort(path string, port uint16, service Port) {
	switch {
	case port != 0 || service == 0: // checkPort reports that the service's port is missing
	case service == AllPorts:
		r.failf(path, "required, because the service's port is all")
	default:
		r.failf(path, "required")
	}
}
