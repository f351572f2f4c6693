/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SHELL's own balancer, by sections III and IV of "Stateless Load-Aware Load Balancing in P4"
 * (Pit-Claudel et al., 2018), with two candidates and histories of two servers (c = h = 2, as in
 * section V). It is for comparisons with v1model.p4 (docs/research/reproduction.md), and balances
 * nothing in Segue. Names are those of figure 3, or the terms of the paper.
 *
 * D_OFF_MAX is the data offset of the longest TCP header whose options are parsed: 8, 11, 13 or 15,
 * in units of 4 bytes.
 */
#include <core.p4>
#include <v1model.p4>

#ifndef D_OFF_MAX
#define D_OFF_MAX 15
#endif
/* The numbers of section VI. The paper does not say how many the card has. */
#ifndef BUCKETS
#define BUCKETS 35591
#endif
#ifndef SERVERS
#define SERVERS 500
#endif

const bit<16> ETHERTYPE_IPV6 = 0x86dd;
const bit<8> PROTOCOL_TCP = 6;
const bit<8> PROTOCOL_ROUTING = 43;
const bit<8> ROUTING_TYPE_SRH = 4;

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> ethertype;
}

header ipv6_t {
    bit<4>   version;
    bit<8>   traffic_class;
    bit<20>  flow_label;
    bit<16>  payload_length;
    bit<8>   next_header;
    bit<8>   hop_limit;
    bit<128> source;
    bit<128> destination;
}

header srh_t {
    bit<8>  next_header;
    bit<8>  length; /* in units of 8 bytes, without the first 8 */
    bit<8>  routing_type;
    bit<8>  segments_left;
    bit<8>  last_entry;
    bit<8>  flags;
    bit<16> tag;
}

header segment_t {
    bit<128> address;
}

header tcp_t {
    bit<16> source_port;
    bit<16> destination_port;
    bit<32> sequence;
    bit<32> acknowledgement;
    bit<4>  data_offset; /* in units of 4 bytes */
    bit<4>  reserved;
    bit<8>  flags;
    bit<16> window;
    bit<16> checksum;
    bit<16> urgent;
}

const bit<8> TCP_SYN = 0x02;
const bit<8> TCP_ACK = 0x10;

/* The options of TCP headers, by their length in bytes: timestamps, and SACKs of up to three blocks
 * behind or in front of them. tcp_opts_24_t is that of figure 3. The paper says of the others only
 * that they exist. */
header tcp_opts_12_t {
    bit<32> nopnoptlength1;
    bit<63> value1;
    bit<1>  potential_cov_channel1;
}

header tcp_opts_24_t {
    bit<32> nopnoptlength1;
    bit<63> value1;
    bit<1>  potential_cov_channel1;
    bit<32> nopnoptlength2;
    bit<63> value2;
    bit<1>  potential_cov_channel2;
}

header tcp_opts_32_t {
    bit<32> nopnoptlength1;
    bit<63> value1;
    bit<1>  potential_cov_channel1;
    bit<64> middle;
    bit<32> nopnoptlength2;
    bit<63> value2;
    bit<1>  potential_cov_channel2;
}

header tcp_opts_40_t {
    bit<32>  nopnoptlength1;
    bit<63>  value1;
    bit<1>   potential_cov_channel1;
    bit<128> middle;
    bit<32>  nopnoptlength2;
    bit<63>  value2;
    bit<1>   potential_cov_channel2;
}

/* Each option is behind two no-operations. */
const bit<32> TIMESTAMPS = 0x0101080a;
#if D_OFF_MAX >= 11
const bit<32> SACK_1 = 0x0101050a; /* of one block */
#endif
#if D_OFF_MAX >= 13
const bit<32> SACK_2 = 0x01010512;
#endif
#if D_OFF_MAX >= 15
const bit<32> SACK_3 = 0x0101051a;
#endif

/* The segment that is visited last comes first (RFC 8754 section 2). */
struct shell_headers_t {
    ethernet_t    ethernet;
    ipv6_t        ipv6;
    srh_t         srh;
    segment_t     vip;
    segment_t     second;
    segment_t     first;
    tcp_t         tcp;
    tcp_opts_12_t tcp_opts_12;
    tcp_opts_24_t tcp_opts_24;
    tcp_opts_32_t tcp_opts_32;
    tcp_opts_40_t tcp_opts_40;
}

