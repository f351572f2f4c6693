/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of a packet, as in bpf/balancer/balancer.bpf.c:
 *
 *     parse -> receive -> classify -> lookup or choose -> find next hop -> encapsulate
 *
 * The wrapper of an architecture sets ingress_port, frame_length and hash, and acts by verdict and
 * egress_port.
 */
#include "sizes.p4"
#include "headers.p4"
#include "parse.p4"
#include "classify.p4"
#include "lookup.p4"
#include "encapsulate.p4"

control Balance(inout headers_t headers, inout packet_t p) {
    CheckLengths() check_lengths;
    Receive() receive;
    Classify() classify;
    ReadCookie() read_cookie;
    Choose() choose;
    Lookup() lookup;
    FindNextHop() find_next_hop;
    Encapsulate() encapsulate;
    Punt() punt;

    apply {
        p.reason = reason_t.NONE;
        p.verdict = verdict_t.FORWARD;
        if (p.unusual != reason_t.PASS_NOT_IP) {
            check_lengths.apply(headers, p);
        }
        receive.apply(headers, p);
        if (p.reason == reason_t.NONE) {
            p.verdict = verdict_t.FORWARD;
            classify.apply(p, headers.tcp);
        }
        if (p.verdict == verdict_t.FORWARD) {
            p.bucket = p.hash & p.service.bucket_mask;
            if (headers.tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN) {
                choose.apply(p);
            } else {
                read_cookie.apply(p, headers.tcp);
                lookup.apply(p);
            }
        }
        if (p.verdict == verdict_t.FORWARD) {
            find_next_hop.apply(headers, p);
        }
        if (p.verdict == verdict_t.FORWARD) {
            encapsulate.apply(headers, p);
        }
        if (p.verdict == verdict_t.PUNT) {
            punt.apply(headers, p);
        } else if (p.verdict == verdict_t.PASS) {
            p.egress_port = p.host_port;
        }
    }
}

control Deparse(packet_out packet, in headers_t headers) {
    apply {
        packet.emit(headers);
    }
}
