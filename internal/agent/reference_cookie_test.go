// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// cookie is the cookie of a flow, in the low bits of timestamps. It is zero if there is none.
type cookie struct{ width, column uint32 }

func (c cookie) mask() uint32 { return 1<<c.width - 1 }

// cookieFlow returns the entry of a flow with a cookie.
func cookieFlow(c cookie, balancer netip.Prefix, kind desired.Encapsulation, acknowledged bool) remembered {
	return remembered{state: "cookie", balancer: balancer, kind: kind, cookie: c, acknowledged: acknowledged}
}

// cookie returns the cookie that an offer asks for.
func (w *wrapped) cookie() cookie {
	offer := w.offer()
	c := cookie{width: uint32(offer.Cookie), column: uint32(max(offer.Column, 0))}
	if offer.Column == srv6.NoColumn || c.column > c.mask() {
		return cookie{}
	}
	return c
}

// acceptWithCookie enters a flow. A repeated offer without a column leaves the column as it is.
func (h *hunter) acceptWithCookie(f flow, w *wrapped) {
	c, known := w.cookie(), h.flows[f]
	if c == (cookie{}) && known.state == "cookie" && !known.acknowledged {
		c = known.cookie
	}
	h.flows[f] = cookieFlow(c, w.sender, w.kind, false)
}

// takeCookie takes the cookie out of the echo of a packet. The packet that completes the handshake
// enters the flow. The echo of such a packet is not later than what the stack has sent; only tests
// with real sockets can know that.
func (h *hunter) takeCookie(w *wrapped, s segment, local sockets) {
	c := cookie{width: uint32(w.offer().Cookie)}
	if c.width == 0 || s.isError || s.flags&packet.ACK == 0 {
		return
	}
	at, echo := findTimestamps(s.tcp), uint32(0)
	if at > 0 {
		echo = binary.BigEndian.Uint32(s.tcp[at+4:])
	}
	c.column = echo & c.mask()
	if echo == 0 {
		c = cookie{}
	}
	if known := h.flows[s.flow]; local.request || local.cookie {
		if known.state == "cookie" && !known.acknowledged {
			c = known.cookie
		}
		if known.state != "cookie" || !known.acknowledged {
			h.flows[s.flow] = cookieFlow(c, w.sender, w.kind, true)
		}
	}
	mask := cookie{width: uint32(w.offer().Cookie)}.mask()
	switch {
	case echo == 0:
	case local.cookie:
		setTimestamp(s.tcp, at+4, echo&^mask|echo>>6&mask)
	default:
		setTimestamp(s.tcp, at+4, echo|mask)
	}
}

// stamped returns a packet of the host with the cookie in its timestamp. In a test run each packet
// has a socket, so no SYN-ACK has a SYN cookie.
func stamped(frame []byte, c cookie) []byte {
	frame = slices.Clone(frame)
	_, tcp := findTCP(frame)
	at := findTimestamps(tcp)
	if c.width == 0 || at == 0 || at+4 > len(tcp) {
		return frame
	}
	value := binary.BigEndian.Uint32(tcp[at:])
	if after := value&^c.mask() | c.column; after != value {
		setTimestamp(tcp, at, after)
	}
	return frame
}

// hasTimestamps tells whether a packet has the option.
func (s segment) hasTimestamps() bool { return findTimestamps(s.tcp) > 0 }

// findTimestamps returns the offset of the timestamps in a TCP header; 0: there are none. Options
// behind a malformed one do not count. The bytes may end before the header does.
func findTimestamps(tcp []byte) int {
	at, end := 20, int(tcp[12]>>4)*4
	for at < min(end, len(tcp)) && tcp[at] != 0 {
		if tcp[at] == 1 {
			at++
			continue
		}
		if at+1 >= len(tcp) || tcp[at+1] < 2 || at+int(tcp[at+1]) > end {
			return 0
		}
		if tcp[at] == 8 {
			if tcp[at+1] != 10 {
				return 0
			}
			return at + 2
		}
		at += int(tcp[at+1])
	}
	return 0
}

// setTimestamp changes 32 bits of a TCP header, and updates the checksum.
func setTimestamp(tcp []byte, at int, value uint32) {
	setWord(tcp, at, uint16(value>>16))
	setWord(tcp, at+2, uint16(value))
}
