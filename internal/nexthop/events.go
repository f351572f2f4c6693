// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"context"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// subscribe returns a channel of the kernel's messages about changes of interfaces, addresses,
// neighbours, routes, rules and nexthop objects. The channel closes when the context ends. It also
// closes if the reader was too slow and the kernel has therefore dropped messages.
func subscribe(ctx context.Context) (<-chan syscall.NetlinkMessage, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE,
		unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE,
		unix.RTNLGRP_NEXTHOP)
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of interfaces, neighbours and routes: %w", err)
	}
	if err := socket.SetReceiveBufferSize(receiveBuffer, true); err != nil {
		socket.Close()
		return nil, fmt.Errorf("enlarge the receive buffer of a netlink socket: %w", err)
	}
	ctx, end := context.WithCancel(ctx)
	context.AfterFunc(ctx, socket.Close)
	events := make(chan syscall.NetlinkMessage, 1)
	go func() {
		defer close(events)
		defer end()
		for {
			messages, _, err := socket.Receive()
			if err != nil {
				return
			}
			for _, message := range messages {
				select {
				case events <- message:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return events, nil
}

// receiveBuffer is the size of the socket's buffer, in bytes. About a thousand messages can wait in
// it while the tables are read.
const receiveBuffer = 4 << 20

// matters tells whether a message of the kernel could change the hop of a target or an interface of
// the resolver.
func (r *Resolver) matters(message syscall.NetlinkMessage) bool {
	switch message.Header.Type {
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if len(message.Data) < unix.SizeofNdMsg {
			return false
		}
		n, e := parseNeighbour(message.Data)
		if message.Header.Type == unix.RTM_DELNEIGH {
			e = entry{} // the entry is gone, and so not managed
		}
		known := r.neighbours[n]
		return known != nil && known.differs(e)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if len(message.Data) < unix.SizeofRtMsg {
			return false
		}
		route, ok := parseRoute(message.Data)
		return ok && r.targets.any(route.prefix)
	}
	return true
}
