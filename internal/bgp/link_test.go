// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// openLink opens the interface eth1 of a namespace as a link does, once the kernel has given it a
// link-local address.
func openLink(t *testing.T, ns *testhost.Namespace) (conn *ndp.Conn, hardware net.HardwareAddr) {
	t.Helper()
	awaitThat(t, func() error {
		return ns.Do(func() (err error) {
			conn, hardware, err = (&link{iface: "eth1"}).open()
			return err
		})
	})
	return conn, hardware
}

// TestLink: a balancer and a router find each other on a link. The balancer takes only
// advertisements that no router has forwarded.
func TestLink(t *testing.T) {
	t.Parallel()
	balancer, far := testhost.NewNamespace(t), testhost.NewNamespace(t)
	for _, ns := range []*testhost.Namespace{balancer, far} {
		testhost.Must(t, ns.Do(func() error { // addresses can be used at once
			return os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0)
		}))
	}
	testhost.Connect(t, balancer, "eth1", nil, far, "eth1", nil)
	router, hardware := openLink(t, far)
	defer router.Close()
	testhost.Must(t, router.SetReadDeadline(time.Now().Add(patience)))
	conn, own := openLink(t, balancer)

	to := make(chan heard)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- (&link{iface: "eth1", heard: to}).serve(ctx, conn, own) }()
	if h := awaitHeard(t, to); h.iface != "eth1" || h.router.IsValid() {
		t.Errorf("%+v, want a link that can be used", h)
	}
	// The balancer asks for routers, advertises itself, and does so again when it is asked to.
	advertised := 0
	for solicited := false; !solicited || advertised == 0; {
		message, _, _, err := router.ReadFrom()
		testhost.Must(t, err)
		switch m := message.(type) {
		case *ndp.RouterSolicitation:
			solicited = true
		case *ndp.RouterAdvertisement:
			advertised++
			source, ok := m.Options[0].(*ndp.LinkLayerAddress)
			if m.RouterLifetime != 0 || len(m.Options) != 1 || !ok || !bytes.Equal(source.Addr, own) {
				t.Errorf("the balancer advertises %+v", m)
			}
		}
	}
	testhost.Must(t, router.WriteTo(&ndp.RouterSolicitation{}, nil, allRouters))
	requireAdvertisement(t, router)

	advertisement := &ndp.RouterAdvertisement{RouterLifetime: time.Hour}
	forwarded := &ipv6.ControlMessage{HopLimit: ndp.HopLimit - 1}
	testhost.Must(t, router.WriteTo(&ndp.RouterAdvertisement{ReachableTime: time.Second}, forwarded, allNodes))
	select {
	case h := <-to:
		t.Errorf("%+v was heard from another network", h)
	case <-time.After(100 * time.Millisecond): // it would have come before the next one
	}
	testhost.Must(t, router.WriteTo(advertisement, nil, allNodes))
	want := linkLocal(t, far)
	if h := awaitHeard(t, to); h.router != want.WithZone("eth1") {
		t.Errorf("%+v, want %s with hardware address %s", h, want, hardware)
	}
	requireAdvertisement(t, router) // a new router gets one at once
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// linkLocal returns the link-local address of the interface eth1 of a namespace.
func linkLocal(t *testing.T, ns *testhost.Namespace) (address netip.Addr) {
	t.Helper()
	testhost.Must(t, ns.Do(func() error {
		iface, err := net.InterfaceByName("eth1")
		if err != nil {
			return err
		}
		all, err := iface.Addrs()
		for _, a := range all {
			if prefix, _ := netip.ParsePrefix(a.String()); prefix.Addr().IsLinkLocalUnicast() {
				address = prefix.Addr()
			}
		}
		return err
	}))
	return address
}

func awaitHeard(t *testing.T, from <-chan heard) heard {
	t.Helper()
	select {
	case h := <-from:
		return h
	case <-time.After(patience):
		t.Fatalf("nothing was heard for %v", patience)
		return heard{}
	}
}

// requireAdvertisement reads messages until one is an advertisement.
func requireAdvertisement(t *testing.T, router *ndp.Conn) {
	t.Helper()
	for {
		message, _, _, err := router.ReadFrom()
		testhost.Must(t, err)
		if _, ok := message.(*ndp.RouterAdvertisement); ok {
			return
		}
	}
}

// TestLinkThatDoesNotExist is logged once, and does not keep the announcer from its end.
func TestLinkThatDoesNotExist(t *testing.T) {
	t.Parallel()
	log := &logged{}
	stop := startLink(t.Context(), "none", nil, slog.New(slog.NewTextHandler(log, nil)))
	time.Sleep(linkRetry + linkRetry/2)
	stop()
	if strings.Count(log.String(), "unnumbered bgp peer cannot be found on the interface") != 1 {
		t.Errorf("log %q", log)
	}
}

// TestUnnumberedPeer follows the address of a peer that is found on its link. The session is opened
// when the peer is heard. When a session fails, the next one is to the router that was heard last.
func TestUnnumberedPeer(t *testing.T) {
	f := newFixture(t)
	f.attempt = 3 * time.Second
	f.cfg.BGP.Peers[0].Address, f.cfg.BGP.Peers[0].Interface = netip.Addr{}, "none"
	f.cfg.BGP.Peers[0].PasswordFile = ""
	f.start(false, 0, 0)
	peer := func() Peer { return f.state().Peers[0] }
	awaitThat(t, func() error {
		if len(f.state().Peers) == 0 {
			return errors.New("no peer")
		}
		return nil
	})
	if p := peer(); p.Address != "none" || p.Neighbor != "" {
		t.Errorf("%+v", p)
	}
	for _, address := range []string{"127.0.0.7", f.router.addr().Addr().String()} { // nobody listens at the first
		f.announcer.heard <- heard{"none", netip.MustParseAddr(address)}
		awaitThat(t, func() error {
			if p := peer(); p.Neighbor != address {
				return fmt.Errorf("%+v, want %s", p, address)
			}
			return nil
		})
	}
	f.router.await(0, func(*received) error { return nil })
	awaitThat(t, func() error {
		if p := peer(); !p.IsEstablished() {
			return fmt.Errorf("%+v", p)
		}
		return nil
	})
	// An established session stays, whoever else is heard.
	f.announcer.heard <- heard{"none", netip.MustParseAddr("127.0.0.7")}
	f.apply()
	if p := peer(); p.Neighbor != f.router.addr().Addr().String() || !p.IsEstablished() {
		t.Errorf("%+v", p)
	}
	f.cfg.BGP = f.with(func(b *desired.BGP) { b.Peers = nil })
	f.apply()
	f.router.await(0, isClosed)
	if len(f.announcer.links) != 0 {
		t.Errorf("links %v", f.announcer.links)
	}
}
