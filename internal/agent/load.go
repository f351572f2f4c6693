// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
)

// fewHalfOpen is the number of half-open connections that count as load in any case: FEW_HALF_OPEN
// of bpf/agent/load.h.
const fewHalfOpen = 16

// loadNow returns the load by which the policy would decide now, as load_now() of bpf/agent/load.h
// does. known is false if the load is unknown or stale.
//
// The backlog of the listening socket is known only in the agent's network namespace, and only if
// the service has one port. If it is not known, the load of an accept queue is unknown, and other
// loads do not include the backlog.
func (v *View) loadNow(key agentServiceKey, a *agentAcceptance) (
	l agentLoad, known bool, err error,
) {
	queue, listens, err := v.backlog(key)
	if err != nil {
		return l, false, err
	}
	switch agentLoadSource(a.Source) {
	case agentLoadSourceLOAD_CONNECTIONS:
		l, known, err = v.openConnections(key)
	case agentLoadSourceLOAD_ACCEPT_QUEUE:
		l, known = agentLoad{Busy: queue.Waiting, Capacity: accept.NoCapacity}, listens
	case agentLoadSourceLOAD_SHARED_MAP:
		l, known, err = v.mappedLoad(key)
	default:
		l, known, err = v.reportedLoad(key, a)
	}
	if a.Capacity != accept.NoCapacity { // the configured capacity replaces that of the source
		l.Capacity = a.Capacity
	}
	busy := uint64(l.Busy) + notShown(agentLoadSource(a.Source), l, queue)
	l.Busy = uint32(min(busy, math.MaxUint32))
	return l, known, err
}

// notShown returns the number of connections that the server has accepted and that the source does
// not show yet, as not_shown() of bpf/agent/load.h does. A flood of SYNs can at most fill the
// capacity in this way, or double a load without a capacity. But up to fewHalfOpen half-open
// connections count in any case.
func notShown(source agentLoadSource, l agentLoad, queue agentBacklog) uint64 {
	most := l.Capacity
	if most == accept.NoCapacity {
		most = l.Busy
	}
	halfOpen := uint64(min(queue.Young, max(most, fewHalfOpen)))
	switch source {
	case agentLoadSourceLOAD_CGROUP:
		return 0 // its unit is not connections
	case agentLoadSourceLOAD_CONNECTIONS, agentLoadSourceLOAD_ACCEPT_QUEUE:
		return halfOpen // these sources show the waiting connections themselves
	}
	return halfOpen + uint64(queue.Waiting)
}

// reportedLoad returns the load that user space has read from the source and written to the data
// path. known is false if there is none, or if it is stale.
func (v *View) reportedLoad(key agentServiceKey, a *agentAcceptance) (
	l agentLoad, known bool, err error,
) {
	now, err := monotonic()
	if err != nil {
		return l, false, err
	}
	if err := v.maps.Loads.Lookup(key, &l); errors.Is(err, ebpf.ErrKeyNotExist) {
		return l, false, nil
	} else if err != nil {
		return l, false, fmt.Errorf("read %s: %w", v.maps.Loads, err)
	}
	return l, l.When != 0 && now-int64(l.When) <= int64(a.StaleAfter), nil
}

// mappedLoad returns the load that the application keeps in its map at this moment, as the data path
// reads it. known is false if no process reports.
func (v *View) mappedLoad(key agentServiceKey) (l agentLoad, known bool, err error) {
	query := agentLoadQuery{Service: key}
	question := unsafe.Slice((*byte)(unsafe.Pointer(&query)), unsafe.Sizeof(query))
	answer := make([]byte, len(question))
	if _, err := v.mapped.Run(&ebpf.RunOptions{Data: question, DataOut: answer}); err != nil {
		return l, false, fmt.Errorf("ask for the load in the application's map: %w", err)
	}
	copy(question, answer) // question is the memory of query
	return agentLoad{Busy: query.Busy, Capacity: query.Capacity}, query.IsKnown != 0, nil
}

// openConnections returns as a load the number of connections that the server has not closed. It is
// known while the program that counts connections is attached.
func (v *View) openConnections(key agentServiceKey) (l agentLoad, known bool, err error) {
	open, _, err := v.countedConnections(key)
	if open == nil || err != nil {
		return l, false, err
	}
	return agentLoad{Busy: *open, Capacity: accept.NoCapacity}, true, nil
}

// countedConnections returns the number of connections that the server has not closed, and the sum
// of all corrections of this number. open is nil if no program counts connections, or if the
// service has no count.
func (v *View) countedConnections(key agentServiceKey) (open *uint32, corrected uint64, err error) {
	var count agentConnectionCount
	if known, err := find(v.maps.Connections, key, &count); !known || err != nil {
		return nil, 0, err
	}
	_, err = os.Stat(filepath.Join(datapath.Dir(v.instance), connectionCountPin))
	if errors.Is(err, os.ErrNotExist) {
		return nil, count.Corrected, nil
	}
	n := uint32(max(count.Open[0]+count.Open[1]+count.Unseen, 0))
	return &n, count.Corrected, err
}

// backlog returns the connections of the service's listening socket that the application does not
// have yet. It finds the socket that a packet from port 0 would reach: no client uses this port, so
// the packet belongs to no connection. listens is false if there is no listening socket, or if that
// cannot be known. A socket of UDP has an empty backlog.
func (v *View) backlog(key agentServiceKey) (queue agentBacklog, listens bool, err error) {
	vip := addressOf(key)
	if vip.Port() == 0 || !v.here {
		return queue, false, nil
	}
	nobody := netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	if vip.Addr().Is4() {
		nobody = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	sockets, err := querySockets(v.sockets, key.Protocol, nobody, vip)
	if err != nil {
		return queue, false, err
	}
	return sockets.Backlog, sockets.has(agentSocketKindSOCKET_LISTENING), nil
}
