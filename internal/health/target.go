// SPDX-License-Identifier: Apache-2.0

package health

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

// Kind is what a check does.
type Kind uint8

// The kinds of checks.
const (
	TCP   Kind = iota // opens a connection
	HTTP              // sends a request on a connection
	HTTPS             // sends a request on a connection with TLS
	UDP               // sends a datagram
)

// Target is a server of a service with its check. The ranges of its values are those of
// desired.Health.
type Target struct {
	Service, Server string
	Address         netip.AddrPort // the address to which checks connect
	// OnPath tells whether checks take the path of clients' packets. Address is then the VIP, and
	// the mark of packets names the server.
	OnPath bool
	Mark   uint32
	Kind   Kind
	// For HTTP and HTTPS: Path (with the query) and Host are those of the request. The status of
	// the answer must be in the list Status, and its body must contain Body.
	Path, Host, Status, Body string
	Verify                   bool // the certificate of HTTPS must be valid
	// For UDP: Request is the datagram, and the answer must contain Answer.
	Request, Answer string
	Interval        time.Duration // mean time between the starts of two successive checks
	Jitter          time.Duration // how much this time may differ from Interval
	Timeout         time.Duration // timeout of a whole check, at most the interval
	Rise            int           // consecutive successes after which a failing server is healthy
	Fall            int           // consecutive failures after which a server is failing
	// State is the state that the reader of updates knows.
	State State
}

// State is what checks have said about a target.
type State uint8

// The states of a target.
const (
	Healthy State = iota
	Failing
	// Unchecked: no check has had a result yet. One success makes the target Healthy, and Fall
	// failures make it Failing.
	Unchecked
)

// checksAs tells whether two targets are the same but for State.
func (t *Target) checksAs(other *Target) bool {
	like := *other
	like.State = t.State
	return like == *t
}

// AsksAs tells whether the checks of two targets ask the same thing of the same server, even if at
// different intervals. A result of one then holds for the other.
func (t *Target) AsksAs(other *Target) bool {
	like := *other
	like.Mark, like.Interval, like.Jitter, like.Timeout = t.Mark, t.Interval, t.Jitter, t.Timeout
	like.Rise, like.Fall, like.State = t.Rise, t.Fall, t.State
	return like == *t
}

// Targets returns the targets of all services with a health check. Those on the path of clients'
// packets have no marks yet.
func Targets(services []desired.Service) []Target {
	var targets []Target
	for i := range services {
		if services[i].Health != nil {
			targets = appendTargets(targets, &services[i])
		}
	}
	return targets
}

// appendTargets appends the targets of a service, one for each server.
func appendTargets(targets []Target, svc *desired.Service) []Target {
	check := svc.Health
	target := Target{
		Service: svc.Name, OnPath: check.ViaPackets(),
		Interval: check.Interval, Timeout: check.Timeout, Rise: check.Rise, Fall: check.Fall,
	}
	if check.Jitter != nil {
		target.Jitter = *check.Jitter
	}
	port := target.ask(check, svc.VIP)
	for _, server := range svc.Servers {
		target.Server = server.Name
		host := server.Host
		if target.OnPath {
			host = svc.VIP
		}
		target.Address = netip.AddrPortFrom(host, port)
		targets = append(targets, target)
	}
	return targets
}

// ask sets the kind of the check and its request, and returns its port.
func (t *Target) ask(check *desired.Health, vip netip.Addr) (port uint16) {
	switch {
	case check.HTTP != nil:
		t.Kind = HTTP
		return t.askHTTP(check.HTTP, vip, 80)
	case check.HTTPS != nil:
		t.Kind, t.Verify = HTTPS, check.HTTPS.Verify
		return t.askHTTP(check.HTTPS, vip, 443)
	case check.UDP != nil:
		t.Kind = UDP
		request, _ := check.UDP.Datagram() // the configuration was checked: there is no error
		answer, _ := check.UDP.Expected()
		t.Request, t.Answer = string(request), string(answer)
		return check.UDP.Port
	}
	t.Kind = TCP
	return check.TCP.Port
}

// askHTTP sets the request of an HTTP or HTTPS check, and returns its port. usual is the scheme's
// port.
func (t *Target) askHTTP(check *desired.HTTPCheck, vip netip.Addr, usual uint16) (port uint16) {
	t.Path, t.Status, t.Body, t.Host = check.Path, check.Status, check.Body, check.Host
	if t.Host == "" {
		t.Host = hostHeader(vip, check.Port, usual)
	}
	return check.Port
}

// hostHeader returns the Host header of a client of the VIP. So a server with several virtual hosts
// answers for the one that clients get. The header has no port if that is the usual one of the
// scheme (RFC 9110 section 7.2).
func hostHeader(vip netip.Addr, port, usual uint16) string {
	switch {
	case port != usual:
		return net.JoinHostPort(vip.String(), strconv.Itoa(int(port)))
	case vip.Is6():
		return "[" + vip.String() + "]"
	}
	return vip.String()
}
