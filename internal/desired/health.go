// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// HealthVia is the way that health checks take.
type HealthVia string

// The ways of health checks.
const (
	// ViaPackets is the path of clients' packets: checks connect to the VIP, and are encapsulated
	// for the one server.
	ViaPackets HealthVia = "packets"
	// ViaHost is the path to the server's own address: checks connect to its Host.
	ViaHost HealthVia = "host"
)

// Health is an active check of every server of a service. Exactly one of HTTP, HTTPS, TCP and UDP
// is set.
type Health struct {
	Via      HealthVia     `yaml:"via,omitempty"` // default packets
	HTTP     *HTTPCheck    `yaml:"http,omitempty"`
	HTTPS    *HTTPCheck    `yaml:"https,omitempty"`
	TCP      *TCPCheck     `yaml:"tcp,omitempty"`
	UDP      *UDPCheck     `yaml:"udp,omitempty"`
	Interval time.Duration `yaml:"interval,omitempty"` // at least 100ms; default 1s
	// Jitter is how much the time to the next check may differ from Interval, up or down: 0 to half
	// the interval. Default a tenth of the interval.
	Jitter  *time.Duration `yaml:"jitter,omitempty"`
	Timeout time.Duration  `yaml:"timeout,omitempty"` // 1ms to the interval; default the interval
	// After Fall failures in a row, a server gets no new flows. After Rise successes in a row, it gets
	// new flows again. Both are 1 to 1000.
	Rise int `yaml:"rise,omitempty" range:"1 to 1000"` // default 2
	Fall int `yaml:"fall,omitempty" range:"1 to 1000"` // default 3
}

// HTTPCheck succeeds if the answer to a request has the right status and body. Redirects are not
// followed.
type HTTPCheck struct {
	Path string `yaml:"path,omitempty"` // default "/"
	// Port is the service's port by default. It is required if the service is for all ports.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
	// Host is the Host header, and the server name of HTTPS (SNI) unless it is an address. Default:
	// the VIP, with the port if that is not the scheme's.
	Host string `yaml:"host,omitempty"`
	// Status are the statuses of success: numbers and ranges such as "200-299, 404". Default
	// 200-399.
	Status string `yaml:"status,omitempty"`
	// Body is a text that the body must contain, in its first MaxCheckedBody bytes. Empty: the body
	// is not read.
	Body string `yaml:"body,omitempty"`
	// Verify tells whether the certificate of HTTPS must be valid for Host, by the authorities that
	// the balancer's host trusts. Default false. HTTPS only.
	Verify bool `yaml:"verify,omitempty"`
}

const (
	// MaxCheckedBody is how many bytes of a body a check reads.
	MaxCheckedBody = 64 << 10
	// maxCheckText is the greatest length of each text of a check, in bytes, so that a request fits
	// into one packet.
	maxCheckText = 512
	// DefaultStatus are the statuses of success by default.
	DefaultStatus = "200-399"
)

// TCPCheck succeeds when a connection opens.
type TCPCheck struct {
	// Port is the service's port by default. It is required if the service is for all ports.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
}

// UDPCheck sends a datagram, and succeeds if a datagram that contains the answer comes back. An
// ICMP error or no datagram until the timeout is a failure.
type UDPCheck struct {
	// Port is the service's port by default. It is required if the service is for all ports.
	Port uint16 `yaml:"port,omitempty" range:"1 to 65535"`
	// One of Request and RequestHex is the datagram, as text or in hexadecimal.
	Request    string `yaml:"request,omitempty"`
	RequestHex string `yaml:"request-hex,omitempty"`
	// At most one of Answer and AnswerHex is set. Without them any datagram is an answer.
	Answer    string `yaml:"answer,omitempty"`
	AnswerHex string `yaml:"answer-hex,omitempty"`
}

// Datagram returns the request, or an error if RequestHex is not hexadecimal.
func (u *UDPCheck) Datagram() ([]byte, error) { return textOrHex(u.Request, u.RequestHex) }

// Expected returns the text of the answer, or an error if AnswerHex is not hexadecimal.
func (u *UDPCheck) Expected() ([]byte, error) { return textOrHex(u.Answer, u.AnswerHex) }

// textOrHex returns the bytes of a text or, if there are hexadecimal digits, of these.
func textOrHex(text, digits string) ([]byte, error) {
	if digits == "" {
		return []byte(text), nil
	}
	return hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
}

// ViaPackets tells whether the checks take the path of clients' packets.
func (h *Health) ViaPackets() bool { return h.Via == ViaPackets }

// StatusRange is a range of statuses, both ends included.
type StatusRange struct{ First, Last int }

// ParseStatus parses a list of statuses and ranges of statuses, such as "200-299, 404".
func ParseStatus(list string) ([]StatusRange, error) {
	var all []StatusRange
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			last = first
		}
		low, errLow := strconv.Atoi(strings.TrimSpace(first))
		high, errHigh := strconv.Atoi(strings.TrimSpace(last))
		if errLow != nil || errHigh != nil || low < 100 || high > 599 || low > high {
			return nil, fmt.Errorf("%q is not a status from 100 to 599, or a range of them", part)
		}
		all = append(all, StatusRange{low, high})
	}
	return all, nil
}
