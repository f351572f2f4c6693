// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

const (
	// lastPlacement is the time after the check that makes a server fail within which the balancer
	// places its last connection on the server. This is what Segue promises, and no measurement.
	lastPlacement = time.Second
	// failedChecks is the number of failed checks in a row that make a server fail.
	failedChecks = 3
	// observation is how long placements are observed after that check.
	observation = 4 * time.Second
)

// TestNoConnectionAfterLastCheck lets the application of a server accept connections and reset
// them, which only health checks notice. After the check that makes the server fail, the balancer
// may place connections on it for a second at most. The kernel's times of packets at the server's
// port tell both moments, so the test itself may be slow.
func TestNoConnectionAfterLastCheck(t *testing.T) {
	t.Parallel()
	topology := topology("http6-insert", "hunt4-encap")
	topology.Balancers = 1
	health := &desired.Health{HTTP: &desired.HTTPCheck{Path: "/healthz"}, Fall: failedChecks}
	for i := range topology.Services {
		topology.Services[i].Health = health
	}
	l := up(t, topology)
	no := false
	reconfigure(t, l, func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			cfg.Services[i].Probe = &no
		}
	})
	startArrivals(t, l, failureRate, answerLimit)
	f := &failing{T: t, lab: l, server: l.Node("s3")}

	var file sharedFile
	tap, err := l.Node("fabric").Capture("s3", &file)
	must(t, err)
	var seen map[string]*lastPlacements
	eventually(t, func() error {
		seen = readPlacements(t, l, file.reader())
		for version, p := range seen {
			// Checks may have failed while the lab started. They would count as the first of the
			// failed ones.
			if len(p.answered) == 0 {
				return fmt.Errorf("%s: the server has not answered a check", version)
			}
		}
		return nil
	})
	resetConnections(f)
	eventually(t, func() error {
		seen = readPlacements(t, l, file.reader())
		for version, p := range seen {
			if !p.isObserved() {
				return fmt.Errorf("%s: placements were not observed for %v after %d failed checks: %v",
					version, observation, failedChecks, p)
			}
		}
		return nil
	})
	must(t, tap.Stop())
	must(t, f.resetter.Close())
	if log := readLog(t, l.Process("lb1", "lb")); strings.Contains(log, "cannot check servers") {
		t.Skip("the machine was too busy for health checks, so some failed checks did not count")
	}
	for version, p := range seen {
		t.Logf("%s: %v", version, p)
		if p.before == 0 {
			t.Errorf("%s: no connection was placed on s3 in the second before the check", version)
		}
		if late := p.last.Sub(p.failed); late > lastPlacement {
			t.Errorf("%s: the last connection was placed on s3 %v after the check that made it fail",
				version, late)
		}
	}
}

// lastPlacements are connections that were placed on a server which fails its checks.
type lastPlacements struct {
	answered map[layers.TCPPort]bool // the balancer's ports of checks that the server answered
	checks   map[layers.TCPPort]bool // the balancer's ports of failed checks
	failed   time.Time               // when the check failed that makes the server fail
	before   int                     // connections placed in the second before that
	last     time.Time               // when the last connection was placed
	seen     time.Time               // when the last packet passed

	placed []time.Time
}

func (p *lastPlacements) isObserved() bool {
	return !p.failed.IsZero() && p.seen.Sub(p.failed) > observation
}

func (p *lastPlacements) String() string {
	if p.failed.IsZero() {
		return "the server has not failed"
	}
	return fmt.Sprintf("%d failed checks; connections on the server: %d in the second before, "+
		"the last one %v after", len(p.checks), p.before, p.last.Sub(p.failed))
}

// readPlacements reads the packets at a server's port, by the IP version of their service. A check
// fails when the server ends the balancer's connection without an answer. A connection is placed
// when the client's SYN reaches the server. After the failure of a server, no check succeeds.
func readPlacements(t *testing.T, l *lab.Lab, file io.Reader) map[string]*lastPlacements {
	t.Helper()
	balancer := l.Node("lb1")
	all := map[string]*lastPlacements{}
	for _, version := range []string{"IPv6", "IPv4"} {
		all[version] = &lastPlacements{
			answered: map[layers.TCPPort]bool{}, checks: map[layers.TCPPort]bool{},
		}
	}
	reader, err := pcapgo.NewReader(file)
	must(t, err)
	for {
		frame, info, err := reader.ReadPacketData()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // it is being written
			break
		}
		must(t, err)
		for _, p := range all {
			p.seen = info.Timestamp
		}
		tcp, ok := layer[*layers.TCP](frame)
		source, destination := innerAddresses(frame)
		p := all[map[bool]string{true: "IPv4", false: "IPv6"}[source.Is4()]]
		fromServer := destination == balancer.IPv6 || destination == balancer.IPv4
		switch {
		case !ok:
		case fromServer && len(tcp.Payload) > 0:
			p.answered[tcp.DstPort] = true
		case fromServer && (tcp.RST || tcp.FIN) && !p.answered[tcp.DstPort]:
			// The server resets a connection again if the balancer's request arrives after that.
			p.checks[tcp.DstPort] = true
			if p.failed.IsZero() && len(p.checks) == failedChecks {
				p.failed = info.Timestamp
			}
		case tcp.SYN && !tcp.ACK && source != balancer.IPv6 && source != balancer.IPv4:
			p.placed = append(p.placed, info.Timestamp)
		}
	}
	for _, p := range all {
		for _, at := range p.placed {
			if at.Before(p.failed) && p.failed.Sub(at) < time.Second {
				p.before++
			}
			p.last = at
		}
	}
	return all
}

// innerAddresses returns the addresses of a frame's innermost IP header.
func innerAddresses(frame []byte) (source, destination netip.Addr) {
	if ip, ok := layer[*layers.IPv4](frame); ok {
		source, _ = netip.AddrFromSlice(ip.SrcIP)
		destination, _ = netip.AddrFromSlice(ip.DstIP)
	} else if ip, ok := layer[*layers.IPv6](frame); ok {
		source, _ = netip.AddrFromSlice(ip.SrcIP)
		destination, _ = netip.AddrFromSlice(ip.DstIP)
	}
	return source.Unmap(), destination.Unmap()
}
