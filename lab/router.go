// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// Edge describes the edge router.
type Edge struct {
	// Router is the software by which the edge router learns the routes of the VIPs from the
	// balancers. If it is empty, the lab itself configures these routes (SetNextHops).
	Router Router `yaml:"router,omitempty"`
	// BFD tells whether edge router and balancers watch each other by BFD. On each balancer, a
	// process of BIRD speaks BFD.
	BFD bool `yaml:"bfd,omitempty"`
}

// Router is routing software.
type Router string

// The routing software that an edge router can run.
const (
	FRR  Router = "frr"
	BIRD Router = "bird"
)

var routers = []Router{FRR, BIRD}

const (
	// The AS numbers are private ones (RFC 6996).
	edgeASN     = 64512
	balancerASN = 64600
	bgpPort     = 179
	// frrDir contains the daemons of FRR, which are not in the PATH.
	frrDir = "/usr/lib/frr"
	// FRR's daemons give up root by themselves, and run as frrUser.
	frrUser = "frr"
)

// checkRouter returns an error if the edge router runs FRR, and a daemon of FRR is not installed.
// Up itself checks only the program of each process. For BIRD this is the daemon, and for FRR a
// shell that starts the daemons.
func (t Topology) checkRouter() error {
	if t.Edge.Router != FRR {
		return nil
	}
	for _, daemon := range []string{"zebra", "bgpd", "bfdd"} {
		if _, err := exec.LookPath(filepath.Join(frrDir, daemon)); err != nil {
			return fmt.Errorf("the edge router runs FRR: %w", err)
		}
	}
	return nil
}

// router returns the process of the edge router's software, or the zero Process if it has none.
func (n *Node) router() Process {
	switch n.lab.Topology.Edge.Router {
	case FRR:
		return Process{Name: string(FRR), port: bgpPort, args: []string{"sh", n.configPath("frr.sh")}}
	case BIRD:
		return Process{Name: string(BIRD), port: bgpPort, args: []string{
			"bird", "-f", "-c", n.configPath("bird.conf"), "-s", n.lab.path(n.Name, "bird.ctl"),
		}}
	}
	return Process{}
}

// bfd returns the process that speaks BFD on a balancer. The lab does not wait until it is ready,
// because it listens on no TCP port.
func (n *Node) bfd() Process {
	return Process{Name: "bfd", args: []string{
		"bird", "-f", "-c", n.configPath("bfd.conf"), "-s", n.lab.path("run", n.Name+"-bfd.ctl"),
	}}
}

// writeBFD writes the configuration of the balancer's process bfd, if the lab uses BFD.
func (n *Node) writeBFD() error {
	if !n.lab.Topology.Edge.BFD {
		return nil
	}
	c := routerConfig{ID: n.IPv4, Interface: uplink, Sessions: n.bgpSessions()}
	if n.hasOuter() {
		c.Interface = outer
	}
	return n.writeConfig("bfd.conf", c)
}

// routerConfig has the values that the configurations of FRR, of BIRD and of the process bfd use.
type routerConfig struct {
	Dir      string // the router's own directory, for sockets
	FRR      string // the directory of FRR's daemons
	ASN      uint32
	ID       netip.Addr
	Password string
	Sessions []routerSession
	VIPs     []netip.Prefix
	BFD      bool
	// Interface is the balancer's interface to the edge router. Only the process bfd needs it.
	Interface string
}

// routerSession is a BGP session of the edge router with a balancer, or the BFD session beside it.
type routerSession struct {
	Name     string     // unique
	Family   int        // 4 or 6
	Local    netip.Addr // of the edge router
	Neighbor netip.Addr // of the balancer
	ASN      uint32     // of the balancer
}

// bgpSessions returns the edge router's sessions with this balancer: one over IPv4, one over IPv6.
func (n *Node) bgpSessions() []routerSession {
	edge := n.lab.Node("edge")
	local6, local4 := edge.IPv6, edge.IPv4
	if n.hasOuter() {
		gateways := n.outerGateways()
		local6, local4 = gateways[0], gateways[1]
	}
	ipv6, ipv4 := n.outside()
	return []routerSession{
		{Name: n.Name + "v4", Family: 4, Local: local4, Neighbor: ipv4, ASN: balancerASN},
		{Name: n.Name + "v6", Family: 6, Local: local6, Neighbor: ipv6, ASN: balancerASN},
	}
}

