/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The balancer for v1model, the architecture of the software switch bmv2.
 */
#include <core.p4>
#include <v1model.p4>
#include "core/balance.p4"

parser V1Parser(packet_in packet, out headers_t headers, inout packet_t p,
                inout standard_metadata_t standard) {
    Parse() parse;

    state start {
        p.ingress_port = standard.ingress_port;
        p.frame_length = standard.packet_length;
        p.has_timestamps = false;
        parse.apply(packet, headers, p);
        transition accept;
    }
}

control V1Verify(inout headers_t headers, inout packet_t p) {
    apply {}
}

control V1Ingress(inout headers_t headers, inout packet_t p, inout standard_metadata_t standard) {
    Balance() balance;
    counter(64, CounterType.packets_and_bytes) reasons;
    counter(SLOTS, CounterType.packets_and_bytes) servers;

    apply {
        hash(p.hash, HashAlgorithm.crc32, 32w0, {
            p.source, p.destination, p.source_port, p.destination_port
        }, 64w0x1_0000_0000);
        balance.apply(headers, p);
        reasons.count((bit<32>)(bit<8>)p.reason);
        if (is_forward(p.reason)) {
            servers.count((bit<32>)p.servers.slot0);
        }
        if (p.reason == reason_t.DROP_PORT) {
            mark_to_drop(standard);
        } else {
            standard.egress_spec = p.egress_port;
        }
    }
}

control V1Egress(inout headers_t headers, inout packet_t p, inout standard_metadata_t standard) {
    apply {}
}

control V1Compute(inout headers_t headers, inout packet_t p) {
    apply {}
}

V1Switch(V1Parser(), V1Verify(), V1Ingress(), V1Egress(), V1Compute(), Deparse()) main;
