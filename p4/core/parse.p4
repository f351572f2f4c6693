/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parse: from a frame to its addresses and ports, and to the timestamps of TCP or the connection ID
 * of QUIC. Anything else than a whole segment or datagram directly behind its IP header is unusual,
 * and passes to the host.
 */

error {
    BadLength
}

/* Reads the options of a TCP header up to the timestamps. Options behind a malformed one do not
 * count: walk_to_timestamps in bpf/net/timestamp.h. */
parser ParseOptions(packet_in packet, inout headers_t headers, inout packet_t p) {
    state start {
        p.options_left = ((bit<8>)headers.tcp.data_offset - 5) << 2;
        transition next;
    }

    state next {
        transition select(p.options_left) {
            0: accept;
            1: accept; /* no room for an option of two bytes */
            default: read;
        }
    }

    state read {
        transition select(packet.lookahead<bit<8>>()) {
            OPTION_END: accept;
            OPTION_NO_OPERATION: no_operation;
            default: sized_option;
        }
    }

    state no_operation {
        packet.extract(headers.tcp_options.next, 8);
        p.options_left = p.options_left - 1;
        transition next;
    }

    state sized_option {
        bit<16> head = packet.lookahead<bit<16>>();
        bit<8> length = head[7:0]; /* in bytes, with kind and length */
        bit<1> fits = (bit<1>)(length >= 2 && length <= p.options_left);
        transition select(fits, head) {
            (0, _): accept;
            (1, OPTION_TIMESTAMPS ++ 8w10): timestamps;
            (1, OPTION_TIMESTAMPS ++ 8w0 &&& 0xff00): accept;
            default: other;
        }
    }

    /* Kind, length, value and echo (RFC 7323 section 3.2). */
    state timestamps {
        bit<80> option = packet.lookahead<bit<80>>();
        p.has_timestamps = true;
        p.echo = option[31:0];
        transition accept;
    }

    state other {
        bit<16> head = packet.lookahead<bit<16>>();
        packet.extract(headers.tcp_options.next, (bit<32>)head[7:0] << 3);
        p.options_left = p.options_left - head[7:0];
        transition next;
    }
}

parser Parse(packet_in packet, out headers_t headers, inout packet_t p) {
    ParseOptions() options;

    state start {
        p.unusual = reason_t.PASS_NOT_IP;
        packet.extract(headers.ethernet);
        transition select(headers.ethernet.ethertype) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_IPV6: ipv6;
            default: accept;
        }
    }

    state ipv4 {
        packet.extract(headers.ipv4);
        p.unusual = reason_t.PASS_MALFORMED;
        p.source = 96w0xffff ++ headers.ipv4.source;
        p.destination = 96w0xffff ++ headers.ipv4.destination;
        p.traffic_class = headers.ipv4.traffic_class;
        p.hop_limit = headers.ipv4.ttl;
        p.length = (bit<17>)headers.ipv4.length;
        p.header_length = (bit<16>)headers.ipv4.header_length << 2;
        transition select(headers.ipv4.version, headers.ipv4.header_length) {
            (4, 5): ipv4_payload;
            (4, 0 &&& 0xc): accept;
            (4, 4): accept;
            (4, _): ipv4_options;
            default: accept;
        }
    }

    state ipv4_options {
        packet.extract(headers.ipv4_options, ((bit<32>)headers.ipv4.header_length - 5) << 5);
        transition ipv4_payload;
    }

    state ipv4_payload {
        p.unusual = reason_t.PASS_FRAGMENT;
        transition select(headers.ipv4.more_fragments, headers.ipv4.fragment_offset,
                          headers.ipv4.protocol) {
            (0, 0, PROTOCOL_TCP): tcp;
            (0, 0, PROTOCOL_UDP): udp;
            (0, 0, _): other_protocol;
            default: accept;
        }
    }

    state ipv6 {
        packet.extract(headers.ipv6);
        p.unusual = reason_t.PASS_MALFORMED;
        p.source = headers.ipv6.source;
        p.destination = headers.ipv6.destination;
        p.traffic_class = headers.ipv6.traffic_class;
        p.hop_limit = headers.ipv6.hop_limit;
        p.length = 40 + (bit<17>)headers.ipv6.payload_length;
        p.header_length = 40;
        transition select(headers.ipv6.version, headers.ipv6.next_header,
                          headers.ipv6.destination[127:32]) {
            (_, _, 96w0xffff): accept; /* this form means IPv4 */
            (6, PROTOCOL_TCP, _): tcp;
            (6, PROTOCOL_UDP, _): udp;
            (6, _, _): other_protocol;
            default: accept;
        }
    }

    state other_protocol {
        p.unusual = reason_t.PASS_PROTOCOL;
        transition accept;
    }

    state tcp {
        p.unusual = reason_t.PASS_MALFORMED;
        packet.extract(headers.tcp);
        p.protocol = PROTOCOL_TCP;
        p.source_port = headers.tcp.source_port;
        p.destination_port = headers.tcp.destination_port;
        transition select(headers.tcp.data_offset) {
            0 &&& 0xc: accept;
            4: accept;
            default: tcp_options;
        }
    }

    state tcp_options {
        options.apply(packet, headers, p);
        p.unusual = reason_t.NONE;
        transition accept;
    }

    /* A datagram that is too short for a packet of QUIC remains of another protocol. */
    state udp {
        p.unusual = reason_t.PASS_PROTOCOL;
        packet.extract(headers.udp);
        transition select(headers.udp.length) {
            0 .. 24: accept;
            default: quic;
        }
    }

    state quic {
        packet.extract(headers.quic);
        p.protocol = PROTOCOL_UDP;
        p.source_port = headers.udp.source_port;
        p.destination_port = headers.udp.destination_port;
        p.unusual = reason_t.NONE;
        transition accept;
    }
}

/* Finds packets whose lengths contradict each other. A device whose parser cannot compare lengths
 * does it here. */
control CheckLengths(in headers_t headers, inout packet_t p) {
    apply {
        bit<32> room = p.frame_length - 14;
        bit<32> length = (bit<32>)p.length;
        bit<32> udp_end = (bit<32>)p.header_length + (bit<32>)headers.udp.length;
        bit<32> tcp_end = (bit<32>)p.header_length + ((bit<32>)headers.tcp.data_offset << 2);

        if (length > room || length > 65535 || length < (bit<32>)p.header_length) {
            p.unusual = reason_t.PASS_MALFORMED;
        } else if (headers.tcp.isValid() && tcp_end > length) {
            p.unusual = reason_t.PASS_MALFORMED;
        } else if (headers.udp.isValid() && (headers.udp.length < 8 || udp_end > length)) {
            p.unusual = reason_t.PASS_MALFORMED;
        }
    }
}
