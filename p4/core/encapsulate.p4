/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encapsulate and transmit: the headers of both encapsulations (RFC 8754, RFC 8986 section 5), and
 * the next hop towards the first server.
 */

/* Writes the SID of one server. Each place of a list has a table of its own, because a switch
 * applies a table once for each packet. */
control WriteSegment(inout sid_t sid, in bit<16> slot, in bit<4> column, in packet_t p) {
    action set_locator(bit<64> locator) {
        sid.setValid();
        sid.locator = locator;
        sid.function = p.function;
        sid.column = column;
        sid.reports = 0;
        sid.cookie_width = p.service.cookie_width;
        sid.returns = p.returns;
        sid.load = 0;
    }

    table locators {
        key = { slot: exact @name("slot"); }
        actions = { set_locator; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVERS;
    }

    apply {
        locators.apply();
    }
}

control WriteSegments(inout headers_t headers, in packet_t p) {
    WriteSegment() server0;
    WriteSegment() server1;
    WriteSegment() server2;
    WriteSegment() server3;
    WriteSegment() server4;
    WriteSegment() server5;
    WriteSegment() server6;
    WriteSegment() server7;
    WriteSegment() server8;
    WriteSegment() server9;

    apply {
        bit<32> c = p.servers.columns;

        server0.apply(headers.server0, p.servers.slot0, c[3:0], p);
        if (p.servers.count > 1) { server1.apply(headers.server1, p.servers.slot1, c[7:4], p); }
        if (p.servers.count > 2) { server2.apply(headers.server2, p.servers.slot2, c[11:8], p); }
        if (p.servers.count > 3) { server3.apply(headers.server3, p.servers.slot3, c[15:12], p); }
        if (p.servers.count > 4) { server4.apply(headers.server4, p.servers.slot4, c[19:16], p); }
        if (p.servers.count > 5) { server5.apply(headers.server5, p.servers.slot5, c[23:20], p); }
        if (p.servers.count > 6) { server6.apply(headers.server6, p.servers.slot6, c[27:24], p); }
        if (p.servers.count > 7) { server7.apply(headers.server7, p.servers.slot7, c[31:28], p); }
        if (p.servers.count > 8) { server8.apply(headers.server8, p.servers.slot8, 0, p); }
        if (p.servers.count > 9) { server9.apply(headers.server9, p.servers.slot9, 0, p); }
    }
}

/* Writes the headers in front of the segments, and decrements the client's hop limit. */
control Encapsulate(inout headers_t headers, inout packet_t p) {
    WriteSegments() segments;

    action set_source(bit<128> address) {
        p.own_address = address;
    }

    /* The balancer's own address, as the default action. */
    table source {
        actions = { set_source; @defaultonly NoAction; }
        default_action = NoAction();
    }

    /* Decrements TTL, and updates the checksum by RFC 1624. */
    action take_hop_ipv4() {
        bit<17> sum = (bit<17>)headers.ipv4.checksum + 0x0100;

        headers.ipv4.ttl = headers.ipv4.ttl - 1;
        headers.ipv4.checksum = sum >= 0xffff ? (bit<16>)(sum + 1) : (bit<16>)sum;
    }

    /* Starts the outer header, towards the first server. */
    action start_outer(bit<20> flow_label, bit<8> hop_limit, bit<128> address) {
        headers.outer.setValid();
        headers.outer.version = 6;
        headers.outer.traffic_class = p.traffic_class;
        headers.outer.flow_label = flow_label;
        headers.outer.payload_length = (bit<16>)p.length + p.added - 40;
        headers.outer.hop_limit = hop_limit;
        headers.outer.source = address;
        headers.destination = headers.server0;
    }

    action start_srh(bit<8> next_header, bit<8> entries, bit<8> segments_left) {
        headers.srh.setValid();
        headers.srh.next_header = next_header;
        headers.srh.length = entries << 1;
        headers.srh.routing_type = ROUTING_TYPE_SRH;
        headers.srh.segments_left = segments_left;
        headers.srh.last_entry = entries - 1;
        headers.srh.flags = 0;
        headers.srh.tag = 0;
    }

    /* srv6-insert: the client's header goes to the first server, and the list ends with the VIP. */
    action insert() {
        bit<8> count = (bit<8>)p.servers.count;

        start_outer(headers.ipv6.flow_label, p.hop_limit - 1, p.source);
        headers.outer.next_header = PROTOCOL_ROUTING;
        start_srh(headers.ipv6.next_header, count + 2, count);
        headers.vip.setValid();
        headers.vip.address = headers.ipv6.destination;
        headers.balancer.setValid();
        headers.balancer.address = p.own_address;
        headers.ipv6.setInvalid();
    }

    apply {
        bit<8> count = (bit<8>)p.servers.count;
        bit<8> inner = PROTOCOL_IPV6;

        segments.apply(headers, p);
        source.apply();
        p.egress_port = p.next_hop_port;
        headers.ethernet.destination = p.next_hop_mac;
        headers.ethernet.source = p.own_mac;
        headers.ethernet.ethertype = ETHERTYPE_IPV6;
        if (p.service.encapsulation == encapsulation_t.SRV6_INSERT) {
            insert();
        } else {
            /* srv6-encap: an IPv6 header around the client's packet. */
            if (headers.ipv4.isValid()) {
                take_hop_ipv4();
                inner = PROTOCOL_IPIP;
            } else {
                headers.ipv6.hop_limit = headers.ipv6.hop_limit - 1;
            }
            start_outer(p.hash[19:0], 64, p.own_address);
            headers.outer.next_header = inner;
            /* An offer has the whole list, because servers write into their own entries. Other
             * lists leave out the first server (RFC 8986 sections 5.1 and 5.2). */
            if (count == 1) {
                headers.server0.setInvalid();
            } else if (p.function == SID_CONNECT_AVAIL) {
                start_srh(inner, count, count - 1);
                headers.outer.next_header = PROTOCOL_ROUTING;
            } else {
                start_srh(inner, count - 1, count - 1);
                headers.outer.next_header = PROTOCOL_ROUTING;
                headers.server0.setInvalid();
            }
        }
    }
}

/* Finds out how to send the packet to its first server, and whether it may be sent. */
control FindNextHop(inout headers_t headers, inout packet_t p) {
    action set_next_hop(bit<9> port, bit<48> mac, bit<48> own_mac, bit<16> mtu) {
        p.next_hop_port = port;
        p.next_hop_mac = mac;
        p.own_mac = own_mac;
        p.mtu = mtu;
    }

    table next_hops {
        key = { p.servers.slot0: exact @name("slot"); }
        actions = { set_next_hop; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVERS;
    }

    apply {
        bit<16> segments = (bit<16>)p.servers.count;

        if (p.service.encapsulation == encapsulation_t.SRV6_INSERT) {
            p.added = 8 + ((segments + 2) << 4);
        } else if (segments == 1) {
            p.added = 40;
        } else if (p.function == SID_CONNECT_AVAIL) {
            p.added = 48 + (segments << 4);
        } else {
            p.added = 32 + (segments << 4);
        }
        if (!next_hops.apply().hit) {
            p.reason = reason_t.PASS_NO_SERVER;
        } else if (p.hop_limit <= 1) {
            p.reason = reason_t.PASS_HOP_LIMIT;
        } else if (p.length + (bit<17>)p.added > (bit<17>)p.mtu) {
            p.reason = reason_t.PASS_TOO_BIG;
        }
    }
}
