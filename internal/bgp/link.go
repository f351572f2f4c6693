// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
)

const (
	// advertiseInterval is the time between two router advertisements to a link. FRR has the same.
	advertiseInterval = 10 * time.Second
	// linkRetry is the time until a link that cannot be used is tried again: it does not exist yet,
	// or has no link-local address yet.
	linkRetry = time.Second
)

// allNodes and allRouters are the multicast groups of a link (RFC 4291, section 2.7.1).
var (
	allNodes   = netip.MustParseAddr("ff02::1")
	allRouters = netip.MustParseAddr("ff02::2")
)

// link is the link to an unnumbered peer. Routers find each other there by router advertisements
// (RFC 4861), as FRR and switches do. Those of the balancer have the router lifetime 0 and no
// prefixes, so that no host takes the balancer for a default router.
type link struct {
	iface string
	heard chan<- heard
	log   *slog.Logger
}

// heard tells that a link can be used, or that a router there has sent an advertisement.
type heard struct {
	iface  string
	router netip.Addr // link-local, with the interface as zone; zero: the link can be used
}

// startLink sends advertisements to a link, and what it hears there to the channel, until the
// returned function is called. This function waits for the end.
func startLink(ctx context.Context, iface string, to chan<- heard, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	l := &link{iface: iface, heard: to, log: log}
	var group sync.WaitGroup
	group.Go(func() { l.run(ctx) })
	return func() {
		cancel()
		group.Wait()
	}
}

// run uses the link until the context ends. It logs a failure once, until the link has worked again.
func (l *link) run(ctx context.Context) {
	isLogged := false
	for ctx.Err() == nil {
		worked, err := l.use(ctx)
		isLogged = isLogged && !worked
		if ctx.Err() == nil && !isLogged {
			l.log.Warn("unnumbered bgp peer cannot be found on the interface", "interface", l.iface, "error", err)
			isLogged = true
		}
		select {
		case <-time.After(linkRetry):
		case <-ctx.Done():
		}
	}
}

// use opens the link, and serves it until the context ends or an error occurs. worked tells whether
// the link could be opened.
func (l *link) use(ctx context.Context) (worked bool, err error) {
	conn, hardware, err := l.open()
	if err != nil {
		return false, err
	}
	return true, l.serve(ctx, conn, hardware)
}

// serve sends and reads messages until the context ends or an error occurs, and closes the socket.
func (l *link) serve(ctx context.Context, conn *ndp.Conn, hardware net.HardwareAddr) error {
	l.tell(ctx, netip.Addr{})
	ctx, cancel := context.WithCancel(ctx)
	solicited := make(chan struct{}, 1)
	var group sync.WaitGroup
	var readErr error
	group.Go(func() {
		defer cancel()
		readErr = l.read(ctx, conn, solicited)
	})
	err := l.advertise(ctx, conn, hardware, solicited)
	cancel()
	err = errors.Join(err, conn.Close())
	group.Wait()
	return errors.Join(err, readErr)
}

// open opens a socket for neighbour discovery on the link. It also returns the hardware address of
// the interface.
func (l *link) open() (*ndp.Conn, net.HardwareAddr, error) {
	iface, err := net.InterfaceByName(l.iface)
	if err != nil {
		return nil, nil, err
	}
	conn, _, err := ndp.Listen(iface, ndp.LinkLocal)
	if err != nil {
		return nil, nil, err
	}
	filter := &ipv6.ICMPFilter{}
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
	filter.Accept(ipv6.ICMPTypeRouterSolicitation)
	err = errors.Join(conn.SetICMPFilter(filter), conn.JoinGroup(allNodes), conn.JoinGroup(allRouters),
		conn.SetControlMessage(ipv6.FlagHopLimit, true))
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return conn, iface.HardwareAddr, nil
}

// advertise asks for advertisements of routers, and sends those of the balancer: at once, regularly,
// and when it is asked to.
func (l *link) advertise(
	ctx context.Context, conn *ndp.Conn, hardware net.HardwareAddr, solicited <-chan struct{},
) error {
	// FRR needs the hardware address to send IPv4 packets to an IPv6 next hop.
	source := []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: hardware}}
	if err := conn.WriteTo(&ndp.RouterSolicitation{Options: source}, nil, allRouters); err != nil {
		return fmt.Errorf("ask for routers: %w", err)
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-solicited:
		case <-ctx.Done():
			return nil
		}
		if err := conn.WriteTo(&ndp.RouterAdvertisement{Options: source}, nil, allNodes); err != nil {
			return fmt.Errorf("advertise the balancer: %w", err)
		}
		timer.Reset(advertiseInterval)
	}
}

// read reads messages until the context ends and the socket is closed. A router that is heard for
// the first time gets an advertisement at once.
func (l *link) read(ctx context.Context, conn *ndp.Conn, solicited chan<- struct{}) error {
	known := map[netip.Addr]bool{}
	for {
		message, control, from, err := conn.ReadFrom()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("read from the link: %w", err)
		case control == nil || control.HopLimit != ndp.HopLimit: // not from this link (RFC 4861, section 6.1)
			continue
		}
		_, isAdvertisement := message.(*ndp.RouterAdvertisement)
		if isAdvertisement && !from.IsLinkLocalUnicast() {
			continue
		}
		if isAdvertisement {
			l.tell(ctx, from)
			if known[from] || len(known) >= mostRouters {
				continue
			}
			known[from] = true
		}
		select {
		case solicited <- struct{}{}:
		default: // one is due already
		}
	}
}

// tell sends to the channel that the link can be used, or the address of a router.
func (l *link) tell(ctx context.Context, router netip.Addr) {
	select {
	case l.heard <- heard{l.iface, router}:
	case <-ctx.Done():
	}
}

// mostRouters is how many routers of a link are known. Others get no advertisement at once, so that
// a host that poses as many routers causes no more of them.
const mostRouters = 8
