/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The balancer for PSA, the Portable Switch Architecture. All steps are in
 * the ingress; the egress passes the packet on. PSA does not tell the length of a frame.
 */
#include <core.p4>
#include <psa.p4>
#include "core/balance.p4"

struct none_t {}

parser PsaIngressParser(packet_in packet, out headers_t headers, inout packet_t p,
                        in psa_ingress_parser_input_metadata_t standard,
                        in none_t resubmitted, in none_t recirculated) {
    Parse() parse;

    state start {
        p.ingress_port = (bit<9>)(PortIdUint_t)standard.ingress_port;
        p.frame_length = 14 + 65535; /* unknown: no IP header contradicts it */
        p.has_timestamps = false;
        parse.apply(packet, headers, p);
        transition accept;
    }
}

control PsaIngress(inout headers_t headers, inout packet_t p,
                   in psa_ingress_input_metadata_t standard,
                   inout psa_ingress_output_metadata_t result) {
    Balance() balance;
    Hash<bit<32>>(PSA_HashAlgorithm_t.CRC32) crc;
    Counter<bit<64>, bit<8>>(64, PSA_CounterType_t.PACKETS_AND_BYTES) reasons;
    Counter<bit<64>, bit<16>>(SLOTS, PSA_CounterType_t.PACKETS_AND_BYTES) servers;

    apply {
        p.hash = crc.get_hash({
            p.source, p.destination, p.source_port, p.destination_port
        });
        balance.apply(headers, p);
        reasons.count((bit<8>)p.reason);
        if (is_forward(p.reason)) {
            servers.count(p.servers.slot0);
        }
        if (p.reason == reason_t.DROP_PORT) {
            ingress_drop(result);
        } else {
            send_to_port(result, (PortId_t)(PortIdUint_t)p.egress_port);
        }
    }
}

control PsaIngressDeparser(packet_out packet, out none_t clone, out none_t resubmit,
                           out none_t normal, inout headers_t headers, in packet_t p,
                           in psa_ingress_output_metadata_t result) {
    Deparse() deparse;

    apply {
        deparse.apply(packet, headers);
    }
}

parser PsaEgressParser(packet_in packet, out none_t headers, inout none_t p,
                       in psa_egress_parser_input_metadata_t standard,
                       in none_t normal, in none_t clone_of_ingress, in none_t clone_of_egress) {
    state start {
        transition accept;
    }
}

control PsaEgress(inout none_t headers, inout none_t p, in psa_egress_input_metadata_t standard,
                  inout psa_egress_output_metadata_t result) {
    apply {}
}

control PsaEgressDeparser(packet_out packet, out none_t clone, out none_t recirculate,
                          inout none_t headers, in none_t p,
                          in psa_egress_output_metadata_t result,
                          in psa_egress_deparser_input_metadata_t standard) {
    apply {}
}

PSA_Switch(IngressPipeline(PsaIngressParser(), PsaIngress(), PsaIngressDeparser()),
           PacketReplicationEngine(),
           EgressPipeline(PsaEgressParser(), PsaEgress(), PsaEgressDeparser()),
           BufferingQueueingEngine()) main;
