// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/segue-lb/segue/internal/desired"
)

const (
	// connectRetry is the time between two attempts to connect to a peer. The library makes an
	// attempt after three quarters of this time or more, and waits one second less than this time
	// for an answer. connectRetry is much shorter than the time for which a peer keeps the routes
	// of a balancer that restarts.
	connectRetry = 3 * time.Second
	// deferral is how long a restarted balancer waits for the routes of its peers before it sends
	// its own (RFC 4724, section 4.1). A balancer ignores the routes of its peers, so it waits as
	// briefly as the library can.
	deferral = time.Second
)

// speaker is the BGP speaker of the library. It knows nothing of services.
type speaker struct {
	server      *server.BgpServer
	asn         uint32
	graceful    bool // peers are asked to keep the routes while no process runs (RFC 4724)
	restartTime time.Duration
	events      chan sessionEvent
	cancel      context.CancelFunc
}

// sessionEvent tells that the state of a session has changed.
type sessionEvent struct {
	peer          netip.Addr
	isEstablished bool
	keepsRoutes   bool   // the peer keeps the routes while the balancer restarts
	takesIPv6Hops bool   // for IPv4 routes (RFC 8950)
	reason        string // why an established session has ended
}

// startSpeaker starts a speaker without peers and routes. With graceful, the speaker supports
// graceful restarts. startSpeaker returns an error if its port cannot be opened. The caller must
// read events, and call stop.
func startSpeaker(ctx context.Context, b *desired.BGP, graceful bool, log *slog.Logger) (*speaker, error) {
	ctx, cancel := context.WithCancel(ctx)
	level := &slog.LevelVar{}
	s := &speaker{
		server: server.NewBgpServer(server.LoggerOption(slog.New(&libraryLog{log.Handler()}), level)),
		asn:    b.ASN, graceful: graceful, restartTime: b.RestartTime, events: make(chan sessionEvent), cancel: cancel,
	}
	go s.server.Serve() // until stop
	port := int32(-1)   // none
	if b.Listen != 0 {
		port = int32(b.Listen)
	}
	err := s.server.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: b.ASN, RouterId: b.RouterID.String(), ListenPort: port,
	}})
	if err != nil {
		err = fmt.Errorf("bgp.listen %d: %w", b.Listen, err)
	} else {
		err = s.refuseRoutes(ctx)
	}
	if err == nil {
		err = s.server.WatchEvent(ctx, server.WatchEventMessageCallbacks{
			OnPeerUpdate: func(e *apiutil.WatchEventMessage_PeerEvent, _ time.Time) { s.forward(ctx, e) },
		}, server.WatchPeer())
	}
	if err != nil {
		s.stop(false)
		return nil, err
	}
	return s, nil
}

// refuseRoutes makes the speaker ignore the routes of its peers. Otherwise it would pass them on to
// its other peers.
func (s *speaker) refuseRoutes(ctx context.Context) error {
	own := &api.Policy{Name: "own", Statements: []*api.Statement{{
		Name:       "own",
		Conditions: &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL},
		Actions:    &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT},
	}}}
	if err := s.server.AddPolicy(ctx, &api.AddPolicyRequest{Policy: own}); err != nil {
		return err
	}
	return s.server.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{
		Assignment: &api.PolicyAssignment{
			Name:          "global",
			Direction:     api.PolicyDirection_POLICY_DIRECTION_IMPORT,
			Policies:      []*api.Policy{{Name: own.Name}},
			DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT,
		},
	})
}

// forward sends a change of a session's state to the channel events, and ignores other events of
// peers. While nobody reads the channel, forward blocks, and the library keeps further events.
func (s *speaker) forward(ctx context.Context, e *apiutil.WatchEventMessage_PeerEvent) {
	if e.Type != apiutil.PEER_EVENT_STATE {
		return
	}
	state := e.Peer.State
	event := sessionEvent{
		peer: state.NeighborAddress, reason: state.DisconnectMessage,
		isEstablished: state.SessionState == bgp.BGP_FSM_ESTABLISHED,
	}
	for _, c := range state.RemoteCap {
		event.keepsRoutes = event.keepsRoutes || c.Code() == bgp.BGP_CAP_GRACEFUL_RESTART
		if hops, ok := c.(*bgp.CapExtendedNexthop); ok {
			event.takesIPv6Hops = slices.ContainsFunc(hops.Tuples, func(t *bgp.CapExtendedNexthopTuple) bool {
				return t.NLRIAFI == bgp.AFI_IP && t.NLRISAFI == bgp.SAFI_UNICAST && t.NexthopAFI == bgp.AFI_IP6
			})
		}
	}
	select {
	case s.events <- event:
	case <-ctx.Done():
	}
}

