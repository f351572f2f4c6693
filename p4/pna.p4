/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The balancer for PNA, the Portable NIC Architecture. PNA does not tell
 * the length of a frame.
 */
#include <core.p4>
#include <pna.p4>
#include "core/balance.p4"

parser PnaParser(packet_in packet, out headers_t headers, inout packet_t p,
                 in pna_main_parser_input_metadata_t standard) {
    Parse() parse;

    state start {
        p.ingress_port = (bit<9>)(PortIdUint_t)standard.input_port;
        p.frame_length = 14 + 65535; /* unknown: no IP header contradicts it */
        p.has_timestamps = false;
        parse.apply(packet, headers, p);
        transition accept;
    }
}

control PnaMain(inout headers_t headers, inout packet_t p, in pna_main_input_metadata_t standard,
                inout pna_main_output_metadata_t result) {
    Balance() balance;
    Hash<bit<32>>(PNA_HashAlgorithm_t.CRC32) crc;
    Counter<bit<64>, bit<8>>(64, PNA_CounterType_t.PACKETS_AND_BYTES) reasons;
    Counter<bit<64>, bit<16>>(SLOTS, PNA_CounterType_t.PACKETS_AND_BYTES) servers;

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
            drop_packet();
        } else {
            send_to_port((PortId_t)(PortIdUint_t)p.egress_port);
        }
    }
}

control PnaDeparser(packet_out packet, inout headers_t headers, in packet_t p,
                    in pna_main_output_metadata_t result) {
    Deparse() deparse;

    apply {
        deparse.apply(packet, headers);
    }
}

PNA_NIC(PnaParser(), PnaMain(), PnaDeparser()) main;
