/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Receive and classify: which packets are for this balancer, and for which of its services.
 */

/* Sorts packets by the port on which they arrive. Behind each port towards the network there is a
 * port to the host that controls the switch. The host has the address of the network's port, and
 * gets all packets that are for no VIP. */
control Receive(in headers_t headers, inout packet_t p) {
    action from_host(bit<9> network_port) {
        p.reason = reason_t.PASS_FROM_HOST;
        p.verdict = verdict_t.PASS;
        p.host_port = network_port;
    }

    action from_network(bit<9> host_port, bit<48> mac) {
        p.host_port = host_port;
        p.verdict = verdict_t.PASS;
        if (headers.ethernet.destination != mac) {
            p.reason = reason_t.PASS_NOT_FOR_HOST;
        } else if (headers.ethernet.source[40:40] == 1) {
            p.reason = reason_t.DROP_GROUP_SOURCE;
            p.verdict = verdict_t.DROP;
        } else if (p.unusual == reason_t.PASS_NOT_IP) {
            p.reason = reason_t.PASS_NOT_IP;
        }
    }

    action drop() {
        p.reason = reason_t.DROP_OUTSIDE;
        p.verdict = verdict_t.DROP;
    }

    table ports {
        key = { p.ingress_port: exact; }
        actions = { from_host; from_network; drop; }
        default_action = drop();
        size = 64;
    }

    apply {
        ports.apply();
    }
}

/* Finds the service of a packet: by its port, or else the VIP's service for all ports. */
control Classify(inout packet_t p, in tcp_t tcp) {
    action set_vip(bit<16> number) {
        p.vip = number;
    }

    action set_service(bit<16> number, bit<1> tables, bit<32> bucket_mask, bit<4> candidates,
                       bit<2> cookie_width, bit<1> hunts, encapsulation_t encapsulation) {
        p.service.number = number;
        p.service.tables = tables;
        p.service.bucket_mask = bucket_mask;
        p.service.candidates = candidates;
        p.service.cookie_width = cookie_width;
        p.service.hunts = hunts;
        p.service.encapsulation = encapsulation;
    }

    table vips {
        key = { p.destination: exact @name("address"); }
        actions = { set_vip; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVICES;
    }

    table services {
        key = {
            p.vip: exact @name("vip");
            tcp.destination_port: exact @name("port");
        }
        actions = { set_service; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVICES;
    }

    table services_of_all_ports {
        key = { p.vip: exact @name("vip"); }
        actions = { set_service; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVICES;
    }

    apply {
        if (!vips.apply().hit) {
            p.reason = reason_t.PASS_NOT_VIP;
            p.verdict = verdict_t.PASS;
        } else if (p.unusual != reason_t.NONE) {
            p.reason = p.unusual;
            p.verdict = verdict_t.PUNT;
        } else if (!services.apply().hit) {
            if (!services_of_all_ports.apply().hit) {
                p.reason = reason_t.PUNT_NO_SERVICE;
                p.verdict = verdict_t.PUNT;
            }
        }
        if (p.reason == reason_t.NONE && tcp.flags & TCP_SYN != 0 &&
            tcp.flags & (TCP_FIN | TCP_RST) != 0) {
            p.reason = reason_t.DROP_TCP_FLAGS;
            p.verdict = verdict_t.DROP;
        }
    }
}
