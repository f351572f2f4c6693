// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// patience is the limit for an answer, in the time of the guest's clock.
const patience = time.Minute

// connect builds a lab with a balancer and two servers, and uses each of its services once: those
// of the built-in topology, which have each encapsulation with TCP and UDP and each IP version, and
// one for each further kind of method.
func connect(ctx context.Context) (err error) {
	topology := lab.DefaultTopology()
	topology.Name, topology.Balancers, topology.Servers = "guest", 1, 2
	topology.Applications = []lab.Application{lab.Emulated}
	topology.Services = append(topology.Services,
		service("stateless", 0x11, desired.PlacementHash, desired.PersistenceStateless),
		service("hint", 0x12, desired.PlacementHash, desired.PersistenceHint),
		service("infer", 0x13, desired.PlacementInfer, desired.PersistenceTable),
		service("round-robin", 0x14, desired.PlacementRoundRobin, desired.PersistenceTable),
	)
	l, err := lab.Up(ctx, topology, lab.Options{
		Segue: "/bin/segue", Laboratory: "/bin/segue-lab",
		Progress: func(step string) { fmt.Println("guest:", step) },
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	var errs []error
	for _, s := range l.Topology.Services {
		server, err := use(ctx, l, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.Name, err))
			continue
		}
		fmt.Printf("guest: %s (%s, %s): answered by %s\n", s.Name, s.Protocol, s.Encapsulation, server)
	}
	status, err := l.Node("lb1").Run(ctx, "segue", "status", "-i", l.Node("lb1").Instance())
	for line := range strings.Lines(status) {
		if strings.Contains(line, " XDP on ") {
			fmt.Print("guest: ", line)
		}
	}
	return errors.Join(append(errs, err)...)
}

// service returns a service of TCP over IPv6. number is the last part of its VIP.
func service(
	name string, number uint8, placement desired.Placement, persistence desired.Persistence,
) lab.Service {
	vip := netip.MustParseAddr("2001:db8:80::").As16()
	vip[15] = number
	return lab.Service{
		Name: name, VIP: netip.AddrFrom16(vip), Port: 80, Protocol: desired.TCP,
		Encapsulation: desired.SRv6Encap, Placement: placement, Persistence: persistence,
	}
}

// use asks a service for an answer until it gets one: in the beginning, the balancer does not know
// the next hops of all servers yet. It returns the server that answered.
func use(ctx context.Context, l *lab.Lab, s lab.Service) (server string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ask := askTCP
	if s.Protocol == desired.UDP {
		ask = askUDP
	}
	for {
		once, cancelOnce := context.WithTimeout(ctx, patience/6)
		server, err = ask(once, l.Node("client"), s)
		cancelOnce()
		if err == nil || ctx.Err() != nil {
			return server, err
		}
	}
}

func askTCP(ctx context.Context, client *lab.Node, s lab.Service) (server string, err error) {
	c := http.Client{Transport: &http.Transport{DialContext: client.Dial, DisableKeepAlives: true}}
	url := fmt.Sprintf("http://%s/", s.Address())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	response, err := c.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return "", err
	}
	if response.StatusCode != http.StatusOK {
		return "", errors.New(response.Status)
	}
	return response.Header.Get("X-Segue-Server"), nil
}

func askUDP(ctx context.Context, client *lab.Node, s lab.Service) (server string, err error) {
	conn, err := client.Dial(ctx, "udp", s.Address().String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte("hello")); err != nil {
		return "", err
	}
	buf := make([]byte, 2048)
	n, err := conn.Read(buf)
	if err != nil {
		return "", err
	}
	server, echo, _ := strings.Cut(string(buf[:n]), "\n")
	if echo != "hello" {
		return "", fmt.Errorf("the echo is %q", echo)
	}
	return server, nil
}
