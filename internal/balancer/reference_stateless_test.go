// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

func isStateless(svc *desired.Service) bool {
	return svc.Persistence == desired.PersistenceStateless
}

// tabled returns the service as it is or was with a flow table. It returns false if the flow table
// cannot have flows of the service.
func (r *reference) tabled(svc *desired.Service) (desired.Service, bool) {
	if svc.Persistence == desired.PersistenceTable {
		return *svc, true
	}
	former, ok := r.former[svc.Name]
	return former, ok
}

// findByColumn returns the course of a packet of a service with persistence stateless or hint, and
// the reason under which it is counted. The flow table is asked first, if it can have flows of the
// service. Hints are asked about packets without a cookie.
func (r *reference) findByColumn(p parsed, svc *desired.Service) (to []stage, reason string) {
	if former, ok := r.former[svc.Name]; ok {
		if server, reason := r.findFormer(p, svc, former); server != nil {
			return toFormer(former, server), reason
		}
	}
	if p.opens() {
		return r.placeInRow(p, svc)
	}
	if _, ok := column(p, svc); !ok && r.hasHints() {
		if to = r.followHint(p, svc); to != nil {
			return to, "forward_known"
		}
		return stages(srv6.RecoverStickiness, r.possible(p.flow, svc)...), "forward_recover"
	}
	return r.followCookie(p, svc)
}

// followCookie returns the course of a packet other than a SYN to the servers that may have its
// flow, by its cookie. With hints, a server that is asked alone returns the packet if it does not
// have the flow.
func (r *reference) followCookie(p parsed, svc *desired.Service) (to []stage, reason string) {
	to = withCookies(svc, stages(srv6.Steer, r.holders(p, svc)...))
	if len(to) != 1 || p.visitsAll() {
		return to, "forward_recover"
	}
	if r.hasHints() {
		to[0].argument |= srv6.Offer{Returns: true}.Argument()
	}
	return to, "forward_known"
}

// findFormer returns the server of a flow that the flow table has, and the reason.
func (r *reference) findFormer(
	p parsed, svc *desired.Service, former desired.Service,
) (*desired.Server, string) {
	if server := r.persist(p, svc); server != nil {
		return server, "forward_known"
	}
	if !former.Placement.Method().ServersDecide {
		return nil, ""
	}
	return r.confirm(p, svc, r.halfOpenOf(p.flow).find(p.flow, svc.Name))
}

// toFormer returns the course of a packet of a flow that the flow table has. Servers of a service
// that hunted wait for an acknowledgement. Timestamps of such flows have no cookies.
func toFormer(former desired.Service, server *desired.Server) []stage {
	if former.Placement.Method().ServersDecide {
		return alone(srv6.AckStickiness, server)
	}
	return alone(srv6.Deliver, server)
}

// widthOf returns the width of cookies in bits. It is at least 1, because servers send signals
// about flows without a cookie.
func widthOf(svc *desired.Service) int { return max(1, bits.Len(uint(svc.Candidates-1))) }

// withCookies makes stages tell how many bits of timestamps tell the columns of a row apart, and
// returns them.
func withCookies(svc *desired.Service, all []stage) []stage {
	for i := range all {
		all[i].argument |= srv6.Offer{Cookie: widthOf(svc)}.Argument()
	}
	return all
}

// column returns the column in the cookie of a packet. It returns 0 and false if the packet has
// none: no timestamps, or timestamps without an echo (RFC 7323 section 3.2). The only column of a
// row needs no cookie. Under persistence hint, packets have no cookies.
func column(p parsed, svc *desired.Service) (int, bool) {
	if !isStateless(svc) {
		return 0, false
	}
	if svc.Candidates == 1 {
		return 0, true
	}
	timestamps := timestampsIn(p.options)
	if timestamps == nil || p.flags&packet.ACK == 0 {
		return 0, false
	}
	echo := binary.BigEndian.Uint32(timestamps[4:])
	column := int(echo % (1 << widthOf(svc)))
	if echo == 0 || column >= svc.Candidates {
		return 0, false
	}
	return column, true
}

// timestampsIn returns the value and the echo in TCP options, or nil if there are no timestamps. A
// malformed option ends the options.
func timestampsIn(options []byte) []byte {
	for len(options) > 0 && options[0] != 0 {
		if options[0] == 1 {
			options = options[1:]
			continue
		}
		if len(options) == 1 || options[1] < 2 || int(options[1]) > len(options) {
			return nil
		}
		option := options[:options[1]]
		options = options[options[1]:]
		if option[0] == 8 {
			if len(option) != 10 {
				return nil
			}
			return option[2:]
		}
	}
	return nil
}

// holders lists the servers that may have the flow of a packet other than a SYN: those that the
// cookie's column has and had, the last one first. If a packet has no cookie, or if its column has
// no server, or if a server has returned it, or if the flow may be older than cookies, then all
// servers of the row may have the flow. With hints they also may if the column has several servers,
// because the cookie may be misleading. The column of most flows is 0.
func (r *reference) holders(p parsed, svc *desired.Service) []string {
	bucket := r.bucket(p.flow, svc)
	column, ok := column(p, svc)
	past := r.past(svc, bucket, column)
	names := r.fitFirst(svc, past, nil)
	_, isFormer := r.former[svc.Name]
	isCertain := len(names) == 1 || len(names) > 1 && !r.hasHints()
	if ok && isCertain && !isFormer && !p.visitsAll() {
		return names
	}
	var rest []string
	for age := range r.depth(svc) {
		for _, name := range r.row(svc, age, bucket) {
			if age == 0 || name != "" && r.reaches(name) {
				rest = append(rest, name)
			}
		}
	}
	return r.fitFirst(svc, past, rest)
}

