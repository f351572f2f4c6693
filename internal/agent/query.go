// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// socketNames are the names of socket states in output. The index is BPF_TCP_* of the kernel's
// bpf.h. The last state is BPF_TCP_NEW_SYN_RECV, the kernel's present form of a half-open
// connection.
var socketNames = [...]string{"none", "established", "syn-sent", "request", "fin-wait-1", "fin-wait-2", "time-wait", "close",
	"close-wait", "last-ack", "listening", "closing", "request"}

// socketState is the answer about the kernel's sockets for a flow: the flow's own socket, or the
// listening socket that a packet of the flow would reach.
type socketState struct {
	agentSocketQuery
}

// querySockets finds the sockets for packets from a client to a VIP, in the network namespace of
// the calling thread. program is query_socket. Its input is a struct with the flow, and its output
// is the same struct with the other fields filled in.
func querySockets(
	program *ebpf.Program, protocol uint8, client, vip netip.AddrPort,
) (state socketState, err error) {
	state.Flow = flowKey(client, vip)
	state.Flow.Protocol = protocol
	question := unsafe.Slice((*byte)(unsafe.Pointer(&state.agentSocketQuery)), unsafe.Sizeof(state.agentSocketQuery))
	answer := make([]byte, len(question))
	if _, err := program.Run(&ebpf.RunOptions{Data: question, DataOut: answer}); err != nil {
		return state, fmt.Errorf("ask for sockets of %s: %w", vip, err)
	}
	copy(question, answer) // question is the memory of state
	return state, nil
}

// socketName returns the name of a socket's state: BPF_TCP_*, or 0 if there is no socket.
func socketName(state uint32) string {
	if int(state) < len(socketNames) {
		return socketNames[state]
	}
	return fmt.Sprintf("state %d", state)
}

// has tells whether there is a socket of any of the kinds.
func (s socketState) has(kinds ...agentSocketKind) bool {
	for _, kind := range kinds {
		if agentSocketKind(s.Kinds)&kind != 0 {
			return true
		}
	}
	return false
}

// flowKey returns the data path's key of a TCP flow.
func flowKey(client, vip netip.AddrPort) agentFlowKey {
	key := agentFlowKey{Protocol: unix.IPPROTO_TCP}
	key.Source.In6U.U6Addr8, key.Destination.In6U.U6Addr8 = client.Addr().As16(), vip.Addr().As16()
	key.SourcePort, key.DestinationPort = networkOrder(client.Port()), networkOrder(vip.Port())
	return key
}

// networkOrder converts a port between host and network byte order.
func networkOrder(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}
