// SPDX-License-Identifier: Apache-2.0

package health

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

// Target is a server of a service with its check. The ranges of its values are those of
// config.Health.
type Target struct {
	Service, Server string
	Address         netip.AddrPort // the address to which checks connect
	// Path is the path of an HTTP check, with its query; empty for a TCP check.
	Path string
	// Host is the Host header of an HTTP check.
	Host     string
	Interval time.Duration // time between the starts of two successive checks
	Timeout  time.Duration // timeout of a whole check, at most the interval
	Rise     int           // consecutive successes after which a server is healthy again
	Fall     int           // consecutive failures after which the server is failing
	// Failing is the initial state of a new target. A target that starts as failing becomes
	// healthy after Rise successes.
	Failing bool
}

// Targets returns the targets of all services with a health check.
func Targets(services []desired.Service) []Target {
	var targets []Target
	for i := range services {
		if services[i].Health != nil {
			targets = appendTargets(targets, &services[i])
		}
	}
	return targets
}

func appendTargets(targets []Target, svc *desired.Service) []Target {
	check := svc.Health
	target := Target{
		Service:  svc.Name,
		Interval: check.Interval,
		Timeout:  check.Timeout,
		Rise:     check.Rise,
		Fall:     check.Fall,
	}
	var port uint16
	if check.HTTP != nil {
		port = check.HTTP.Port
		target.Path, target.Host = check.HTTP.Path, hostHeader(svc.VIP, port)
	} else {
		port = check.TCP.Port
	}
	for _, server := range svc.Servers {
		target.Server = server.Name
		target.Address = netip.AddrPortFrom(server.Host, port)
		targets = append(targets, target)
	}
	return targets
}

// hostHeader returns the Host header of a client of the VIP, so that a server with
// several virtual hosts answers for the one that clients get. It has no port if
// that is the default of the scheme (RFC 9110 section 7.2).
func hostHeader(vip netip.Addr, port uint16) string {
	switch {
	case port != 80:
		return net.JoinHostPort(vip.String(), strconv.Itoa(int(port)))
	case vip.Is6():
		return "[" + vip.String() + "]"
	}
	return vip.String()
}
