/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of a packet, as in bpf/balancer/balancer.bpf.c:
 *
 *     parse -> receive -> classify -> lookup or choose -> find next hop -> encapsulate
 *
 * Packets that this program does not balance pass to the host behind the switch, unchanged. The host
 * runs the XDP balancer with the same tables, and handles them.
 *
 * The wrapper of an architecture sets ingress_port, frame_length and hash. It sends the packet to
 * egress_port, unless the reason is DROP_PORT.
 */
#include "sizes.p4"
#include "headers.p4"
#include "parse.p4"
#include "classify.p4"
#include "lookup.p4"
#include "encapsulate.p4"

/* Whether the packet goes to a server. */
bool is_forward(in reason_t reason) {
    return (bit<8>)reason >= 1 && (bit<8>)reason <= 4;
}

control Balance(inout headers_t headers, inout packet_t p) {
    CheckLengths() check_lengths;
    Receive() receive;
    Classify() classify;
    ReadCookie() read_cookie;
    Choose() choose;
    Lookup() lookup;
    LookupServerID() lookup_server_id;
    FindNextHop() find_next_hop;
    Encapsulate() encapsulate;

    apply {
        p.reason = reason_t.NONE;
        if (p.unusual != reason_t.PASS_NOT_IP) {
            check_lengths.apply(headers, p);
        }
        receive.apply(headers, p);
        if (p.reason == reason_t.NONE) {
            classify.apply(p, headers.tcp);
        }
        if (p.reason == reason_t.NONE) {
            p.bucket = p.hash & p.service.bucket_mask;
            if (p.protocol == PROTOCOL_UDP) {
                lookup_server_id.apply(headers, p);
            } else if (headers.tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN) {
                choose.apply(p);
            } else {
                read_cookie.apply(p, headers.tcp);
                lookup.apply(p);
            }
        }
        if (is_forward(p.reason)) {
            find_next_hop.apply(headers, p);
        }
        if (is_forward(p.reason)) {
            encapsulate.apply(headers, p);
        }
    }
}

control Deparse(packet_out packet, in headers_t headers) {
    apply {
        packet.emit(headers);
    }
}