// stop ends all sessions. With keepRoutes, it sends no notification, as if the process had died.
// Peers that support graceful restarts then keep the routes (RFC 4724, section 4.2). Without
// keepRoutes, it sends a notification, and peers remove the routes at once.
func (s *speaker) stop(keepRoutes bool) {
	s.cancel()
	err := s.server.StopBgp(context.Background(), &api.StopBgpRequest{AllowGracefulRestart: keepRoutes})
	if err != nil {
		s.server.Log().Error("stop the BGP speaker", "error", err)
	}
}

// addPeer begins to open a session to an address of a peer. With preserved, the balancer tells the
// peer that it has restarted and that its data path has continued (the bits R and F of RFC 4724,
// section 3). The peer then keeps the routes of the session before.
func (s *speaker) addPeer(
	ctx context.Context, p *desired.BGPPeer, address netip.Addr, password string, preserved bool,
) error {
	peer := &api.Peer{
		Conf: &api.PeerConf{
			NeighborAddress: address.String(), PeerAsn: p.ASN, AuthPassword: password,
		},
		Timers: &api.Timers{Config: &api.TimersConfig{
			ConnectRetry: uint64(connectRetry / time.Second),
			HoldTime:     uint64(p.HoldTime / time.Second),
			// A third of the hold time (RFC 4271, section 10).
			KeepaliveInterval: uint64(p.HoldTime / time.Second / 3),
		}},
		Transport: &api.Transport{RemotePort: uint32(p.Port)},
		GracefulRestart: &api.GracefulRestart{
			Enabled:         s.graceful,
			RestartTime:     uint32(s.restartTime / time.Second),
			DeferralTime:    uint32(deferral / time.Second),
			LocalRestarting: preserved,
		},
	}
	if p.Multihop != 0 {
		peer.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: uint32(p.Multihop)}
	}
	if p.TTLSecurity {
		peer.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: 255}
	}
	for _, family := range p.Families {
		peer.AfiSafis = append(peer.AfiSafis, &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: apiFamily(family), Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: s.graceful}},
		})
	}
	if err := s.server.AddPeer(ctx, &api.AddPeerRequest{Peer: peer}); err != nil {
		return fmt.Errorf("peer %s: %w", address, err)
	}
	return nil
}

// removePeer ends a session with a notification, so that the peer removes the routes.
func (s *speaker) removePeer(ctx context.Context, peer netip.Addr) error {
	if err := s.server.DeletePeer(ctx, &api.DeletePeerRequest{Address: peer.String()}); err != nil {
		return fmt.Errorf("peer %s: %w", peer, err)
	}
	return nil
}

// session is an established session, as the library reports it.
type session struct {
	localAddress netip.Addr
	holdTime     time.Duration // the one that both sides have agreed on
	prefixes     uint64        // the number of prefixes announced to the peer
}

// sessions returns the established sessions by the addresses of their peers.
func (s *speaker) sessions(ctx context.Context) (map[netip.Addr]session, error) {
	all := map[netip.Addr]session{}
	err := s.server.ListPeer(ctx, &api.ListPeerRequest{EnableAdvertised: true}, func(p *api.Peer) {
		address, err := netip.ParseAddr(p.GetConf().GetNeighborAddress())
		if err != nil || p.GetState().GetSessionState() != api.PeerState_SESSION_STATE_ESTABLISHED {
			return
		}
		found := session{
			holdTime: time.Duration(p.GetTimers().GetState().GetNegotiatedHoldTime()) * time.Second,
		}
		found.localAddress, _ = netip.ParseAddr(p.GetTransport().GetLocalAddress())
		for _, f := range p.GetAfiSafis() {
			found.prefixes += f.GetState().GetAdvertised()
		}
		all[address] = found
	})
	return all, err
}

// announce announces a route, or changes its attributes.
func (s *speaker) announce(r route) error {
	path, err := r.path(s.asn)
	if err == nil {
		_, err = s.server.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{path}})
	}
	if err != nil {
		return fmt.Errorf("announce %s: %w", r.prefix, err)
	}
	return nil
}