struct user_metadata_t {
    bit<1>   covert_channel; /* which candidate has the flow; 0: the first one */
    bit<16>  bucket;
    bit<2>   count; /* of servers in the segment list; 0: there is no list */
    bit<128> first;
    bit<128> second;
}

parser ShellParser(packet_in packet, out shell_headers_t hdr, inout user_metadata_t user_metadata,
                   inout standard_metadata_t standard) {
    state start {
        user_metadata.covert_channel = 0; /* for packets without timestamps (footnote 2) */
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ethertype) {
            ETHERTYPE_IPV6: parse_ipv6;
            default: accept;
        }
    }

    state parse_ipv6 {
        packet.extract(hdr.ipv6);
        transition select(hdr.ipv6.next_header) {
            PROTOCOL_TCP: parse_tcp;
            default: accept;
        }
    }

    state parse_tcp {
        packet.extract(hdr.tcp);
        transition select(hdr.tcp.data_offset) {
            8: parse_tcp_opts_12;
#if D_OFF_MAX >= 11
            11: parse_tcp_opts_24;
#endif
#if D_OFF_MAX >= 13
            13: parse_tcp_opts_32;
#endif
#if D_OFF_MAX >= 15
            15: parse_tcp_opts_40;
#endif
            default: accept;
        }
    }

    state parse_tcp_opts_12 {
        packet.extract(hdr.tcp_opts_12);
        transition select(hdr.tcp_opts_12.nopnoptlength1) {
            TIMESTAMPS: set_covert_channel_12;
            default: accept;
        }
    }

    state set_covert_channel_12 {
        user_metadata.covert_channel = hdr.tcp_opts_12.potential_cov_channel1;
        transition accept;
    }

#if D_OFF_MAX >= 11
    state parse_tcp_opts_24 {
        packet.extract(hdr.tcp_opts_24);
        transition select(hdr.tcp_opts_24.nopnoptlength1) {
            TIMESTAMPS: set_covert_channel_24_1;
            SACK_1: parse_tcp_opts_24_2;
            default: accept;
        }
    }

    state set_covert_channel_24_1 {
        user_metadata.covert_channel = hdr.tcp_opts_24.potential_cov_channel1;
        transition accept;
    }

    state parse_tcp_opts_24_2 {
        transition select(hdr.tcp_opts_24.nopnoptlength2) {
            TIMESTAMPS: set_covert_channel_24_2;
            default: accept;
        }
    }

    state set_covert_channel_24_2 {
        user_metadata.covert_channel = hdr.tcp_opts_24.potential_cov_channel2;
        transition accept;
    }
#endif

#if D_OFF_MAX >= 13
    state parse_tcp_opts_32 {
        packet.extract(hdr.tcp_opts_32);
        transition select(hdr.tcp_opts_32.nopnoptlength1) {
            TIMESTAMPS: set_covert_channel_32_1;
            SACK_2: parse_tcp_opts_32_2;
            default: accept;
        }
    }

    state set_covert_channel_32_1 {
        user_metadata.covert_channel = hdr.tcp_opts_32.potential_cov_channel1;
        transition accept;
    }

    state parse_tcp_opts_32_2 {
        transition select(hdr.tcp_opts_32.nopnoptlength2) {
            TIMESTAMPS: set_covert_channel_32_2;
            default: accept;
        }
    }

    state set_covert_channel_32_2 {
        user_metadata.covert_channel = hdr.tcp_opts_32.potential_cov_channel2;
        transition accept;
    }
#endif

#if D_OFF_MAX >= 15
    state parse_tcp_opts_40 {
        packet.extract(hdr.tcp_opts_40);
        transition select(hdr.tcp_opts_40.nopnoptlength1) {
            TIMESTAMPS: set_covert_channel_40_1;
            SACK_3: parse_tcp_opts_40_2;
            default: accept;
        }
    }

    state set_covert_channel_40_1 {
        user_metadata.covert_channel = hdr.tcp_opts_40.potential_cov_channel1;
        transition accept;
    }

    state parse_tcp_opts_40_2 {
        transition select(hdr.tcp_opts_40.nopnoptlength2) {
            TIMESTAMPS: set_covert_channel_40_2;
            default: accept;
        }
    }

    state set_covert_channel_40_2 {
        user_metadata.covert_channel = hdr.tcp_opts_40.potential_cov_channel2;
        transition accept;
    }