// bgp returns the BGP section of the balancer's configuration. It returns nil if the edge router
// runs no routing software.
func (n *Node) bgp() *desired.BGP {
	if n.lab.Topology.Edge.Router == "" {
		return nil
	}
	b := &desired.BGP{ASN: balancerASN, RouterID: n.IPv4}
	for _, s := range n.bgpSessions() {
		b.Peers = append(b.Peers, desired.BGPPeer{
			Address: s.Local, ASN: edgeASN, PasswordFile: n.lab.bgpPasswordPath(),
		})
	}
	return b
}

// bgpPasswordPath returns the file with the password of all BGP sessions.
func (l *Lab) bgpPasswordPath() string { return l.path("bgp-password") }

// writeRouter writes the files of the edge router's software, and the password of the BGP sessions.
func (n *Node) writeRouter() error {
	t := &n.lab.Topology
	if t.Edge.Router == "" {
		return nil
	}
	c := routerConfig{
		Dir: n.lab.path(n.Name), FRR: frrDir, ASN: edgeASN, ID: n.IPv4, Password: rand.Text(),
		BFD: t.Edge.BFD,
	}
	for _, vip := range t.vips() {
		c.VIPs = append(c.VIPs, netip.PrefixFrom(vip, vip.BitLen()))
	}
	for _, name := range n.lab.balancers() {
		c.Sessions = append(c.Sessions, n.lab.Node(name).bgpSessions()...)
	}
	if err := os.WriteFile(n.lab.bgpPasswordPath(), []byte(c.Password+"\n"), 0o600); err != nil {
		return err
	}
	if err := os.Mkdir(c.Dir, 0o755); err != nil {
		return err
	}
	if t.Edge.Router == BIRD {
		return n.writeConfig("bird.conf", c)
	}
	// FRR: frr.sh starts its daemons, and each daemon has a file of its own.
	return errors.Join(giveTo(c.Dir, frrUser), n.writeConfig("frr.sh", c),
		n.writeConfig("zebra.conf", c), n.writeConfig("bgpd.conf", c), n.writeConfig("bfdd.conf", c))
}

// giveTo makes the user with this name the owner of a directory, so that a daemon of this user can
// make files in it.
func giveTo(dir, name string) error {
	u, err := user.Lookup(name)
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, -1)
}

// awaitRoutes returns when the edge router has learned the routes of all VIPs from all balancers.
// It returns an error if that takes longer than readyTimeout.
func (l *Lab) awaitRoutes(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout,
		fmt.Errorf("not after %v", readyTimeout))
	defer cancel()
	for {
		hops, err := l.NextHops()
		if err != nil {
			return err
		}
		missing := slices.IndexFunc(l.Topology.vips(), func(vip netip.Addr) bool {
			return len(hops[vip]) < l.Topology.Balancers
		})
		if missing < 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			vip := l.Topology.vips()[missing]
			return fmt.Errorf("the edge router has learned the route of VIP %s from %v only: %w",
				vip, hops[vip], context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// NextHops returns, for each VIP, the names of the balancers to which the edge router sends the
// VIP's packets. The names are in alphabetical order. The result has no entry for VIPs without a
// route.
func (l *Lab) NextHops() (map[netip.Addr][]string, error) {
	names := map[string]string{} // the name of each balancer, by each of its addresses
	for _, name := range l.balancers() {
		ipv6, ipv4 := l.Node(name).outside()
		names[ipv6.String()], names[ipv4.String()] = name, name
	}
	all := map[netip.Addr][]string{}
	err := l.Node("edge").netlink(func(h *netlink.Handle) error {
		for _, vip := range l.Topology.vips() {
			family := netlink.FAMILY_V6
			if vip.Is4() {
				family = netlink.FAMILY_V4
			}
			routes, err := h.RouteListFiltered(family, &netlink.Route{
				Dst: ipNet(netip.PrefixFrom(vip, vip.BitLen())), Table: unix.RT_TABLE_MAIN,
			}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
			if err != nil {
				return fmt.Errorf("edge: route of VIP %s: %w", vip, err)
			}
			for _, route := range routes {
				if route.Gw != nil { // a route with a single next hop
					all[vip] = append(all[vip], names[route.Gw.String()])
				}
				for _, hop := range route.MultiPath {
					all[vip] = append(all[vip], names[hop.Gw.String()])
				}
			}
			slices.Sort(all[vip])
		}
		return nil
	})
	return all, err
}