func (s *speaker) withdraw(r route) error {
	path, err := r.path(s.asn)
	if err == nil {
		err = s.server.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{path}})
	}
	if err != nil {
		return fmt.Errorf("withdraw %s: %w", r.prefix, err)
	}
	return nil
}

// path returns the route in the form of the library. asn is the balancer's autonomous system. An
// unspecified next hop (0.0.0.0 or ::) stands for the local address of each session. For an IPv4
// route in an IPv6 session, this is an IPv6 address (RFC 8950).
func (r route) path(asn uint32) (*apiutil.Path, error) {
	nlri, err := bgp.NewIPAddrPrefix(r.prefix)
	if err != nil {
		return nil, err
	}
	path := &apiutil.Path{
		Family: bgp.RF_IPv4_UC, Nlri: nlri, Age: time.Now().Unix(),
		Attrs: []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)},
	}
	hop := r.nextHop
	if r.prefix.Addr().Is4() { // IPv4 has the next hop in NEXT_HOP, and IPv6 in MP_REACH_NLRI (RFC 4760)
		if !hop.IsValid() {
			hop = netip.IPv4Unspecified()
		}
		attribute, err := bgp.NewPathAttributeNextHop(hop)
		if err != nil {
			return nil, err
		}
		path.Attrs = append(path.Attrs, attribute)
	} else {
		if !hop.IsValid() {
			hop = netip.IPv6Unspecified()
		}
		path.Family = bgp.RF_IPv6_UC
		attribute, err := bgp.NewPathAttributeMpReachNLRI(path.Family, []bgp.PathNLRI{{NLRI: nlri}}, hop)
		if err != nil {
			return nil, err
		}
		path.Attrs = append(path.Attrs, attribute)
	}
	path.Attrs = append(path.Attrs, r.preferences(asn)...)
	path.Attrs = append(path.Attrs, r.communityAttributes()...)
	return path, nil
}

// preferences returns the path attributes by which routers prefer one route to another. In external
// sessions, the library puts the balancer's autonomous system before an AS_PATH, and leaves out
// LOCAL_PREF.
func (r route) preferences(asn uint32) (attributes []bgp.PathAttributeInterface) {
	if r.prepend > 0 {
		path := bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, slices.Repeat([]uint32{asn}, int(r.prepend)))
		attributes = append(attributes, bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{path}))
	}
	if r.med.isSet {
		attributes = append(attributes, bgp.NewPathAttributeMultiExitDisc(r.med.value))
	}
	if r.localPref.isSet {
		attributes = append(attributes, bgp.NewPathAttributeLocalPref(r.localPref.value))
	}
	return attributes
}

// communityAttributes returns the path attributes of the communities.
func (r route) communityAttributes() (attributes []bgp.PathAttributeInterface) {
	var standard []uint32
	var large []*bgp.LargeCommunity
	for _, c := range r.communities {
		if value, ok := c.Standard(); ok {
			standard = append(standard, value)
		} else if parts, ok := c.Large(); ok {
			large = append(large, bgp.NewLargeCommunity(parts[0], parts[1], parts[2]))
		}
	}
	if len(standard) > 0 {
		attributes = append(attributes, bgp.NewPathAttributeCommunities(standard))
	}
	if len(large) > 0 {
		attributes = append(attributes, bgp.NewPathAttributeLargeCommunities(large))
	}
	return attributes
}

// apiFamily returns a family in the form of the library.
func apiFamily(family desired.Family) *api.Family {
	afi := api.Family_AFI_IP
	if family == desired.IPv6 {
		afi = api.Family_AFI_IP6
	}
	return &api.Family{Afi: afi, Safi: api.Family_SAFI_UNICAST}
}

// libraryLog passes two kinds of the library's messages on to a log: warnings, and messages about
// notifications, which tell why a session is refused. It drops all other messages: this package
// logs the same, or nobody needs them.
type libraryLog struct{ to slog.Handler }

// Enabled implements slog.Handler. The messages about notifications have the level info.
func (l *libraryLog) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

// Handle implements slog.Handler.
func (l *libraryLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn && !strings.Contains(r.Message, "notification") {
		return nil
	}
	r.Message = "bgp library: " + r.Message
	return l.to.Handle(ctx, r)
}

func (l *libraryLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &libraryLog{l.to.WithAttrs(attrs)}
}

func (l *libraryLog) WithGroup(name string) slog.Handler { return &libraryLog{l.to.WithGroup(name)} }