#endif
}

control ShellVerify(inout shell_headers_t hdr, inout user_metadata_t user_metadata) {
    apply {}
}

control ShellIngress(inout shell_headers_t hdr, inout user_metadata_t user_metadata,
                     inout standard_metadata_t standard) {
    action set_list(bit<2> count, bit<128> first, bit<128> second) {
        user_metadata.count = count;
        user_metadata.first = first;
        user_metadata.second = second;
    }

    /* The first row of the history matrix: the segment lists of SYNs. */
    table consistent_hashing {
        key = { user_metadata.bucket: exact @name("bucket"); }
        actions = { set_list; @defaultonly NoAction; }
        default_action = NoAction();
        size = BUCKETS;
    }

    /* The columns of the history matrix: the segment lists of other packets. */
    table choice_history {
        key = {
            user_metadata.bucket: exact @name("bucket");
            user_metadata.covert_channel: exact @name("covert_channel");
        }
        actions = { set_list; @defaultonly NoAction; }
        default_action = NoAction();
        size = 2 * BUCKETS;
    }

    action insert_srh(bit<8> servers) {
        hdr.srh.setValid();
        hdr.srh.next_header = PROTOCOL_TCP;
        hdr.srh.length = (servers + 1) << 1;
        hdr.srh.routing_type = ROUTING_TYPE_SRH;
        hdr.srh.segments_left = servers;
        hdr.srh.last_entry = servers;
        hdr.srh.flags = 0;
        hdr.srh.tag = 0;
        hdr.vip.setValid();
        hdr.vip.address = hdr.ipv6.destination;
        hdr.first.setValid();
        hdr.first.address = user_metadata.first;
        hdr.ipv6.next_header = PROTOCOL_ROUTING;
        hdr.ipv6.payload_length = hdr.ipv6.payload_length + 24 + ((bit<16>)servers << 4);
        hdr.ipv6.destination = user_metadata.first;
    }

    action insert_second() {
        hdr.second.setValid();
        hdr.second.address = user_metadata.second;
    }

    action forward(bit<9> port) {
        standard.egress_spec = port;
    }

    action drop() {
        mark_to_drop(standard);
    }

    /* The layer-2 lookup, by the first segment. */
    table interfaces {
        key = { hdr.ipv6.destination: exact @name("destination"); }
        actions = { forward; @defaultonly drop; }
        default_action = drop();
        size = SERVERS;
    }

    apply {
        user_metadata.count = 0;
        if (hdr.tcp.isValid()) {
            hash(user_metadata.bucket, HashAlgorithm.crc32, 16w0, {
                hdr.ipv6.source, hdr.ipv6.destination, hdr.ipv6.next_header,
                hdr.tcp.source_port, hdr.tcp.destination_port
            }, (bit<17>)BUCKETS);
            if (hdr.tcp.flags & (TCP_SYN | TCP_ACK) == TCP_SYN) {
                consistent_hashing.apply();
                if (user_metadata.count == 2 && hdr.tcp.data_offset <= 8) {
                    user_metadata.count = 1; /* it has no timestamps (footnote 2) */
                }
            } else {
                choice_history.apply();
            }
        }
        if (user_metadata.count == 0) {
            drop();
        } else {
            insert_srh((bit<8>)user_metadata.count);
            if (user_metadata.count == 2) {
                insert_second();
            }
            interfaces.apply();
        }
    }
}

control ShellEgress(inout shell_headers_t hdr, inout user_metadata_t user_metadata,
                    inout standard_metadata_t standard) {
    apply {}
}

control ShellCompute(inout shell_headers_t hdr, inout user_metadata_t user_metadata) {
    apply {}
}

control ShellDeparse(packet_out packet, in shell_headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

V1Switch(ShellParser(), ShellVerify(), ShellIngress(), ShellEgress(), ShellCompute(),
         ShellDeparse()) main;
