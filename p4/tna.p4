/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The balancer for TNA, the architecture of Tofino. All steps are in the
 * ingress, and packets bypass the egress. Only the egress of TNA knows the length of a frame.
 */
#include <core.p4>
#include <tna.p4>
#include "core/balance.p4"

struct none_t {}

parser TnaIngressParser(packet_in packet, out headers_t headers, out packet_t p,
                        out ingress_intrinsic_metadata_t standard) {
    Parse() parse;

    state start {
        packet.extract(standard);
        packet.advance(PORT_METADATA_SIZE);
        p.ingress_port = standard.ingress_port;
        p.frame_length = 14 + 65535; /* unknown: no IP header contradicts it */
        p.has_timestamps = false;
        parse.apply(packet, headers, p);
        transition accept;
    }
}

control TnaIngress(inout headers_t headers, inout packet_t p,
                   in ingress_intrinsic_metadata_t standard,
                   in ingress_intrinsic_metadata_from_parser_t parsed,
                   inout ingress_intrinsic_metadata_for_deparser_t result,
                   inout ingress_intrinsic_metadata_for_tm_t queue) {
    Balance() balance;
    Hash<bit<32>>(HashAlgorithm_t.CRC32) crc;
    Counter<bit<64>, bit<8>>(64, CounterType_t.PACKETS_AND_BYTES) reasons;
    Counter<bit<64>, bit<16>>(SLOTS, CounterType_t.PACKETS_AND_BYTES) servers;

    apply {
        /* If nothing here reads the error, the parser drops packets that are too short. */
        if (parsed.parser_err != PARSER_ERROR_OK && p.unusual == reason_t.NONE) {
            p.unusual = reason_t.PASS_MALFORMED;
        }
        p.hash = crc.get({
            p.source, p.destination, p.source_port, p.destination_port
        });
        balance.apply(headers, p);
        reasons.count((bit<8>)p.reason);
        if (is_forward(p.reason)) {
            servers.count(p.servers.slot0);
        }
        if (p.reason == reason_t.DROP_PORT) {
            result.drop_ctl = 1;
        } else {
            queue.ucast_egress_port = p.egress_port;
            queue.bypass_egress = 1;
        }
    }
}

control TnaIngressDeparser(packet_out packet, inout headers_t headers, in packet_t p,
                           in ingress_intrinsic_metadata_for_deparser_t result) {
    Deparse() deparse;

    apply {
        deparse.apply(packet, headers);
    }
}

parser TnaEgressParser(packet_in packet, out none_t headers, out none_t p,
                       out egress_intrinsic_metadata_t standard) {
    state start {
        packet.extract(standard);
        transition accept;
    }
}

control TnaEgress(inout none_t headers, inout none_t p, in egress_intrinsic_metadata_t standard,
                  in egress_intrinsic_metadata_from_parser_t parsed,
                  inout egress_intrinsic_metadata_for_deparser_t result,
                  inout egress_intrinsic_metadata_for_output_port_t port) {
    apply {}
}

control TnaEgressDeparser(packet_out packet, inout none_t headers, in none_t p,
                          in egress_intrinsic_metadata_for_deparser_t result) {
    apply {}
}

Pipeline(TnaIngressParser(), TnaIngress(), TnaIngressDeparser(),
         TnaEgressParser(), TnaEgress(), TnaEgressDeparser()) pipe;

Switch(pipe) main;