// fitFirst lists different servers of two lists, at most as many as a packet can visit: those that
// are fit, then those that can be reached, and then the others. Each time, the first list comes
// first.
func (r *reference) fitFirst(svc *desired.Service, first, second []string) (names []string) {
	fails := func(name string) bool { return r.isUnfit(svc, serverOfName(svc, name)) }
	for _, wanted := range []func(string) bool{
		func(name string) bool { return r.reaches(name) && !fails(name) },
		r.reaches,
		func(string) bool { return true },
	} {
		for _, name := range slices.Concat(first, second) {
			isNew := name != "" && !slices.Contains(names, name)
			if isNew && wanted(name) && len(names) < desired.MaxVisited {
				names = append(names, name)
			}
		}
	}
	return names
}

// placeInRow returns the course of a SYN, and the reason. The SYN goes to servers of its row only,
// because packets with cookies find no others. If none of these gets new flows, but other servers
// of the service do, then it goes to those that can be reached. If the client does not use
// timestamps, a hint tells later which candidate has taken the connection. Without hints, only the
// first one is asked.
func (r *reference) placeInRow(p parsed, svc *desired.Service) (to []stage, reason string) {
	known := r.bucketOf(p.flow).find(p.flow, svc.Name)
	half := r.halfOpenOf(p.flow).find(p.flow, svc.Name)
	asked, marks := r.askedFormer(svc, known, half), marksTimestamps(p, svc)
	if svc.Placement.Method().ServersDecide && !marks {
		asked = r.askedByHint(p, svc, asked)
	}
	names, isHeld := r.inRow(p, svc, asked), len(asked) > 0
	if svc.Placement.Method().FollowsFlow || !marks && !r.hasHints() {
		names = names[:min(1, len(names))]
	}
	if len(names) == 0 && len(asked) > 0 && len(r.usable(svc)) > 0 {
		names, asked = []string{asked[0].server}, nil // it must accept the connection
		to = []stage{{srv6.ConnectForce, names[0], srv6.Offer{Column: srv6.NoColumn}.Argument()}}
	} else {
		if svc.OrdersByReports() && asked == nil {
			names, _ = r.order(svc, names)
		}
		to = r.fitting(p, svc, asked, names)
	}
	if svc.OrdersByReports() {
		to = asking(to, "")
	}
	if len(to) == 0 {
		return nil, ""
	}
	for _, e := range []*referenceEntry{known, half} {
		if e != nil && e.server != svc.Name+"/"+to[0].server {
			*e = referenceEntry{} // later packets of the connection go by their cookies
		}
	}
	// The server that accepts a flow of the flow table has to signal that it does.
	if isStateless(svc) && !isHeld && (marks || !r.hasHints()) {
		withCookies(svc, to)
	}
	if svc.Placement.Method().FollowsFlow {
		return to, "forward_new"
	}
	return to, "forward_hunt"
}

// marksTimestamps tells whether the server of a SYN can tell its column by cookies.
func marksTimestamps(p parsed, svc *desired.Service) bool {
	return isStateless(svc) && (svc.Candidates == 1 || timestampsIn(p.options) != nil)
}

// askedByHint returns the server that the hint of a SYN's flow names, if it can be asked, or else
// the given one.
func (r *reference) askedByHint(p parsed, svc *desired.Service, asked []stage) []stage {
	server := r.hintedFirst(p, svc)
	switch {
	case server == nil:
		return asked
	case !r.reaches(server.Name):
		return nil
	}
	return stages(srv6.Steer, server.Name)
}

// askedFormer returns the server that may have the connection of a SYN from before the service
// became stateless, if the service hunts.
func (r *reference) askedFormer(svc *desired.Service, known, half *referenceEntry) []stage {
	former, ok := r.former[svc.Name]
	switch {
	case !ok || !svc.Placement.Method().ServersDecide:
		return nil
	case known == nil && former.Placement.Method().ServersDecide:
		return r.askedFirst(svc, half)
	}
	return r.askedFirst(svc, known)
}

// inRow lists the servers of its row to which a SYN can go, without those that are asked first.
func (r *reference) inRow(p parsed, svc *desired.Service, asked []stage) []string {
	usable := r.usable(svc)
	if len(usable) == 0 {
		return nil
	}
	row := slices.DeleteFunc(r.row(svc, 0, r.bucket(p.flow, svc)), func(name string) bool {
		return slices.ContainsFunc(asked, func(s stage) bool { return s.server == name })
	})
	takes := func(s string) bool {
		return slices.ContainsFunc(usable, func(u desired.Server) bool { return u.Name == s })
	}
	for _, fit := range []func(string) bool{takes, r.reaches} {
		unfit := func(s string) bool { return !fit(s) }
		if names := slices.DeleteFunc(slices.Clone(row), unfit); len(names) > 0 {
			return names
		}
	}
	return nil
}
